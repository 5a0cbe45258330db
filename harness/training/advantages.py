"""Advantages of a group of rollouts: pure functions of their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

SPREAD_FLOOR = 1e-6
"""Below this standard deviation a group carries no signal, only rounding."""


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
        kind: `mean` = r - mean(r); `mean_std` = (r - mean(r)) / std(r).

    Returns:
        Zeros for a group with fewer than two counting rollouts or without spread.

    Raises:
        ValueError: on a non-finite reward or an unknown kind.

    Source: Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2 for `mean_std`; Liu et al.
    2025 (Dr. GRPO, arXiv 2503.20783) for dropping the standard deviation.
    """
    if kind not in ("mean", "mean_std"):
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
