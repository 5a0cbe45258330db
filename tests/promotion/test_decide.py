"""Decisions on a run: what is allowed, and what is recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.errors import NotFoundError, RefusedError, UsageError
from harness.core.types import FailureClass
from harness.ledger import Actor
from harness.promotion.promote import decide, promote
from tests.promotion.promotion_world import RUN, make_items


def test_a_decision_is_recorded_with_its_reason(world):
    world.complete()
    decide(world.program, RUN, "keep", "  better on every label  ", actor=Actor("person", "p"))
    assert (world.run.decision, world.run.reason) == ("keep", "better on every label")
    assert world.run.decisions[-1]["actor"] == {"kind": "person", "name": "p"}


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_a_decision_needs_a_reason(world, reason):
    world.complete()
    with pytest.raises(UsageError, match="reason"):
        decide(world.program, RUN, "keep", reason)


def test_an_unknown_decision_is_answered_with_the_close_one(world):
    world.complete()
    with pytest.raises(UsageError, match="'kepe'") as caught:
        decide(world.program, RUN, "kepe", "r")
    assert "keep" in caught.value.hint


def test_a_decision_on_an_unknown_run_is_not_found(world):
    world.complete()
    with pytest.raises(NotFoundError):
        decide(world.program, "run-002", "keep", "r")


def allowed(world):
    decisions = []
    for decision in ("keep", "reject", "rerun", "retune", "inconclusive"):
        count = len(world.run.decisions)
        try:
            decide(world.program, RUN, decision, "r")
        except RefusedError as error:
            assert error.hint
            assert len(world.run.decisions) == count
        else:
            decisions.append(decision)
    return decisions


@pytest.mark.parametrize("failure", ["infra", "tool", "verifier"])
def test_a_spoiled_run_is_run_again_or_left_open(world, failure):
    world.create().start().evaluate("policy", make_items(30)).finish(outcome="failed", failure=failure)
    assert allowed(world) == ["rerun", "inconclusive"]


def test_a_run_without_evals_cannot_be_kept(world):
    world.create().start().finish()
    assert allowed(world) == ["reject", "retune", "inconclusive"]


def test_base_evals_alone_do_not_make_a_run_worth_keeping(world):
    world.create().start().evaluate("base", make_items(8), step=0).finish()
    assert "keep" not in allowed(world)


def test_a_completed_run_is_not_run_again_without_a_failure(world):
    world.complete()
    assert allowed(world) == ["keep", "reject", "retune", "inconclusive"]


def test_a_completed_run_with_lost_samples_may_be_run_again(world):
    items = [*make_items(30)[:39], replace(make_items(30)[39], failure=FailureClass.TOOL)]
    world.create().start().evaluate("policy", items).finish()
    assert "rerun" in allowed(world)


def test_a_run_stopped_by_a_budget_may_be_kept_but_an_interrupted_one_not(world):
    world.create().start().evaluate("policy", make_items(30)).finish(outcome="stopped")
    assert allowed(world) == ["keep", "reject", "retune", "inconclusive"]
    world.start(attempt=2).finish(attempt=2, outcome="interrupted")
    assert allowed(world) == ["reject", "rerun", "retune", "inconclusive"]


def test_a_run_that_diverged_is_the_models_failure(world):
    world.create().start().finish(outcome="failed", failure="model")
    assert allowed(world) == ["reject", "retune", "inconclusive"]


def test_nothing_is_decided_before_a_run_ends(world):
    world.create()
    assert allowed(world) == ["inconclusive"]
    world.start()
    assert allowed(world) == []


def test_a_promoted_run_is_not_rejected(world):
    world.complete()
    promote(world.program, RUN, gates=("heldout",))
    assert allowed(world) == ["keep", "retune", "inconclusive"]


def test_an_imported_run_can_be_judged_but_not_run_again(world):
    world.ledger.append(RUN, "imported", {"type": "import", "hypothesis": "h"})
    assert allowed(world) == ["keep", "reject", "retune", "inconclusive"]
