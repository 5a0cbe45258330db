"""What prompts have in common: a tree of the prefixes that two or more of them share.

Prompts of one environment begin with the same system text and demonstrations, prompts of several environments with
different ones, and later turns of one task with its whole first turn. The tree finds all of it from the token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FAMILY_TOKENS = 256
"""Tokens of keys and values that a family must save to be worth the operations it adds to every decoding step."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens `start` to `stop` of all prompts below: no more than that is common to all of them.

    Args:
        start: depth where the prefix around it ends.
        stop: depth where the prompts part; `start` when they part at once, which only the outermost may.
        below: places of prompts, and prefixes that some of them share beyond this one, in order of their first prompt.
    """

    start: int
    stop: int
    below: tuple[Prefix | int, ...]

    @property
    def prompts(self) -> tuple[int, ...]:
        """Places of the prompts below; those that share more stand together."""
        parts = ((item,) if isinstance(item, int) else item.prompts for item in self.below)
        return tuple(place for part in parts for place in part)

    @property
    def key(self) -> tuple[int, int]:
        """What tells the prefix from all others of its tree: its first prompt and where it begins."""
        item: Prefix | int = self
        while not isinstance(item, int):
            item = item.below[0]
        return item, self.start

    def walk(self, above: tuple[Prefix, ...] = ()) -> Iterator[tuple[int, tuple[Prefix, ...]]]:
        """Yield each prompt's place with the prefixes on its path, outermost first, those that share more together."""
        path = (*above, self) if self.stop > self.start else above
        for item in self.below:
            if isinstance(item, int):
                yield item, path
            else:
                yield from item.walk(path)


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """Return how many leading tokens all sequences share, leaving each at least one of its own.

    Args:
        sequences: none of them empty.
    """
    first, last = min(sequences), max(sequences)  # what these two share, all between them share
    limit = max(min(map(len, sequences)) - 1, 0)
    return next((i for i in range(limit) if first[i] != last[i]), limit)


def shared_prefixes(prompts: Sequence[Sequence[int]]) -> Prefix:
    """Return the tree of all prefixes that prompts share; each prompt keeps at least its last token for itself.

    Raises:
        ValueError: when a prompt is empty.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    return _prefix([tuple(prompt) for prompt in prompts], range(len(prompts)), 0)


def _prefix(prompts: Sequence[tuple[int, ...]], places: Sequence[int], start: int) -> Prefix:
    # a single prompt is no prefix of several: it is all its own
    stop = common_prefix([prompts[place] for place in places]) if len(places) > 1 else start
    kinds: dict[tuple[int, int], list[int]] = {}
    for place in places:
        alone = len(prompts[place]) == stop + 1  # only its last token is left
        kinds.setdefault((0, place) if alone else (1, prompts[place][stop]), []).append(place)
    below = (own[0] if len(own) == 1 else _prefix(prompts, own, stop) for own in kinds.values())
    return Prefix(start, stop, tuple(below))


class Kin(NamedTuple):
    """Prompts that decode together: `shared` leading tokens of all of them are kept once, the rest of each apart."""

    shared: int
    prompts: tuple[int, ...]


def families(prompts: Sequence[Sequence[int]]) -> list[Kin]:
    """Split prompts into families, those that share more next to each other.

    Takes the split that keeps the fewest tokens, where each family counts `FAMILY_TOKENS` more.
    """
    return _families(shared_prefixes(prompts), [len(prompt) for prompt in prompts])[1]


def _families(item: Prefix | int, lengths: Sequence[int]) -> tuple[int, list[Kin]]:
    if isinstance(item, int):
        return FAMILY_TOKENS + lengths[item], [Kin(0, (item,))]
    together = FAMILY_TOKENS + item.stop + sum(lengths[place] - item.stop for place in item.prompts)
    parts = [_families(part, lengths) for part in item.below]
    apart = sum(tokens for tokens, _ in parts)
    if together <= apart:
        return together, [Kin(item.stop, item.prompts)]
    return apart, [kin for _, split in parts for kin in split]
