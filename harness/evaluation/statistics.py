"""Means, intervals and paired differences of per-item results; pure and deterministic.

Every interval is cluster-robust: items that share a cluster (a drug-protein pair, a document) are
not independent, and counting them as if they were makes intervals too narrow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import numpy as np
from scipy import stats

from harness.core.errors import NotFoundError, UsageError
from harness.evaluation.records import ItemRecord

_NO_SPREAD = 1e-12
"""Relative size below which a sum of residuals is rounding, not variation."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with a confidence interval.

    Args:
        mean: NaN when there is no value, or any value is non-finite.
        low: lower bound; -inf when one cluster, or a constant without known range, leaves it open.
        high: upper bound; inf likewise.
        n: number of values.
        clusters: number of distinct clusters.
    """

    mean: float
    low: float
    high: float
    n: int
    clusters: int

    @property
    def is_finite(self) -> bool:
        """Whether mean and both bounds are finite."""
        return isfinite(self.mean) and isfinite(self.low) and isfinite(self.high)


@dataclass(frozen=True, slots=True)
class PairedInterval(Interval):
    """A mean difference over the same items on both sides.

    Args:
        wins: items where the first side is higher.
        losses: items where it is lower.
        ties: items without a difference.
        missing: items that do not count on both sides (absent, or failed outside the model).
    """

    wins: int
    losses: int
    ties: int
    missing: int


def mean_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    *,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Interval:
    """Return the mean of `values` with a cluster-robust Student t interval.

    With residual sums u_g of G clusters over N values, the variance of the mean is
    G/(G-1) * sum(u_g^2) / N^2 and the quantile is Student's t with G-1 degrees of freedom. One
    value per cluster gives the one-sample t interval. When no cluster deviates from the mean, the
    t interval would be a point; the bound is then what G clusters without a deviation allow: with
    confidence, at most u = 1 - (alpha/2)^(1/G) of all clusters deviate, each at most to the end of
    the range (for a proportion of 0 or 1: the Clopper-Pearson interval).

    Args:
        values: one number per item.
        clusters: the cluster of each value, same length.
        confidence: two-sided coverage, strictly between 0 and 1.
        bounds: range a value can have; clips the interval and closes it for constant values. None,
            or values outside it: unknown range.

    Raises:
        UsageError: when lengths differ or confidence is out of range.

    Source: Cameron & Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference", J. Human
        Resources 50(2): the CR1 estimator with finite-sample factor G/(G-1) * (N-1)/(N-K) and
        T(G-1) quantiles, for a regression on a constant (K = 1); Clopper & Pearson 1934,
        Biometrika 26(4).
    """
    _check_arguments(values, clusters, confidence)
    data = np.asarray(values, dtype=np.float64)
    index = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    n, groups = len(data), len(index)
    if n == 0 or not bool(np.isfinite(data).all()):
        return Interval(nan, nan, nan, n, groups)
    mean = _mean(data)
    if groups < 2:
        return Interval(mean, -inf, inf, n, groups)
    sums = np.bincount([index[cluster] for cluster in clusters], weights=data - mean, minlength=groups)
    known = bounds if bounds is not None and bounds[0] <= data.min() and data.max() <= bounds[1] else None
    if bool(np.abs(sums).max() <= _NO_SPREAD * n * max(1.0, abs(mean))):
        return Interval(mean, *_constant_bounds(mean, groups, confidence, known), n, groups)
    error = float(np.sqrt(groups / (groups - 1) * np.square(sums).sum()) / n)
    half = float(stats.t.ppf(0.5 + confidence / 2, groups - 1)) * error
    low, high = known or (-inf, inf)
    return Interval(mean, max(mean - half, low), min(mean + half, high), n, groups)


def _check_arguments(values: Sequence[float], clusters: Sequence[Hashable], confidence: float) -> None:
    if len(values) != len(clusters):
        raise UsageError(f"{len(values)} values but {len(clusters)} clusters", "give one cluster per value")
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"confidence {confidence} is not between 0 and 1", "95 % is written 0.95")


def _mean(data: np.ndarray) -> float:
    """Return the mean; exact for a constant, so that no rounding looks like spread."""
    return float(data[0]) if bool((data == data[0]).all()) else float(data.mean())


def _constant_bounds(
    mean: float, groups: int, confidence: float, bounds: tuple[float, float] | None
) -> tuple[float, float]:
    if bounds is None:
        return (-inf, inf)
    deviating = 1.0 - ((1.0 - confidence) / 2) ** (1.0 / groups)
    return (mean - deviating * (mean - bounds[0]), mean + deviating * (bounds[1] - mean))


def left_out(items: Iterable[ItemRecord]) -> dict[str, int]:
    """Count, by failure class, the items that belong in no mean (tool, infra, verifier)."""
    return dict(sorted(Counter(str(item.failure) for item in items if not item.counts).items()))


def mean_of(items: Sequence[ItemRecord], metric: str = "reward", confidence: float = 0.95) -> Interval:
    """Return mean and interval of one metric over the items that count.

    Failures of class `model` are in the denominator; the other classes are not (`left_out` counts
    them).

    Args:
        items: records of one eval.
        metric: `reward`, a component or a metric.
        confidence: two-sided coverage.

    Raises:
        NotFoundError: when an item that counts does not record `metric`: a mean over fewer items
            than it claims would be a lie.
    """
    counted = [item for item in items if item.counts]
    values = [_value(item, metric) for item in counted]
    return mean_interval(values, [item.cluster for item in counted], confidence)


def paired_difference(
    a: Sequence[ItemRecord], b: Sequence[ItemRecord], metric: str = "reward", confidence: float = 0.95
) -> PairedInterval:
    """Return the mean of `a` minus `b` over the items that count on both sides, with its interval.

    Args:
        a: records of one eval, for example of the trained model.
        b: records of another eval of the same items, for example of the base model.
        metric: `reward`, a component or a metric.
        confidence: two-sided coverage.

    Raises:
        NotFoundError: when a joined item does not record `metric`.
        UsageError: when a task and sample occurs twice on one side, or has different clusters.
    """
    return contrast((a, b), (1.0, -1.0), metric, confidence)


def contrast(
    evals: Sequence[Sequence[ItemRecord]], weights: Sequence[float], metric: str = "reward", confidence: float = 0.95
) -> PairedInterval:
    """Return the mean of a weighted sum of several evals of the same items, with its interval.

    Weights 1 and -1 are a paired difference; 1, -1, -1, 1 a difference of two differences. Only items that count in
    every eval enter, those of weight 0 too, so contrasts of the same evals are about the same items and add up.

    A t interval trusts that many small effects add up. When k clusters differ at all and
    2 * (1/2)^k exceeds 1 - confidence (fewer than six at 95 %), even k wins and no loss happen too
    often by chance, so the interval is then widened to hold zero.

    Args:
        evals: records, one sequence per eval.
        weights: one per eval.
        metric: `reward`, a component or a metric.
        confidence: two-sided coverage.

    Raises:
        NotFoundError: when a joined item does not record `metric`.
        UsageError: when a task and sample occurs twice in an eval, or has different clusters.

    Source: `mean_interval` of the sums per item; the floor is the exact sign test (Dixon & Mood 1946, JASA 41).
    """
    sides = [_by_key(items) for items in evals]
    every = set().union(*sides)
    keys = sorted(key for key in every if all(key in side and side[key].counts for side in sides))
    if moved := [key for key in keys if len({side[key].cluster for side in sides}) > 1]:
        raise UsageError(f"task {moved[0][0]!r} has another cluster on each side", "evaluate both on the same items")
    parts = list(zip(sides, weights, strict=True))
    sums = [sum(weight * _value(side[key], metric) for side, weight in parts) for key in keys]
    clusters = [sides[0][key].cluster for key in keys]
    bounds = (sum(min(weight, 0.0) for weight in weights), sum(max(weight, 0.0) for weight in weights))
    interval = mean_interval(sums, clusters, confidence, bounds=bounds)
    low, high = interval.low, interval.high
    totals: dict[str, float] = defaultdict(float)
    for cluster, value in zip(clusters, sums, strict=True):
        totals[cluster] += value
    differing = sum(abs(total) > _NO_SPREAD for total in totals.values())
    if 2.0 * 0.5**differing > 1.0 - confidence:
        low, high = min(low, 0.0), max(high, 0.0)
    return PairedInterval(
        mean=interval.mean,
        low=low,
        high=high,
        n=interval.n,
        clusters=interval.clusters,
        wins=sum(value > _NO_SPREAD for value in sums),
        losses=sum(value < -_NO_SPREAD for value in sums),
        ties=sum(abs(value) <= _NO_SPREAD for value in sums),
        missing=len(every) - len(keys),
    )


def _value(item: ItemRecord, metric: str) -> float:
    value = item.value(metric)
    if value is None:
        raise NotFoundError(
            f"metric {metric!r} is not recorded for task {item.task!r}, sample {item.sample}",
            f"recorded there: {', '.join(['reward', *sorted({*item.components, *item.metrics})])}",
        )
    return value


def _by_key(items: Sequence[ItemRecord]) -> dict[tuple[str, int], ItemRecord]:
    result = {item.key: item for item in items}
    if len(result) != len(items):
        raise UsageError("an eval holds a task and sample twice", "join evals of one step and one prompt only")
    return result
