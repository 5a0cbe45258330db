"""From chat messages to token ids, once: history is never decoded and tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.core.errors import ConfigError
from harness.core.types import Message


def render_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the prompt's token ids, ending where the assistant's reply begins.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: system, user and assistant turns; the last one is not the assistant's.

    Raises:
        ConfigError: when the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError("the model's tokenizer has no chat template", "use an instruction-tuned model")
    chat = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: Any, token_ids: Sequence[int], eos_ids: frozenset[int]) -> str:
    """Return the text of sampled ids without the end-of-turn token that closed it."""
    ids = list(token_ids)
    if ids and ids[-1] in eos_ids:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
