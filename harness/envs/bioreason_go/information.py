"""How much a term says: information content and information accretion, from annotation counts.

Counts are of proteins, not of annotations: a protein counts once for each term that one of its labels
is, or descends from (is_a and part_of within the aspect).

- IC(t) = -ln((n_t + c) / (N + c)) in nats, n_t the proteins with t and N those with any label of the aspect.
- IA(t) = -log2((n_t + c) / (m_t + c)) in bits, m_t the proteins that have all parents of t.
  Source: Clark and Radivojac 2013, Bioinformatics 29(13), i53-i61, equation 1 (there without c).

With c = 1, the default, a term that was never seen says as much as one that was seen once among twice as
many proteins, and not infinitely much. With c = 0 such a term gets 0, the convention of go3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from harness.core.canonical import sha256_hex
from harness.envs.bioreason_go.ontology import Ontology

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Information:
    """What the terms of one ontology say, from one set of annotated proteins.

    Args:
        counts: proteins annotated with each term, propagated; shape (terms,).
        ic: information content in nats, 0 at the roots; shape (terms,).
        ia: information accretion in bits, 0 at the roots; shape (terms,).
        sha: hash of the ontology, the counts and the pseudocount; scores depend on nothing else.
    """

    counts: Counts
    ic: Numbers
    ia: Numbers
    sha: str


def _annotations(ontology: Ontology, proteins: Iterable[Sequence[int]]) -> csr_array:
    """Return the propagated annotations as 0/1, shape (proteins, terms)."""
    rows = [np.asarray(ontology.closure(indices), np.int64) for indices in proteins]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    columns = np.concatenate([np.zeros(0, np.int64), *rows])
    return csr_array((np.ones(len(columns), np.int32), columns, indptr), shape=(len(rows), len(ontology)))


def _with_all_parents(ontology: Ontology, annotated: csr_array) -> Counts:
    """Return for each term the proteins that have all of its parents; shape (terms,), 0 for terms without one."""
    lengths = np.array([len(row) for row in ontology.parents], np.int64)
    children = np.repeat(np.arange(len(ontology)), lengths)
    parents = np.array([parent for row in ontology.parents for parent in row], np.int64)
    edges = csr_array((np.ones(len(parents), np.int32), (parents, children)), shape=(len(ontology), len(ontology)))
    found = (annotated @ edges).tocsr()  # [p, t]: how many parents of t protein p has
    columns = found.indices[found.data == lengths[found.indices]]
    return np.bincount(columns, minlength=len(ontology))


def information(ontology: Ontology, proteins: Iterable[Sequence[int]], pseudocount: float = 1.0) -> Information:
    """Return the information of every term.

    Args:
        proteins: for each protein the indices of its labels, of any aspect, not propagated.
        pseudocount: c of the module, at least 0.

    Raises:
        ValueError: when the pseudocount is negative.
    """
    if pseudocount < 0:
        raise ValueError(f"pseudocount must be at least 0, not {pseudocount}")
    annotated = _annotations(ontology, proteins)
    counts: Counts = np.bincount(annotated.indices, minlength=len(ontology))
    totals = {aspect: int(counts[root]) for aspect, root in ontology.roots.items()}
    total = np.array([totals.get(aspect, 0) for aspect in ontology.aspects], np.int64)
    above = _with_all_parents(ontology, annotated)
    above[list(ontology.roots.values())] = counts[list(ontology.roots.values())]
    key = f"{ontology.sha} {pseudocount!r} {' '.join(map(str, counts.tolist()))}"
    return Information(
        counts=counts,
        ic=_surprise(counts, total, pseudocount),
        ia=_surprise(counts, above, pseudocount) / np.log(2),
        sha=sha256_hex(key),
    )


def _surprise(part: Counts, whole: Counts, pseudocount: float) -> Numbers:
    """Return -ln((part + c) / (whole + c)), and 0 where a count without pseudocount is 0."""
    top, bottom = part + pseudocount, whole + pseudocount
    ratio = np.divide(bottom, top, out=np.ones(len(part)), where=(top > 0) & (bottom > 0))
    surprise: Numbers = np.log(ratio)
    return surprise
