"""Suggestions for names that do not exist."""

from __future__ import annotations

from collections.abc import Iterable


def suggest(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return a hint with the nearest candidate, followed by the general hint."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? {otherwise}" if near else otherwise
