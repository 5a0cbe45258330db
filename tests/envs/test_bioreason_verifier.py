"""Form and worth of answers: every attack of the list of public verifier bugs that concerns them, and totality."""

import json
import math
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.core.types import Episode, FailureClass, FinishReason, Message
from harness.envs.bioreason_go.answer import read_answer
from harness.envs.bioreason_go.verifier import COMPONENTS, Scorer, Weights
from tests.envs.go_support import (
    APOPTOSIS,
    ATP,
    BINDING,
    KINASE,
    LABELS,
    MEMBRANE,
    NUCLEUS,
    OBSOLETE,
    PHOSPHORYLATION,
    ROOTS,
    SIGNALLING,
    TYROSINE_KINASE,
    UNKNOWN,
    information_of_train,
    reply,
    score,
    scorer,
)

RIGHT = reply(**LABELS)
HALF = reply(mf=[TYROSINE_KINASE], bp=[PHOSPHORYLATION], cc=[MEMBRANE])


def episode(*messages):
    return Episode("t", tuple(Message(role, text) for role, text in messages), FinishReason.STOP)


def test_a_right_answer_earns_everything():
    result = score(RIGHT)
    assert result.reward == 1.0
    assert set(result.components) == set(COMPONENTS)
    assert set(result.components.values()) == {1.0}
    assert result.metrics["simgic"] == result.metrics["exact_precision"] == result.metrics["exact_recall"] == 1.0
    assert result.failure is None


@pytest.mark.parametrize(
    ("text", "problem", "recovered"),
    [
        (f"```json\n{RIGHT}\n```", "code fence around the object", True),
        (f"{RIGHT}\n```", "code fence around the object", True),
        (f"Here it is: {RIGHT}", "text before the object", True),
        (f"{RIGHT}\nI hope this helps.", "text after the object", True),
        (RIGHT + RIGHT, "more than one object", False),
        (f"{RIGHT}\n{HALF}", "more than one object", False),
        (f"[{RIGHT}]", "text before the object", True),
        ("", "no answer after the reasoning", False),
        ("The protein is a kinase.", "no object", False),
    ],
)
def test_e3_6_fence_prose_and_two_objects_are_no_answer(text, problem, recovered):
    result = score(text)
    assert result.reward == 0.0
    assert set(result.components.values()) == {0.0}
    assert result.diagnostics["problem"] == problem
    assert result.metrics["lenient_similarity"] == float(recovered)
    assert result.failure is FailureClass.MODEL


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (RIGHT[:-1] + ', "mf": []}', "duplicate key"),
        (RIGHT[:-1] + ', "mf": ["GO:0004713", "GO:0005524"]}', "duplicate key"),
        ('{"summary": {"a": 1, "a": 2}, "mf": [], "bp": [], "cc": []}', "duplicate key"),
        ('{"summary": "x", "mf": NaN, "bp": [], "cc": []}', "a number or depth JSON has not"),
        ('{"summary": "x", "mf": [Infinity], "bp": [], "cc": []}', "a number or depth JSON has not"),
        ('{"summary": "x", "mf": [1e999], "bp": [], "cc": []}', "a number or depth JSON has not"),
        ('{"a":' * 70 + "1" + "}" * 70, "a number or depth JSON has not"),
        ("\ufeff" + RIGHT, "byte order mark before the object"),
    ],
)
def test_e3_7_duplicate_keys_numbers_json_has_not_and_bom(text, problem):
    result = score(text)
    assert (result.reward, result.diagnostics["problem"]) == (0.0, problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (RIGHT[:-1], "not JSON"),
        (RIGHT[:-2] + "}", "not JSON"),
        (f'{{"summary": "x", "mf": ["GO:0004713", {RIGHT}', "not JSON"),
        (RIGHT.replace('"', "'"), "not JSON"),
        (RIGHT[:-1] + ",}", "not JSON"),
    ],
)
def test_e3_8_nothing_is_repaired(text, problem):
    result = score(text)
    assert (result.reward, result.diagnostics["problem"]) == (0.0, problem)
    assert result.metrics["lenient_similarity"] == 0.0


