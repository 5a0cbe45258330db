"""Similarity against go3's own numbers, and scores of real genes against an independent implementation."""

import json
import math
import os
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from harness.envs.bioreason_go.information import information
from harness.envs.bioreason_go.ontology import build, load_shipped
from harness.envs.bioreason_go.similarity import lin, resnik, simgic
from harness.envs.bioreason_go.terms import ASPECTS, Tables, Term
from harness.envs.bioreason_go.verifier import Scorer
from tests.envs.go_support import reply

REFERENCE = json.loads((Path(__file__).parent / "data" / "go3_similarity.json").read_text())
EXPORT = Path(
    os.environ.get("HARNESS_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"), "go", "godb_export"
)
EXPERIMENT = {"EXP", "IDA", "IPI", "IMP", "IGI", "IEP", "TAS", "IC"}
TOLERANCE = 1e-6


def places(ontology, ids):
    """Return the indices of ids, all of which are terms."""
    found = [place for go_id in ids if (place := ontology.index_of(go_id)) is not None]
    assert len(found) == len(ids)
    return found


@cache
def reference():
    ontology = load_shipped()
    assert ontology.sha == REFERENCE["ontology"], "run scripts/go3_reference.py again"
    rows = [places(ontology, ids) for ids in REFERENCE["proteins"]]
    found = information(ontology, rows, pseudocount=0)
    return ontology, found.ic


def test_information_equals_go3():
    ontology, ic = reference()
    assert len(REFERENCE["ic"]) > 100
    for name, value in REFERENCE["ic"].items():
        assert ic[ontology.index_of(name)] == pytest.approx(value, abs=TOLERANCE)


def test_a_thousand_pairs_equal_go3():
    ontology, ic = reference()
    assert len(REFERENCE["pairs"]) == 1000
    for first, second, *expected in REFERENCE["pairs"]:
        one, other = ontology.index_of(first), ontology.index_of(second)
        found = resnik(ontology, ic, one, other), lin(ontology, ic, one, other), simgic(ontology, ic, [one], [other])
        assert found == pytest.approx(expected, abs=TOLERANCE), (first, second)


def test_where_go3_takes_another_ancestor_its_resnik_is_smaller_and_simgic_equal():
    ontology, ic = reference()
    for first, second, their_resnik, their_lin, their_simgic in REFERENCE["pairs_of_another_ancestor"]:
        one, other = ontology.index_of(first), ontology.index_of(second)
        assert their_resnik < resnik(ontology, ic, one, other) - TOLERANCE
        assert their_lin < lin(ontology, ic, one, other)
        assert simgic(ontology, ic, [one], [other]) == pytest.approx(their_simgic, abs=TOLERANCE)


def test_simgic_of_sets_equals_go3():
    ontology, ic = reference()
    for first, second, aspect, expected in REFERENCE["sets"]:
        lists = [
            [i for i in map(ontology.index_of, REFERENCE["proteins"][p]) if ontology.aspect(i) == aspect]
            for p in (first, second)
        ]
        assert simgic(ontology, ic, *lists) == pytest.approx(expected, abs=TOLERANCE)


def test_what_the_definitions_leave_open():
    ontology, ic = reference()
    binding, nucleus = ontology.index_of("GO:0005515"), ontology.index_of("GO:0005634")
    root = ontology.roots["mf"]
    assert resnik(ontology, ic, binding, nucleus) == lin(ontology, ic, binding, nucleus) == 0.0
    assert resnik(ontology, ic, root, root) == lin(ontology, ic, root, root) == 0.0
    assert math.copysign(1, ic[root]) == 1.0  # not -0.0
    assert simgic(ontology, ic, [], []) == simgic(ontology, ic, [binding], []) == 0.0
    seen = next(i for i in range(len(ontology)) if ic[i] > 1)
    assert lin(ontology, ic, seen, seen) == simgic(ontology, ic, [seen], [seen]) == 1.0


def small():
    """a <- b, a <- c, {b, c} <- d, in one aspect."""
    terms = (
        Term("GO:0000001", "a", "mf"),
        Term("GO:0000002", "b", "mf", is_a=("GO:0000001",)),
        Term("GO:0000003", "c", "mf", part_of=("GO:0000001",)),
        Term("GO:0000004", "d", "mf", is_a=("GO:0000002", "GO:0000003")),
    )
    return build(Tables("test", terms, {}, {}))


