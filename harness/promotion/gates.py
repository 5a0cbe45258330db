"""The promotion gates as pure functions: GOAL, CONTEXT and evidence in, a verdict with its rows out.

A gate has three answers. `fail` needs a number that says no; whatever is absent, incomplete or not
comparable is `cannot_tell`, never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from harness.core.canonical import encode_non_finite
from harness.core.errors import ExitCode, NotFoundError
from harness.core.types import Verdict
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import Interval, left_out, mean_of, paired_difference
from harness.program import Context, ContextEnv, Goal, GoalEnv

FAILURE_LIMIT = 0.02
"""Share of requested samples that may be lost to tools, infrastructure or the verifier."""

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Check:
    """One row of a gate.

    Args:
        env: environment id.
        check: `evidence`, `threshold`, `gain` or `not_below`.
        metric: what was measured; empty for `evidence`.
        value: the measured mean or mean difference; None when nothing could be measured.
        low: lower bound of its interval.
        high: upper bound of its interval.
        bound: what it is held against.
        verdict: what this row says.
        detail: one sentence for people.
    """

    env: str
    check: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    bound: float | None
    verdict: Verdict
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Return the row for the ledger and the certificate; non-finite numbers typed."""
        return dict(encode_non_finite({name: getattr(self, name) for name in self.__slots__}))


