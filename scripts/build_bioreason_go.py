"""Make the shipped data of the environment bioreason-go: the ontology, the proteins and the numbers of their card.

    python scripts/build_bioreason_go.py                 # download both Debian packages with apt-get, build
    python scripts/build_bioreason_go.py --packages DIR  # build from .deb files that are there already
    python scripts/build_bioreason_go.py --check         # 0 the card agrees with the shipped files, 1 it does not

Source: GO.sqlite of r-bioc-go.db and org.Hs.eg.sqlite of r-bioc-org.hs.eg.db, both 3.16.0-1 (GO 2022-07-01,
NCBI Gene 2022-09-12). Rules, in this order:

1. Genes: protein coding, with at least one Pfam domain.
2. Labels: terms with low-throughput experimental evidence (EXP IDA IPI IMP IGI IEP), roots and
   `protein binding` left out, the most specific ones of each aspect. Evidence ND says that nothing is known and is
   never read. Kept are genes with 1 to 5 labels in at least two aspects, and none with more than 5.
3. Split: whole clusters of all genes (`harness.envs.bioreason_go.splits`).
4. Candidates: in each aspect three terms that relatives carry and one drawn by frequency. A relative shares a
   domain; it counts by the square of the Jaccard index of the domain sets, plus 2 with the same symbol stem. A
   term counts once for any annotation of a relative and once more for an experimental one. The gene's own
   annotation is never read, and a train gene never sees that of a held-out gene.
5. Kept are genes where the candidates have at least a third of the labels, in the mean over the labelled aspects:
   with less, there is too little in the prompt to reason from. This makes the task easier than annotating a genome.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, diags_array

from harness.core.canonical import sha256_hex
from harness.envs.bioreason_go.ontology import Ontology, build, load_shipped
from harness.envs.bioreason_go.records import ProteinRecord, load_shipped_records, write_records
from harness.envs.bioreason_go.splits import Member, clusters, held_out, stem
from harness.envs.bioreason_go.terms import ASPECTS, Aspect, Tables, Term, write_compact

DATA = Path(__file__).resolve().parents[1] / "harness" / "envs" / "bioreason_go" / "data"
PACKAGES = ("r-bioc-go.db", "r-bioc-org.hs.eg.db")
EXPERIMENTAL = frozenset({"EXP", "IDA", "IPI", "IMP", "IGI", "IEP"})
NO_DATA = "ND"
PROTEIN_BINDING = "GO:0005515"
MOST_LABELS = 5
FROM_RELATIVES, BY_FREQUENCY = 3, 1
LEAST_RECALL = 1 / 3
HELDOUT_TARGET = 760
MARKS = ("<!-- numbers:begin -->", "<!-- numbers:end -->")


@dataclass(slots=True)
class Gene:
    """A human gene; `terms` holds the index of each annotated term with whether its evidence is experimental."""

    id: str
    symbol: str
    name: str
    domains: set[str] = field(default_factory=set)
    terms: dict[int, bool] = field(default_factory=dict)


def fetch(folder: Path) -> None:
    """Download both packages into `folder`, unless they are there."""
    if any(not list(folder.glob(f"{package}_*.deb")) for package in PACKAGES):
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)


def unpack(folder: Path, into: Path) -> tuple[Path, Path]:
    """Unpack both packages and return the paths of GO.sqlite and org.Hs.eg.sqlite."""
    for package in PACKAGES:
        (deb,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(deb), str(into)], check=True)
    return next(into.rglob("GO.sqlite")), next(into.rglob("org.Hs.eg.sqlite"))


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for reading."""
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def read_ontology(database: sqlite3.Connection) -> Tables:
    """Return the terms, is_a and part_of edges, alternative and obsolete ids of GO.sqlite."""
    release = database.execute("SELECT value FROM metadata WHERE name = 'GOSOURCEDATE'").fetchone()[0]
    ids = dict(database.execute("SELECT _id, go_id FROM go_term WHERE ontology IN ('MF', 'BP', 'CC')"))
    parents: dict[str, dict[str, set[str]]] = {"isa": defaultdict(set), "part of": defaultdict(set)}
    for aspect in ASPECTS:
        query = f"SELECT _id, _parent_id, relationship_type FROM go_{aspect}_parents"  # noqa: S608 - fixed names
        for child, parent, relation in database.execute(query):
            if relation in parents and parent in ids:  # the roots stand below a made-up node
                parents[relation][ids[child]].add(ids[parent])
    rows = database.execute("SELECT go_id, term, ontology FROM go_term WHERE ontology IN ('MF', 'BP', 'CC')")
    terms = tuple(
        Term(name, title, aspect.lower(), tuple(parents["isa"][name]), tuple(parents["part of"][name]))
        for name, title, aspect in rows
    )
    alternatives = {
        alternative: ids[primary]
        for primary, alternative in database.execute("SELECT _id, secondary FROM go_synonym WHERE secondary != ''")
        if primary in ids
    }
    obsolete: dict[str, tuple[str, ...]] = {name: () for (name,) in database.execute("SELECT go_id FROM go_obsolete")}
    return Tables(release, terms, alternatives, obsolete)


