"""From chat messages to token ids, once: history is never decoded and tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.core.errors import ConfigError
from harness.core.types import Message

PROBES = ("reply", "<think>\nwhy\n</think>\n\nreply")
"""Replies that a template must repeat as they are; some cut the thinking out of earlier turns."""


def _render(tokenizer: Any, messages: Sequence[Message], *, reply_next: bool) -> str:
    """Return a conversation as text; `reply_next` ends it where the assistant's reply begins.

    Raises:
        ConfigError: when the tokenizer has no chat template, or the template refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise ConfigError("the model's tokenizer has no chat template", "use an instruction-tuned model")
    chat = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=reply_next))
    except Exception as error:  # a template is a program of its own and raises what it likes
        roles = ", ".join(message.role for message in messages)
        raise ConfigError(
            f"the model's chat template refuses a conversation of {roles}: {str(error)[:200]}",
            "use a model whose template knows these roles, or an environment that does without them",
        ) from error


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the prompt's token ids, ending where the assistant's reply begins.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: system, user and assistant turns; the last one is not the assistant's.

    Raises:
        ConfigError: when the tokenizer has no chat template, or the template refuses the messages.
    """
    return _ids(tokenizer, _render(tokenizer, messages, reply_next=True))


def render_suffix(
    tokenizer: Any, history: Sequence[Message], following: Sequence[Message], eos_ids: frozenset[int]
) -> list[int]:
    """Return the ids between the end of a reply and the begin of the next one.

    They are the difference of two renders of the conversation, before the reply and after what followed it, with
    stand-ins for the model's own replies. So they hold the separator that the template puts behind a turn, and no
    sampled token is tokenised again. The end-of-turn token is not among them: the model wrote one.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        history: all messages before the reply; replies of earlier turns may be among them.
        following: the messages that answer the reply.
        eos_ids: every id that ends a turn.

    Raises:
        ConfigError: when the template shows earlier replies otherwise than the model wrote them, or does not close
            a reply with an end-of-turn token; history could then not stay as it was sampled.
    """
    tails = {_tail(tokenizer, history, following, probe) for probe in PROBES}
    if len(tails) != 1:
        raise _unfit("renders what follows a reply differently for different replies")
    ids = _ids(tokenizer, tails.pop())
    if not ids or ids[0] not in eos_ids:
        raise _unfit("does not close a reply with an end-of-turn token")
    return ids[1:]


def render_reply(tokenizer: Any, messages: Sequence[Message], reply: str, eos_ids: frozenset[int]) -> list[int]:
    """Return a reply as the ids that a model would have sampled after `render_chat(messages)`, end of turn included.

    The reply is tokenised on its own, as sampled ids follow a prompt, so no token spans the two.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: what the reply answers.
        reply: its text.
        eos_ids: every id that ends a turn.

    Raises:
        ConfigError: when the template does not close a reply with an end-of-turn token.
    """
    begin = _render(tokenizer, messages, reply_next=True) + PROBES[0]
    whole = _render(tokenizer, [*messages, Message("assistant", PROBES[0])], reply_next=False)
    tail = _ids(tokenizer, whole.removeprefix(begin)) if whole.startswith(begin) else []
    if not tail or tail[0] not in eos_ids:
        raise ConfigError(
            "the model's chat template does not close a reply with an end-of-turn token",
            "set warmup.steps = 0, or give the model's folder a chat_template.jinja that closes replies",
        )
    return [*_ids(tokenizer, reply), tail[0]]


def _tail(tokenizer: Any, history: Sequence[Message], following: Sequence[Message], probe: str) -> str:
    """Return the text after a reply, up to where the next one begins, with `probe` in place of every reply."""
    earlier = [Message(m.role, probe) if m.role == "assistant" else m for m in history]
    begin = _render(tokenizer, earlier, reply_next=True) + probe
    whole = _render(tokenizer, [*earlier, Message("assistant", probe), *following], reply_next=True)
    if not whole.startswith(begin):
        raise _unfit("changes earlier replies when the conversation goes on, or writes them elsewhere")
    return whole[len(begin) :]


def _unfit(what: str) -> ConfigError:
    return ConfigError(
        f"the model's chat template {what}, so an episode of several turns would not stay what was sampled",
        "set sampling.max_turns = 1, or give the model's folder a chat_template.jinja that only appends",
    )


def decode(tokenizer: Any, token_ids: Sequence[int], eos_ids: frozenset[int]) -> str:
    """Return the text of sampled ids without the end-of-turn token that closed it."""
    ids = list(token_ids)
    if ids and ids[-1] in eos_ids:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
