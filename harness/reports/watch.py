"""Show the whole record of a run to the watchdogs: of this program's runs, and of imported ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from harness.config.load import load_config
from harness.config.schema import WatchdogSection
from harness.core.errors import NotFoundError
from harness.core.numbers import number_or_none
from harness.ledger import RunState, State
from harness.ledger.results import own_prompt_evals
from harness.ledger.superseded import current_rows, read_rows
from harness.program import Program, read_context
from harness.reports.compact import parse_metrics
from harness.reports.write import METRICS
from harness.training.watchdogs import Finding, HeldOut, paired, replay, replicated

FEWEST_REPLICATES = 3
"""Evaluations of one base model that say how much an evaluation varies, where there are no paired items."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What the watchdogs say of a run.

    Args:
        findings: in the order of steps.
        rows: steps with metrics.
        heldout: the held-out points that could be tested.
        noise: what they were tested against: `paired items`, `N evaluations of the base model`, or `` when nothing
            says how much an evaluation varies.
    """

    findings: tuple[Finding, ...]
    rows: int
    heldout: tuple[HeldOut, ...]
    noise: str


def watch_run(program: Program, state: State, run: str) -> Watched:
    """Replay a run's metrics and held-out results through the rules of `[watchdog]`.

    Args:
        program: the program.
        state: of its ledger.
        run: id of one of its runs. A run of this program is judged by its own limits, an imported one by the defaults.

    Raises:
        NotFoundError: when the run has no metrics here.
    """
    record = state.runs[run]
    rows = _rows(program, run)
    points = paired(own_prompt_evals(record), float(read_context(program).eval.confidence))
    noise = "paired items" if points else ""
    if not points:
        points, noise = _replicates(state, record)
    path = program.config_path(run)
    limits = load_config(path).watchdog if record.kind == "training" and path.is_file() else WatchdogSection()
    found = replay(rows, points, limits).findings
    return Watched(tuple(found), len({row["step"] for row in rows}), tuple(points), noise)


def _rows(program: Program, run: str) -> list[dict[str, Any]]:
    path = program.run_dir(run) / "metrics.jsonl"
    if path.is_file():
        return [dict(row) for row in current_rows(read_rows(path))]
    committed = program.analysis_dir(run) / METRICS
    if not committed.is_file():
        raise NotFoundError(
            f"{run} has no metrics here", f"`harness report {run}` commits them where the run was trained"
        )
    metrics = parse_metrics(committed.read_text(encoding="utf-8"), METRICS)
    return [
        {"step": step}
        | {key: values[index] for key, values in metrics.columns.items() if not math.isnan(values[index])}
        for index, step in enumerate(metrics.steps)
    ]


def _replicates(state: State, record: RunState) -> tuple[list[HeldOut], str]:
    """Test an imported run against the spread of the base model over all runs that came from the same source."""
    own = own_prompt_evals(record)
    wanted = Counter((str(data.get("env")), str(data.get("metric"))) for data in own if data.get("subject") == "policy")
    if not wanted:
        return [], ""
    env, metric = wanted.most_common(1)[0][0]
    source = (record.created.get("source") or {}).get("name")
    base = [
        value
        for other in state.runs.values()
        if other.kind == "import" and (other.created.get("source") or {}).get("name") == source
        for data in own_prompt_evals(other)
        if (data.get("subject"), str(data.get("env")), str(data.get("metric"))) == ("base", env, metric)
        and (value := _reward(data)) is not None
    ]
    scores = {
        int(data["step"]): value
        for data in own
        if (data.get("subject"), str(data.get("env"))) == ("policy", env) and (value := _reward(data)) is not None
    }
    if len(base) < FEWEST_REPLICATES or len(set(base)) < 2 or not scores:
        return [], ""
    return replicated(base, scores, env), f"{len(base)} evaluations of the base model"


def _reward(data: dict[str, Any]) -> float | None:
    return number_or_none((data.get("means") or {}).get("reward", {}).get("mean"))
