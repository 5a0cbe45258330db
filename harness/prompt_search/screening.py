"""Which texts may stand in a prompt at all, whoever wrote them: whole, short, clean, and with the slots they need."""

from __future__ import annotations

import re

from harness.core.text import clean_text

LONGEST_GROWTH, ALWAYS_ALLOWED = 3, 2000
"""A new text may have three times the characters of the one it replaces, or 2,000 where that is more."""
_SLOT = re.compile(r"\[\[[A-Z][A-Z0-9_]*\]\]")
_CONTROL_TOKEN = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?s>|\[/?INST\]")


def slots_of(text: str) -> list[str]:
    """Return the places `[[NAME]]` of a text where other text is put, each once, in order."""
    return list(dict.fromkeys(_SLOT.findall(text)))


def longest(text: str) -> int:
    """Return how many characters a text may have that replaces this one."""
    return max(ALWAYS_ALLOWED, LONGEST_GROWTH * len(text))


def screen(name: str, old: str, new: str) -> str | None:
    """Return why a text may not replace another one, whoever wrote it; None when it may.

    Args:
        name: of the component.
        old: the seed's text: what it needs, its successor needs.
        new: the proposal.
    """
    if not new.strip():
        return f"{name}: the answer was cut or holds no text"
    if len(new) > longest(old):
        return f"{name} has {len(new)} characters, at most {longest(old)} are allowed"
    if new != clean_text(new):
        return f"{name} holds control or invisible characters"
    if (found := _CONTROL_TOKEN.search(new)) and found[0] not in old:
        return f"{name} holds {found[0]!r}, which chat templates give a meaning"
    needed, given = slots_of(old), slots_of(new)
    if missing := [slot for slot in needed if slot not in given]:
        return f"{name} lacks {', '.join(missing)}"
    if unknown := [slot for slot in given if slot not in needed]:
        return f"{name} holds {', '.join(unknown)}, and nothing is put there"
    return None
