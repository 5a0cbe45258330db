"""The parent of an imported run, guessed from configs: only when asked, and recorded as a guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.imports.settings import changes

MAX_CHANGES = 3
"""More differences than this are another experiment, not a step from a parent."""
MAX_COMPARED = 500
"""Runs compared with one another; beyond it only the nearest ones before are."""


def infer_parents(configs: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the place of the parent for every config that has one, by place.

    The parent is the earlier config with the fewest differences that count, the earliest of equals; a config
    without a near relative begins a line of its own.

    Args:
        configs: in the order the runs were made.
    """
    found: dict[int, int] = {}
    for index, config in enumerate(configs):
        best = (MAX_CHANGES + 1, -1)
        for earlier in range(max(0, index - MAX_COMPARED), index):
            if config and configs[earlier]:
                distance = sum(row["counts"] for row in changes(configs[earlier], config))
                best = min(best, (distance, earlier))
        if best[0] <= MAX_CHANGES:
            found[index] = best[1]
    return found
