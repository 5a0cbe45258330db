"""Advantages against numbers worked out by hand, and what they owe every group."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from harness.training.advantages import group_advantages, spread


def test_reward_minus_mean_by_hand():
    assert group_advantages([1.0, 0.0, 0.5, 0.5]) == [0.5, -0.5, 0.0, 0.0]
    assert group_advantages([0.0, 0.0, 0.0, 1.0]) == [-0.25, -0.25, -0.25, 0.75]


def test_divided_by_the_standard_deviation_by_hand():
    # mean 0.5, deviations (0.5, -0.5, 0.5, -0.5), population standard deviation 0.5
    assert group_advantages([1.0, 0.0, 1.0, 0.0], "mean_std") == [1.0, -1.0, 1.0, -1.0]
    # mean 1, squares (1, 1, 4) of (0, 2, -1...): rewards 0, 2, 3, -1 → mean 1, variance (1+1+4+4)/4 = 2.5
    root = math.sqrt(2.5)
    expected = [-1 / root, 1 / root, 2 / root, -2 / root]
    assert group_advantages([0.0, 2.0, 3.0, -1.0], "mean_std") == pytest.approx(expected, abs=1e-15)


def test_rollouts_outside_the_baseline_move_nothing():
    assert group_advantages([1.0, None, 0.0, None]) == [0.5, 0.0, -0.5, 0.0]
    with_failed = group_advantages([0.25, None, 1.0, 0.5])
    without = group_advantages([0.25, 1.0, 0.5])
    assert [a for i, a in enumerate(with_failed) if i != 1] == without
    assert with_failed[1] == 0.0


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
@pytest.mark.parametrize(
    "rewards", [[], [1.0], [None, None], [1.0, None, None], [0.3, 0.3, 0.3], [0.3, None, 0.3], [0.1 + 0.2, 0.3]]
)
def test_no_spread_no_advantage(rewards, kind):
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
def test_sum_is_zero_and_order_is_kept(kind):
    source = random.Random(5)
    for _ in range(200):
        rewards = [source.choice([None, 0.0, 0.1, 0.37, 1.0]) for _ in range(8)]
        advantages = group_advantages(rewards, kind)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-12)
        pairs = [(r, a) for r, a in zip(rewards, advantages, strict=True) if r is not None]
        assert [a for _, a in sorted(pairs)] == sorted(a for _, a in pairs)


def test_spread_is_the_population_standard_deviation():
    rewards = [0.1, 0.9, 0.4, 0.4, 1.3]
    assert spread(rewards) == pytest.approx(statistics.pstdev(rewards), abs=1e-15)
    assert spread([None, *rewards]) == spread(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_is_no_number_to_learn_from(bad):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([0.0, bad])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown advantage"):
        group_advantages([0.0, 1.0], "median")
