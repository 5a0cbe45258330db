"""Check every fact of the embedded drug-protein corpus against the annotation it cites.

A fact is verified when the document of its PMID, in the DrugProt files under the shared data folder, holds an annotated
relation of exactly that type between a chemical and a protein with exactly those names, and when no document of the
files gives the same two names another relation. Names are compared after Unicode NFC, case folding and collapsing of
white space; nothing else is folded. Facts that cannot be verified are listed with the reason.

    python scripts/check_corpus.py
    HARNESS_SHARED_DATA=/data python scripts/check_corpus.py

Exit code: 0 all facts verified, 1 some are not, 2 a file is malformed, 3 the shared data is absent.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "harness" / "envs" / "drugprot" / "data" / "facts.tsv"
COLUMNS = ("chemical", "protein", "relation", "source", "note")
SUBSETS = (("bioc_train_subset", ""), ("official_toy", "gs_"))


class Fact(NamedTuple):
    """One line of facts.tsv."""

    chemical: str
    protein: str
    relation: str
    source: str
    note: str = ""


Pair = tuple[str, str]
Gold = Mapping[Pair, Mapping[str, set[str]]]
"""Normalised (chemical, protein) to the PMIDs of each relation annotated between them."""


def normalise(name: str) -> str:
    """Return `name` in NFC, case-folded, with single spaces."""
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())


def read_facts(path: Path) -> list[Fact]:
    """Read facts.tsv.

    Raises:
        ValueError: when the header or the number of columns of a line is wrong.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ValueError(f"{path}: the header must be {' '.join(COLUMNS)}, separated by tabs")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) not in (len(COLUMNS) - 1, len(COLUMNS)):  # editors strip the tab of an empty note
            raise ValueError(f"{path}:{number}: {len(row)} columns instead of {len(COLUMNS)}")
    return [Fact(*row) for row in rows[1:]]


def read_gold(folder: Path) -> Gold:
    """Read the annotated relations of every DrugProt subset under `folder` (`drugprot/` of the shared data)."""
    gold: dict[Pair, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for subset, prefix in SUBSETS:
        base = folder / subset
        names = {(row[0], row[1]): row[5] for row in _rows(base / f"{prefix}entities.tsv")}
        for pmid, relation, first, second in _rows(base / f"{prefix}relations.tsv"):
            chemical = names[pmid, first.removeprefix("Arg1:")]
            protein = names[pmid, second.removeprefix("Arg2:")]
            gold[normalise(chemical), normalise(protein)][relation].add(pmid)
    return gold


def _rows(path: Path) -> Iterator[list[str]]:
    """Yield the fields of each line; entity names may hold quotes, so no csv dialect is involved."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.rstrip("\n").split("\t")


def problem(fact: Fact, gold: Gold) -> str | None:
    """Return why `fact` is not verified by `gold`, or None when it is."""
    kind, _, pmid = fact.source.partition(":")
    if kind != "PMID":
        return f"source {fact.source!r} cannot be looked up in the shared data"
    relations = gold.get((normalise(fact.chemical), normalise(fact.protein)), {})
    if pmid not in relations.get(fact.relation, set()):
        return f"no {fact.relation} between these names in document {pmid}"
    others = sorted(set(relations) - {fact.relation})
    if others:
        return f"the same names are also annotated as {', '.join(others)}"
    return None


def unverified(facts: Sequence[Fact], gold: Gold) -> list[tuple[Fact, str]]:
    """Return the facts that `gold` does not verify, each with the reason."""
    checked = ((fact, problem(fact, gold)) for fact in facts)
    return [(fact, reason) for fact, reason in checked if reason is not None]


def summary(facts: Sequence[Fact]) -> str:
    """Return counts by label and of distinct pairs, chemicals, proteins and documents."""
    labels = Counter(fact.relation for fact in facts)
    lines = [f"{count:5d}  {label}" for label, count in sorted(labels.items(), key=lambda item: (-item[1], item[0]))]
    distinct = {
        "facts": len(facts),
        "pairs": len({(normalise(fact.chemical), normalise(fact.protein)) for fact in facts}),
        "chemicals": len({normalise(fact.chemical) for fact in facts}),
        "proteins": len({normalise(fact.protein) for fact in facts}),
        "documents": len({fact.source for fact in facts}),
    }
    return "\n".join([*lines, "", *(f"{count:5d}  distinct {name}" for name, count in distinct.items())])


def main(argv: Sequence[str] | None = None) -> int:
    """Check the corpus and print counts; the exit codes are in the module docstring."""
    default = os.environ.get("HARNESS_SHARED_DATA") or str(ROOT.parent / "shared" / "data")
    parser = argparse.ArgumentParser(description="Check the facts of the embedded corpus against the gold annotation.")
    parser.add_argument("--facts", type=Path, default=FACTS, help="facts.tsv to check")
    parser.add_argument("--data", type=Path, default=Path(default), help="shared data folder (HARNESS_SHARED_DATA)")
    options = parser.parse_args(argv)
    try:
        facts = read_facts(options.facts)
    except (OSError, ValueError) as error:
        print(f"check_corpus: {error}", file=sys.stderr)
        return 2
    try:
        gold = read_gold(options.data / "drugprot")
    except OSError as error:
        print(f"check_corpus: cannot read the DrugProt files: {error}", file=sys.stderr)
        print("hint: point HARNESS_SHARED_DATA at the folder that holds drugprot/", file=sys.stderr)
        return 3
    except (LookupError, ValueError) as error:
        print(f"check_corpus: the DrugProt files under {options.data} are malformed: {error!r}", file=sys.stderr)
        return 2
    print(summary(facts))
    failures = unverified(facts, gold)
    for fact, reason in failures:
        print(f"unverified: {fact.chemical} | {fact.protein} | {fact.relation} | {fact.source}: {reason}")
    print(f"\n{len(facts) - len(failures)} verified, {len(failures)} unverified")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
