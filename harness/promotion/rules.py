"""Who may be promoted, and which decision a run's state allows; pure rules over ledger state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.errors import ExitCode, RefusedError
from harness.core.failures import DECISIONS, SPOILED
from harness.core.types import Decision, FailureClass, Outcome
from harness.ledger import RunState
from harness.ledger.results import current_evals


class PromotionRefusedError(RefusedError):
    """A rule forbids to promote this run whatever its evals say: the answer is no."""

    exit_code = ExitCode.NO


def promotion_refusals(run: RunState) -> list[str]:
    """Return every rule that forbids promoting `run`; empty when none does."""
    reasons = []
    kind = run.kind
    if kind == "import":
        reasons.append(f"{run.run} is imported; numbers of another system are never promoted, replicate it here")
    elif kind != "training":
        reasons.append(f"{run.run} is a {kind.replace('_', '-')} run and has no adapter to promote")
    if run.decision == Decision.REJECT:
        reasons.append(f"{run.run} was rejected ({run.reason}); a new decision must replace that first")
    return reasons


def not_completed(run: RunState) -> str:
    """Return why the run has no completed attempt to judge; empty when its last attempt completed."""
    if not run.attempts:
        return f"{run.run} was never launched"
    outcome = run.attempts[-1].get("outcome")
    if outcome == Outcome.COMPLETED:
        return ""
    return f"the last attempt of {run.run} " + (f"ended as {outcome}" if outcome else "has not finished")


def protocol_drift(run: RunState, current: Mapping[str, str], amendments: list[Mapping[str, Any]]) -> tuple[str, bool]:
    """Compare GOAL.md and CONTEXT.md with what they were when the run first started.

    Args:
        run: state of the run.
        current: hashes of the files now, by `goal` and `context`.
        amendments: data of all `amended` events, oldest first.

    Returns:
        A sentence when a file was edited without `harness amend` (else empty), and whether an
        amendment stands between the run's start and now, which makes a promotion post hoc.
    """
    first = run.attempts[0] if run.attempts else {}
    then: Mapping[str, str] = first.get("protocol") or run.created.get("protocol") or {}
    post_hoc = False
    for key, file in (("goal", "GOAL.md"), ("context", "CONTEXT.md")):
        old, now = then.get(key), current.get(key)
        if old == now:
            continue
        reachable = {old}
        for amendment in amendments:
            if amendment.get("file") == file and amendment.get("old_sha") in reachable:
                reachable.add(amendment.get("new_sha"))
        if now not in reachable:
            return f"{file} was edited after {run.run} started, and no amendment records why", False
        post_hoc = True
    return "", post_hoc


def decision_refusal(run: RunState, decision: Decision) -> str:
    """Return why `decision` cannot be taken on `run` now; empty when it can.

    The rules, first match wins:

    - a run in progress gets no decision;
    - a run that was never launched was not tested: only inconclusive;
    - a promoted run is neither rejected nor run again: its certificate stands until a better run
      is promoted;
    - when the last attempt died of infrastructure, a tool or a verifier, only what
      `core.failures.DECISIONS` leaves: the hypothesis was not tested;
    - rerun needs such a failure, an interruption, a crash, or one among the items of an eval;
    - keep needs an attempt that was not cut short and an eval of the trained policy.

    Args:
        run: state of the run.
        decision: what is to be recorded.
    """
    last = run.attempts[-1] if run.attempts else None
    if last is None and run.kind != "import":
        allowed = decision is Decision.INCONCLUSIVE
        return "" if allowed else f"{run.run} was never launched, so only inconclusive can be said of it"
    if last is not None and last.get("outcome") is None:
        return f"{run.run} is not finished"
    if run.promoted is not None and decision in (Decision.REJECT, Decision.RERUN):
        return f"{run.run} is promoted; {decision} would contradict its certificate"
    spoiled = last is not None and last.get("outcome") != Outcome.COMPLETED and last.get("failure") in SPOILED
    if last is not None and spoiled and decision not in DECISIONS[FailureClass(last["failure"])]:
        left = " or ".join(DECISIONS[FailureClass(last["failure"])])
        return f"{last['failure']} failure ended the last attempt of {run.run}: only {left}"
    if decision is Decision.RERUN:
        return "" if spoiled or _was_spoiled(run) else _not_spoiled(run)
    if decision is Decision.KEEP:
        return _not_keepable(run)
    return ""


def _was_spoiled(run: RunState) -> bool:
    if not run.attempts:
        return False
    interrupted = run.attempts[-1].get("outcome") in (Outcome.INTERRUPTED, Outcome.CRASHED)
    return interrupted or any(data.get("failures", {}).get(kind, 0) for data in current_evals(run) for kind in SPOILED)


def _not_spoiled(run: RunState) -> str:
    return f"nothing outside the model failed in {run.run}, so the same run again would only repeat it"


def _not_keepable(run: RunState) -> str:
    if run.kind == "import":
        return ""
    if run.attempts[-1].get("outcome") not in (Outcome.COMPLETED, Outcome.STOPPED):
        return f"the last attempt of {run.run} ended as {run.attempts[-1].get('outcome')}; only a finished run is kept"
    if run.kind == "training" and not any(data.get("subject") == "policy" for data in current_evals(run)):
        return f"{run.run} has no held-out eval of its policy, so nothing says that it is worth keeping"
    return ""
