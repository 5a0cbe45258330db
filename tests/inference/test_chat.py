"""What stands between two replies is derived from the template and equals a full render, or is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from harness.core.errors import ConfigError, HarnessError
from harness.core.types import Message
from harness.inference.chat import render_chat, render_suffix
from tests.chat_support import (
    EOT,
    IM_END,
    LLAMA_LIKE,
    PLAIN,
    QWEN_LIKE,
    STRICT,
    SYSTEM_LAST,
    THOUGHTLESS,
    chat_tokenizer,
)

OPENING = [Message("system", "Be brief."), Message("user", "What is 12*3?")]
REPLIES = ["calc: 12*3", "<think>\nthat is 36\n</think>\n\nanswer: 36", "calc: 1"]
ENDS = frozenset({IM_END, EOT})


def smollm2():
    from transformers import AutoTokenizer

    from harness.inference.models import resolve_model

    try:
        return AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    except HarnessError as error:
        pytest.skip(f"the embedded model is not here: {error}")


def family(name):
    """Return a tokenizer and the id that ends a turn."""
    if name == "smollm2":
        tokenizer = smollm2()
        return tokenizer, tokenizer.eos_token_id
    return (chat_tokenizer(QWEN_LIKE), IM_END) if name == "qwen" else (chat_tokenizer(LLAMA_LIKE), EOT)


def grown(tokenizer, end, opening, answers):
    """Return the ids of an episode built turn by turn, and its messages."""
    ids, messages = render_chat(tokenizer, opening), list(opening)
    for reply, following in zip(REPLIES, answers, strict=False):
        ids += [*tokenizer(reply, add_special_tokens=False)["input_ids"], end]
        ids += render_suffix(tokenizer, messages, following, frozenset({end}))
        messages += [Message("assistant", reply), *following]
    return ids, messages


@pytest.mark.parametrize("roles", [("user",), ("tool",), ("tool", "tool"), ()])
@pytest.mark.parametrize("opening", [OPENING, OPENING[1:]])
@pytest.mark.parametrize("name", ["smollm2", "qwen", "llama"])
def test_item_09_turn_by_turn_equals_a_full_render(name, opening, roles):
    """The suffix holds the separator behind a turn (verl#6501) and what the template makes of the roles (verl#6921)."""
    tokenizer, end = family(name)
    answers = [[Message(role, f"= {number} ") for role in roles] for number in (36, 12, 5)]
    ids, messages = grown(tokenizer, end, opening, answers)
    assert ids == render_chat(tokenizer, messages)
    if name != "llama":  # ChatML: a line break stands behind every end of turn
        behind = {ids[place + 1] for place, token in enumerate(ids[:-1]) if token == end}
        assert behind == set(tokenizer("\n", add_special_tokens=False)["input_ids"])


def test_item_08_what_was_sampled_is_never_tokenised_again():
    """The model wrote c, a, l, c one by one; a render of the text would merge them into one id (TRL#5224)."""
    tokenizer = chat_tokenizer(QWEN_LIKE)
    spelled = tokenizer.convert_tokens_to_ids([*"calc: 12"])
    merged = tokenizer("calc: 12", add_special_tokens=False)["input_ids"]
    assert len(merged) < len(spelled) and tokenizer.decode(spelled) == "calc: 12"
    suffix = render_suffix(tokenizer, OPENING, [Message("user", "= 12")], ENDS)
    assert suffix == render_suffix(tokenizer, OPENING, [Message("user", "= 12")], frozenset({IM_END}))
    text = tokenizer.decode([*render_chat(tokenizer, OPENING), *spelled, IM_END, *suffix])
    whole = [*OPENING, Message("assistant", "calc: 12"), Message("user", "= 12")]
    assert text == tokenizer.decode(render_chat(tokenizer, whole))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (THOUGHTLESS, "changes earlier replies"),
        (SYSTEM_LAST, "changes earlier replies"),
        (PLAIN, "does not close a reply with an end-of-turn token"),
    ],
)
def test_item_09_a_template_that_does_not_only_append_is_refused(template, words):
    tokenizer = chat_tokenizer(template)
    with pytest.raises(ConfigError, match=words) as caught:
        render_suffix(tokenizer, OPENING, [Message("user", "= 36")], ENDS)
    assert "sampling.max_turns = 1" in caught.value.hint
    assert render_chat(tokenizer, OPENING)  # one turn goes on working


def test_another_end_of_turn_than_the_models_is_refused():
    with pytest.raises(ConfigError, match="does not close a reply"):
        render_suffix(chat_tokenizer(LLAMA_LIKE), OPENING, [Message("user", "= 36")], frozenset({IM_END}))


def test_a_template_that_raises_is_named():
    with pytest.raises(ConfigError, match="refuses a conversation of system, user, assistant, tool: no tools here"):
        render_suffix(chat_tokenizer(STRICT), OPENING, [Message("tool", "= 36")], ENDS)


def test_a_reply_with_spaces_at_its_ends_needs_no_special_template():
    """A template that trims is not refused: the suffix does not depend on what the model wrote."""
    tokenizer = chat_tokenizer(LLAMA_LIKE)
    history = [*OPENING, Message("assistant", "  calc: 1 \n"), Message("user", " = 1 ")]
    plain = [*OPENING, Message("assistant", "calc: 1"), Message("user", " = 1 ")]
    following = [Message("user", "go on")]
    assert render_suffix(tokenizer, history, following, ENDS) == render_suffix(tokenizer, plain, following, ENDS)
