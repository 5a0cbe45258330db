"""From item records to what an `evaluated` event says about them; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.canonical import encode_non_finite
from harness.core.errors import UsageError
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import Interval, PairedInterval, mean_of, paired_difference


def metric_names(items: Sequence[ItemRecord]) -> tuple[str, ...]:
    """Return `reward` and every component and metric that all counted items record, sorted after it."""
    counted = [item for item in items if item.counts]
    presence = _presence(counted)
    return ("reward", *sorted(name for name, present in presence.items() if present == len(counted)))


def summarise(
    items: Sequence[ItemRecord],
    *,
    requested: int,
    confidence: float = 0.95,
    base: Sequence[ItemRecord] | None = None,
    base_shipped: Sequence[ItemRecord] | None = None,
) -> dict[str, Any]:
    """Return the members of an `evaluated` event that follow from the items.

    Args:
        items: one record per requested sample, in the full form when answers are to be counted.
        requested: samples the protocol asked for.
        confidence: two-sided coverage of every interval.
        base: the base model's records under the run's prompt; gives `gain`.
        base_shipped: the base model's records under the shipped prompt; gives `gain_shipped`.

    Returns:
        `n` (items in every mean), `requested`, `failures` {class: count}, `means`, with a base
        `gain` and `gain_shipped`, and `extra`; JSON-ready, non-finite numbers typed.

    Raises:
        UsageError: when there are more items than were requested.
    """
    if len(items) > requested:
        raise UsageError(f"{len(items)} items but only {requested} were requested", "count samples times tasks")
    counted = [item for item in items if item.counts]
    names = metric_names(items)
    result: dict[str, Any] = {
        "n": len(counted),
        "requested": requested,
        "failures": dict(sorted(Counter(str(item.failure) for item in items if item.failure is not None).items())),
        "means": {name: interval_json(mean_of(items, name, confidence)) for name in names},
    }
    if base is not None:
        result["gain"] = _gains(items, base, confidence)
    if base_shipped is not None:
        result["gain_shipped"] = _gains(items, base_shipped, confidence)
    result["extra"] = _extra(counted)
    return dict(encode_non_finite(result))


def interval_json(interval: Interval) -> dict[str, float | int]:
    """Return an interval's numbers by name; a paired one adds its counts (numbers may be non-finite)."""
    result: dict[str, float | int] = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    if isinstance(interval, PairedInterval):
        counts = ("n", "clusters", "wins", "losses", "ties", "missing")
        result |= {name: getattr(interval, name) for name in counts}
    return result


def answer_shares(items: Sequence[ItemRecord]) -> dict[str, Any]:
    """Return `answers` {answer: count} and `top_answer_share`, from the diagnostic `answer`.

    Only items that count and gave an answer are in the denominator, so a model that answers one
    letter whenever it answers has share 1. Empty when no item has the diagnostic.
    """
    answers = Counter(item.diagnostics["answer"] for item in items if item.counts and item.diagnostics.get("answer"))
    if not answers:
        return {}
    return {"answers": dict(sorted(answers.items())), "top_answer_share": max(answers.values()) / answers.total()}


def _gains(items: Sequence[ItemRecord], base: Sequence[ItemRecord], confidence: float) -> Mapping[str, Any]:
    shared = [name for name in metric_names(items) if name in metric_names(base)]
    return {name: interval_json(paired_difference(items, base, name, confidence)) for name in shared}


def _presence(items: Sequence[ItemRecord]) -> Counter[str]:
    return Counter(name for item in items for name in {*item.components, *item.metrics})


def _extra(counted: Sequence[ItemRecord]) -> dict[str, Any]:
    extra = answer_shares(counted)
    partial = {name: n for name, n in sorted(_presence(counted).items()) if n < len(counted)}
    if partial:  # no mean is given for these: its denominator would be silently smaller
        extra["partial_metrics"] = partial
    return extra
