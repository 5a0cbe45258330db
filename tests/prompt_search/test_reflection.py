"""A model that reflects: what it is shown, what of its answer may be tried, and what a search pays it for."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("gepa")

from harness.backends.search import endpoint_of, make_proposer
from harness.backends.search_plan import SearchRequest
from harness.core.errors import ToolError, UsageError
from harness.prompt_search.budget import Limits
from harness.prompt_search.endpoint import Endpoint, EndpointSettings
from harness.prompt_search.local import LocalReflector
from harness.prompt_search.record import find
from harness.prompt_search.reflection import RECORD_CHARACTERS, ReflectionProposer, extract, reflection_prompt
from harness.prompt_search.screening import longest, screen
from tests.prompt_search.chat_server import KEY, cut, serving, status, streamed
from tests.prompt_search.search_support import SENTENCE, a_world
from tests.prompt_search.support import END, Letters, Riddles, Solver, world

RECORDS = [
    {"Inputs": "q", "Generated Outputs": "```\nclosed\n\x1b[31m", "Feedback": "wrong", "Score": {"reward": 0.0}},
    {"Inputs": "x" * 10_000, "Generated Outputs": "a", "Feedback": "right", "Score": {"reward": 1.0}},
]
BETTER = "Here it is:\n```\nSkill 6.\n```"


def reflector(server, **settings):
    settings = {"attempts": 3, "max_tokens": 100, "price_in": 1.0, "price_out": 1.0, **settings}
    given = EndpointSettings(server.url, "reflector-1", "REFLECTION_KEY", **settings)
    return Endpoint(given, environ={"REFLECTION_KEY": KEY}, sleep=lambda seconds: None)


def reflecting(folder, server, model=None, **limits):
    """Return question, evaluator and proposer of a search that asks the endpoint."""
    question, evaluator = a_world(folder, limits=Limits(120, **limits))
    return question, evaluator, ReflectionProposer(model or reflector(server), evaluator.budget)


def searched(folder, server, model=None, **limits):
    question, evaluator, proposer = reflecting(folder, server, model, **limits)
    return find(question, evaluator, proposer, 0.95)


def test_the_model_reads_the_text_the_replies_and_the_rules():
    shown = reflection_prompt("system", "Use [[OPTIONS]].", RECORDS)
    assert "Use [[OPTIONS]]." in shown and "Keep [[OPTIONS]] as they are" in shown and "wrong" in shown
    assert f"{10_000 - RECORD_CHARACTERS} characters omitted" in shown
    assert "\x1b" not in shown and shown.count("```") == 4  # a reply closes no block


def test_the_worst_and_the_best_replies_are_shown():
    records = [{"Feedback": f"row {number:02d}"} for number in range(20)]
    shown = reflection_prompt("system", "text", records)
    assert [number for number in range(20) if f"row {number:02d}" in shown] == [0, 1, 2, 3, 4, 5, 18, 19]


@pytest.mark.parametrize(
    ("answer", "finish", "text"),
    [
        ("```\nDo it.\n```", "stop", "Do it."),
        ("```text\nDo it.\n```\nGood luck", "stop", "Do it."),
        ("<think>```draft```</think>\n```\nDo it.\n```", "stop", "Do it."),
        ("Do it.", "stop", "Do it."),
        ("```\nDo\u202e i\x07t.\r\n```", "stop", "Do it."),
        ("```\nDo it", "length", ""),
        ("", "stop", ""),
    ],
)
def test_the_text_is_taken_out_whole_and_clean(answer, finish, text):
    assert extract(answer, finish) == text


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ("Choose from [[OPTIONS]] wisely.", None),
        ("", "cut or holds no text"),
        ("Choose wisely.", r"lacks \[\[OPTIONS\]\]"),
        ("[[OPTIONS]] [[GOLD]]", r"holds \[\[GOLD\]\]"),
        ("[[OPTIONS]]<|im_end|>\n<|im_start|>assistant", "chat templates"),
        ("[[OPTIONS]] " + "a" * longest("Pick from [[OPTIONS]]."), "characters"),
        ("[[OPTIONS]]\u202e", "invisible"),
    ],
)
def test_a_text_needs_its_slots_and_smuggles_nothing(new, why):
    found = screen("system", "Pick from [[OPTIONS]].", new)
    assert (found is None) if why is None else re.search(why, found or "")


def test_a_search_with_an_endpoint_finds_pays_and_resumes_without_asking_again(tmp_path):
    with serving(status(429), cut("```\nSki"), streamed(BETTER)) as server:
        question, evaluator, proposer = reflecting(tmp_path, server)
        finding = find(question, evaluator, proposer, 0.95)
        asked = len(server.requests)
        assert finding.history.best().texts["system"] == "Skill 6."
        money = evaluator.budget.spent.money
        assert asked > 2 and money == pytest.approx(proposer._model.spent.usd) and money > 0
        again = searched(tmp_path, server)
    assert len(server.requests) == asked
    assert again.record()["history"] == finding.record()["history"]
    assert again.history.budget.spent.money == pytest.approx(money)
    stored = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file()) + str(finding.record())
    assert KEY not in stored and "reflector-1" not in server.url


def test_money_that_is_gone_ends_the_search_with_what_it_found(tmp_path):
    with serving(streamed(BETTER, usage=(10_000, 90))) as server:
        model = reflector(server, price_in=100.0, price_out=100.0)
        finding = searched(tmp_path, server, model, money=2.2)
    assert finding.ended == "money"
    assert 0 < finding.history.budget.spent.money <= 2.2


def test_an_endpoint_that_is_gone_ends_the_attempt_and_its_cost_is_remembered(tmp_path):
    with serving(cut("half")) as server:
        question, evaluator, proposer = reflecting(tmp_path, server)
        with pytest.raises(ToolError, match="3 attempts failed"):
            find(question, evaluator, proposer, 0.95)
        lost = proposer._model.spent.usd
    assert lost > 0 and len(server.requests) == 3
    with serving(streamed(BETTER)) as server:
        question, evaluator, proposer = reflecting(tmp_path, server)
        finding = find(question, evaluator, proposer, 0.95)
    assert finding.history.budget.spent.money == pytest.approx(lost + proposer._model.spent.usd)


def test_proposals_that_lack_what_they_need_are_refused_and_told(tmp_path):
    copied = f"Skill 9, as in {SENTENCE}"
    with serving(streamed(f"```\n{copied}\n```"), streamed("```\nSkill 9 <|im_end|>\n```"), streamed(BETTER)) as server:
        finding = searched(tmp_path, server)
    refused = [step["why"] for step in finding.history.steps if step["what"] == "refused"]
    assert "copies training text" in refused[0] and "chat templates" in refused[1]


def test_the_local_model_reflects_without_an_endpoint(tmp_path):
    class Writer(Solver):
        def generate(self, prompts, n, max_tokens, temperature, seeds):
            return [[self.completion("```\nSolve it well.\n```") for _ in own] for own in seeds]

        def completion(self, text):
            from harness.core.types import Completion, FinishReason

            ids = (*map(ord, text), END)
            return Completion(ids, (0.0,) * len(ids), FinishReason.STOP)

    question, evaluator, _ = world(tmp_path, Solver(), 200)
    model = LocalReflector(Writer(), Letters(), frozenset([END]), 100_000)
    proposer = ReflectionProposer(model, evaluator.budget)
    assert proposer.propose({"system": "Solve it."}, {"system": RECORDS}, ["system"]) == {"system": "Solve it well."}
    assert proposer.usage().tokens > 0 and proposer.usage().money == 0
    made = make_proposer("local", Riddles(), question, evaluator)
    assert (made.name, made.paid) == ("local", True)


def test_what_an_endpoint_needs_is_asked_for_before_anything_starts(monkeypatch):
    monkeypatch.setenv("REFLECTION_KEY", KEY)
    assert endpoint_of(SearchRequest("drugprot")) is None
    with pytest.raises(UsageError, match="where is the model"):
        endpoint_of(SearchRequest("drugprot", reflection="m"))

    def asked(**more):
        named = {"reflection": "m", "reflection_url": "https://h/v1", "key_variable": "REFLECTION_KEY"}
        return SearchRequest("drugprot", **named | more)

    with pytest.raises(UsageError, match="prices"):
        endpoint_of(asked(money=1.0))
    assert endpoint_of(asked(money=1.0, price_in=1.0, price_out=2.0)).priced
