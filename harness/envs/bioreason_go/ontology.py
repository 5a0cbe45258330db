"""The Gene Ontology as a graph: ids resolved, closures computed, the release pinned by a hash.

The closure of a term is the term and all its ancestors over is_a and part_of WITHIN its aspect; edges
into another aspect are dropped, as the CAFA evaluation does. Rows of the closure are stored one after
another (CSR), so the whole ontology takes a few megabytes.

An id that is both an alternative and an obsolete id counts as the alternative: its primary is known,
so nothing is gained by refusing it.
"""

from __future__ import annotations

import gzip
import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError, NotFoundError, RefusedError
from harness.core.memory import no_collection
from harness.envs.bioreason_go.terms import (
    ASPECTS,
    Aspect,
    Tables,
    Term,
    read_compact,
    read_export,
    read_obo,
    write_compact,
)

if TYPE_CHECKING:
    from scipy.sparse import csr_array

ROOT_IDS: dict[Aspect, str] = {"mf": "GO:0003674", "bp": "GO:0008150", "cc": "GO:0005575"}
Status = Literal["current", "alt", "obsolete", "unknown"]
Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an id stands for.

    Args:
        id: the primary id for `current` and `alt`, else the id that was asked for.
        index: of the primary term; None for `obsolete` and `unknown`.
        replaced_by: current ids that the source names as the successors of an obsolete id.
    """

    id: str
    index: int | None
    status: Status
    replaced_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ontology:
    """One release of the ontology; terms are numbered in the order of their ids.

    Args:
        release: date of the release, or `unknown`.
        sha: SHA-256 of the canonical text of all terms, names, edges, alternative and obsolete ids, hex.
        terms: primary ids of the current terms, ascending.
        names: of the terms.
        aspects: of the terms.
        roots: index of the root of each aspect that has one.
        indptr, indices: closure of term i, ascending, is `indices[indptr[i]:indptr[i + 1]]`.
        parents: direct is_a and part_of parents of each term within its aspect.
        obsolete: obsolete id to the current ids that replace it, where the source has them.
    """

    release: str
    sha: str
    terms: tuple[str, ...]
    names: tuple[str, ...]
    aspects: tuple[Aspect, ...]
    roots: Mapping[Aspect, int]
    indptr: Indices
    indices: Indices
    parents: tuple[tuple[int, ...], ...]
    obsolete: Mapping[str, tuple[str, ...]]
    _lookup: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.terms)

    def __repr__(self) -> str:
        return f"Ontology({self.release}, {len(self)} terms, {self.sha[:12]})"

    def index_of(self, go_id: str) -> int | None:
        """Return the index of a primary or alternative id; None for any other text."""
        return self._lookup.get(go_id)

    @property
    def lookup(self) -> Mapping[str, int]:
        """Index of the term of every primary and alternative id."""
        return self._lookup

    def canonical(self, go_id: str) -> Resolved:
        """Return what an id stands for; total over all strings, spelling is compared exactly."""
        index = self._lookup.get(go_id)
        if index is not None:
            primary = self.terms[index]
            return Resolved(primary, index, "current" if primary == go_id else "alt")
        if go_id in self.obsolete:
            return Resolved(go_id, None, "obsolete", self.obsolete[go_id])
        return Resolved(go_id, None, "unknown")

    def aspect(self, index: int) -> Aspect:
        """Return `mf`, `bp` or `cc`."""
        return self.aspects[index]

    def name(self, index: int) -> str:
        """Return the name of a term."""
        return self.names[index]

    def id(self, index: int) -> str:
        """Return the primary id of a term."""
        return self.terms[index]

    def ancestors(self, index: int) -> Indices:
        """Return the closure of a term, itself included: int32 indices, ascending; a view, not to be written."""
        return self.indices[self.indptr[index] : self.indptr[index + 1]]

    def closure(self, indices: Sequence[int] | Indices) -> Indices:
        """Return the union of the closures of several terms: int32 indices, ascending."""
        if len(indices) == 0:
            return np.zeros(0, np.int32)
        return np.unique(np.concatenate([self.ancestors(int(index)) for index in indices]))

    @property
    def closure_matrix(self) -> csr_array:
        """The closure as a sparse 0/1 matrix, shape (terms, terms): row i has ones in the columns of its ancestors."""
        from scipy.sparse import csr_array

        ones: npt.NDArray[np.int8] = np.ones(len(self.indices), np.int8)
        matrix: Any = csr_array((ones, self.indices, self.indptr), shape=(len(self), len(self)))
        return matrix

    def require(self, sha: str, what: str) -> None:
        """Check that something was made with this very ontology.

        Raises:
            RefusedError: when `sha` is another one; terms and edges change between releases, and labels of one
                release scored on another give numbers that mean nothing.
        """
        if sha != self.sha:
            raise RefusedError(
                f"{what} was made with the ontology {sha[:12]}, but this is {self.sha[:12]} (release {self.release})",
                "use the ontology of the release the data set was made with, or build the data set again",
            )


def _sorted_terms(tables: Tables) -> tuple[Term, ...]:
    terms = tuple(sorted(tables.terms, key=lambda term: term.id))
    for first, second in itertools.pairwise(terms):
        if first.id == second.id:
            raise ConfigError(f"ontology: the term {first.id[:40]} stands twice")
    return terms


def _lookup(terms: Sequence[Term], alternatives: Mapping[str, str]) -> dict[str, int]:
    primaries = {term.id: index for index, term in enumerate(terms)}
    lookup = {name: primaries[primary] for name, primary in alternatives.items() if primary in primaries}
    return lookup | primaries  # a primary id is never an alternative of another


def _parents(terms: Sequence[Term], lookup: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Return the direct parents of each term in its own aspect, ascending."""
    rows = []
    for term in terms:
        row = set()
        for parent in (*term.is_a, *term.part_of):
            index = lookup.get(parent)
            if index is None:
                raise ConfigError(
                    f"ontology: {term.id[:40]} has the parent {parent[:40]!r}, which is no current term",
                    "use the whole release, not a cut-out of it",
                )
            if terms[index].aspect == term.aspect:
                row.add(index)
        rows.append(tuple(sorted(row)))
    return tuple(rows)


