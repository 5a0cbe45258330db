"""Numbers of the ledger as people read them; a member that is no number is shown as absent, not as zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.canonical import decode_number


def number_or_none(value: Any) -> float | None:
    """Return a stored number as float, typed non-finite ones included; None for anything else."""
    try:
        return decode_number(value)
    except ValueError:
        return None


def spell_interval(value: Any) -> str:
    """Spell `{mean, low, high}` as `0.512 [0.430, 0.594]`; `-` when there is no mean."""
    if not isinstance(value, Mapping):
        return "-"
    mean, low, high = (number_or_none(value.get(key)) for key in ("mean", "low", "high"))
    if mean is None:
        return "-"
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]" if low is not None and high is not None else f"{mean:.3f}"


def spell_duration(seconds: float) -> str:
    """Spell seconds as people do: 4.2 s, 42 s, 3.5 min, 2.1 h."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
