"""Write tests/envs/data/go3_similarity.json: what go3 computes on the shipped ontology and seeded annotations.

Run it with an interpreter that has this package and go3 (`pip install go3==2.0.0`), which nothing here needs otherwise:

    python scripts/go3_reference.py

go3 follows is_a only, so part_of edges within an aspect are written as is_a: both sides then see the same graph.
Pairs for which go3's deepest common ancestor is not the most informative one, so that its Resnik is not the one of
the definition, are stored apart.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import go3

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.envs.bioreason_go.ontology import Ontology, load_shipped  # noqa: E402 - as the path above makes it
from harness.envs.bioreason_go.terms import ASPECT_NAMES, ASPECTS  # noqa: E402

TARGET = ROOT / "tests" / "envs" / "data" / "go3_similarity.json"
VERSION = "2.0.0"
PROTEINS, TERMS, PAIRS, SETS = 300, 4, 1000, 100
GAF_ASPECT = {"mf": "F", "bp": "P", "cc": "C"}


def drawn_annotations(ontology: Ontology, rng: random.Random) -> list[list[str]]:
    """Return the ids of each protein: a few terms of every aspect."""
    by_aspect = {a: [i for i in range(len(ontology)) if ontology.aspect(i) == a] for a in ASPECTS}
    return [[ontology.id(i) for a in ASPECTS for i in rng.sample(by_aspect[a], TERMS)] for _ in range(PROTEINS)]


def load(ontology: Ontology, proteins: list[list[str]]) -> Any:
    """Load graph and annotations into go3 and return its counter."""
    stanzas = ["format-version: 1.2\n"]
    for index, name in enumerate(ontology.terms):
        lines = [f"id: {name}", f"name: {ontology.name(index)}", f"namespace: {ASPECT_NAMES[ontology.aspect(index)]}"]
        lines += [f"is_a: {ontology.id(parent)}" for parent in ontology.parents[index]]
        stanzas.append("[Term]\n" + "\n".join(lines) + "\n")
    rows = ["!gaf-version: 2.2"]
    for number, terms in enumerate(proteins):
        for term in terms:
            place = ontology.index_of(term)
            assert place is not None
            aspect = GAF_ASPECT[ontology.aspect(place)]
            cells = ["X", f"P{number}", f"P{number}", "involved_in", term, "PMID:1", "IDA", "", aspect]
            rows.append("\t".join([*cells, "", "", "protein", "taxon:9606", "20220701", "X", "", ""]))
    with tempfile.TemporaryDirectory() as folder:
        obo, gaf = Path(folder) / "go.obo", Path(folder) / "proteins.gaf"
        obo.write_text("\n".join(stanzas))
        gaf.write_text("\n".join(rows) + "\n")
        go3.load_go_terms(str(obo))
        return go3.build_term_counter(go3.load_gaf(str(gaf)))


def pairs(ontology: Ontology, counter: Any, rng: random.Random) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return [first, second, Resnik, Lin, simGIC] of annotated terms of one aspect: as defined, and the others."""
    seen = {a: [t for t in sorted(counter.counts) if ontology.aspect(ontology.index_of(t) or 0) == a] for a in ASPECTS}
    same: list[list[Any]] = []
    other: list[list[Any]] = []
    while len(same) < PAIRS:
        first, second = rng.sample(seen[rng.choice(ASPECTS)], 2)
        row: list[Any] = [first, second]
        row += [round(go3.semantic_similarity(first, second, method, counter), 9) for method in ("resnik", "lin")]
        row.append(round(go3.termset_similarity([first], [second], "lin", "simgic", counter), 9))
        common = go3.common_ancestor(first, second)
        best = max((counter.ic.get(term, 0.0) for term in common), default=0.0)
        (same if math.isclose(best, row[2], abs_tol=1e-9) else other).append(row)
    return same, other


def sets(ontology: Ontology, counter: Any, proteins: list[list[str]], rng: random.Random) -> list[list[Any]]:
    """Return [protein, protein, aspect, simGIC] of whole annotations."""
    rows = []
    for _ in range(SETS):
        first, second = rng.sample(range(PROTEINS), 2)
        aspect = rng.choice(ASPECTS)
        lists = [
            [t for t in proteins[p] if ontology.aspect(ontology.index_of(t) or 0) == aspect] for p in (first, second)
        ]
        rows.append([first, second, aspect, round(go3.termset_similarity(*lists, "lin", "simgic", counter), 9)])
    return rows


def main() -> int:
    """Write the file."""
    rng = random.Random(20220701)  # noqa: S311 - which terms are compared is no secret
    ontology = load_shipped()
    proteins = drawn_annotations(ontology, rng)
    counter = load(ontology, proteins)
    same, other = pairs(ontology, counter, rng)
    data = {
        "made_by": f"scripts/go3_reference.py with go3 {VERSION}",
        "ontology": ontology.sha,
        "proteins": proteins,
        "ic": {term: round(counter.ic[term], 9) for term in sorted(counter.counts)[::20]},
        "pairs": same,
        "pairs_of_another_ancestor": other,
        "sets": sets(ontology, counter, proteins, rng),
    }
    TARGET.parent.mkdir(exist_ok=True)
    body = ",\n".join(f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in data.items())
    TARGET.write_text("{\n" + body + "\n}\n")
    print(f"{TARGET.name}: {len(same)} pairs, {len(other)} with another ancestor")
    return 0


if __name__ == "__main__":
    sys.exit(main())