def _order(parents: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the terms so that each stands after all its parents (Kahn 1962)."""
    children: list[list[int]] = [[] for _ in parents]
    waiting = [len(row) for row in parents]
    for child, row in enumerate(parents):
        for parent in row:
            children[parent].append(child)
    order = [index for index, count in enumerate(waiting) if count == 0]
    for index in order:  # grows while it is walked
        for child in children[index]:
            waiting[child] -= 1
            if waiting[child] == 0:
                order.append(child)
    if len(order) < len(parents):
        raise ConfigError("ontology: is_a and part_of go in a circle", "the file is damaged; fetch the release again")
    return order


def _closure(parents: Sequence[tuple[int, ...]]) -> tuple[Indices, Indices]:
    """Return (indptr, indices) of the reflexive transitive closure."""
    rows: list[array[int]] = [array("i")] * len(parents)
    for index in _order(parents):
        above = parents[index]
        row = {index, *rows[above[0]]} if above else {index}
        for parent in above[1:]:
            row.update(rows[parent])
        rows[index] = array("i", row)
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    flat = array("i")
    for one in rows:
        flat.extend(one)
    # One sort for all rows: by row first, then by column.
    keys = np.repeat(np.arange(len(rows), dtype=np.int64) * len(rows), lengths) + np.frombuffer(flat, np.int32)
    keys.sort()
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), (keys % len(rows)).astype(np.int32)


def _roots(terms: Sequence[Term], parents: Sequence[tuple[int, ...]]) -> dict[Aspect, int]:
    """Return the official root of each aspect, or else the only term of it without a parent."""
    roots: dict[Aspect, int] = {}
    for aspect in ASPECTS:
        tops = [i for i, term in enumerate(terms) if term.aspect == aspect and not parents[i]]
        official = [i for i in tops if terms[i].id == ROOT_IDS[aspect]]
        if official or len(tops) == 1:
            roots[aspect] = (official or tops)[0]
    return roots


def build(tables: Tables, sha: str | None = None) -> Ontology:
    """Return the graph of some tables.

    Args:
        sha: hash of the tables' compact text where the caller has it; computed otherwise.

    Raises:
        ConfigError: when a term stands twice, a parent is no current term, or the edges go in a circle.
    """
    terms = _sorted_terms(tables)
    lookup = _lookup(terms, tables.alternatives)
    parents = _parents(terms, lookup)
    indptr, indices = _closure(parents)
    obsolete = {
        name: tuple(dict.fromkeys(terms[lookup[new]].id for new in replaced if new in lookup))
        for name, replaced in tables.obsolete.items()
        if name not in lookup
    }
    return Ontology(
        release=tables.release,
        sha=sha or sha256_hex(write_compact(tables)),
        terms=tuple(term.id for term in terms),
        names=tuple(term.name for term in terms),
        aspects=tuple(term.aspect for term in terms),
        roots=_roots(terms, parents),
        indptr=indptr,
        indices=indices,
        parents=parents,
        obsolete=obsolete,
        _lookup=lookup,
    )


def load_obo(source: Path | str | bytes) -> Ontology:
    """Load go-basic.obo or go.obo from a path, or from the bytes of such a file.

    Raises:
        NotFoundError: when there is no such file.
        ConfigError: when it is no OBO file of the Gene Ontology.
    """
    if isinstance(source, bytes):
        return build(read_obo(source))
    path = Path(source)
    if not path.is_file():
        raise NotFoundError(f"no ontology at {path}", "give the path of go-basic.obo or go.obo")
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty", "fetch go-basic.obo again")
    with no_collection(), path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return build(read_obo(data))


def load_export(folder: Path, release: str) -> Ontology:
    """Load the TSV tables of a GO database; see `terms.read_export`."""
    return build(read_export(folder, release))


@lru_cache(maxsize=1)
def load_shipped() -> Ontology:
    """Load the ontology in the package: GO 2022-07-01 with is_a and part_of."""
    data = gzip.decompress((files("harness.envs.bioreason_go") / "data" / "ontology.tsv.gz").read_bytes())
    with no_collection():
        return build(read_compact(data), sha256_hex(data))
