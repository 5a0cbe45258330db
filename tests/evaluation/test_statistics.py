"""Intervals against independent references: by hand, scipy's t test, a bootstrap, simulated coverage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.core.errors import NotFoundError, UsageError
from harness.core.types import FailureClass
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import left_out, mean_interval, mean_of, paired_difference


def item(task, reward, *, cluster=None, sample=0, failure=None, **components):
    return ItemRecord(task, cluster or task, sample, reward, components, {}, failure)


def test_cr1_by_hand():
    # Clusters (1, 0), (1, 1), (0): mean 0.6, residual sums -0.2, 0.8, -0.6; sum of squares 1.04;
    # variance 3/2 * 1.04 / 25 = 0.0624; t(0.975, 2) = 4.302653.
    result = mean_interval([1, 0, 1, 1, 0], list("aabbc"), bounds=None)
    assert result.mean == pytest.approx(0.6)
    assert result.high - result.mean == pytest.approx(4.302652729911275 * math.sqrt(0.0624))
    assert result.low == pytest.approx(0.6 - 4.302652729911275 * math.sqrt(0.0624))
    assert (result.n, result.clusters) == (5, 3)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40), st.sampled_from([0.8, 0.95, 0.99]))
def test_one_item_per_cluster_is_the_t_interval(values, confidence):
    if np.std(values) < 1e-6:
        return
    ours = mean_interval(values, range(len(values)), confidence, bounds=None)
    reference = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    assert (ours.low, ours.high) == pytest.approx(tuple(reference), rel=1e-9, abs=1e-9)


def test_duplicating_every_item_inside_its_cluster_changes_nothing():
    values, clusters = [0.1, 0.9, 0.4, 0.7], list("abcd")
    once, thrice = mean_interval(values, clusters), mean_interval(values * 3, clusters * 3)
    assert (once.low, once.high) == pytest.approx((thrice.low, thrice.high))
    assert (once.n, thrice.n) == (4, 12)


def test_close_to_a_cluster_bootstrap():
    random = np.random.default_rng(0)
    sizes = random.integers(1, 5, size=80)
    levels = random.beta(2, 3, size=80)
    groups = [(random.random(size) < level).astype(float) for size, level in zip(sizes, levels, strict=True)]
    clusters = [number for number, group in enumerate(groups) for _ in group]
    ours = mean_interval(np.concatenate(groups).tolist(), clusters)
    sums, counts = np.array([group.sum() for group in groups]), np.array([len(group) for group in groups])
    drawn = random.integers(0, 80, size=(5000, 80))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    assert ours.low == pytest.approx(low, abs=0.012)
    assert ours.high == pytest.approx(high, abs=0.012)
    naive = mean_interval(np.concatenate(groups).tolist(), range(len(clusters)))
    assert naive.high - naive.low < ours.high - ours.low  # what ignoring the clusters would claim


def test_coverage_with_correlated_clusters():
    random = np.random.default_rng(1)
    clusters = np.repeat(np.arange(40), 3).tolist()
    trials, held, naive_held = 1500, 0, 0
    for _ in range(trials):
        values = (0.5 + np.repeat(random.normal(0, 0.2, 40), 3) + random.normal(0, 0.1, 120)).tolist()
        result = mean_interval(values, clusters, bounds=None)
        naive = mean_interval(values, range(120), bounds=None)
        held += result.low <= 0.5 <= result.high
        naive_held += naive.low <= 0.5 <= naive.high
    assert 0.935 <= held / trials <= 0.965
    assert naive_held / trials < 0.85


@pytest.mark.parametrize(("value", "successes"), [(0.0, 0), (1.0, 30)])
def test_a_constant_proportion_has_the_clopper_pearson_interval(value, successes):
    ours = mean_interval([value] * 30, range(30))
    reference = stats.binomtest(successes, 30).proportion_ci(0.95, method="exact")
    assert (ours.low, ours.high) == pytest.approx((reference.low, reference.high))
    assert ours.mean == value


def test_a_constant_inside_the_range_is_open_on_both_sides():
    ours = mean_interval([0.3] * 60, [n // 2 for n in range(60)])
    assert ours.mean == 0.3
    assert 0.0 < ours.low < 0.3 < ours.high < 1.0
    wider = mean_interval([0.3] * 60, [n // 6 for n in range(60)])  # fewer clusters say less
    assert wider.low < ours.low and wider.high > ours.high


def test_clusters_that_cancel_inside_do_not_make_a_point():
    ours = mean_interval([0.0, 1.0] * 10, [n // 2 for n in range(20)])
    assert ours.low < 0.5 < ours.high


@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
def test_a_constant_of_unknown_range_is_unbounded(bounds):
    ours = mean_interval([7.0] * 10, range(10), bounds=bounds)
    assert (ours.mean, ours.low, ours.high) == (7.0, -math.inf, math.inf)
    assert not ours.is_finite


def test_one_cluster_cannot_tell():
    ours = mean_interval([0.2, 0.4], ["a", "a"])
    assert ours.mean == pytest.approx(0.3)
    assert (ours.low, ours.high, ours.clusters) == (-math.inf, math.inf, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_makes_everything_nan(bad):
    ours = mean_interval([0.5, bad, 0.1], "abc")
    assert all(math.isnan(x) for x in (ours.mean, ours.low, ours.high))


def test_no_values_have_no_mean():
    ours = mean_interval([], [])
    assert math.isnan(ours.mean) and ours.n == 0


def test_intervals_stay_in_the_range():
    ours = mean_interval([0.0] * 19 + [1.0], range(20))
    assert ours.low == 0.0 and ours.high > 0.05


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), min_size=1, max_size=30), st.randoms())
def test_the_mean_lies_in_its_interval_and_order_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    one = mean_interval([v for v, _ in pairs], [c for _, c in pairs])
    two = mean_interval([v for v, _ in shuffled], [c for _, c in shuffled])
    assert one.low <= one.mean <= one.high
    assert (one.mean, one.low, one.high) == pytest.approx((two.mean, two.low, two.high), abs=1e-9)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, math.nan])
def test_confidence_outside_the_open_unit_interval_is_refused(confidence):
    with pytest.raises(UsageError, match="confidence"):
        mean_interval([0.0, 1.0], "ab", confidence)


def test_lengths_must_agree():
    with pytest.raises(UsageError, match="2 values but 1 clusters"):
        mean_interval([0.0, 1.0], "a")


def test_model_failures_count_and_others_do_not():
    items = [
        item("a", 1.0),
        item("b", 0.0, failure=FailureClass.MODEL),
        item("c", 0.0, failure=FailureClass.INFRA),
        item("d", 0.0, failure=FailureClass.TOOL),
        item("e", 0.0, failure=FailureClass.VERIFIER),
        item("f", 0.0, failure=FailureClass.VERIFIER),
    ]
    result = mean_of(items)
    assert (result.mean, result.n) == (0.5, 2)
    assert left_out(items) == {"infra": 1, "tool": 1, "verifier": 2}


def test_a_metric_that_a_counted_item_lacks_is_an_error_not_a_smaller_denominator():
    with pytest.raises(NotFoundError, match=r"'accuracy' is not recorded for task 'b'"):
        mean_of([item("a", 1.0, accuracy=1.0), item("b", 0.0)], "accuracy")
    unscored = item("b", 0.0, failure=FailureClass.INFRA)
    assert mean_of([item("a", 1.0, accuracy=1.0), unscored], "accuracy").n == 1


def test_paired_difference_joins_counts_and_reports_what_is_missing():
    a = [item("t1", 1.0), item("t2", 0.0), item("t3", 0.5), item("t4", 1.0), item("t5", 1.0, failure=FailureClass.TOOL)]
    b = [item("t5", 0.0), item("t3", 0.5), item("t2", 0.5), item("t1", 0.0), item("t6", 0.0)]
    result = paired_difference(a, b)
    assert (result.wins, result.losses, result.ties, result.missing) == (1, 1, 1, 3)
    assert (result.n, result.clusters) == (3, 3)
    assert result.mean == pytest.approx((1.0 - 0.5 + 0.0) / 3)


def test_paired_difference_is_the_paired_t_interval_when_clusters_are_items():
    random = np.random.default_rng(3)
    before = random.random(50)
    after = np.clip(before + random.normal(0.05, 0.1, 50), 0, 1)
    result = paired_difference(
        [item(str(n), float(x)) for n, x in enumerate(after)], [item(str(n), float(x)) for n, x in enumerate(before)]
    )
    reference = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert (result.low, result.high) == pytest.approx((reference.low, reference.high))


def test_samples_of_a_task_are_paired_by_number_and_share_its_cluster():
    a = [item("t", 1.0, sample=0), item("t", 0.0, sample=1), item("u", 1.0, sample=0)]
    b = [item("t", 0.0, sample=1), item("t", 0.0, sample=0), item("u", 1.0, sample=0)]
    result = paired_difference(a, b)
    assert (result.wins, result.ties, result.clusters) == (1, 2, 2)


def test_two_equal_evals_differ_by_zero_but_not_certainly():
    items = [item(str(n), 0.5) for n in range(20)]
    result = paired_difference(items, items)
    assert result.mean == 0.0 and result.ties == 20
    assert -0.5 < result.low < 0.0 < result.high < 0.5


@pytest.mark.parametrize(("wins", "significant"), [(4, False), (5, False), (6, True), (9, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_handful_of_differing_clusters_shows_nothing(wins, significant, sign):
    high, low = [item(str(n), float(n < wins)) for n in range(120)], [item(str(n), 0.0) for n in range(120)]
    result = paired_difference(high, low) if sign > 0 else paired_difference(low, high)
    assert (result.low > 0.0 or result.high < 0.0) is significant
    assert significant is bool(stats.binomtest(wins, wins, 0.5).pvalue < 0.05)


def test_differing_clusters_are_counted_not_items():
    a = [item(f"{c}-{n}", 1.0, cluster=str(c)) for c in range(5) for n in range(8)]
    b = [replace(record, reward=0.1 * int(record.cluster)) for record in a]
    assert paired_difference(a, b).low == 0.0
    apart = [replace(record, cluster=record.task) for record in a]
    assert paired_difference(apart, [replace(record, cluster=record.task) for record in b]).low > 0.5


def test_false_gains_stay_rare_when_few_items_change():
    random = np.random.default_rng(5)
    trials, gains = 600, 0
    for _ in range(trials):
        change = np.where(random.random(120) < 0.04, random.choice([-1.0, 1.0], 120), 0.0)
        a, b = (
            [item(str(n), float(c > 0)) for n, c in enumerate(change)],
            [item(str(n), float(c < 0)) for n, c in enumerate(change)],
        )
        gains += paired_difference(a, b).low > 0.0
    assert gains / trials < 0.025


def test_nan_on_either_side_is_nan():
    a, b = [item("a", math.nan), item("b", 1.0)], [item("a", 0.0), item("b", 0.0)]
    assert math.isnan(paired_difference(a, b).mean) and math.isnan(paired_difference(b, a).low)


def test_nothing_in_common_has_no_mean():
    result = paired_difference([item("a", 1.0)], [item("b", 1.0)])
    assert math.isnan(result.mean) and result.missing == 2


def test_pairs_with_different_clusters_or_repeated_items_are_refused():
    with pytest.raises(UsageError, match="another cluster"):
        paired_difference([item("a", 1.0, cluster="x")], [item("a", 1.0, cluster="y")])
    with pytest.raises(UsageError, match="twice"):
        paired_difference([item("a", 1.0), item("a", 1.0)], [])
