"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint: the nearest known name, if any is near, and the list of all."""
    names = sorted(known)
    near = difflib.get_close_matches(name[:80], names, n=1)
    listed = "known: " + (", ".join(names) or "none")
    return f"did you mean {near[0]!r}? {listed}" if near else listed
