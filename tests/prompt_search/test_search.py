"""The search as a whole: it finds, keeps to its budget, and comes back from a kill without paying twice."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("gepa")

from harness.core.errors import ConfigError, InfraError, UsageError
from harness.core.types import FailureClass
from harness.prompt_search.budget import Limits, sizes_for
from harness.prompt_search.record import find
from harness.prompt_search.search import search
from tests.prompt_search.support import Riddles, Solver, found, world


def told(finding):
    """What two equal searches agree on: everything but seconds."""
    record = finding.record()
    record["spent"] = {key: value for key, value in record["spent"].items() if key != "seconds"}
    return record


def test_it_finds_demonstrations_that_help_on_items_it_did_not_see(tmp_path):
    finding = found(tmp_path, Solver(), 600)
    result = finding.result()
    assert result["scoring"]["items"] == 126
    gain = result["scoring"]["gain"]
    assert gain["seed"]["reward"]["low"] > 0 and gain["random"]["reward"]["low"] > 0
    assert len(finding.shown) == 6 and finding.chosen.index > 0
    assert [found["index"] for found in finding.record()["history"]] == list(range(result["candidates"]))
    assert finding.prompt_id == f"found-{result['prompt_sha'][:8]}"


def test_no_task_stands_in_two_parts_and_none_of_the_shown_is_scored(tmp_path):
    question, evaluator, proposer = world(tmp_path, Solver(), 300)
    finding = find(question, evaluator, proposer, 0.95, 60)
    shown = {task.id for task in finding.shown}
    clusters = {task.cluster for task in finding.shown}
    scored = {item.task for item in finding.scoring["found"]}
    chosen_by = {item.task for item in finding.validation["found"]}
    assert not shown & scored and not shown & chosen_by and not scored & chosen_by
    assert not clusters & {item.cluster for item in finding.scoring["found"]}
    assert not any("heldout" in prompt for prompt, _ in evaluator.player.engine.asked)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_search_never_spends_more_evaluations_than_its_budget(tmp_path, seed):
    question, evaluator, proposer = world(tmp_path, Solver(), 217, seed)
    _, ended = search(question, evaluator, proposer)
    assert ended == "evaluations"
    assert evaluator.player.engine.played == evaluator.budget.spent.evaluations <= 217
    assert evaluator.budget.spent.evaluations > 217 - question.sizes.validation - question.sizes.minibatch


def test_other_limits_end_a_search_within_one_batch(tmp_path):
    question, evaluator, proposer = world(tmp_path, Solver(), 400, tokens=300)
    _, ended = search(question, evaluator, proposer)
    assert ended == "tokens"
    assert 300 <= evaluator.budget.spent.tokens < 300 + 2 * question.sizes.validation


def test_below_the_floor_a_search_is_refused():
    sizes = sizes_for(600)
    assert sizes.floor == 4 * (sizes.validation + sizes.minibatch)
    with pytest.raises(UsageError, match="too few") as refused:
        Limits(sizes.floor - 1).check(sizes)
    assert f"--budget {sizes.floor}" in refused.value.hint
    Limits(sizes.floor).check(sizes)
    with pytest.raises(UsageError, match="nothing"):
        Limits(600, money=0.0).check(sizes)


@pytest.mark.parametrize(
    ("before", "after"), [((k,), ()) for k in (1, 2, 4, 6, 9)] + [((), (k,)) for k in (1, 3, 5, 7, 10)]
)
def test_a_kill_at_any_moment_costs_nothing_that_was_paid_and_changes_nothing(tmp_path, before, after):
    whole = found(tmp_path / "whole", Solver(), 200, items=60)
    with pytest.raises(KeyboardInterrupt):
        found(tmp_path / "killed", killed := Solver(before, after), 200, items=60)
    again = found(tmp_path / "killed", resumed := Solver(), 200, items=60)
    assert told(again) == told(whole)
    assert not set(killed.asked) & set(resumed.asked)
    lines = (tmp_path / "killed" / "evaluations.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys)) == killed.played + resumed.played
    assert found(tmp_path / "killed", third := Solver(), 200, items=60).result() == again.result()
    assert third.played == 0


def test_a_line_torn_by_a_kill_is_paid_again_and_nothing_else(tmp_path):
    whole = found(tmp_path, Solver(), 200, items=60)
    path = tmp_path / "evaluations.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = found(tmp_path, engine := Solver(), 200, items=60)
    assert engine.played == 1 and told(again) == told(whole)


def test_a_failure_of_the_machine_is_neither_scored_nor_stored(tmp_path):
    env = Riddles()
    question, evaluator, proposer = world(tmp_path, Solver(), 200, env=env)
    bad = question.validation[3].id
    env.broken = lambda task: FailureClass.INFRA if task.id == bad else None
    with pytest.raises(InfraError, match=bad):
        search(question, evaluator, proposer)
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [row["task"] for row in rows if row["kind"] == "failure"] == [bad] * 3
    assert bad not in {row["item"]["task"] for row in rows if row["kind"] == "evaluation"}
    again = found(tmp_path, Solver(), 200, items=60)
    assert bad in again.history.found[0].scores
    assert again.history.found[0].scores == found(tmp_path / "other", Solver(), 200, items=60).history.found[0].scores


def test_a_failure_that_passes_is_tried_again(tmp_path):
    env, left = Riddles(), [FailureClass.TOOL, FailureClass.INFRA]
    env.broken = lambda task: left.pop() if left else None
    question, evaluator, proposer = world(tmp_path, Solver(), 200, env=env)
    history, _ = search(question, evaluator, proposer)
    assert len(history.found[0].scores) == question.sizes.validation
    assert evaluator.cache.failed_tokens == 4


def test_a_seed_that_cannot_be_played_is_an_error_of_the_user(tmp_path):
    question, evaluator, proposer = world(tmp_path, Solver(), 200)
    empty = type(question)({**question.seed_candidate, "system": ""}, question.parts, question.sizes, question.seed)
    with pytest.raises(ConfigError, match="is empty"):
        search(empty, evaluator, proposer)
