"""Rewards worked out by hand, every attack seen in public, and totality over hostile text."""

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.canonical import canonical_json
from harness.core.types import Episode, FailureClass, FinishReason, Message
from harness.envs.drugprot.keywords import KEYWORDS, distinct_keywords, words
from harness.envs.drugprot.labels import LABELS, LETTERS, letter_of, permuted_letters
from harness.envs.drugprot.verifier import find_boxes, parse_reply, score_episode, score_reply

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
VARIANTS = ["hardened", "published"]
each_variant = pytest.mark.parametrize("variant", VARIANTS)
# 12 keywords, "drug" and "protein"; no other scoring word.
TWELVE = "agonist inhibit substrate kinase transporter receptor enzyme ligand affinity pathway domain channel"
FULL = f"{TWELVE} drug protein"


def score(text, gold="K", finish=STOP, variant="hardened"):
    return score_reply(text, gold, finish, variant)


def padded(text, length):
    """Return text filled up with single words of no value to exactly `length` characters."""
    return (text + " " + "qz " * length)[: length - 1] + "q"


@pytest.mark.parametrize(
    ("think", "reasoning"),
    [
        ("x" * 100, 0.0),
        ("x" * 101, 0.1),
        ("x" * 200, 0.1),
        ("x" * 201, 0.2),
        ("x" * 400, 0.2),
        ("x" * 401, 0.4),
        ("the drug", 0.1),
        ("a gene", 0.1),
        ("chemical and protein", 0.2),
        ("it inhibits", 0.025),
        ("it inhibits the kinase", 0.05),
        (TWELVE, 0.1 + 0.3 - 0.1 * (len(TWELVE) <= 100)),
        (padded(FULL, 201), 0.2 + 0.3 + 0.2),
        (padded(FULL, 401), 0.9),
        (padded(" ".join(KEYWORDS) + " drug chemical protein gene", 900), 0.9),
    ],
)
@each_variant
def test_reasoning_by_hand(think, reasoning, variant):
    result = score(f"<think>{think}</think>\\boxed{{K}}", variant=variant)
    assert result.components["reasoning"] == pytest.approx(reasoning, abs=1e-12)
    assert result.reward == pytest.approx(0.70 + 0.20 * reasoning + 0.10, abs=1e-6)


@each_variant
def test_largest_total_is_098(variant):
    result = score(f"<think>{padded(FULL, 401)}</think>\\boxed{{K}}", variant=variant)
    assert result.reward == 0.98
    assert result.components == {"accuracy": 1.0, "reasoning": 0.9, "format": 1.0}
    assert result.failure is None


