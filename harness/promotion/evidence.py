"""Evidence for the gates: item files read back, checked against the ledger, means recomputed.

Nothing an event says about a result is believed; it only says which bytes the result follows from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import isclose, isnan
from pathlib import Path
from typing import Any

from harness.core.canonical import decode_number, sha256_hex
from harness.core.errors import CannotTellError
from harness.evaluation.records import ItemRecord, parse_items
from harness.evaluation.statistics import mean_of
from harness.ledger import RunState
from harness.ledger.results import own_prompt_evals
from harness.program import Goal, Program
from harness.promotion.gates import EnvEvidence, EvalEvidence, Evidence

AGAIN = "`harness eval RUN --step N` evaluates again"
_SAME_MEAN = 1e-9
_BINDING = ("n", "requested", "items_sha", "prompt_sha", "verifier", "file", "file_sha")
"""Members without which an eval is bound to nothing."""


def collect(program: Program, run: RunState, goal: Goal, step: int | None = None) -> Evidence:
    """Return the evidence for one step of a run; problems are in it, not raised.

    Args:
        program: where the item files are.
        run: the folded state of the run.
        goal: names the environments and the baseline.
        step: eval step to judge; None takes the step at which the last attempt completed.
    """
    policy = [data for data in own_prompt_evals(run) if data.get("subject") == "policy"]
    steps = sorted({int(data["step"]) for data in policy})
    final = final_step(run)
    chosen = final if step is None else step
    if chosen not in steps:
        have = f"evals are at steps {', '.join(map(str, steps))}" if steps else "the ledger holds none of this run"
        asked = "the final step" if step is None else f"step {step}"
        return Evidence(run.run, chosen, {}, problem=f"no held-out eval of the policy at {asked}; {have}")
    envs = {}
    for wanted in goal.env:
        mine = _latest(policy, wanted.id, step=chosen)
        base = _baseline(run, goal.gate.baseline, wanted.id)
        envs[wanted.id] = EnvEvidence(_load(program, mine), _load(program, base))
    shas = {data.get("adapter_sha") for data in policy if data["step"] == chosen and data.get("adapter_sha")}
    if chosen == final and (recorded := _last_attempt(run).get("adapter_sha")):
        shas.add(recorded)
    problem = ""
    if len(shas) != 1:
        found = "several different adapter hashes" if shas else "no adapter hash"
        problem = f"the ledger holds {found} for step {chosen}, so the evals cannot be bound to an adapter"
    return Evidence(run.run, chosen, envs, problem, adapter_sha="" if problem else str(shas.pop()))


def final_step(run: RunState) -> int | None:
    """Return the step at which the last attempt completed; None when it did not."""
    last = _last_attempt(run)
    return int(last["step"]) if last.get("outcome") == "completed" and last.get("step") is not None else None


def _last_attempt(run: RunState) -> Mapping[str, Any]:
    return run.attempts[-1] if run.attempts else {}


def _latest(evals: Sequence[Mapping[str, Any]], env: str, **equal: Any) -> Mapping[str, Any] | None:
    found = [
        data for data in evals if data.get("env") == env and all(data.get(key) == value for key, value in equal.items())
    ]
    return found[-1] if found else None


def _baseline(run: RunState, baseline: str, env: str) -> Mapping[str, Any] | None:
    base = [data for data in run.evals if data.get("subject") == "base"]
    if baseline == "base_run_prompt":
        return _latest(base, env, prompt="run")
    shipped = _latest(base, env, prompt="shipped")
    if shipped is None and _run_prompt(run, env) == "shipped":
        return _latest(base, env, prompt="run")  # the run's own prompt is the shipped one
    return shipped


def _run_prompt(run: RunState, env: str) -> str | None:
    tables = run.created.get("basis", {}).get("config", {}).get("env", [])
    return next((table.get("prompt", "shipped") for table in tables if table.get("id") == env), None)


def _load(program: Program, data: Mapping[str, Any] | None) -> EvalEvidence | None:
    if data is None:
        return None
    items: tuple[ItemRecord, ...] = ()
    problem = ""
    if missing := [name for name in _BINDING if data.get(name) is None]:
        problem = f"its event does not record {', '.join(missing)}"
    else:
        try:
            items = _read_checked(program, data)
        except CannotTellError as error:
            problem = f"{error.message} ({error.hint})"
    return EvalEvidence(
        subject=str(data["subject"]),
        prompt=str(data.get("prompt", "run")),
        step=int(data["step"]),
        requested=int(data.get("requested") or 0),
        items_sha=str(data.get("items_sha")),
        prompt_sha=str(data.get("prompt_sha")),
        verifier=str(data.get("verifier")),
        file=str(data.get("file")),
        file_sha=str(data.get("file_sha")),
        items=items,
        protocol=data.get("protocol"),
        problem=problem,
    )


def _read_checked(program: Program, data: Mapping[str, Any]) -> tuple[ItemRecord, ...]:
    """Return the items of an eval whose file has the recorded hash.

    Raises:
        CannotTellError: when the file lies outside analysis/, is absent, changed or damaged, or
            does not give the recorded counts and mean.
    """
    name = str(data["file"])
    path = Path(os.path.realpath(program.root / name))
    if not path.is_relative_to(Path(program.analysis).resolve()):
        raise CannotTellError(f"{name} lies outside analysis/", AGAIN)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CannotTellError(f"cannot read {name}: {error.strerror}", "restore it with git") from error
    if sha256_hex(content) != data["file_sha"]:
        raise CannotTellError(f"{name} was changed after it was recorded", f"`git checkout -- {name}` restores it")
    items = tuple(parse_items(content, name))
    counted = sum(item.counts for item in items)
    if counted != data["n"]:
        raise CannotTellError(f"{name} holds {counted} counted samples, its event says {data['n']}", AGAIN)
    recorded = _recorded_mean(data)
    recomputed = mean_of(items).mean
    if not (isclose(recorded, recomputed, abs_tol=_SAME_MEAN) or (isnan(recorded) and isnan(recomputed))):
        raise CannotTellError(f"{name} gives a mean reward of {recomputed:.6f}, its event says {recorded:.6f}", AGAIN)
    return items


def _recorded_mean(data: Mapping[str, Any]) -> float:
    try:
        return decode_number(data["means"]["reward"]["mean"])
    except (KeyError, TypeError, ValueError):
        raise CannotTellError(f"the event of {data['file']} records no mean reward", AGAIN) from None