def read_genes(database: sqlite3.Connection, ontology: Ontology) -> list[Gene]:
    """Return the protein-coding genes with a Pfam domain, in the order of their ids."""
    rows = database.execute(
        "SELECT g._id, g.gene_id, i.symbol, i.gene_name FROM genes g JOIN gene_info i USING (_id) "
        "JOIN genetype t USING (_id) WHERE t.gene_type = 'protein-coding'"
    )
    genes = {key: Gene(f"ncbi-{gene_id}", symbol, name) for key, gene_id, symbol, name in rows}
    for key, domain in database.execute("SELECT _id, pfam_id FROM pfam WHERE pfam_id IS NOT NULL"):
        if key in genes:
            genes[key].domains.add(domain)
    silent = {*ontology.roots.values(), ontology.index_of(PROTEIN_BINDING)}
    for aspect in ASPECTS:
        query = f"SELECT _id, go_id, evidence FROM go_{aspect}"  # noqa: S608 - fixed names
        for key, go_id, evidence in database.execute(query):
            index = ontology.index_of(go_id)
            if key in genes and index is not None and index not in silent and evidence != NO_DATA:
                known = genes[key].terms
                known[index] = known.get(index, False) or evidence in EXPERIMENTAL
    return sorted((gene for gene in genes.values() if gene.domains), key=lambda gene: gene.id)


def labels_of(gene: Gene, ontology: Ontology) -> dict[Aspect, tuple[str, ...]]:
    """Return the most specific experimental terms by aspect, ids ascending."""
    terms = {index for index, experimental in gene.terms.items() if experimental}
    above = {int(a) for index in terms for a in ontology.ancestors(index) if a != index}
    chosen = sorted(terms - above)
    return {a: tuple(ontology.id(i) for i in chosen if ontology.aspect(i) == a) for a in ASPECTS}


def eligible(labels: Mapping[Aspect, Sequence[str]]) -> bool:
    """Return whether at least two aspects have labels and none has more than fit in a short answer."""
    counts = [len(labels[aspect]) for aspect in ASPECTS]
    return max(counts) <= MOST_LABELS and sum(count > 0 for count in counts) >= 2


def relatives(genes: Sequence[Gene], hidden: frozenset[str]) -> csr_array:
    """Return how much each gene (column) says about each other one (row); shape (genes, genes), rows sum to 1.

    The diagonal is 0; in the row of a gene outside `hidden` so are the columns of those inside.
    """
    domains = {name: k for k, name in enumerate(sorted({d for gene in genes for d in gene.domains}))}
    pairs = [(row, domains[d]) for row, gene in enumerate(genes) for d in sorted(gene.domains)]
    rows, columns = np.array(pairs).T
    has = csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(genes), len(domains)))
    shared = (has @ has.T).tocoo()
    first, second = shared.coords
    sizes = np.array([len(gene.domains) for gene in genes])
    jaccard = shared.data / (sizes[first] + sizes[second] - shared.data)
    stems = np.array([stem(gene.symbol) for gene in genes])
    weight = jaccard**2 + 2.0 * ((stems[first] == stems[second]) & (stems[first] != ""))
    inside = np.array([gene.id in hidden for gene in genes])
    weight *= (first != second) & (inside[first] | ~inside[second])
    matrix = csr_array((weight, (first, second)), shape=(len(genes), len(genes)))
    matrix.eliminate_zeros()
    total = matrix.sum(axis=1)
    return csr_array(diags_array(1 / np.where(total > 0, total, 1)) @ matrix)


def annotation_matrix(genes: Sequence[Gene], terms: int) -> csr_array:
    """Return 1 for each annotated term and 2 for an experimental one; shape (genes, terms)."""
    rows = [row for row, gene in enumerate(genes) for _ in gene.terms]
    columns = [index for gene in genes for index in gene.terms]
    values = [1.0 + experimental for gene in genes for experimental in gene.terms.values()]
    return csr_array((values, (rows, columns)), shape=(len(genes), terms))


