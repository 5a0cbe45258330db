"""Numbers as a report writes them: a mean with its interval, and how it is marked."""

from __future__ import annotations

import math

from harness.reports.blocks import Inline, Tone, strong, text
from harness.reports.model import Estimate


def estimate(value: Estimate | None, *, signed: bool = False, judged: bool = True) -> Inline:
    """Return a mean with its interval, `0.431 (0.402 to 0.460)`; a dash when there is none.

    Args:
        value: the mean and its interval.
        signed: it is a difference; bold when its interval leaves zero out.
        judged: more is better, so above zero is green and below red; False for counts and lengths.
    """
    if value is None:
        return text("—", "quiet")
    sign = "+" if signed else ""
    mean, low, high = (number(part, sign) for part in (value.mean, value.low, value.high))
    if not value.bounded:
        return text(mean)
    clear = signed and (value.low > 0 or value.high < 0)
    tone: Tone = "" if not judged else "good" if value.low > 0 else "bad"
    shown = strong(mean, tone) if clear else text(mean)
    return (*shown, *text(" "), *text(f"({low} to {high})", "quiet"))


def number(value: float, sign: str = "") -> str:
    """Return a number with three decimals, a real minus sign, and words for what is no number."""
    if not math.isfinite(value):
        return "not finite" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    return f"{value:{sign}.3f}".replace("-", "−")
