"""Advantages of groups of rollouts, and the over-long penalty: pure functions of rewards and lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SPREAD_FLOOR = 1e-6
"""Below this standard deviation a group carries no signal, only rounding."""
KINDS = ("mean", "mean_std", "batch_std", "component")
"""What `train.advantage` takes."""


def spread(rewards: Sequence[float | None]) -> float:
    """Return the population standard deviation of the rewards that count (None does not)."""
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2:
        return 0.0
    mean = math.fsum(valid) / len(valid)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in valid) / len(valid))


def group_advantages(rewards: Sequence[float | None], kind: str = "mean") -> list[float]:
    """Return one advantage per rollout of a group.

    Args:
        rewards: None marks a rollout outside the baseline (infrastructure failed, nothing to
            train on); its advantage is 0.
        kind: `mean` = r - mean(r); `mean_std` = (r - mean(r)) / std(r); `batch_std` = as `mean`, to be
            divided by `batch_scale`.

    Returns:
        Zeros for a group with fewer than two counting rollouts or without spread.

    Raises:
        ValueError: on a non-finite reward or an unknown kind.

    Source: Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2 for `mean_std`; Liu et al.
    2025 (Dr. GRPO, arXiv 2503.20783) for dropping the standard deviation; Liu et al. 2025 (Part I: Tricks or
    Traps?, arXiv 2508.08221) for the group's mean with the batch's standard deviation.
    """
    if kind not in ("mean", "mean_std", "batch_std"):
        raise ValueError(f"unknown advantage {kind!r}")
    valid = [reward for reward in rewards if reward is not None]
    if any(not math.isfinite(reward) for reward in valid):
        raise ValueError("a reward is not finite; mark its rollout as failed instead")
    deviation = spread(rewards)
    if deviation < SPREAD_FLOOR:
        return [0.0] * len(rewards)
    mean = math.fsum(valid) / len(valid)
    scale = deviation if kind == "mean_std" else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]


def component_advantages(components: Sequence[Mapping[str, float] | None], weights: Mapping[str, float]) -> list[float]:
    """Return one advantage per rollout of a group, every reward component normalised on its own.

    The weighted sum over components of (c - mean(c)) / std(c) within the group: rewards that a sum would merge
    (a right answer in a wrong format, a wrong one in the right format) keep apart. A component without spread
    adds nothing. The result is to be divided by `batch_scale`.

    Args:
        components: per rollout its parts by name, a missing one counting 0; None marks a rollout outside the baseline.
        weights: of the components; 1 where none is given.

    Raises:
        ValueError: on a non-finite component.

    Source: Liu et al. 2026 (GDPO, arXiv 2601.05242); `multi_objective_aggregation="normalize_then_sum"` in TRL.
    """
    names = sorted({name for parts in components if parts is not None for name in parts})
    total = [0.0] * len(components)
    for name in names:
        values = [None if parts is None else parts.get(name, 0.0) for parts in components]
        own = group_advantages(values, "mean_std")
        total = [sum_ + weights.get(name, 1.0) * value for sum_, value in zip(total, own, strict=True)]
    outside = [parts is None for parts in components]
    floor = max((abs(value) for value in total), default=0.0) < SPREAD_FLOOR
    return [0.0 if floor or out else value for value, out in zip(total, outside, strict=True)]


def batch_scale(kind: str, rewards: Sequence[Sequence[float | None]], advantages: Sequence[Sequence[float]]) -> float:
    """Return what all advantages of one step are divided by.

    Args:
        kind: `batch_std` divides by the standard deviation of all counting rewards of the step, `component` by
            that of all counting advantages; the other kinds by 1.
        rewards: per group, None for rollouts outside the baseline.
        advantages: per group, aligned with `rewards`.

    Returns:
        Population standard deviation; 1 where it is below `SPREAD_FLOOR`, since every advantage is 0 then.
    """
    if kind not in ("batch_std", "component"):
        return 1.0
    pairs = [
        (reward, advantage)
        for some_rewards, some_advantages in zip(rewards, advantages, strict=True)
        for reward, advantage in zip(some_rewards, some_advantages, strict=True)
        if reward is not None
    ]
    deviation = spread([reward if kind == "batch_std" else advantage for reward, advantage in pairs])
    return deviation if deviation >= SPREAD_FLOOR else 1.0


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """Return what is added to the reward of a completion near the length limit: from 0 down to -1.

    Args:
        length: tokens of the completion.
        max_tokens: the limit.
        buffer: tokens before the limit over which the penalty grows; 0 turns it off.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13 (soft overlong punishment).
    """
    if not buffer:
        return 0.0
    return -min(max(length - (max_tokens - buffer), 0) / buffer, 1.0)
