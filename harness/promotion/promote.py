"""Promote a run, or record a decision on it: the rules and gates applied, the ledger appended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.core.canonical import sha256_hex
from harness.core.errors import CannotTellError, ExitCode, NotFoundError, RefusedError, UsageError
from harness.core.failures import SPOILED
from harness.core.files import atomic_write
from harness.core.names import did_you_mean
from harness.core.types import Decision, Verdict
from harness.ledger import Actor, Ledger, NewEvent, RunState, State
from harness.ledger.life import live_status
from harness.program import Context, Goal, Program, protocol_hashes, read_context, read_goal
from harness.promotion import certificate as certificates
from harness.promotion.evidence import collect
from harness.promotion.gates import Evidence, GateResult, combine, exit_code, heldout_gate
from harness.promotion.rules import (
    PromotionRefusedError,
    decision_refusal,
    not_completed,
    promotion_refusals,
    protocol_drift,
)

GATES = ("heldout", "traces", "workflow")
"""All gates by name; `traces` and `workflow` answer `not_run`."""


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """What `promote` found and did.

    Args:
        run: run id.
        step: eval step that was judged.
        verdict: of all gates asked for together.
        gates: their results.
        promoted: whether the run stands promoted with this evidence now.
        dry_run: nothing was written.
        post_hoc: GOAL or CONTEXT was amended after the run started.
        certificate: program-relative path; empty unless the gates passed.
        certificate_sha: hash of its bytes; empty unless the gates passed.
    """

    run: str
    step: int | None
    verdict: Verdict
    gates: tuple[GateResult, ...]
    promoted: bool
    dry_run: bool
    post_hoc: bool = False
    certificate: str = ""
    certificate_sha: str = ""
    reasons: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> ExitCode:
        """Return 0 for pass, 1 for fail, 3 for cannot tell."""
        return exit_code(self.verdict)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome for `--json`."""
        return {
            "run": self.run,
            "step": self.step,
            "verdict": self.verdict,
            "gates": [gate.to_json() for gate in self.gates],
            "promoted": self.promoted,
            "dry_run": self.dry_run,
            "post_hoc": self.post_hoc,
            "certificate": self.certificate or None,
            "certificate_sha": self.certificate_sha or None,
            "reasons": list(self.reasons),
        }


def promote(
    program: Program,
    run: str,
    gates: Sequence[str] = GATES,
    *,
    dry_run: bool = False,
    step: int | None = None,
    actor: Actor | None = None,
) -> GateOutcome:
    """Apply the gates to a run; on a pass write its certificate and promote it.

    Appends `gated` with every row whatever the verdict, and `promoted` after a pass, both under
    the ledger's lock, so that the state judged is the state promoted.

    Args:
        program: the research program.
        run: run id.
        gates: names of the gates to apply; the record says which were asked for.
        dry_run: judge only; write nothing.
        step: eval step to judge; the final one when None.
        actor: who asks; found from the environment when None.

    Raises:
        UsageError: on an unknown gate, or none.
        NotFoundError: when there is no such run.
        PromotionRefusedError: when a rule forbids it (rejected, imported, prompt search, GOAL or
            CONTEXT edited without an amendment, already promoted on other evidence). Exit code 1.
        CannotTellError: when the run has no completed attempt. Exit code 3.
    """
    asked = _asked(gates)
    goal, context, protocol = read_goal(program), read_context(program), protocol_hashes(program)
    ledger = Ledger(program.ledger)
    if dry_run:
        outcome, _, _ = _judge(program, ledger.state(), run, asked, (goal, context), protocol, step, dry_run=True)
        return outcome
    outcomes: list[GateOutcome] = []

    def build(state: State) -> list[NewEvent]:
        outcome, text, data = _judge(program, state, run, asked, (goal, context), protocol, step, dry_run=False)
        outcomes[:] = [outcome]
        events = [NewEvent(run, "gated", data, actor=actor)]
        if outcome.promoted and state.runs[run].promoted is None:
            atomic_write(program.root / outcome.certificate, text)  # before the event that names its hash
            where = {"certificate": outcome.certificate, "certificate_sha": outcome.certificate_sha}
            events.append(NewEvent(run, "promoted", data | where, actor=actor))
        return events

    ledger.append_locked(build)
    return outcomes[0]


def _asked(gates: Sequence[str]) -> tuple[str, ...]:
    for name in gates:
        if name not in GATES:
            raise UsageError(f"there is no gate {name!r}", did_you_mean(name, GATES))
    if not gates:
        raise UsageError("no gate was asked for", did_you_mean("", GATES))
    return tuple(name for name in GATES if name in gates)