def test_e3_8_braces_in_strings_are_text():
    assert score(reply(summary='a } kinase { "]', **LABELS)).reward == 1.0
    assert score(reply(summary="see {} and </answer>", **LABELS)).reward == 1.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"summary": None}, "summary is no text"),
        ({"summary": " \n"}, "summary is empty"),
        ({"mf": "GO:0004713"}, "mf is no list"),
        ({"bp": {"GO:0006468": 1}}, "bp is no list"),
        ({"cc": None}, "cc is no list"),
        ({"mf": [4713]}, "mf holds something that is no text"),
        ({"mf": [["GO:0004713"]]}, "mf holds something that is no text"),
        ({"bp": [None]}, "bp holds something that is no text"),
        ({"reward": 1}, "a key too many"),
        ({"MF": []}, "a key too many"),
    ],
)
def test_wrong_types_and_extra_keys(change, problem):
    result = score(json.dumps({**json.loads(RIGHT), **change}))
    assert (result.reward, result.diagnostics["problem"]) == (0.0, problem)


@pytest.mark.parametrize("key", ["summary", "mf", "bp", "cc"])
def test_missing_keys(key):
    value = json.loads(RIGHT)
    del value[key]
    assert score(json.dumps(value)).diagnostics["problem"] == f"key {key} is missing"


def test_keys_in_any_order_and_blanks_around():
    value = json.loads(RIGHT)
    assert score("\n\t " + json.dumps(dict(reversed(value.items())), indent=2) + " \r\n").reward == 1.0


def test_only_the_final_answer_counts():
    assert score(f"<think>{RIGHT}</think>").reward == 0.0
    assert score(f"<think>{RIGHT}</think>{HALF}").reward == score(HALF).reward < 1.0
    assert score(f"GO:0004713 it is</think>{RIGHT}").reward == 1.0
    assert score(f"<think>{RIGHT}").reward == 0.0
    cut = score(RIGHT[:30], finish=FinishReason.LENGTH)
    assert cut.diagnostics["problem"] == "truncated before a valid answer"
    assert cut.metrics["truncated"] == 1.0


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("go:0004713", "malformed"),
        ("GO:00046721", "malformed"),
        ("GO:000471", "malformed"),
        (" GO:0004713", "malformed"),
        ("GO:0004713\n", "malformed"),
        ("GO:٠٠٠٤٧١٣", "malformed"),
        ("GО:0004713", "malformed"),  # Cyrillic O
        ("ＧＯ:0004713", "malformed"),
        ("GO:0004713 (protein tyrosine kinase activity)", "malformed"),
        ("protein tyrosine kinase activity", "malformed"),
        ("", "malformed"),
        ("\ud800", "malformed"),
        (UNKNOWN, "unknown"),
        (OBSOLETE, "obsolete"),
    ],
)
def test_e3_14_look_alikes_and_ids_that_are_none_are_false_positives(entry, kind):
    alone, beside = score(reply(mf=[entry])), score(reply(mf=[*LABELS["mf"], entry], bp=LABELS["bp"], cc=LABELS["cc"]))
    assert alone.components["valid"] == 1.0
    assert alone.components["similarity"] == alone.components["coverage"] == alone.components["cardinality"] == 0.0
    assert alone.metrics[f"{kind}_ids"] == 1.0
    assert 0.6 < beside.components["mf_f1"] < 1.0
    assert beside.components["similarity"] < 1.0
    assert beside.components["bp_f1"] == beside.components["cc_f1"] == 1.0


def test_e3_15_roots_say_nothing():
    only = score(reply(**{aspect: [root] for aspect, root in ROOTS.items()}))
    assert only.components == {name: float(name == "valid") for name in COMPONENTS}
    assert only.metrics["answered"] == 0.0
    assert only.metrics["root_ids"] == 3.0
    with_root = score(reply(**{aspect: [ROOTS[aspect], *ids] for aspect, ids in LABELS.items()}))
    assert with_root.components == score(RIGHT).components
    assert scorer().gold({aspect: [root] for aspect, root in ROOTS.items()}).aspects == {}


