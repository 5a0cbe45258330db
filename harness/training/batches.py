"""From scored groups to micro-batches of shared-prefix trees under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.core.types import Rollout
from harness.inference.tree import TreeBatch, build_tree, common_prefix


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task.

    Args:
        rollouts: all of them, in the order they were asked for.
        advantages: one per rollout.
        temperature: of the sampler.
        outside: positions of rollouts that are no part of the loss: failed ones, and masked truncated ones.
        elsewhere: positions of rollouts that the loss counts and this pass need not compute, since their gradient
            is zero or another pass has them.
    """

    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    temperature: float = 1.0
    outside: frozenset[int] = frozenset()
    elsewhere: frozenset[int] = frozenset()

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
    def computed(self) -> list[int]:
        """Positions of the rollouts in the loss that this pass computes; those without a sampled token never are."""
        skipped = self.outside | self.elsewhere
        return [i for i, rollout in enumerate(self.rollouts) if any(rollout.sampled) and i not in skipped]

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens in the loss."""
        return sum(sum(rollout.sampled) for rollout, _ in self.trained)

    def computed_tokens(self, root: int) -> int:
        """Return the tokens of the group's branch in the tree: suffix, and everything after it of computed rollouts."""
        return len(self.prompt) - root + sum(len(self.rollouts[i].token_ids) for i in self.computed)

    @property
    def rewards(self) -> list[float | None]:
        """The reward of every rollout; None for those outside the loss, which are no part of the baseline either."""
        return [None if i in self.outside else rollout.score.reward for i, rollout in enumerate(self.rollouts)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass over M trained tokens.

    Args:
        tree: the flat layout.
        advantages: (M,) advantage of every trained token, in layout order.
        sampler_logprobs: (M,) log probabilities the engine reported.
        temperatures: (M,) temperature each token was sampled at.
        lengths: trained tokens of each rollout, in layout order; they add up to M.
        rollouts: the computed ones, in layout order.
    """

    tree: TreeBatch
    advantages: Tensor
    sampler_logprobs: Tensor
    temperatures: Tensor
    lengths: tuple[int, ...]
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """An optimizer batch as a sequence of passes.

    Args:
        root: tokens that all prompts share; each pass computes them.
        parts: the groups of each pass.
    """

    root: int
    parts: list[list[Group]]

    @property
    def largest(self) -> int:
        """Tokens of the largest pass; 0 without any."""
        sizes = [sum(group.computed_tokens(self.root) for group in part) for part in self.parts]
        return self.root + max(sizes) if sizes else 0

    @property
    def divisible(self) -> bool:
        """Whether some pass holds more than one rollout."""
        return any(sum(len(group.computed) for group in part) > 1 for part in self.parts)


def plan_passes(groups: Sequence[Group], budget: int, skip_idle: bool) -> Plan:
    """Return the passes of an optimizer batch; they depend on nothing but the arguments.

    Args:
        groups: those without a token to compute are in no pass.
        budget: tokens of one pass.
        skip_idle: leave out rollouts of advantage zero; see `without_idle_rows`.
    """
    kept = [group for group in (without_idle_rows(groups) if skip_idle else groups) if group.computed]
    if not kept:
        return Plan(0, [])
    prompts = [group.prompt for group in kept]
    root = common_prefix(prompts) if len(prompts) > 1 else 0
    return Plan(root, split_groups(kept, root, budget))


def without_idle_rows(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without the work on rollouts of advantage zero; the loss goes on counting them.

    Only for a loss in which every term of a token has its advantage as a factor: an entropy bonus and a KL to a
    reference give such rollouts a gradient too.
    """
    idle = [frozenset(i for i, advantage in enumerate(group.advantages) if advantage == 0) for group in groups]
    kept = [replace(group, elsewhere=group.elsewhere | rows) for group, rows in zip(groups, idle, strict=True)]
    return [group for group in kept if group.computed]


def split_groups(groups: Sequence[Group], root: int, budget: int) -> list[list[Group]]:
    """Split groups into passes whose trees stay within `budget` tokens, as few as can be found.

    In order when that needs no more passes; else by first-fit decreasing (Johnson 1974; at most 11/9 of the best
    number, plus one). The rollouts of a group over the budget are spread over several passes, each of which computes
    the prompt again; a single rollout over the budget is a pass of its own.

    Args:
        groups: their prompts share the first `root` token ids.
        root: shared tokens, part of every pass.
        budget: tokens of one pass.
    """
    pieces = [piece for group in groups for piece in _pieces(group, root, budget)]
    sizes = [piece.computed_tokens(root) for piece in pieces]
    in_order = _next_fit(sizes, budget - root)
    packed = _first_fit_decreasing(sizes, budget - root)
    chosen = in_order if len(in_order) <= len(packed) else packed
    return [[pieces[index] for index in bin_] for bin_ in chosen]


def _pieces(group: Group, root: int, budget: int) -> list[Group]:
    """Return the group, or parts of it that each fit the budget or hold a single rollout."""
    rows = group.computed
    if group.computed_tokens(root) <= budget - root or len(rows) < 2:
        return [group]
    room = budget - len(group.prompt)
    bins = _first_fit_decreasing([len(group.rollouts[i].token_ids) for i in rows], room)
    parts = [frozenset(rows[index] for index in bin_) for bin_ in bins]
    return [replace(group, elsewhere=group.elsewhere | (frozenset(rows) - part)) for part in parts]


def _next_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    used = capacity + 1
    for index, size in enumerate(sizes):
        if used + size > capacity:
            bins.append([])
            used = 0
        bins[-1].append(index)
        used += size
    return bins


def _first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the places of `sizes` in bins; places within a bin, and bins by their first place, in order."""
    bins: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        size = sizes[index]
        fit = next((b for b, full in enumerate(used) if full + size <= capacity), None)
        if fit is None:
            bins.append([index])
            used.append(size)
        else:
            bins[fit].append(index)
            used[fit] += size
    return sorted(sorted(bin_) for bin_ in bins)


def micro_batch(groups: Sequence[Group], root: int, device: torch.device, dtype: torch.dtype) -> MicroBatch:
    """Lay out the computed rollouts of some groups as one tree with their per-token advantages.

    Args:
        groups: their prompts share the first `root` token ids.
        dtype: of advantages and log probabilities.
    """
    rows = [[group.rollouts[i] for i in group.computed] for group in groups]
    sampled = [[rollout.sampled for rollout in row] for row in rows]
    whole = all(all(flags) for row in sampled for flags in row)
    tree = build_tree(
        [group.prompt for group in groups],
        [[rollout.token_ids for rollout in row] for row in rows],
        root,
        device,
        None if whole else sampled,
    )
    advantages: list[float] = []
    logprobs: list[float] = []
    temperatures: list[float] = []
    lengths: list[int] = []
    for group, row in zip(groups, rows, strict=True):
        for index, rollout in zip(group.computed, row, strict=True):
            written = rollout.completion
            count = len(written.token_ids)
            lengths.append(count)
            advantages += [group.advantages[index]] * count
            logprobs += written.logprobs
            temperatures += [group.temperature] * count
    return MicroBatch(
        tree,
        torch.tensor(advantages, dtype=dtype, device=device),
        torch.tensor(logprobs, dtype=dtype, device=device),
        torch.tensor(temperatures, dtype=dtype, device=device),
        tuple(lengths),
        tuple(rollout for row in rows for rollout in row),
    )
