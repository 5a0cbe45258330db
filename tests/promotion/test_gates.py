"""The held-out gate: a pass needs complete, comparable, finite evidence that clears every bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.core.canonical import canonical_json
from harness.core.errors import ExitCode
from harness.core.types import FailureClass, Verdict
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import paired_difference
from harness.program import Context, Goal
from harness.promotion.gates import EnvEvidence, EvalEvidence, Evidence, combine, exit_code, heldout_gate

N = 40


def make_goal(**env):
    values = {"id": "e", "metric": "accuracy", "threshold": 0.5, "min_gain": 0.0, "not_below": ["format"]} | env
    return Goal.model_validate({"gate": {"baseline": "base_run_prompt", "confidence": 0.95}, "env": [values]})


def make_context(env="e", items=N, samples=1):
    entry = {"id": env, "items": items, "split": "heldout", "samples": samples, "max_tokens": 64, "temperature": 1.0}
    return Context.model_validate(
        {"model": {"name": "m"}, "eval": {"interval": 5, "seed": 0, "confidence": 0.95, "env": [entry]}}
    )


def make_items(right, form=N, n=N):
    """`right` of n items are accurate, `form` of n well formed; which ones is fixed, so evals pair up."""
    return tuple(
        ItemRecord(
            f"t{k:02d}",
            f"c{k // 2}",
            0,
            0.7 * (k < right) + 0.1 * (k < form),
            {"accuracy": float(k < right), "format": float(k < form)},
            {},
            None if k < right else FailureClass.MODEL,
        )
        for k in range(n)
    )


def side(subject, items, **changes):
    values = EvalEvidence(subject, "run", 20, N, "I", "P", "v1", f"analysis/run-001/{subject}", "F", items)
    return replace(values, **changes)


def judge(policy, base, goal=None, context=None):
    evidence = Evidence("run-001", 20, {"e": EnvEvidence(policy, base)}, adapter_sha="A")
    return heldout_gate(goal or make_goal(), context or make_context(), evidence)


POLICY, BASE = side("policy", make_items(30)), side("base", make_items(10))


def rows(result, **equal):
    return [check for check in result.checks if all(getattr(check, key) == value for key, value in equal.items())]


def test_a_clear_gain_passes_and_every_row_is_shown():
    result = judge(POLICY, BASE)
    assert result.verdict is Verdict.PASS
    assert [check.check for check in result.checks] == ["evidence", "threshold", "gain", "not_below"]
    (gain,) = rows(result, check="gain")
    expected = paired_difference(POLICY.items, BASE.items, "accuracy", 0.95)
    assert (gain.value, gain.low, gain.high, gain.bound) == (0.5, expected.low, expected.high, 0.0)
    assert result.reasons() == []
    canonical_json(result.to_json())


def test_a_mean_below_the_threshold_fails_with_its_numbers():
    result = judge(POLICY, BASE, make_goal(threshold=0.76))
    assert result.verdict is Verdict.FAIL
    (row,) = rows(result, check="threshold")
    assert (row.value, row.bound, row.verdict) == (0.75, 0.76, Verdict.FAIL)
    assert "0.7500 [" in result.reasons()[0] and "is below the threshold 0.76" in result.reasons()[0]


def test_a_mean_at_the_threshold_passes_whatever_the_last_bit_says():
    assert judge(POLICY, BASE, make_goal(threshold=0.75)).verdict is Verdict.PASS
    assert judge(POLICY, BASE, make_goal(threshold=math.nextafter(0.75, 1))).verdict is Verdict.PASS


def test_a_handful_of_losses_is_not_wholly_below():
    result = judge(side("policy", make_items(30, form=N - 10)), BASE)  # five clusters of two
    (row,) = rows(result, check="not_below")
    assert (row.high, row.verdict) == (0.0, Verdict.PASS)


def test_the_lower_bound_must_exceed_the_minimum_gain_not_the_mean():
    low = paired_difference(POLICY.items, BASE.items, "accuracy", 0.95).low
    assert judge(POLICY, BASE, make_goal(min_gain=low - 1e-9)).verdict is Verdict.PASS
    assert judge(POLICY, BASE, make_goal(min_gain=low)).verdict is Verdict.FAIL
    (row,) = rows(judge(POLICY, BASE, make_goal(min_gain=0.45)), check="gain")
    assert row.value > 0.45 and row.verdict is Verdict.FAIL
    assert "does not lie wholly above the minimum gain 0.45" in row.detail


def test_a_higher_confidence_asks_for_more():
    goal = make_goal(min_gain=0.2)
    strict = Goal.model_validate(goal.model_dump() | {"gate": {"baseline": "base_run_prompt", "confidence": 0.999}})
    assert judge(POLICY, BASE, goal).verdict is Verdict.PASS
    assert judge(POLICY, BASE, strict).verdict is Verdict.FAIL


def test_the_same_model_twice_gains_nothing():
    result = judge(side("policy", BASE.items), BASE, make_goal(threshold=0.0))
    assert result.verdict is Verdict.FAIL
    assert rows(result, check="gain")[0].verdict is Verdict.FAIL


def test_not_below_fails_only_when_the_interval_lies_wholly_below():
    slightly = judge(side("policy", make_items(30, form=N - 1)), BASE)
    assert rows(slightly, check="not_below")[0].verdict is Verdict.PASS
    assert "does not lie wholly below" in rows(slightly, check="not_below")[0].detail
    clearly = judge(side("policy", make_items(30, form=N // 2)), BASE)
    (row,) = rows(clearly, check="not_below")
    assert (row.verdict, row.bound) == (Verdict.FAIL, 0.0)
    assert "lies wholly below the base" in row.detail
    assert clearly.verdict is Verdict.FAIL


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["policy", "base"])
def test_a_non_finite_number_fails(bad, where):
    broken = (replace(POLICY.items[0], components={"accuracy": bad, "format": 1.0}), *POLICY.items[1:])
    policy, base = (side("policy", broken), BASE) if where == "policy" else (POLICY, side("base", broken))
    result = judge(policy, base)
    assert result.verdict is Verdict.FAIL
    canonical_json(result.to_json())


def test_a_non_finite_number_fails_even_when_the_eval_is_incomplete():
    broken = (replace(POLICY.items[0], components={"accuracy": math.nan, "format": 1.0}),)
    result = judge(side("policy", broken), BASE)
    assert result.verdict is Verdict.FAIL
    assert {check.verdict for check in result.checks} == {Verdict.FAIL, Verdict.CANNOT_TELL}


def test_a_non_finite_number_outside_the_denominator_does_not_matter():
    lost = replace(POLICY.items[0], reward=math.nan, components={}, failure=FailureClass.INFRA)
    policy = side("policy", (lost, *make_items(30, n=100)[1:]), requested=100)
    base = side("base", make_items(10, n=100), requested=100)
    result = judge(policy, base, make_goal(threshold=0.1, not_below=[]), make_context(items=100))
    assert result.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("policy", "base", "says"),
    [
        (None, BASE, "no held-out eval of the policy"),
        (POLICY, None, "no held-out eval of the base model under the run's prompt"),
        (None, None, "no held-out eval"),
        (side("policy", POLICY.items[1:]), BASE, "39 of 40 requested samples"),
        (side("policy", POLICY.items[1:], requested=39), BASE, "39 samples were requested, CONTEXT.md asks for 40"),
        (side("policy", ()), BASE, "0 of 40"),
        (side("policy", POLICY.items, items_sha="J"), BASE, "not evaluated on the same items"),
        (side("policy", POLICY.items, verifier="v2"), BASE, "verifier versions differ: policy v2, base v1"),
        (side("policy", POLICY.items, prompt_sha="Q"), BASE, "did not see the same prompt"),
        (side("policy", (), problem="x.jsonl was changed"), BASE, "policy: x.jsonl was changed"),
        (POLICY, side("base", (), problem="x.jsonl was changed"), "base: x.jsonl was changed"),
        (side("policy", (*POLICY.items[1:], replace(POLICY.items[0], task="u"))), BASE, "do not hold the same tasks"),
        (
            side("policy", (*POLICY.items[1:], replace(POLICY.items[0], cluster="u"))),
            BASE,
            "do not hold the same tasks",
        ),
    ],
)
def test_evidence_that_is_absent_incomplete_or_not_comparable_cannot_tell(policy, base, says):
    result = judge(policy, base)
    assert result.verdict is Verdict.CANNOT_TELL
    assert says in "; ".join(result.reasons())
    assert not rows(result, verdict=Verdict.FAIL)


@pytest.mark.parametrize("failure", [FailureClass.INFRA, FailureClass.TOOL, FailureClass.VERIFIER])
@pytest.mark.parametrize(("lost", "verdict"), [(2, Verdict.PASS), (3, Verdict.CANNOT_TELL)])
def test_more_than_two_percent_lost_samples_cannot_tell(failure, lost, verdict):
    items = make_items(60, form=100, n=100)
    broken = tuple(replace(item, failure=failure, components={}) for item in items[:lost]) + items[lost:]
    base = side("base", make_items(10, form=100, n=100), requested=100)
    result = judge(side("policy", broken, requested=100), base, context=make_context(items=100))
    assert result.verdict is verdict


def test_samples_per_task_count_in_what_was_asked_for():
    policy, base = (
        replace(v, items=(*v.items, *(replace(i, sample=1) for i in v.items)), requested=2 * N) for v in (POLICY, BASE)
    )
    assert judge(policy, base, context=make_context(samples=2)).verdict is Verdict.PASS
    assert judge(policy, base, context=make_context(items=2 * N)).verdict is Verdict.PASS
    assert judge(POLICY, BASE, context=make_context(samples=2)).verdict is Verdict.CANNOT_TELL


def test_model_failures_are_no_lost_samples():
    assert all(item.failure is FailureClass.MODEL for item in POLICY.items[30:])
    assert judge(POLICY, BASE).verdict is Verdict.PASS


def test_the_shipped_baseline_may_have_another_prompt():
    goal = Goal.model_validate(make_goal().model_dump() | {"gate": {"baseline": "base_shipped_prompt"}})
    base = side("base", BASE.items, prompt="shipped", prompt_sha="S")
    assert judge(POLICY, base, goal).verdict is Verdict.PASS
    assert "under the shipped prompt" in judge(POLICY, None, goal).reasons()[0]


def test_one_cluster_cannot_tell():
    policy = side("policy", tuple(replace(item, cluster="c") for item in POLICY.items))
    base = side("base", tuple(replace(item, cluster="c") for item in BASE.items))
    assert judge(policy, base).verdict is Verdict.CANNOT_TELL


def test_a_metric_that_was_not_recorded_cannot_tell():
    result = judge(POLICY, BASE, make_goal(metric="f1", not_below=[]))
    assert result.verdict is Verdict.CANNOT_TELL
    assert "'f1' is not recorded" in result.reasons()[0]


def test_an_environment_outside_the_protocol_cannot_tell():
    result = judge(POLICY, BASE, context=make_context(env="other"))
    assert result.verdict is Verdict.CANNOT_TELL
    assert "CONTEXT.md does not evaluate it" in result.reasons()[0]


def test_an_environment_without_evidence_cannot_tell():
    result = heldout_gate(make_goal(), make_context(), Evidence("run-001", 20, {}))
    assert result.verdict is Verdict.CANNOT_TELL


def test_a_problem_of_the_whole_evidence_cannot_tell():
    evidence = Evidence("run-001", 20, {"e": EnvEvidence(POLICY, BASE)}, problem="no adapter hash")
    assert heldout_gate(make_goal(), make_context(), evidence).verdict is Verdict.CANNOT_TELL


def test_a_failed_environment_outweighs_a_missing_one():
    both = make_goal().model_dump()
    both["env"] = [both["env"][0] | {"threshold": 0.99}, both["env"][0] | {"id": "other"}]
    result = heldout_gate(
        Goal.model_validate(both), make_context(), Evidence("run-001", 20, {"e": EnvEvidence(POLICY, BASE)})
    )
    assert result.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("verdicts", "expected", "code"),
    [
        ([Verdict.PASS], Verdict.PASS, ExitCode.OK),
        ([Verdict.PASS, Verdict.CANNOT_TELL], Verdict.CANNOT_TELL, ExitCode.CANNOT_TELL),
        ([Verdict.PASS, Verdict.NOT_RUN], Verdict.CANNOT_TELL, ExitCode.CANNOT_TELL),
        ([Verdict.CANNOT_TELL, Verdict.FAIL], Verdict.FAIL, ExitCode.NO),
        ([Verdict.NOT_RUN, Verdict.FAIL, Verdict.PASS], Verdict.FAIL, ExitCode.NO),
        ([], Verdict.CANNOT_TELL, ExitCode.CANNOT_TELL),
    ],
)
def test_verdicts_combine_and_map_to_exit_codes(verdicts, expected, code):
    assert combine(verdicts) is expected
    assert exit_code(combine(verdicts)) is code


def test_not_run_can_never_exit_zero():
    assert exit_code(Verdict.NOT_RUN) is ExitCode.CANNOT_TELL