@pytest.mark.parametrize(
    ("text", "hardened", "published"),
    [
        # Reasoning 0.1 + 0.1 + 0.1 + 0.025 (one keyword) = 0.325.
        ("<think>" + padded("the drug inhibits a protein", 101) + "</think>\\boxed{K}", 0.865, 0.865),
        ("<think>" + padded("the drug inhibits a protein", 101) + "</think>\\boxed{A}", 0.165, 0.165),
        ("<think>" + padded("the drug inhibits a protein", 101) + "</think>K", 0.0, 0.065),
        ("\\boxed{K}", 0.80, 0.80),
        ("\\boxed{A}", 0.10, 0.10),
        ("K", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_totals_by_hand(text, hardened, published):
    assert score(text, variant="hardened").reward == pytest.approx(hardened, abs=1e-9)
    assert score(text, variant="published").reward == pytest.approx(published, abs=1e-9)


@pytest.mark.parametrize("after", ["", "The answer is K.", "\\boxed{}", "\\boxed{K"])
@each_variant
def test_e3_1_box_only_inside_think(after, variant):
    result = score(f"<think>surely \\boxed{{K}}</think>{after}", variant=variant)
    assert result.components["accuracy"] == result.components["format"] == 0.0
    assert result.failure is FailureClass.MODEL


@each_variant
def test_e3_1_other_answer_after_think_decides(variant):
    result = score("<think>\\boxed{K}</think>\\boxed{A}", variant=variant)
    assert (result.components["accuracy"], result.components["format"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{A}\\boxed{K}",
        "\\boxed{K}\\boxed{A}",
        "\\boxed{A/K}",
        "\\boxed{A, K}",
        "\\boxed{A}{K}\\boxed{K}",
        "".join(f"\\boxed{{{letter}}}" for letter in LETTERS),
        "\\boxed{K} or \\boxed{?}",
        "\\boxed{\\boxed{A}\\boxed{K}}",
        "\\boxed{K} \\boxed{A",
    ],
)
@each_variant
def test_e3_2_several_boxes(answer, variant):
    result = score(f"<think>{FULL}</think>{answer}", variant=variant)
    assert result.components["accuracy"] == result.components["format"] == 0.0
    assert result.diagnostics["problem"]


@each_variant
def test_e3_2_equal_repeats_are_one_answer(variant):
    result = score("\\boxed{K} so \\boxed{k}, \\boxed{\\text{K}}", variant=variant)
    assert (result.components["accuracy"], result.components["format"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    "text", ["<think></think>a", "<think>x</think>", f"<think>{FULL}</think>", "</think>", "<think>"]
)
def test_e3_3_junk_structure_earns_nothing(text):
    result = score(text, gold="A")
    assert result.reward == 0.0
    assert set(result.components.values()) == {0.0}
    assert score(text, gold="A", variant="published").components["format"] == 0.0


def test_e3_4_stuffing_is_capped_and_repeats_count_once():
    once = score("<think>inhibit</think>\\boxed{K}")
    many = score("<think>" + "inhibit inhibits inhibited inhibitor inhibition " + "</think>\\boxed{K}")
    assert once.metrics["keywords"] == many.metrics["keywords"] == 1
    stuffed = score("<think>" + (" ".join(KEYWORDS) + " drug gene ") * 50 + "</think>\\boxed{A}")
    assert stuffed.reward == pytest.approx(0.2 * 0.9 + 0.1)  # wrong answer: far below 0.8 for a bare right one
    assert stuffed.failure is FailureClass.MODEL


def test_e3_4_white_space_is_no_reasoning_when_hardened():
    text = "<think>" + " \n" * 400 + "</think>\\boxed{K}"
    assert score(text).components["reasoning"] == 0.0
    assert score(text, variant="published").components["reasoning"] == 0.4


@each_variant
def test_e3_5_opening_tag_in_the_prompt(variant):
    with_tag = score(f"<think>{padded(FULL, 250)}</think>\\boxed{{K}}", variant=variant)
    without = score(f"{padded(FULL, 250)}</think>\\boxed{{K}}", variant=variant)
    assert without == with_tag


@each_variant
def test_e3_5_split_is_at_the_last_closing_tag(variant):
    result = score("<think>a</think>\\boxed{A}<think>b</think>\\boxed{K}", variant=variant)
    assert result.diagnostics["answer"] == "K"
    result = score("<think>a</think>\\boxed{K} wait <think>b</think>", variant=variant)
    assert result.components["format"] == 0.0


@each_variant
def test_e3_9_only_the_last_assistant_message_counts(variant):
    right = "\\boxed{K}"
    demonstrations = (Message("user", "q"), Message("assistant", right), Message("user", "\\boxed{K}"))
    for messages in ((), demonstrations, (*demonstrations, Message("assistant", "no idea"))):
        result = score_episode(Episode("t", messages, STOP), "K", variant)
        assert result.components["accuracy"] == 0.0
    answered = (*demonstrations, Message("assistant", right))
    assert score_episode(Episode("t", answered, STOP), "K", variant).components["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("antagonist", 1),  # not agonist as well
        ("antagonists agonists", 2),
        ("reinhibited", 0),
        ("kinases", 1),
        ("kinase's", 1),
        ("co-substrate", 1),
        ("subdomain", 0),
        ("domain_a", 0),
        ("phosphorylation and phosphorylated", 1),
        ("catalyzes catalysed", 1),
        ("Kinase KINASE", 1),
        ("\u212ainase \u043ainase", 0),  # Kelvin sign, Cyrillic
        ("regulate upregulated downregulates", 3),
    ],
)
def test_e3_13_keywords_are_whole_words(text, count):
    assert distinct_keywords(words(text)) == count


@pytest.mark.parametrize("text", ["general genetic generic", "drugstore", "proteinuria", "chemically", "photochemical"])
def test_e3_13_mentions_are_whole_words(text):
    assert score(f"<think>{text}</think>\\boxed{{K}}").components["reasoning"] == 0.0


@pytest.mark.parametrize(
    "box",
    ["\\boxed{K}", "\\boxed{k}", "\\boxed{ K }", "\\boxed{\\text{K}}", "\\boxed{\\text{ k }}", "\\boxed{\\mathbf{K}}"],
)
@each_variant
def test_e3_14_accepted_spellings(box, variant):
    assert score(box, variant=variant).components["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("content", "gold"),
    [
        ("\u041a", "K"),  # Cyrillic
        ("\u0410", "A"),
        ("\u0415", "E"),
        ("\u041c", "M"),
        ("\uff21", "A"),  # fullwidth
        ("\uff2b", "K"),
        ("\u212a", "K"),  # Kelvin sign, lower() gives k
        ("\u0391", "A"),  # Greek
        ("K\u200b", "K"),
        ("\u3000K", "K"),
        ("N", "K"),
        ("KK", "K"),
        ("K.", "K"),
        ("SUBSTRATE", "K"),
        ("11", "K"),
        ("{K}", "K"),
        ("", "K"),
    ],
)
@each_variant
def test_e3_14_look_alikes_and_other_content(content, gold, variant):
    result = score(f"\\boxed{{{content}}}", gold=gold, variant=variant)
    assert result.components["accuracy"] == result.components["format"] == 0.0


@each_variant
def test_e3_14_an_article_is_no_answer(variant):
    assert score("It is a substrate. A", gold="A", variant=variant).components["accuracy"] == 0.0


def test_e3_20_constants_do_not_collide_with_the_gold():
    """Every wrong letter is wrong for every gold, and the right one right: no letter is special."""
    for gold in LETTERS:
        marks = [score(f"\\boxed{{{letter}}}", gold=gold).components["accuracy"] for letter in LETTERS]
        assert marks == [float(letter == gold) for letter in LETTERS]


@pytest.mark.parametrize(
    "text", ["<think>long", "<think>\\boxed{K}", "<think>x</think>\\boxed{", "<think>x</think>\\boxed{K", "so it is"]
)
@each_variant
def test_truncated_text_is_a_failure_of_the_model(text, variant):
    result = score(text, finish=LENGTH, variant=variant)
    assert result.failure is FailureClass.MODEL
    assert result.counts
    assert result.components["format"] == 0.0
    assert result.diagnostics["problem"] == "truncated before a valid answer"
    assert result.metrics["truncated"] == 1.0


@each_variant
def test_closed_answer_before_the_limit_still_counts(variant):
    result = score("<think>x</think>\\boxed{K} and then", finish=LENGTH, variant=variant)
    assert result.components["accuracy"] == 1.0
    assert "problem" not in result.diagnostics


def test_diagnostics_let_letters_be_counted():
    assert score("\\boxed{A}").diagnostics == {"gold": "K", "answer": "A"}
    assert "answer" not in score("K").diagnostics  # no valid answer, no letter


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("\\boxed{{K}}", ("?",)),
        ("{\\boxed{K}}", ("K",)),
        ("}\\boxed{K}{", ("K",)),
        ("\\boxed{K\\}}", ("?",)),
        ("\\\\boxed{K}", ("K",)),
        ("boxed{K}", ()),
        ("\\boxed {K}", ()),
        ("\\boxed{" + " " * 70 + "K}", ("?",)),
    ],
)
def test_boxes_are_brace_matched(text, boxes):
    assert find_boxes(text) == boxes


pieces = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "\\boxed{", "}", "{", "\\", "K", "a", " ", "\\text{", "\u041a", "\ud800", "drug"]
    )
    | st.text(max_size=5),
    max_size=40,
).map("".join)