def test_e3_15_broad_spraying_pays_less_than_one_right_term():
    ontology = scorer().ontology
    sprayed = {a: [ontology.id(i) for i in range(len(ontology)) if ontology.aspect(i) == a][:300] for a in ROOTS}
    spray = score(reply(**{aspect: [*LABELS[aspect], *ids] for aspect, ids in sprayed.items()}))
    honest = score(reply(mf=[TYROSINE_KINASE], bp=[PHOSPHORYLATION], cc=[MEMBRANE]))
    assert spray.metrics["exact_recall"] == 1.0
    assert spray.components["cardinality"] < 0.02
    assert spray.reward < honest.reward - 0.4


def test_e3_16_wrong_aspect_aliases_and_repeats():
    misplaced = score(reply(mf=[*LABELS["mf"], NUCLEUS], bp=LABELS["bp"], cc=LABELS["cc"]))
    assert misplaced.metrics["misplaced_ids"] == 1.0
    assert misplaced.components["mf_f1"] < 1.0
    swapped = score(reply(mf=LABELS["cc"], bp=LABELS["mf"], cc=LABELS["bp"]))
    assert swapped.components["similarity"] == swapped.components["coverage"] == 0.0
    repeated = score(reply(mf=LABELS["mf"] * 40, bp=LABELS["bp"], cc=LABELS["cc"]))
    assert repeated.components == score(RIGHT).components
    assert repeated.metrics["repeated_ids"] == 78.0


def test_e3_16_an_alias_and_its_primary_are_one_term():
    ontology = scorer().ontology
    alias = "GO:0000021"  # now GO:0007131
    index = ontology.index_of(alias)
    labels = {"bp": [ontology.id(index)]}
    both = score(reply(bp=[alias, ontology.id(index)]), labels)
    assert (
        both.reward == score(reply(bp=[alias]), labels).reward == score(reply(bp=[ontology.id(index)]), labels).reward
    )
    assert both.reward == 1.0
    wrong = score(reply(mf=[alias, ontology.id(index)]), labels)
    assert wrong.metrics["misplaced_ids"] == 1.0
    assert score(reply(bp=labels["bp"]), {"bp": [alias]}).reward == 1.0  # an alias among the labels too


def test_e3_17_nothing_of_the_gold_leaves_a_score_but_for_feedback():
    result = score(reply(mf=[KINASE]))
    told = " ".join([*result.diagnostics.values(), *result.components, *result.metrics])
    assert not any(go_id in told for ids in LABELS.values() for go_id in ids)


def test_e3_18_a_bad_answer_is_the_models_and_counts():
    for text in ("", "x", reply(mf=[UNKNOWN]), reply()):
        result = score(text)
        assert result.failure is FailureClass.MODEL
        assert result.counts


def test_e3_19_ids_quoted_in_prompt_or_earlier_turns_do_not_count():
    gold = scorer().gold(LABELS)
    asked = episode(("system", RIGHT), ("user", RIGHT))
    assert scorer().score_episode(asked, gold).reward == 0.0
    shown = episode(("user", "q"), ("assistant", RIGHT), ("user", "and now?"))
    assert scorer().score_episode(shown, gold).reward == 0.0
    assert scorer().score_episode(episode(("user", "q"), ("assistant", RIGHT)), gold).reward == 1.0
    assert score(reply(summary=f"It has {RIGHT}")).components["similarity"] == 0.0


def test_an_aspect_without_labels_is_not_scored():
    labels = {"mf": LABELS["mf"], "bp": [], "cc": ["GO:0005575"]}
    result = score(reply(mf=LABELS["mf"], bp=[APOPTOSIS]), labels)
    assert result.reward == 1.0
    assert "bp_f1" not in result.components
    assert "bp_recall" not in result.metrics
    assert result.components["mf_f1"] == 1.0


def test_a_near_miss_earns_a_part_and_less_the_broader_it_is():
    steps = [score(reply(mf=[go_id]), {"mf": [TYROSINE_KINASE]}) for go_id in (TYROSINE_KINASE, KINASE, BINDING)]
    values = [result.components["similarity"] for result in steps]
    assert values[0] == 1.0 > values[1] > 0.3 > values[2]


