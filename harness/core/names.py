"""Help with a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint for a misspelt name: the nearest known one when any is near.

    Args:
        name: as it was written; only its beginning is compared.
        known: the names there are.
        otherwise: what to do besides; when empty, all known names are listed if none is near.
    """
    from difflib import get_close_matches  # costs a start more than all of core, and only errors need it

    names = list(dict.fromkeys(known))
    near = get_close_matches(name[:80], names, n=1)
    if near:
        return f"did you mean {near[0]!r}? {otherwise}".rstrip()
    return otherwise or ("known: " + ", ".join(names) if names else "")
