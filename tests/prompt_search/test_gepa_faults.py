"""Known faults of gepa 0.1.4, by issue number: plain gepa has each, a search of this project does not."""

import gepa
import pytest
from gepa.core.adapter import EvaluationBatch

from harness.core.errors import InfraError, ToolError, UsageError
from harness.prompt_search.adapter import SearchAdapter
from harness.prompt_search.budget import Limits
from tests.prompt_search.search_support import SENTENCE, SIZES, Skills, StepProposer, a_search


class PlainAdapter:
    """What gepa's documentation asks for: numbers as tasks, right when below the skill that the text names."""

    propose_new_texts = None

    def __init__(self):
        self.calls = []
        self.failing = set()

    def evaluate(self, batch, candidate, capture_traces=False):
        self.calls.append((list(batch), dict(candidate), capture_traces))
        skill = int(candidate["system"].split()[-1])
        scores = [float(number % 10 < skill and number not in self.failing) for number in batch]
        self.failing.clear()  # the failure was transient
        return EvaluationBatch(["out"] * len(batch), scores, ["trace"] * len(batch) if capture_traces else None)

    def make_reflective_dataset(self, candidate, eval_batch, components):
        return {name: [{"Feedback": "more skill"}] for name in components}


class Silent:
    def log(self, message):
        pass


def plain(adapter, *, calls=60, **settings):
    given = {"reflection_lm": lambda prompt: "```\nSkill 5\n```"}
    return gepa.optimize(
        seed_candidate={"system": "Skill 2"},
        trainset=list(range(6)),
        valset=list(range(100, 112)),
        adapter=adapter,
        max_metric_calls=calls,
        logger=Silent(),
        skip_perfect_score=False,
        **{**given, **settings},
    )


def validations(adapter):
    return [call for call in adapter.calls if len(call[0]) == 12]


def test_gepa_428_no_traces_are_kept_of_a_whole_validation(tmp_path, monkeypatch):
    adapter = PlainAdapter()
    plain(adapter)
    assert any(traces for _, _, traces in validations(adapter))  # gepa 0.1.4 asks for them

    made = []
    evaluate = SearchAdapter.evaluate

    def watched(self, batch, candidate, capture_traces=False):
        result = evaluate(self, batch, candidate, capture_traces)
        made.append((len(batch), capture_traces, result.trajectories))
        return result

    monkeypatch.setattr(SearchAdapter, "evaluate", watched)
    history, _, _ = a_search(tmp_path)
    assert len(history.found) > 1
    asked = [traces for size, capture, traces in made if size == SIZES.validation and capture]
    assert asked and all(traces is None for traces in asked)
    assert all(traces for size, capture, traces in made if size == SIZES.minibatch and capture)


def test_gepa_453_a_resumed_search_pays_for_nothing_again(tmp_path):
    adapter = PlainAdapter()
    plain(adapter, run_dir=str(tmp_path / "plain"), calls=40)
    adapter.calls.clear()
    plain(adapter, run_dir=str(tmp_path / "plain"), calls=40)
    assert [candidate for _, candidate, _ in validations(adapter)] == [{"system": "Skill 2"}]  # paid, and thrown away

    first, ended, before = a_search(tmp_path)
    again, ended_again, after = a_search(tmp_path)
    assert before.player.engine.samples == before.budget.spent.evaluations > 0
    assert after.player.engine.samples == 0
    assert [found.to_json() for found in again.found] == [found.to_json() for found in first.found]
    assert (ended_again, again.steps) == (ended, first.steps)
    assert not list(tmp_path.glob("*.bin"))


def test_gepa_456_a_transient_failure_is_no_zero_and_is_never_cached(tmp_path):
    adapter = PlainAdapter()
    adapter.failing = {101}
    settings = {"run_dir": str(tmp_path / "plain"), "cache_evaluation": True, "calls": 40}
    plain(adapter, **settings)
    result = plain(adapter, **settings)
    assert result.val_subscores[0][1] == 0.0  # 101 is right under Skill 2, and stays wrong for ever

    env = Skills()
    clean, _, _ = a_search(tmp_path / "clean", env=env)
    shaken = Skills()
    shaken.fails = dict.fromkeys(clean.found[0].scores, 1)
    history, _, evaluator = a_search(tmp_path / "shaken", env=shaken)
    assert [found.to_json() for found in history.found] == [found.to_json() for found in clean.found]
    assert evaluator.cache.failed_tokens > 0

    # a service that stays down ends the search instead, and what it spoiled is not in the cache
    down = Skills()
    down.fails = dict.fromkeys(list(clean.found[0].scores)[:1], 99)
    with pytest.raises(InfraError, match="failed 3 times as tool"):
        a_search(tmp_path / "down", env=down)
    mended, _, _ = a_search(tmp_path / "down", env=Skills())
    assert mended.found[0].scores == clean.found[0].scores


def test_gepa_375_a_budget_that_can_accept_nothing_is_refused():
    result = plain(PlainAdapter(), calls=13)
    assert result.num_candidates <= 2  # a success of one proposal at most

    with pytest.raises(UsageError, match=r"too few") as caught:
        Limits(SIZES.floor - 1).check(SIZES)
    assert f"--budget {SIZES.floor}" in caught.value.hint
    Limits(SIZES.floor).check(SIZES)


def test_gepa_375_the_smallest_budget_accepts_three_proposals_and_is_kept(tmp_path):
    history, _, evaluator = a_search(tmp_path, evaluations=SIZES.floor)
    assert sum(step["what"] == "accepted" for step in history.steps) == 3
    assert evaluator.player.engine.samples <= SIZES.floor


def test_gepa_261_a_prompt_that_copies_training_text_is_refused_and_logged(tmp_path):
    copied = f"Skill 9. For example: {SENTENCE}."
    result = plain(PlainAdapter(), reflection_lm=lambda prompt: f"```\n{SENTENCE} Skill 9\n```")
    assert SENTENCE in result.best_candidate["system"]

    proposer = StepProposer(lambda text: copied if text == "Skill 2." else "Skill 2.")
    history, _, evaluator = a_search(tmp_path, proposer=proposer)
    refused = [step for step in history.steps if step["what"] == "refused"]
    assert refused and "copies training text of task train-" in refused[0]["why"]
    assert refused[0]["components"] == {"system": copied}
    assert all(copied not in texts.values() for texts in evaluator.texts.values())
    assert history.best().texts == {"system": "Skill 2."}


def test_a_missing_propose_new_texts_or_one_that_raises_is_no_silent_end(tmp_path):
    class Forgetful(PlainAdapter):
        def __getattribute__(self, name):
            if name == "propose_new_texts":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert plain(Forgetful()).num_candidates == 1  # every proposal raised, and nobody was told

    assert callable(SearchAdapter.propose_new_texts)

    def fail(text):
        raise ToolError("the endpoint is gone")

    proposer = StepProposer(fail)
    with pytest.raises(ToolError, match="endpoint is gone"):
        a_search(tmp_path, proposer=proposer)
    assert proposer.asked == 1  # gepa asks again, task by task; a paid proposer must not be asked twice