def _judge(
    program: Program,
    state: State,
    run: str,
    asked: tuple[str, ...],
    goal_context: tuple[Goal, Context],
    protocol: dict[str, str],
    step: int | None,
    *,
    dry_run: bool,
) -> tuple[GateOutcome, str, dict[str, Any]]:
    """Return the outcome, the certificate's text (empty without a pass) and the `gated` data."""
    found = _run(state, run)
    post_hoc = _check_promotable(found, state, protocol)
    goal, context = goal_context
    evidence = collect(program, found, goal, step)
    results = tuple(_apply(name, goal, context, evidence) for name in asked)
    verdict = combine(gate.verdict for gate in results)
    text, path, sha = "", "", ""
    if verdict is Verdict.PASS:
        certificate = certificates.build_certificate(found, evidence, results, protocol, post_hoc=post_hoc)
        text = certificates.certificate_text(certificate)
        path = program.relative(program.analysis_dir(run) / certificates.FILE)
        sha = sha256_hex(text)
        _check_same_certificate(found, sha)
    outcome = GateOutcome(
        run=run,
        step=evidence.step,
        verdict=verdict,
        gates=results,
        promoted=verdict is Verdict.PASS and not dry_run,
        dry_run=dry_run,
        post_hoc=post_hoc,
        certificate=path,
        certificate_sha=sha,
        reasons=tuple(reason for gate in results for reason in _reasons(gate)),
    )
    data = {
        "verdict": verdict,
        "gates": [gate.to_json() for gate in results],
        "gates_asked": list(asked),
        "step": evidence.step,
        "post_hoc": post_hoc,
    }
    return outcome, text, data


def _apply(name: str, goal: Goal, context: Context, evidence: Evidence) -> GateResult:
    return heldout_gate(goal, context, evidence) if name == "heldout" else GateResult(name, Verdict.NOT_RUN)


def _reasons(gate: GateResult) -> list[str]:
    if gate.verdict is Verdict.NOT_RUN:
        return [f"gate {gate.name} was not run"]
    return gate.reasons()


def _run(state: State, run: str) -> RunState:
    if run not in state.runs:
        raise NotFoundError(f"there is no run {run[:80]!r}", "`harness list` shows all runs")
    return state.runs[run]


def _check_promotable(run: RunState, state: State, protocol: dict[str, str]) -> bool:
    if reasons := promotion_refusals(run):
        raise PromotionRefusedError("; ".join(reasons), f"`harness show {run.run}` shows how it came to that")
    if reason := not_completed(run):
        raise CannotTellError(
            f"{reason}, so there is nothing to judge",
            f"`harness launch {run.run}{' --resume' if run.attempts else ''}`",
        )
    drift, post_hoc = protocol_drift(run, protocol, list(state.amendments))
    if drift:
        raise PromotionRefusedError(drift, 'restore it with git, or record the change: `harness amend --reason "…"`')
    return post_hoc


def _check_same_certificate(run: RunState, sha: str) -> None:
    if run.promoted is not None and run.promoted["certificate_sha"] != sha:
        raise PromotionRefusedError(
            f"{run.run} is promoted at step {run.promoted['step']} on other evidence",
            "a certificate is never replaced: `harness new-run --replicate` makes a run of its own",
        )


def decide(
    program: Program,
    run: str,
    decision: Decision | str,
    reason: str,
    *,
    by_rule: str | None = None,
    actor: Actor | None = None,
) -> None:
    """Record what was concluded from a run; a later decision replaces an earlier one.

    Args:
        program: the research program.
        run: run id.
        decision: keep, reject, rerun, retune or inconclusive.
        reason: why; never empty.
        by_rule: name of the rule when no judgement was involved.
        actor: who decides; found from the environment when None.

    Raises:
        UsageError: on an unknown decision or a blank reason.
        NotFoundError: when there is no such run.
        RefusedError: when the run's state does not allow this decision (`rules.decision_refusal`).
    """
    if not reason.strip():
        raise UsageError("a decision needs a reason", f'`harness decide {run} {decision} --reason "…"`')
    try:
        chosen = Decision(decision)
    except ValueError:
        hint = did_you_mean(str(decision)[:80], [str(known) for known in Decision])
        raise UsageError(f"there is no decision {str(decision)[:80]!r}", hint) from None

    def build(state: State) -> list[NewEvent]:
        found = _run(state, run)
        if refusal := decision_refusal(found, chosen):
            raise RefusedError(refusal, _decision_hint(found))
        data = {"decision": chosen, "reason": reason.strip(), "by_rule": by_rule}
        return [NewEvent(run, "decided", data, actor=actor)]

    Ledger(program.ledger).append_locked(build)


def _decision_hint(run: RunState) -> str:
    if not run.attempts:
        return f"`harness launch {run.run}` tests it first"
    if run.attempts[-1].get("outcome") is None:
        if live_status(run) == "stale":
            return f"its process is gone: `harness recover {run.run}` closes it"
        return f"`harness stop {run.run}` ends it, `harness wait {run.run}` waits"
    if run.attempts[-1].get("failure") in SPOILED:
        return f"the hypothesis was not tested: `harness decide {run.run} rerun --reason …`, then `harness launch`"
    if run.promoted is not None:
        return "write down what was found with `harness note`; promoting a better run replaces it as champion"
    return f"`harness show {run.run}` shows its attempts and evals"