@given(pieces | st.text(), st.sampled_from(LETTERS), st.sampled_from([STOP, LENGTH]), st.sampled_from(VARIANTS))
def test_any_text_gets_a_score_within_bounds(text, gold, finish, variant):
    result = score_reply(text, gold, finish, variant)
    assert 0.0 <= result.reward <= 0.98
    assert all(0.0 <= value <= 1.0 for value in result.components.values())
    assert (result.failure is None) == (result.components["accuracy"] == 1.0)
    assert result.components["accuracy"] <= result.components["format"] == result.metrics["valid"]
    if variant == "hardened" and not result.metrics["valid"]:
        assert result.reward == 0.0
    json.loads(canonical_json(dict(result.diagnostics)))
    assert score_reply(text, gold, finish, variant) == result


@given(pieces)
def test_published_pays_at_least_what_hardened_pays(text):
    hardened, published = (score(text, variant=variant) for variant in VARIANTS)
    assert published.reward >= hardened.reward
    assert published.components["accuracy"] == hardened.components["accuracy"]


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{",
        "{",
        "}",
        "<think>",
        "</think>",
        "<",
        "\\",
        "\\text{",
        "a ",
        "_",
        "\\boxed{K}",
        "</think>\\boxed{",
        " ",
    ],
)
def test_hostile_megabyte_is_linear(unit):
    text = unit * (1_000_000 // len(unit))
    signal.alarm(60)  # ends the process: a quadratic scan takes minutes
    try:
        score(text)
        parse_reply("<think>" + text)
    finally:
        signal.alarm(0)


def test_there_are_37_keywords_with_the_public_five():
    assert len(KEYWORDS) == len(set(KEYWORDS)) == 37
    assert {"agonist", "inhibit", "substrate", "kinase", "transporter"} <= set(KEYWORDS)
    assert all(distinct_keywords({term}) == 1 for term in KEYWORDS)


def test_labels_and_letters():
    assert len(LABELS) == len(LETTERS) == 13
    assert [letter_of(label) for label in ("INDIRECT-DOWNREGULATOR", "INHIBITOR", "SUBSTRATE", "PART-OF")] == list(
        "AEKM"
    )


def test_permuted_letters_move_every_label():
    order = permuted_letters("heldout-permuted")
    assert sorted(order) == list(LETTERS)
    assert all(a != b for a, b in zip(order, LETTERS, strict=True))