@dataclass(frozen=True, slots=True)
class GateResult:
    """What one gate says, with the rows it says it from."""

    name: str
    verdict: Verdict
    checks: tuple[Check, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the gate for the ledger and the certificate."""
        return {"name": self.name, "verdict": self.verdict, "checks": [check.to_json() for check in self.checks]}

    def reasons(self) -> list[str]:
        """Return the sentences of the rows that did not pass."""
        return [check.detail for check in self.checks if check.verdict is not Verdict.PASS]


@dataclass(frozen=True, slots=True)
class EvalEvidence:
    """One eval of one environment, read back from its committed item file.

    Args:
        subject: `base` or `policy`.
        prompt: `run` or `shipped`.
        step: optimizer step of the evaluated adapter.
        requested: samples asked for.
        items_sha: hash of the held-out tasks.
        prompt_sha: hash of the prompt the model saw.
        verifier: version of the scoring function.
        file: program-relative path of the item file.
        file_sha: its hash according to the ledger.
        items: what the file holds; empty with a problem.
        protocol: how the items were chosen and sampled, as the event records it.
        problem: why the file cannot be used; empty when it can.
    """

    subject: str
    prompt: str
    step: int
    requested: int
    items_sha: str
    prompt_sha: str
    verifier: str
    file: str
    file_sha: str
    items: tuple[ItemRecord, ...] = ()
    protocol: Mapping[str, Any] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EnvEvidence:
    """The two evals a gate compares in one environment; None when the ledger has none."""

    policy: EvalEvidence | None
    baseline: EvalEvidence | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the held-out gate knows of a run.

    Args:
        run: run id.
        step: eval step under judgement; None when the run has no eval of its policy.
        envs: evidence by environment id.
        problem: why the step cannot be judged; empty when it can.
        adapter_sha: hash of the adapter that was evaluated; empty with a problem.
    """

    run: str
    step: int | None
    envs: Mapping[str, EnvEvidence]
    problem: str = ""
    adapter_sha: str = ""


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """Return fail when any fails, else cannot_tell when any is not a pass (or there is none), else pass."""
    seen = set(verdicts)
    if Verdict.FAIL in seen:
        return Verdict.FAIL
    return Verdict.PASS if seen == {Verdict.PASS} else Verdict.CANNOT_TELL


def exit_code(verdict: Verdict) -> ExitCode:
    """Map a verdict to an exit code: pass 0, fail 1, everything else 3."""
    return {Verdict.PASS: ExitCode.OK, Verdict.FAIL: ExitCode.NO}.get(verdict, ExitCode.CANNOT_TELL)


def heldout_gate(goal: Goal, context: Context, evidence: Evidence) -> GateResult:
    """Judge a run's held-out evals by GOAL.md; never raises for missing or odd evidence.

    Args:
        goal: thresholds, minimum gains, and which baseline a gain is measured against.
        context: the frozen protocol the evals must have followed.
        evidence: items of policy and baseline by environment.
    """
    checks: list[Check] = []
    if evidence.problem:
        checks.append(_unusable("", f"{evidence.run}: {evidence.problem}"))
    for wanted in goal.env:
        found = evidence.envs.get(wanted.id, EnvEvidence(None, None))
        checks += _judge_env(goal, wanted, context.eval_env(wanted.id), found)
    if not goal.env:
        checks.append(_unusable("", "GOAL.md names no environment, so there is nothing to pass"))
    return GateResult("heldout", combine(check.verdict for check in checks), tuple(checks))


def _judge_env(goal: Goal, wanted: GoalEnv, protocol: ContextEnv | None, found: EnvEvidence) -> list[Check]:
    problems = _evidence_problems(goal, wanted.id, protocol, found)
    metrics = (wanted.metric, *wanted.not_below)
    if problems:
        sides = [("the policy", found.policy), ("the baseline", found.baseline)]
        broken = [row for name, side in sides if side for row in _non_finite(wanted.id, metrics, name, side)]
        return [_unusable(wanted.id, f"{wanted.id}: {problem}") for problem in problems] + broken
    policy, base = _items(found.policy), _items(found.baseline)
    confidence = goal.gate.confidence
    complete = f"{wanted.id}: all {len(policy)} samples of both sides are on record and comparable"
    checks = [Check(wanted.id, "evidence", "", len(policy), None, None, len(base), Verdict.PASS, complete)]
    checks.append(_threshold(wanted, lambda: mean_of(policy, wanted.metric, confidence)))
    checks.append(_gain(wanted, lambda: paired_difference(policy, base, wanted.metric, confidence)))
    for metric in wanted.not_below:
        checks.append(_not_below(wanted, metric, policy, base, confidence))
    return checks


def _items(side: EvalEvidence | None) -> tuple[ItemRecord, ...]:
    return side.items if side else ()


def _evidence_problems(goal: Goal, env: str, protocol: ContextEnv | None, found: EnvEvidence) -> list[str]:
    """Return every reason why the two evals of an environment cannot be compared."""
    if protocol is None:
        return [f"GOAL.md has a threshold for {env}, but CONTEXT.md does not evaluate it"]
    policy, base = found.policy, found.baseline
    baseline = "the base model under the " + ("run's" if goal.gate.baseline == "base_run_prompt" else "shipped")
    problems = [] if policy else ["there is no held-out eval of the policy at this step"]
    problems += [] if base else [f"there is no held-out eval of {baseline} prompt"]
    for name, side in (("policy", policy), ("base", base)):
        if side is not None:
            problems += [f"{name}: {problem}" for problem in _side_problems(side, protocol)]
    if policy is None or base is None or policy.problem or base.problem:
        return problems
    if policy.items_sha != base.items_sha:
        problems.append("policy and base were not evaluated on the same items (items_sha differs)")
    if policy.verifier != base.verifier:
        problems.append(f"verifier versions differ: policy {policy.verifier}, base {base.verifier}")
    if goal.gate.baseline == "base_run_prompt" and policy.prompt_sha != base.prompt_sha:
        problems.append("policy and base did not see the same prompt (prompt_sha differs)")
    mine = {item.key: item.cluster for item in policy.items}
    theirs = {item.key: item.cluster for item in base.items}
    if mine != theirs:
        differing = len(mine.items() ^ theirs.items())
        problems.append(f"the item files do not hold the same tasks, samples and clusters ({differing} differ)")
    return problems


def _side_problems(side: EvalEvidence, protocol: ContextEnv) -> list[str]:
    if side.problem:
        return [side.problem]
    problems = []
    expected, described = protocol.items * protocol.samples, protocol.described()
    other = sorted(key for key, value in (side.protocol or described).items() if described.get(key) != value)
    if other:
        problems.append(f"it was evaluated with another {', '.join(other)} than CONTEXT.md asks for")
    if side.requested != expected:
        problems.append(f"{side.requested} samples were requested, CONTEXT.md asks for {expected}")
    if len(side.items) != side.requested:
        problems.append(f"{len(side.items)} of {side.requested} requested samples are on record")
    lost = left_out(side.items)
    if sum(lost.values()) > FAILURE_LIMIT * side.requested:
        classes = ", ".join(f"{n} {name}" for name, n in lost.items())
        problems.append(f"{classes} failures in {side.requested} samples are more than {FAILURE_LIMIT:.0%}")
    return problems


def _non_finite(env: str, metrics: Iterable[str], name: str, side: EvalEvidence) -> list[Check]:
    """Return a failing row per non-finite metric: more evidence can never turn it into a pass."""
    rows = []
    for metric in dict.fromkeys(metrics):
        values = [item.value(metric) for item in side.items if item.counts]
        bad = sum(value is not None and not isfinite(value) for value in values)
        if bad:
            detail = f"{env}: {metric} of {name} is not a finite number in {bad} samples"
            rows.append(Check(env, "evidence", metric, None, None, None, None, Verdict.FAIL, detail))
    return rows


def _unusable(env: str, detail: str) -> Check:
    return Check(env, "evidence", "", None, None, None, None, Verdict.CANNOT_TELL, detail)


def _threshold(wanted: GoalEnv, measure: Callable[[], Interval]) -> Check:
    def judge(interval: Interval) -> tuple[Verdict, str]:
        reached = interval.mean >= wanted.threshold - _ROUNDING
        relation = "reaches" if reached else "is below"
        detail = f"mean {wanted.metric} {_show(interval)} {relation} the threshold {wanted.threshold:g}"
        return (Verdict.PASS if reached else Verdict.FAIL), detail

    return _check(wanted.id, "threshold", wanted.metric, wanted.threshold, measure, judge)


def _gain(wanted: GoalEnv, measure: Callable[[], Interval]) -> Check:
    def judge(interval: Interval) -> tuple[Verdict, str]:
        above = interval.low > wanted.min_gain
        relation = "lies above" if above else "does not lie wholly above"
        detail = f"gain in {wanted.metric} {_show(interval)} {relation} the minimum gain {wanted.min_gain:g}"
        return (Verdict.PASS if above else Verdict.FAIL), detail

    return _check(wanted.id, "gain", wanted.metric, wanted.min_gain, measure, judge)


def _not_below(
    wanted: GoalEnv, metric: str, policy: tuple[ItemRecord, ...], base: tuple[ItemRecord, ...], confidence: float
) -> Check:
    def judge(interval: Interval) -> tuple[Verdict, str]:
        lower = interval.high < 0.0
        relation = "lies wholly below" if lower else "does not lie wholly below"
        return (Verdict.FAIL if lower else Verdict.PASS), f"change in {metric} {_show(interval)} {relation} the base"

    return _check(
        wanted.id, "not_below", metric, 0.0, lambda: paired_difference(policy, base, metric, confidence), judge
    )


def _check(
    env: str,
    check: str,
    metric: str,
    bound: float,
    measure: Callable[[], Interval],
    judge: Callable[[Interval], tuple[Verdict, str]],
) -> Check:
    """Measure and judge; a non-finite mean fails, an unbounded interval or a missing metric cannot tell."""
    try:
        interval = measure()
    except NotFoundError as error:
        return Check(env, check, metric, None, None, None, bound, Verdict.CANNOT_TELL, f"{env}: {error}")
    if not isfinite(interval.mean):
        verdict, detail = Verdict.FAIL, f"{metric} is not a finite number"
    elif not interval.is_finite:
        verdict = Verdict.CANNOT_TELL
        detail = f"{metric} has no interval: {interval.n} samples in {interval.clusters} cluster(s) cannot bound it"
    else:
        verdict, detail = judge(interval)
    return Check(env, check, metric, interval.mean, interval.low, interval.high, bound, verdict, f"{env}: {detail}")


def _show(interval: Interval) -> str:
    return f"{interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
