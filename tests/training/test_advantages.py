"""Advantages against numbers worked out by hand, and what they owe every group."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.training.advantages import (
    batch_scale,
    component_advantages,
    group_advantages,
    overlong_penalty,
    spread,
)

TRL = json.loads((Path(__file__).parent / "data" / "trl_losses.json").read_text())


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


def test_batch_std_by_hand():
    groups: list[list[float | None]] = [[1.0, 0.0], [0.5, None, 0.5], [0.0, 0.0]]
    advantages = [group_advantages(group, "batch_std") for group in groups]
    assert advantages == [[0.5, -0.5], [0.0, 0.0, 0.0], [0.0, 0.0]]
    # counting rewards 1, 0, 0.5, 0.5, 0, 0: mean 1/3, variance (4/9 + 3/9 + 2/36) / 6 = 5/36
    assert batch_scale("batch_std", groups, advantages) == pytest.approx(math.sqrt(5 / 36), abs=1e-15)
    assert batch_scale("mean", groups, advantages) == batch_scale("mean_std", groups, advantages) == 1.0
    assert batch_scale("batch_std", [[1.0, 1.0]], [[0.0, 0.0]]) == 1.0


def test_components_by_hand():
    # a right answer in a wrong format and a wrong one in the right format have the same sum
    parts = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}, {"right": 0.0, "form": 0.0}, None]
    # right: mean 1/3, std sqrt(2)/3 → sqrt(2), -sqrt(2)/2, -sqrt(2)/2; form the same, shifted by one; weight 0.5
    one, half = math.sqrt(2), -math.sqrt(2) / 2
    expected = [one + 0.5 * half, half + 0.5 * one, half + 0.5 * half, 0.0]
    assert component_advantages(parts, {"form": 0.5}) == pytest.approx(expected, abs=1e-12)
    merged = group_advantages([1.0, 1.0, 0.0, None])
    assert merged[0] == merged[1]  # what the sum cannot tell apart


def test_a_component_without_spread_or_without_a_value_adds_nothing():
    parts = [{"right": 1.0, "form": 0.7}, {"form": 0.7}]
    assert component_advantages(parts, {}) == [1.0, -1.0]
    assert component_advantages([{"form": 0.7}, {"form": 0.7}], {}) == [0.0, 0.0]
    assert component_advantages([{"form": 0.7}, None], {}) == [0.0, 0.0]
    with pytest.raises(ValueError, match="not finite"):
        component_advantages([{"form": math.nan}, {"form": 0.0}], {})


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=9),
    shift=st.floats(-5, 5),
    kind=st.sampled_from(["mean", "mean_std", "batch_std"]),
)
def test_every_group_sums_to_zero_and_a_shift_changes_nothing(rewards, shift, kind):
    advantages = group_advantages(rewards, kind)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
    assert all(a == 0 for a, r in zip(advantages, rewards, strict=True) if r is None)
    if spread(rewards) > 1e-3:
        shifted = group_advantages([None if r is None else r + shift for r in rewards], kind)
        assert shifted == pytest.approx(advantages, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.none() | st.dictionaries(st.sampled_from("abc"), st.floats(0, 1), max_size=3), min_size=1, max_size=8
    ),
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0, 4)),
)
def test_component_advantages_sum_to_zero(parts, weights):
    advantages = component_advantages(parts, weights)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
    assert all(a == 0 for a, p in zip(advantages, parts, strict=True) if p is None)


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_soft_overlong_punishment_by_hand(length, expected):
    assert overlong_penalty(length, 100, 20) == pytest.approx(expected)
    assert overlong_penalty(length, 100, 0) == 0.0


def test_trl_computes_the_same_advantages():
    """TRL divides by the sample standard deviation plus 1e-4; this project by the population's."""
    case = TRL["advantages"]
    rewards = [row[0] for row in case["rewards"]]
    groups = [rewards[:4], rewards[4:]]
    plain = [a for group in groups for a in group_advantages(group)]
    assert plain == pytest.approx(case["mean"], abs=1e-6)

    def theirs(values):
        return statistics.stdev(values) + 1e-4

    scaled = [a * spread(group) / theirs(group) for group in groups for a in group_advantages(group, "mean_std")]
    assert scaled == pytest.approx(case["mean_std"], abs=1e-6)
    assert [a / theirs(rewards) for a in plain] == pytest.approx(case["batch_std"], abs=1e-6)
    without = group_advantages([groups[0][0], None, *groups[0][2:]]) + group_advantages(groups[1])
    assert without == pytest.approx(case["mean_without_1"], abs=1e-6)

    parts = [{"a": row[0], "b": row[1]} for row in case["rewards"]]
    weights = dict(zip("ab", case["weights"], strict=True))
    whole = component_advantages(parts[:4], weights) + component_advantages(parts[4:], weights)
    scale = batch_scale("component", [rewards], [whole])
    bessel = math.sqrt(7 / 8)  # of the batch; that of the groups cancels
    assert [a / scale * bessel for a in whole] == pytest.approx(case["component"], abs=1e-3)