class Frequencies:
    """Draws terms of an aspect as often as the experimental annotations of some genes have them."""

    def __init__(self, genes: Iterable[Gene], ontology: Ontology) -> None:
        self.urns: dict[Aspect, list[tuple[str, int]]] = {aspect: [] for aspect in ASPECTS}
        for gene in genes:
            for index in sorted(i for i, experimental in gene.terms.items() if experimental):
                self.urns[ontology.aspect(index)].append((gene.id, index))

    def draw(self, gene: str, aspect: Aspect, count: int, taken: Iterable[int]) -> list[int]:
        """Return `count` further terms; annotations of `gene` itself are put back unread."""
        urn, known = self.urns[aspect], set(taken)
        drawn: list[int] = []
        for attempt in range(10_000):
            if len(drawn) == count:
                break
            owner, index = urn[int(sha256_hex(f"draw/{gene}/{aspect}/{attempt}")[:12], 16) % len(urn)]
            if owner != gene and index not in known:
                known.add(index)
                drawn.append(index)
        return drawn


def candidates(genes: Sequence[Gene], ontology: Ontology, hidden: frozenset[str]) -> dict[str, dict[Aspect, list[str]]]:
    """Return the candidate ids of each gene by aspect, in hash order; the gene's own annotation plays no part."""
    support = csr_array(relatives(genes, hidden) @ annotation_matrix(genes, len(ontology)))
    support.sort_indices()
    frequencies = Frequencies((gene for gene in genes if gene.id not in hidden), ontology)
    aspects = np.array([ASPECTS.index(aspect) for aspect in ontology.aspects])
    result: dict[str, dict[Aspect, list[str]]] = {}
    for row, gene in enumerate(genes):
        span = slice(support.indptr[row], support.indptr[row + 1])
        terms, score = support.indices[span], np.round(support.data[span], 9)
        ranked = terms[np.lexsort((terms, -score))]
        result[gene.id] = {}
        for number, aspect in enumerate(ASPECTS):
            chosen = [int(t) for t in ranked[aspects[ranked] == number][:FROM_RELATIVES]]
            wanted = FROM_RELATIVES + BY_FREQUENCY - len(chosen)
            chosen += frequencies.draw(gene.id, aspect, wanted, chosen)
            ids = [ontology.id(index) for index in chosen]
            result[gene.id][aspect] = sorted(ids, key=lambda go_id: sha256_hex(f"order/{gene.id}/{go_id}"))
    return result


def recall(labels: Mapping[Aspect, Sequence[str]], guessed: Mapping[Aspect, Sequence[str]]) -> float:
    """Return the share of labels that are candidates, in the mean over the labelled aspects."""
    shares = [len({*labels[a]} & {*guessed[a]}) / len(labels[a]) for a in ASPECTS if labels[a]]
    return sum(shares) / len(shares)


def make_records(genes: Sequence[Gene], ontology: Ontology) -> list[ProteinRecord]:
    """Return the kept proteins, with split and candidates."""
    cluster_of = clusters([Member(gene.id, gene.symbol, frozenset(gene.domains)) for gene in genes])
    labels = {gene.id: labels_of(gene, ontology) for gene in genes}
    fit = {name: cluster_of[name] for name in labels if eligible(labels[name])}
    held_clusters = {fit[name] for name in held_out(fit, HELDOUT_TARGET)}
    hidden = frozenset(name for name, cluster in cluster_of.items() if cluster in held_clusters)
    guessed = candidates(genes, ontology, hidden)
    return [
        ProteinRecord(
            id=gene.id,
            gene=gene.symbol,
            name=gene.name,
            organism="Homo sapiens",
            domains=tuple(sorted(gene.domains)),
            candidates=guessed[gene.id],
            labels=labels[gene.id],
            cluster=cluster_of[gene.id],
            split="heldout" if gene.id in hidden else "train",
        )
        for gene in genes
        if gene.id in fit and recall(labels[gene.id], guessed[gene.id]) >= LEAST_RECALL
    ]


def _closure(ids: Iterable[str], ontology: Ontology) -> set[int]:
    indices = [ontology.index_of(go_id) for go_id in ids]
    return set(ontology.closure([i for i in indices if i is not None]).tolist()) - set(ontology.roots.values())


def _agreement(records: Sequence[ProteinRecord], ontology: Ontology) -> tuple[float, float, float, float]:
    """Return exact recall and precision and those of closures, of copying: mean over aspects, then proteins."""
    rows = []
    for record in records:
        row = []
        for aspect in ASPECTS:
            right, guess = {*record.labels[aspect]}, {*record.candidates[aspect]}
            if right:
                a, b = _closure(right, ontology), _closure(guess, ontology)
                exact, near = len(right & guess), len(a & b)
                row.append((exact / len(right), exact / len(guess), near / len(a), near / len(b)))
        rows.append(np.mean(row, axis=0))
    first, second, third, fourth = np.mean(rows, axis=0).tolist()
    return first, second, third, fourth


