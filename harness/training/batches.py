"""From scored groups to micro-batches of shared-prefix trees under a token budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from harness.core.types import Rollout
from harness.inference.prefixes import Prefix, shared_prefixes
from harness.inference.tree import TreeBatch, build_tree


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

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of the computed rollouts behind their prompt."""
        return sum(len(self.rollouts[i].token_ids) for i in self.computed)

    @property
    def rewards(self) -> list[float | None]:
        """The reward of every rollout; None for those outside the loss, which are no part of the baseline either."""
        return [None if i in self.outside else rollout.score.reward for i, rollout in enumerate(self.rollouts)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass over M trained tokens.

    Args:
        tree: the flat layout.
        advantages: (M,) advantage of every trained token, group by group.
        sampler_logprobs: (M,) log probabilities the engine reported.
        temperatures: (M,) temperature each token was sampled at.
        lengths: trained tokens of each rollout, group by group; they add up to M.
        rollouts: the computed ones, in the same order.
    """

    tree: TreeBatch
    advantages: Tensor
    sampler_logprobs: Tensor
    temperatures: Tensor
    lengths: tuple[int, ...]
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """An optimizer batch as a sequence of passes: the groups of each."""

    parts: list[list[Group]]

    @property
    def largest(self) -> int:
        """Tokens of the largest pass; 0 without any."""
        return max(map(pass_tokens, self.parts), default=0)

    @property
    def divisible(self) -> bool:
        """Whether some pass holds more than one rollout."""
        return any(sum(len(group.computed) for group in part) > 1 for part in self.parts)


def pass_tokens(groups: Sequence[Group]) -> int:
    """Return the tokens of a pass over some groups; a prefix that prompts share counts once."""
    whole = _Pass()
    for place, want in _wants(groups).items():
        whole.add(place, want)
    return whole.tokens


def plan_passes(groups: Sequence[Group], budget: int, skip_idle: bool) -> Plan:
    """Return the passes of an optimizer batch; they depend on nothing but the arguments.

    Args:
        groups: those without a token to compute are in no pass.
        budget: tokens of one pass.
        skip_idle: leave out rollouts of advantage zero; see `without_idle_rows`.
    """
    kept = [group for group in (without_idle_rows(groups) if skip_idle else groups) if group.computed]
    return Plan(split_groups(kept, budget))


def without_idle_rows(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without the work on rollouts of advantage zero; the loss goes on counting them.

    Only for a loss in which every term of a token has its advantage as a factor: an entropy bonus and a KL to a
    reference give such rollouts a gradient too.
    """
    idle = [frozenset(i for i, advantage in enumerate(group.advantages) if advantage == 0) for group in groups]
    kept = [replace(group, elsewhere=group.elsewhere | rows) for group, rows in zip(groups, idle, strict=True)]
    return [group for group in kept if group.computed]


def split_groups(groups: Sequence[Group], budget: int) -> list[list[Group]]:
    """Split groups into passes whose trees stay within `budget` tokens, as few as can be found.

    In order, or in order with groups that share more of their prompts next to each other, or by first-fit decreasing
    (Johnson 1974; at most 11/9 of the best number, plus one) with a group going where most of its prompt is: the one
    that needs the fewest passes and then the fewest tokens, the first of equals. The rollouts of a group over the
    budget are spread over several passes, each of which computes the prompt again; a single rollout over the budget
    is a pass of its own.

    Args:
        groups: in the order they were drawn.
        budget: tokens of one pass.
    """
    pieces = [piece for group in groups for piece in _pieces(group, budget)]
    if not pieces:
        return []
    wants = _wants(pieces)
    by_size = sorted(wants, key=lambda place: (-_Pass().added(wants[place]), place))
    in_order = [_fill(order, wants, budget, last_only=True) for order in (sorted(wants), wants)]
    tries = (*in_order, _fill(by_size, wants, budget))
    chosen = min(tries, key=lambda passes: (len(passes), sum(one.tokens for one in passes)))
    return [[pieces[place] for place in places] for places in sorted(sorted(one.places) for one in chosen)]


def _pieces(group: Group, budget: int) -> list[Group]:
    """Return the group, or parts of it that each fit the budget or hold a single rollout."""
    rows = group.computed
    room = budget - len(group.prompt)
    if group.computed_tokens <= room or len(rows) < 2:
        return [group]
    wants = {i: _Want((), len(group.rollouts[i].token_ids)) for i in rows}
    by_size = sorted(rows, key=lambda i: (-wants[i].own, i))
    parts = sorted(sorted(one.places) for one in _fill(by_size, wants, room))
    return [replace(group, elsewhere=group.elsewhere | (frozenset(rows) - frozenset(part))) for part in parts]


class _Want(NamedTuple):
    """What a piece takes in a pass: the prefixes it shares with others, and `own` tokens of its own."""

    path: tuple[Prefix, ...]
    own: int


def _wants(groups: Sequence[Group]) -> dict[int, _Want]:
    """Return what each group takes by its place; those that share more stand together."""
    wants = {}
    for place, path in shared_prefixes([group.prompt for group in groups]).walk():
        depth = path[-1].stop if path else 0
        wants[place] = _Want(path, len(groups[place].prompt) - depth + groups[place].computed_tokens)
    return wants


@dataclass(slots=True)
class _Pass:
    places: list[int] = field(default_factory=list)
    prefixes: set[tuple[int, int]] = field(default_factory=set)
    tokens: int = 0

    def added(self, want: _Want) -> int:
        """Return by how many tokens the pass would grow."""
        return want.own + sum(p.stop - p.start for p in want.path if p.key not in self.prefixes)

    def add(self, place: int, want: _Want) -> None:
        """Take a piece into the pass."""
        self.tokens += self.added(want)
        self.prefixes |= {prefix.key for prefix in want.path}
        self.places.append(place)


def _fill(order: Iterable[int], wants: Mapping[int, _Want], budget: int, last_only: bool = False) -> list[_Pass]:
    """Put pieces into passes, each into the one that grows least among those with room; the first of equals.

    Args:
        order: places of the pieces.
        wants: by place.
        budget: tokens of one pass; a piece over it gets a pass of its own.
        last_only: look at the newest pass alone.
    """
    passes: list[_Pass] = []
    for place in order:
        want = wants[place]
        open_ = passes[-1:] if last_only else passes
        fits = [one for one in open_ if one.tokens + one.added(want) <= budget]
        if not fits:
            fits = [_Pass()]
            passes += fits
        min(fits, key=lambda one: one.added(want)).add(place, want)
    return passes


def micro_batch(groups: Sequence[Group], device: torch.device, dtype: torch.dtype) -> MicroBatch:
    """Lay out the computed rollouts of some groups as one tree with their per-token advantages.

    Args:
        dtype: of advantages and log probabilities.
    """
    rows = [[group.rollouts[i] for i in group.computed] for group in groups]
    sampled = [[rollout.sampled for rollout in row] for row in rows]
    whole = all(all(flags) for row in sampled for flags in row)
    tree = build_tree(
        [group.prompt for group in groups],
        [[rollout.token_ids for rollout in row] for row in rows],
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