def test_cardinality_asks_for_an_overlap_and_falls_with_the_excess():
    labels = {"mf": LABELS["mf"]}
    bad = [f"GO:99999{n:02d}" for n in range(10)]
    assert score(reply(mf=[UNKNOWN]), labels).components["cardinality"] == 0.0
    assert score(reply(mf=[*LABELS["mf"], bad[0]]), labels).components["cardinality"] == 1.0
    assert score(reply(mf=[*LABELS["mf"], *bad]), labels).components["cardinality"] == pytest.approx(3 / 12)


def test_similarity_by_hand():
    s = scorer()
    ic, of = information_of_train().ic, s.ontology.index_of
    truth = set(s.ontology.ancestors(of(TYROSINE_KINASE)).tolist())
    guess = set(s.ontology.ancestors(of(ATP)).tolist()) | set(s.ontology.ancestors(of(KINASE)).tolist())
    shared, both = math.fsum(ic[t] for t in truth & guess), math.fsum(ic[t] for t in [*truth, *guess])
    expected = 2 * shared / (both + s._closures.worst["mf"])  # one wrong string weighs as the most informative term
    assert s._closures.worst["mf"] == pytest.approx(max(ic[t] for t in range(len(ic)) if s.ontology.aspect(t) == "mf"))
    result = score(reply(mf=[ATP, KINASE, UNKNOWN]), {"mf": [TYROSINE_KINASE]})
    assert result.components["similarity"] == pytest.approx(expected, abs=1e-9)
    f1 = 2 * (len(truth & guess) - 1) / (len(truth) - 1 + len(guess) - 1 + 1)
    assert result.components["f1"] == result.components["mf_f1"] == pytest.approx(f1, abs=1e-12)


def test_weights_change_the_reward_and_the_version():
    s = scorer()
    plain = Scorer(s.ontology, _information_of(s), Weights(similarity=0, coverage=0, cardinality=0, valid=0, f1=1))
    gold = plain.gold(LABELS)
    result = plain.score_reply(HALF, gold)
    assert result.reward == pytest.approx(result.components["f1"], abs=1e-6)
    assert plain.version != s.version
    aspect = Scorer(s.ontology, _information_of(s), Weights(valid=1, similarity=0, coverage=0, cardinality=0, bp_f1=3))
    assert aspect.score_reply(reply(mf=LABELS["mf"]), aspect.gold({"mf": LABELS["mf"]})).reward == 1.0
    assert aspect.score_reply(reply(mf=LABELS["mf"]), aspect.gold(LABELS)).reward == 0.25
    for bad in ({"f1": -1}, {"similarity": float("nan")}, {"similarty": 1}):
        with pytest.raises(ValidationError):
            Weights(**bad)
    with pytest.raises(ValidationError, match="must be above 0"):
        Weights(similarity=0, coverage=0, cardinality=0, valid=0, mf_f1=1)


def _information_of(s):
    from harness.envs.bioreason_go.information import information

    return information(s.ontology, [[s.ontology.index_of(KINASE)], [s.ontology.index_of(NUCLEUS)]])


def test_equal_answers_have_one_key():
    keys = [
        score(text).diagnostics["answer"]
        for text in (RIGHT, reply(summary="other", mf=LABELS["mf"][::-1], bp=LABELS["bp"] * 2, cc=LABELS["cc"]), HALF)
    ]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].startswith("2 mf, 2 bp, 1 cc ids, ")


def test_feedback_names_what_was_wrong():
    text = reply(mf=[UNKNOWN, KINASE, "go:1\ud800"], bp=[OBSOLETE, NUCLEUS], cc=[NUCLEUS])
    told = scorer().feedback(episode(("user", "q"), ("assistant", text)), scorer().gold(LABELS))
    for part in (
        f"invented {UNKNOWN}",
        "not of the form GO:0000000 'go:1\\ud800'",
        "1 of 1 terms right",
        "GO:0004713 (protein tyrosine kinase activity)",
        f"obsolete {OBSOLETE}",
        f"wrong list {NUCLEUS} (belongs to cc)",
        "biological process: ",
        "no term; missed GO:0006468 (protein phosphorylation)",
        "0 of 1 terms right; not among the labels GO:0005634 (nucleus)",
    ):
        assert part in told
    bad = scorer().feedback(episode(("user", "q"), ("assistant", "{")), scorer().gold(LABELS))
    assert bad == "The answer is no valid object: not JSON."
    unscored = scorer().feedback(episode(("assistant", reply(bp=[APOPTOSIS]))), scorer().gold({"mf": [KINASE]}))
    assert "biological process: no labels, not scored." in unscored