def statistics(records: Sequence[ProteinRecord], ontology: Ontology) -> list[tuple[str, str]]:
    """Return the numbers of the data card, as (what, value) in order."""
    numbers = [
        ("ontology", f"release {ontology.release}, {len(ontology):,} terms, sha {ontology.sha[:16]}"),
        ("sha of the proteins", sha256_hex(write_records(records, ontology))[:16]),
        ("domains", f"{len({d for r in records for d in r.domains}):,} Pfam ids"),
    ]
    for split in ("train", "heldout"):
        part = [record for record in records if record.split == split]
        exact_r, exact_p, near_r, near_p = _agreement(part, ontology)
        numbers += [
            (f"{split}: proteins, clusters", f"{len(part):,}, {len({r.cluster for r in part}):,}"),
            (f"{split}: largest cluster", f"{Counter(r.cluster for r in part).most_common(1)[0][1]} proteins"),
        ]
        for aspect in ASPECTS:
            counts = [len(record.labels[aspect]) for record in part if record.labels[aspect]]
            distinct = len({go_id for record in part for go_id in record.labels[aspect]})
            numbers.append(
                (
                    f"{split}: {aspect} labels",
                    f"{len(counts):,} proteins, {np.mean(counts):.2f} each, {distinct:,} distinct terms",
                )
            )
        numbers += [
            (f"{split}: candidates against labels, same id", f"recall {exact_r:.3f}, precision {exact_p:.3f}"),
            (f"{split}: candidates against labels, closures", f"recall {near_r:.3f}, precision {near_p:.3f}"),
        ]
    return numbers


def audit(records: Sequence[ProteinRecord], ontology: Ontology) -> list[tuple[str, str]]:
    """Return what could carry the answer and how often it does, as (what, value); see also the rules above."""
    heldout_clusters = {r.cluster for r in records if r.split == "heldout"}
    straddling = sum(r.split == "train" and r.cluster in heldout_clusters for r in records)
    spelt = sum(
        any(ontology.name(i).lower() == record.name.lower().strip() for i in _indices(record, ontology))
        for record in records
    )
    go_ids = sum(bool(re.search(r"GO:\d", f"{record.gene} {record.name}")) for record in records)
    invariant = sum(record.candidates == record.labels for record in records)
    twins = Counter(record.domains for record in records if record.split == "train")
    seen = sum(record.split == "heldout" and record.domains in twins for record in records)
    return [
        ("clusters in both splits", str(straddling)),
        ("held-out proteins whose very domain set is in train", str(seen)),
        ("names that hold a GO id", str(go_ids)),
        ("names that are the name of a label", str(spelt)),
        ("candidates equal to the labels", str(invariant)),
    ]


def _indices(record: ProteinRecord, ontology: Ontology) -> list[int]:
    found = [ontology.index_of(go_id) for aspect in ASPECTS for go_id in record.labels[aspect]]
    return [index for index in found if index is not None]


def card_block(records: Sequence[ProteinRecord], ontology: Ontology) -> str:
    """Return the generated part of the data card."""
    lines = ["| what | value |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in (*statistics(records, ontology), *audit(records, ontology))]
    return "\n".join([MARKS[0], *lines, MARKS[1]])


def with_block(card: str, block: str) -> str:
    """Return the card with its generated part replaced."""
    before, _, rest = card.partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"README.md lacks {MARKS[0]} … {MARKS[1]}")
    return before + block + after


def build_data(packages: Path | None) -> None:
    """Write the ontology, the proteins and the numbers of the card."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        if packages is None:
            fetch(work)
        go, org = unpack(packages or work, work / "unpacked")
        tables = read_ontology(connect(go))
        text = write_compact(tables)
        ontology = build(tables, sha256_hex(text))
        records = make_records(read_genes(connect(org), ontology), ontology)
    (DATA / "ontology.tsv.gz").write_bytes(gzip.compress(text, 9, mtime=0))
    (DATA / "proteins.jsonl.gz").write_bytes(gzip.compress(write_records(records, ontology), 9, mtime=0))
    card = DATA / "README.md"
    card.write_text(with_block(card.read_text(encoding="utf-8"), card_block(records, ontology)), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or check the card."""
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder with both .deb files")
    parser.add_argument("--check", action="store_true", help="compare the card with the shipped files, build nothing")
    options = parser.parse_args(argv)
    if not options.check:
        build_data(options.packages)
    card = (DATA / "README.md").read_text(encoding="utf-8")
    block = card_block(load_shipped_records(), load_shipped())
    if block not in card:
        print(f"README.md does not have the numbers of the shipped files:\n{block}")
        return 1
    print(block)
    return 0


if __name__ == "__main__":
    sys.exit(main())