def test_information_by_hand():
    found = information(small(), [[3], [1], [1, 2], [2], [0]])
    assert found.counts.tolist() == [5, 3, 3, 1]
    assert found.ic == pytest.approx([0, math.log(6 / 4), math.log(6 / 4), math.log(6 / 2)])
    # two proteins have both parents of d, one of them d itself
    assert found.ia == pytest.approx([0, math.log2(6 / 4), math.log2(6 / 4), math.log2(3 / 2)])
    none = information(small(), [[1]], pseudocount=0)
    assert none.ic.tolist() == none.ia.tolist() == [0, 0, 0, 0]
    assert information(small(), []).ic.tolist() == [0, 0, 0, 0]
    assert found.sha != information(small(), [[3]]).sha
    with pytest.raises(ValueError, match="at least 0"):
        information(small(), [], pseudocount=-1)


def test_no_more_than_127_paths_overflow():
    ontology = load_shipped()
    mf = [i for i in range(len(ontology)) if ontology.aspect(i) == "mf"][:2000]
    assert information(ontology, [mf]).counts.max() == 1


class Naive:
    """The definitions once more, from the exported tables, with sets and dictionaries and nothing of the package."""

    def __init__(self, terms, edges, proteins):
        self.aspect = {name: aspect.lower() for name, aspect, _ in terms if aspect in ("MF", "BP", "CC")}
        self.above = defaultdict(set)
        for child, relation, parent in edges:
            if relation in ("isa", "part of") and self.aspect.get(child) == self.aspect.get(parent):
                self.above[child].add(parent)
        self.roots = {name for name in self.aspect if not self.above[name]}
        self.memo = {}
        counts = Counter()
        for labels in proteins:
            counts.update(set().union(*(self.closure(term) for ids in labels.values() for term in ids)))
        total = {self.aspect[root]: counts[root] for root in self.roots}
        self.ic = {t: math.log((total[a] + 1) / (counts[t] + 1)) for t, a in self.aspect.items()}

    def closure(self, term):
        if term not in self.memo:
            self.memo[term] = {term}.union(*(self.closure(parent) for parent in self.above[term]))
        return self.memo[term]

    def score(self, answer, labels):
        """Return (similarity, f1, simgic) as means over the aspects with labels."""
        rows = []
        for aspect, ids in labels.items():
            truth = set().union(*map(self.closure, ids)) - self.roots
            if truth:
                guess = set().union(*map(self.closure, answer[aspect])) - self.roots
                weight = [sum(self.ic[t] for t in part) for part in (guess & truth, guess, truth, guess | truth)]
                rows.append(
                    (
                        2 * weight[0] / (weight[1] + weight[2]),
                        2 * len(guess & truth) / (len(guess) + len(truth)),
                        weight[0] / weight[3],
                    )
                )
        return np.mean(rows, axis=0)


@pytest.mark.skipif(not EXPORT.is_dir(), reason="needs the exported GO database of HARNESS_SHARED_DATA")
def test_scores_of_the_exported_genes_equal_an_independent_implementation():
    import gzip

    def rows(name):
        with gzip.open(EXPORT / f"{name}.tsv.gz", "rt", encoding="utf-8") as file:
            return [line.rstrip("\n").split("\t") for line in file][1:]

    genes = json.loads((EXPORT / "human_genes_sample.json").read_text())
    assert len(genes) == 101
    labels: list[dict[str, list[str]]] = [
        {a: sorted({i for i, code, of in g["go"] if of.lower() == a and code in EXPERIMENT}) for a in ASPECTS}
        for g in genes
    ]
    naive = Naive(rows("terms"), rows("edges"), labels)
    ontology = load_shipped()
    counted = information(ontology, [places(ontology, [i for ids in of.values() for i in ids]) for of in labels])
    scorer = Scorer(ontology, counted)
    for number, truth in enumerate(labels):
        for answer in (truth, labels[(number + 1) % 101], {a: ids[::2] for a, ids in truth.items()}):
            result = scorer.score_reply(reply(**answer), scorer.gold(truth))
            found = result.components["similarity"], result.components["f1"], result.metrics["simgic"]
            assert found == pytest.approx(naive.score(answer, truth), abs=1e-9), genes[number]["symbol"]
