"""A small real tokenizer with merges, and chat templates in the manner of model families."""

from __future__ import annotations

import string

QWEN_LIKE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool>\\n' + m.content + '\\n</tool>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML with a system text of its own and tool messages that are grouped into a user turn."""

LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + (m.content | trim) + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
"""Headers, a begin token, trimmed content, and no separator between turns."""

THOUGHTLESS = (
    "{% for m in messages %}"
    "{% set said = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content %}"
    "{{ '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Cuts the thinking out of every reply but the last message."""

SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'user' and loop.last %}{{ messages[0].content + '\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Repeats the system text in the last user turn only."""

PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Turns without any token that ends them."""

STRICT = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
STRICT += QWEN_LIKE
"""Refuses tool messages."""

SPECIAL = ("<unk>", "<|begin|>", "<|im_end|>", "<|im_start|>", "<|eot|>", "<|head|>", "<|/head|>")
MERGES = (("a", "l"), ("c", "al"), ("cal", "c"), ("1", "2"), ("\n", "\n"), ("a", "n"), ("an", "s"), ("=", " "))
IM_END, EOT = SPECIAL.index("<|im_end|>"), SPECIAL.index("<|eot|>")


def chat_tokenizer(template):
    """Return a byte-pair tokenizer of printable characters; its merges make ids and text no bijection."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = [c for c in string.printable if c.isprintable() or c == "\n"]
    words = [*SPECIAL, *letters, *(left + right for left, right in MERGES)]
    inner = Tokenizer(BPE({word: i for i, word in enumerate(words)}, list(MERGES), unk_token=SPECIAL[0]))
    inner.add_special_tokens(list(SPECIAL))
    inner.decoder = decoders.Fuse()
    names = {"unk_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = template
    return tokenizer
