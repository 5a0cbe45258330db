"""The folded ledger as flat tables: what `harness query` asks and `harness export` writes.

Every cell is text, a whole number, a number, a truth value or None; nested data are JSON text.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.canonical import canonical_json, encode_non_finite
from harness.core.numbers import number_or_none
from harness.ledger.fold import RunState, State
from harness.ledger.results import last_policy_evals
from harness.ledger.select import means, run_config
from harness.ledger.superseded import is_superseded, read_rows, superseded_rows

TEXT, INTEGER, NUMBER, TRUTH = "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN"
TABLES = ("runs", "events", "evals", "metrics")
Cell = str | int | float | bool | None

RUNS = {
    "run": TEXT,
    "status": TEXT,
    "decision": TEXT,
    "reason": TEXT,
    "champion": TRUTH,
    "promoted": TRUTH,
    "kind": TEXT,
    "parent": TEXT,
    "replicate_of": TEXT,
    "lever": TEXT,
    "hypothesis": TEXT,
    "tags": TEXT,
    "attempts": INTEGER,
    "failure": TEXT,
    "step": INTEGER,
    "wall_s": NUMBER,
    "tokens": INTEGER,
    "env": TEXT,
    "reward": NUMBER,
    "reward_low": NUMBER,
    "reward_high": NUMBER,
    "gain": NUMBER,
    "gain_low": NUMBER,
    "gain_high": NUMBER,
    "created_at": TEXT,
    "finished_at": TEXT,
    "config_sha": TEXT,
    "config": TEXT,
}
EVENTS = {
    "id": TEXT,
    "run": TEXT,
    "kind": TEXT,
    "recorded_at": TEXT,
    "actor_kind": TEXT,
    "actor": TEXT,
    "data": TEXT,
    "sha": TEXT,
}
EVALS = {
    "run": TEXT,
    "recorded_at": TEXT,
    "attempt": INTEGER,
    "step": INTEGER,
    "subject": TEXT,
    "env": TEXT,
    "prompt": TEXT,
    "last": TRUTH,
    "superseded": TRUTH,
    "n": INTEGER,
    "requested": INTEGER,
    "metric": TEXT,
    "mean": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "gain": NUMBER,
    "gain_low": NUMBER,
    "gain_high": NUMBER,
    "file": TEXT,
}
METRICS = {
    "run": TEXT,
    "step": INTEGER,
    "attempt": INTEGER,
    "metric": TEXT,
    "value": NUMBER,
    "superseded": TRUTH,
}
COLUMNS: dict[str, dict[str, str]] = {"runs": RUNS, "events": EVENTS, "evals": EVALS, "metrics": METRICS}
"""Table → column → type, in DuckDB's words."""
_INT64 = 1 << 63


class Table(NamedTuple):
    """One table: `columns` maps names to types; a row has a cell for each."""

    name: str
    columns: Mapping[str, str]
    rows: list[tuple[Cell, ...]]


