"""Semantic similarity of terms and of sets of terms; pure functions of an ontology and its information.

Sources: Resnik 1995 (IJCAI, equation 2); Lin 1998 (ICML, section 2.3); Pesquita et al. 2008 (BMC Bioinformatics 9,
suppl. 5, S4) for simGIC. Where a definition says nothing: terms of different aspects have no common ancestor,
so Resnik and Lin are 0; Lin is 0 for a term without information, whose own is unknown or nothing.

Scores equal go3 2.0.0 to 1e-6 on canonical ids (`scripts/go3_reference.py`), given the same graph and counts without
a pseudocount, in all but two cases. go3 takes the deepest common ancestor, which is not always the most informative
one that Resnik defines: then its Resnik and Lin are smaller. And it gives Lin 1 for a root with itself.
An alternative id is no node here: resolve it with `Ontology.index_of` first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.envs.bioreason_go.information import Numbers
from harness.envs.bioreason_go.ontology import Ontology


def resnik(ontology: Ontology, ic: Numbers, first: int, second: int) -> float:
    """Return the information content, in the unit of `ic`, of the most informative common ancestor.

    Args:
        ic: information content of every term; shape (terms,).
        first, second: indices of terms.
    """
    common = np.intersect1d(ontology.ancestors(first), ontology.ancestors(second), assume_unique=True)
    return float(ic[common].max()) if len(common) else 0.0


def lin(ontology: Ontology, ic: Numbers, first: int, second: int) -> float:
    """Return 2 IC(common ancestor) / (IC(first) + IC(second)), in [0, 1]; arguments as in `resnik`."""
    one, other = float(ic[first]), float(ic[second])
    return 2 * resnik(ontology, ic, first, second) / (one + other) if one > 0 and other > 0 else 0.0


def simgic(ontology: Ontology, ic: Numbers, first: Sequence[int], second: Sequence[int]) -> float:
    """Return the information two sets share over the information of both, on closures, in [0, 1].

    Args:
        ic: information content of every term; shape (terms,).
        first, second: indices of the terms of each set, in any order and number.
    """
    one, other = ontology.closure(first), ontology.closure(second)
    total = float(ic[np.union1d(one, other)].sum())
    return float(ic[np.intersect1d(one, other, assume_unique=True)].sum()) / total if total > 0 else 0.0
