"""Which proteins belong together, and which are held out.

Near copies of a protein must not stand in both splits, so the split is by cluster. Proteins are joined when

- their sequences share a tenth of the shorter one's sampled 6-mers, where sequences are there: about 70 %
  identity, since a 6-mer survives with the sixth power of it;
- their domain sets overlap by more than half of their union; or
- they share a domain and their gene symbols have the same stem (ADRA1A, ADRA1B).

Joining is transitive (union-find). "More than half" keeps clusters small: with "at least half" a chain of
two-domain proteins joins a third of all human proteins.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.core.canonical import sha256_hex

_STEM = re.compile(r"\d+[A-Z]{0,2}\d*$")
SHORTEST_STEM = 2
K = 6
SAMPLED = 8
"""One k-mer in so many is kept, the same ones in every sequence."""
FEWEST_KMERS, SHARED_KMERS = 3, 0.1


@dataclass(frozen=True, slots=True)
class Member:
    """What decides the cluster of a protein; `kmers` are those of `sample_kmers`, empty without a sequence."""

    id: str
    gene: str
    domains: frozenset[str]
    kmers: frozenset[int] = frozenset()


def stem(gene: str) -> str:
    """Return a gene symbol without its trailing number and what follows it; empty when too little is left."""
    rest = _STEM.sub("", gene)
    return rest if len(rest) >= SHORTEST_STEM else ""


class _Groups:
    """Disjoint sets of numbers (union-find with path halving)."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, item: int) -> int:
        parent = self.parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, first: int, second: int) -> None:
        a, b = sorted((self.find(first), self.find(second)))
        self.parent[b] = a


def _by_key(keys: Iterable[tuple[int, object]]) -> dict[object, list[int]]:
    groups: dict[object, list[int]] = defaultdict(list)
    for number, key in keys:
        if key:
            groups[key].append(number)
    return groups


def clusters(members: Sequence[Member]) -> dict[str, str]:
    """Return the cluster of each protein, named after its member with the smallest id."""
    members = sorted(members, key=lambda member: member.id)
    groups = _Groups(len(members))
    equal = [
        ((number, member.domains) for number, member in enumerate(members)),
        ((n, (domain, stem(m.gene))) for n, m in enumerate(members) if stem(m.gene) for domain in m.domains),
    ]
    for keys in equal:
        for group in _by_key(keys).values():
            for other in group[1:]:
                groups.join(group[0], other)
    _join_overlapping(members, groups)
    _join_similar(members, groups)
    return {member.id: members[groups.find(number)].id for number, member in enumerate(members)}


def _join_overlapping(members: Sequence[Member], groups: _Groups) -> None:
    """Join domain sets that share more than half of their union."""
    first_with: dict[frozenset[str], int] = {}
    for number, member in enumerate(members):
        if member.domains:
            first_with.setdefault(member.domains, number)
    holders: dict[str, list[frozenset[str]]] = defaultdict(list)
    for domains, number in first_with.items():
        for other in {one for domain in sorted(domains) for one in holders[domain]}:
            if 2 * len(domains & other) > len(domains | other):
                groups.join(number, first_with[other])
        for domain in domains:
            holders[domain].append(domains)


def sample_kmers(sequence: str) -> frozenset[int]:
    """Return hashes of some of the 6-mers of a protein sequence; those of one or two letters say nothing."""
    text = sequence.upper().encode("ascii", "replace")
    found = set()
    for start in range(len(text) - K + 1):
        kmer = text[start : start + K]
        value = zlib.crc32(kmer)
        if value % SAMPLED == 0 and len(set(kmer)) > 2:
            found.add(value)
    return frozenset(found)


def _join_similar(members: Sequence[Member], groups: _Groups) -> None:
    """Join sequences that share enough of their sampled 6-mers."""
    holders: dict[int, list[int]] = defaultdict(list)
    for number, member in enumerate(members):
        shared = Counter(other for kmer in sorted(member.kmers) for other in holders[kmer])
        for other, count in shared.items():
            shorter = min(len(member.kmers), len(members[other].kmers))
            if count >= max(FEWEST_KMERS, SHARED_KMERS * shorter):
                groups.join(number, other)
        for kmer in member.kmers:
            holders[kmer].append(number)


def held_out(cluster_of: Mapping[str, str], target: int) -> frozenset[str]:
    """Return the ids to hold out: whole clusters in hash order, each when it still fits.

    A cluster of more than an eighth of the target is never held out: the split would be about one family.

    Args:
        cluster_of: cluster of each protein.
        target: number of proteins wanted; fewer are returned only when no cluster fits the rest.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name, cluster in cluster_of.items():
        groups[cluster].append(name)
    chosen: list[str] = []
    for cluster in sorted(groups, key=lambda name: sha256_hex(f"bioreason-go/{name}")):
        size = len(groups[cluster])
        if size <= max(1, target // 8) and len(chosen) + size <= target:
            chosen += groups[cluster]
    return frozenset(chosen)