def table(name: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of `COLUMNS` with every cell of its column's type; what is of another type is None.

    Args:
        name: one of `TABLES`.
        rows: values by column; absent ones are None.
    """
    columns = COLUMNS[name]
    return Table(name, columns, [tuple(_cell(row.get(key), kind) for key, kind in columns.items()) for row in rows])


def _cell(value: Any, kind: str) -> Cell:
    if value is None:
        return None
    if kind == TEXT:
        return value if isinstance(value, str) else _json(value)
    if kind == TRUTH:
        return value if isinstance(value, bool) else None
    number = number_or_none(value)
    if number is None or kind == NUMBER:
        return number
    return int(value) if isinstance(value, int) and -_INT64 <= value < _INT64 else None


def _json(value: Any) -> str:
    return canonical_json(encode_non_finite(value), sort=False)


def runs_table(state: State, status: Callable[[RunState], str]) -> Table:
    """Return one row per run.

    Args:
        state: of the ledger.
        status: where a run stands; the ledger alone cannot tell whether a process still lives.

    `env`, `reward` and `gain` are those of the last held-out eval, and empty for a run that was evaluated on several
    environments; the table `evals` has all of them.
    """
    return table("runs", (_run_row(state, run, status) for run in state.runs.values()))


def _run_row(state: State, run: RunState, status: Callable[[RunState], str]) -> dict[str, Any]:
    attempt = run.attempts[-1] if run.attempts else {}
    last = last_policy_evals(run)
    env, data = next(iter(last.items())) if len(last) == 1 else (None, {})
    config = run_config(run)
    return {
        "run": run.run,
        "status": status(run),
        "decision": run.decision,
        "reason": run.reason,
        "champion": run.run == state.champion,
        "promoted": run.promoted is not None,
        "kind": run.kind,
        "parent": run.parent,
        "replicate_of": run.created.get("replicate_of"),
        "lever": run.created.get("lever"),
        "hypothesis": run.hypothesis or None,
        "tags": ",".join(run.tags) or None,
        "attempts": len(run.attempts),
        **{key: attempt.get(key) for key in ("failure", "step", "wall_s", "tokens", "finished_at")},
        "env": env,
        **_bounds(means(data).get("reward"), "reward"),
        **_bounds(means(data, "gain").get("reward"), "gain"),
        "created_at": run.created_at,
        "config_sha": run.config_sha,
        "config": config or None,
    }


def _bounds(interval: Mapping[str, Any] | None, name: str) -> dict[str, float | None]:
    found = interval or {}
    values = {bound: number_or_none(found.get(bound)) for bound in ("mean", "low", "high")}
    return {name: values["mean"], f"{name}_low": values["low"], f"{name}_high": values["high"]}


def events_table(state: State) -> Table:
    """Return one row per event, in the order of the fold; the events of the program itself stand last."""
    events = [event for run in state.runs.values() for event in run.events] + state.program_events
    rows = (
        {
            "id": event.id,
            "run": event.run,
            "kind": event.kind,
            "recorded_at": event.at,
            "actor_kind": event.actor.kind,
            "actor": event.actor.name,
            "data": event.data,
            "sha": event.sha,
        }
        for event in events
    )
    return table("events", rows)


def evals_table(state: State) -> Table:
    """Return one row per held-out eval and metric; `last` marks those that `harness list` shows."""
    return table("evals", _eval_rows(state))


def _eval_rows(state: State) -> Iterator[dict[str, Any]]:
    kept = ("attempt", "step", "subject", "env", "prompt", "n", "requested", "file")
    for run in state.runs.values():
        last = {id(data) for data in last_policy_evals(run).values()}
        for event in run.of_kind("evaluated"):
            shared = {key: event.data.get(key) for key in kept}
            shared |= {"run": run.run, "recorded_at": event.at, "last": id(event.data) in last}
            shared["superseded"] = is_superseded(event.data, run.attempts)
            gains = means(event.data, "gain")
            for metric, interval in means(event.data).items():
                bounds = {bound: interval.get(bound) for bound in ("mean", "low", "high")}
                yield shared | {"metric": metric} | bounds | _bounds(gains.get(metric), "gain")


def metrics_table(files: Iterable[tuple[str, Path]]) -> Table:
    """Return one row per run, step and training metric.

    Args:
        files: run → its `metrics.jsonl`, or the committed `metrics.csv`.

    What a later attempt trained again is marked `superseded`; a torn or foreign line is left out.
    """
    return table("metrics", (row for run, path in files for row in metric_rows(run, path)))


def metric_rows(run: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the training metrics of one run by step, as rows of the table `metrics`.

    Args:
        run: its id.
        path: `metrics.jsonl`, or a table that ends in `.csv`.
    """
    rows = list(_csv_rows(path)) if path.suffix == ".csv" else read_rows(path)
    rows = [row for row in rows if not isinstance(row["step"], bool)]
    marks = superseded_rows(rows)
    for row, superseded in sorted(zip(rows, marks, strict=True), key=lambda pair: pair[0]["step"]):
        shared = {"run": run, "step": row["step"], "attempt": row.get("attempt"), "superseded": superseded}
        for metric, value in row.items():
            number = number_or_none(value)
            if number is not None and metric not in ("step", "time", "attempt"):
                yield shared | {"metric": metric, "value": number}


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for texts in csv.DictReader(file):
            row: dict[str, Any] = {}
            for name, text in texts.items():
                try:
                    row[name] = int(text) if name in ("step", "attempt") else float(text)
                except (TypeError, ValueError):
                    continue
            if "step" in row:
                yield row
