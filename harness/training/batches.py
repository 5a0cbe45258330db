"""From scored groups to micro-batches of shared-prefix trees under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.core.types import Rollout
from harness.inference.tree import TreeBatch, build_tree


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task.

    Args:
        rollouts: all of them, in the order they were asked for.
        advantages: one per rollout.
        temperature: of the sampler.
        outside: positions of rollouts that are no part of the loss: failed ones, and masked truncated ones.
    """

    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    temperature: float = 1.0
    outside: frozenset[int] = frozenset()

    @property
    def prompt(self) -> tuple[int, ...]:
        """The token ids all rollouts of the group share."""
        return self.rollouts[0].prompt_ids

    @property
    def trained(self) -> list[tuple[Rollout, float]]:
        """The rollouts in the loss, each with its advantage."""
        pairs = zip(self.rollouts, self.advantages, strict=True)
        return [pair for index, pair in enumerate(pairs) if index not in self.outside]

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens in the loss."""
        return sum(len(rollout.completion.token_ids) for rollout, _ in self.trained)

    @property
    def rewards(self) -> list[float | None]:
        """The reward of every rollout; None for those outside the loss, which are no part of the baseline either."""
        return [None if i in self.outside else rollout.score.reward for i, rollout in enumerate(self.rollouts)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass.

    Args:
        tree: the flat layout.
        advantages: (M,) advantage of every completion token, in layout order.
        sampler_logprobs: (M,) log probabilities the engine reported.
        temperatures: (M,) temperature each token was sampled at.
    """

    tree: TreeBatch
    advantages: Tensor
    sampler_logprobs: Tensor
    temperatures: Tensor


def split_groups(groups: Sequence[Group], root: int, budget: int) -> list[list[Group]]:
    """Split groups, in order, so that each part's tree stays within `budget` tokens if it can.

    A single group over the budget stays whole: its rows share a prompt.
    """
    parts: list[list[Group]] = []
    used = budget + 1
    for group in groups:
        size = len(group.prompt) - root + group.completion_tokens
        if used + size > budget:
            parts.append([])
            used = root
        parts[-1].append(group)
        used += size
    return parts


def micro_batch(groups: Sequence[Group], root: int, device: torch.device, dtype: torch.dtype) -> MicroBatch:
    """Lay out groups as one tree with their per-token advantages.

    Args:
        groups: their prompts share the first `root` token ids.
        dtype: of advantages and log probabilities.
    """
    completions = [[rollout.completion.token_ids for rollout, _ in group.trained] for group in groups]
    tree = build_tree([group.prompt for group in groups], completions, root, device)
    advantages: list[float] = []
    logprobs: list[float] = []
    temperatures: list[float] = []
    for group in groups:
        for rollout, advantage in group.trained:
            advantages += [advantage] * len(rollout.completion.token_ids)
            logprobs += rollout.completion.logprobs
        temperatures += [group.temperature] * group.completion_tokens
    return MicroBatch(
        tree,
        torch.tensor(advantages, dtype=dtype, device=device),
        torch.tensor(logprobs, dtype=dtype, device=device),
        torch.tensor(temperatures, dtype=dtype, device=device),
    )
