"""What the closures of a few terms hold and say, fast: the inner loop of the verifier.

Terms have places here: those that are ancestors of many come first, so that what almost every closure touches lies
together in memory. IC and IA are rounded to 2^-36, so that every sum below 2^17 is exact and no order of ids changes
a score by a bit.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.envs.bioreason_go.information import Information, Numbers
from harness.envs.bioreason_go.ontology import Ontology
from harness.envs.bioreason_go.terms import ASPECTS, Aspect

Places = npt.NDArray[np.intp]
_ORDER = 4096  # rows of closures numbered beforehand; an answer with more takes a little longer
_BINS = 2 * len(ASPECTS) + 2  # of each aspect outside and inside the labels, and two of the roots


class Sums(NamedTuple):
    """Number, IC in nats and IA in bits of terms: entry 2a of those of aspect a outside a closure, 2a + 1 inside."""

    sizes: list[int]
    ic: list[float]
    ia: list[float]


_NOTHING = Sums([0] * _BINS, [0.0] * _BINS, [0.0] * _BINS)


def _exact(values: Numbers) -> Numbers:
    return np.rint(values * 2.0**36) / 2.0**36


class _Scratch(threading.local):
    """Work space of one thread, one number a term: `seen` needs no clearing, `inside` is cleared by a new stamp."""

    def __init__(self, terms: int) -> None:
        self.seen = np.zeros(terms, np.int64)
        self.inside = np.zeros(terms, np.int64)
        self.stamp = 0


class Closures:
    """The closures of an ontology, with the information of its terms.

    Args:
        worst: the largest IC of each aspect, in nats.
    """

    def __init__(self, ontology: Ontology, information: Information) -> None:
        order = np.argsort(-np.bincount(ontology.indices, minlength=len(ontology)), kind="stable")
        place = np.empty(len(order), np.intp)
        place[order] = np.arange(len(order))
        self._above = place[ontology.indices]
        self._start, self._count = ontology.indptr[:-1].astype(np.intp), np.diff(ontology.indptr).astype(np.intp)
        numbers = {aspect: number for number, aspect in enumerate(ASPECTS)}
        bins = np.array([2 * numbers[aspect] for aspect in ontology.aspects])
        bins[list(ontology.roots.values())] = 2 * len(ASPECTS)  # nobody reads theirs
        self._bins, self._ic, self._ia = bins[order], _exact(information.ic)[order], _exact(information.ia)[order]
        self.worst: dict[Aspect, float] = {
            aspect: float(self._ic[self._bins == 2 * number].max(initial=0.0)) for aspect, number in numbers.items()
        }
        self._order = np.arange(_ORDER)
        self._scratch = _Scratch(len(ontology))

    def union(self, terms: Collection[int]) -> Places:
        """Return the places of the closures of several terms, each once, roots included."""
        if not terms:
            return np.zeros(0, np.intp)
        named = np.fromiter(terms, np.intp, len(terms))
        counts = self._count.take(named)
        ends = counts.cumsum()
        total = int(ends[-1])
        order = self._order[:total] if total <= _ORDER else np.arange(total)
        # row by row without touching a row: where each element stands in `_above`
        above = self._above.take((self._start.take(named) - ends + counts).repeat(counts) + order)
        seen = self._scratch.seen
        seen[above] = order
        chosen: Places = above[seen.take(above) == order]  # where each stands last
        return chosen

    def sums(self, terms: Collection[int], closure: Places) -> Sums:
        """Return what the closures of some terms hold outside and inside another closure, roots left out."""
        if not terms:
            return _NOTHING
        union, scratch = self.union(terms), self._scratch
        scratch.stamp += 1
        scratch.inside[closure] = scratch.stamp
        bins = self._bins.take(union) + (scratch.inside.take(union) == scratch.stamp)
        sizes = np.bincount(bins, minlength=_BINS)
        ic, ia = (np.bincount(bins, values.take(union), _BINS) for values in (self._ic, self._ia))
        return Sums(sizes.tolist(), ic.tolist(), ia.tolist())