ids = st.sampled_from(
    [
        TYROSINE_KINASE,
        ATP,
        PHOSPHORYLATION,
        SIGNALLING,
        MEMBRANE,
        KINASE,
        BINDING,
        NUCLEUS,
        APOPTOSIS,
        UNKNOWN,
        OBSOLETE,
        "go:1",
        "x",
    ]
)
lists = st.fixed_dictionaries({aspect: st.lists(ids, max_size=8) for aspect in ROOTS})
relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(lists, st.randoms(use_true_random=False))
def test_order_and_repeats_leave_the_score(chosen, random):
    other = {}
    for aspect, entries in chosen.items():
        other[aspect] = [*entries, *(entry for entry in entries if random.random() < 0.5)]
        random.shuffle(other[aspect])
    first, second = score(reply(**chosen)), score(reply(**other))
    assert first.components == second.components
    assert (first.reward, first.diagnostics["answer"]) == (second.reward, second.diagnostics["answer"])
    assert all(0.0 <= value <= 1.0 for value in first.components.values())


@cache
def aliases():
    ontology = scorer().ontology
    return [name for name, index in ontology.lookup.items() if name != ontology.id(index)]


@relaxed
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_any_alias_for_its_primary_leaves_the_score(number, extra):
    ontology, known = scorer().ontology, aliases()
    alias = known[number % len(known)]
    index = ontology.index_of(alias)
    aspect = ontology.aspect(index)
    more = LABELS[aspect][:extra]
    first = score(reply(**{aspect: [*more, alias]}))
    second = score(reply(**{aspect: [ontology.id(index), *more]}))
    assert first.components == second.components


@relaxed
@given(lists, st.sampled_from(sorted(ROOTS)), st.integers(0, 43_557))
def test_a_wrong_id_never_raises_precision(chosen, aspect, number):
    """Neither the share of exact labels, nor, for an id with no ancestor in common, the weighted precision."""
    ontology = scorer().ontology
    wrong = ontology.id(number)
    if wrong in LABELS[aspect]:
        return
    before = score(reply(**chosen))
    after = score(reply(**{**chosen, aspect: [*chosen[aspect], wrong]}))
    assert after.metrics["exact_precision"] <= before.metrics["exact_precision"]
    labels = [ontology.lookup[go_id] for ids in LABELS.values() for go_id in ids]
    gold = set(ontology.closure(labels).tolist()) - set(ontology.roots.values())
    if not gold & set(ontology.ancestors(number).tolist()):
        assert after.metrics["precision"] <= before.metrics["precision"]
        assert after.components["similarity"] <= before.components["similarity"]


@relaxed
@given(
    st.one_of(
        st.text(), st.text(alphabet='{}[]",:\\ \n</think>GO0123456789mfbpcsuary\ufeff\ud800'), st.binary().map(repr)
    )
)
def test_any_text_gets_a_score(text):
    for candidate in (text, RIGHT + text, text + RIGHT, reply(summary=text or "x", mf=[text])):
        result = score(candidate)
        assert 0.0 <= result.reward <= 1.0
        assert all(math.isfinite(value) for value in [*result.components.values(), *result.metrics.values()])
        scorer().feedback(episode(("assistant", candidate)), scorer().gold(LABELS)).encode()
        read_answer(candidate, FinishReason.LENGTH)


@pytest.mark.parametrize("text", ["{" * 50_000, '{"a":' * 50_000, "[" * 50_000 + "{", '{"summary": "' + "\\" * 99_999])
def test_deep_and_long_texts(text):
    assert score(text).reward == 0.0


def test_thousands_of_ids():
    ontology = scorer().ontology
    everything = {a: [ontology.id(i) for i in range(len(ontology)) if ontology.aspect(i) == a] for a in ROOTS}
    result = score(reply(**everything))
    assert result.metrics["ids"] == len(ontology)
    assert result.metrics["exact_recall"] == 1.0
    assert result.reward < 0.25
