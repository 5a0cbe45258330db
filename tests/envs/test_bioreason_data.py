"""The shipped proteins: what the card says of them, the rules they were made by, and that nothing leaks."""

import gzip
import importlib.util
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError, RefusedError
from harness.envs.bioreason_go.ontology import load_shipped
from harness.envs.bioreason_go.records import (
    load_shipped_records,
    read_records,
    task_candidates,
    task_labels,
    task_of,
    write_records,
)
from harness.envs.bioreason_go.splits import Member, clusters, held_out, sample_kmers, stem
from harness.envs.bioreason_go.terms import ASPECTS

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "harness" / "envs" / "bioreason_go" / "data"

spec = importlib.util.spec_from_file_location("build_bioreason_go", ROOT / "scripts" / "build_bioreason_go.py")
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules["build_bioreason_go"] = script
spec.loader.exec_module(script)


@pytest.fixture(scope="module")
def ontology():
    return load_shipped()


@pytest.fixture(scope="module")
def records():
    return load_shipped_records()


@pytest.fixture(scope="module")
def card():
    return (DATA / "README.md").read_text(encoding="utf-8")


def numbers(card):
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", card, re.MULTILINE))


def test_the_card_has_the_numbers_of_the_shipped_files(records, ontology, card):
    assert script.card_block(records, ontology) in card
    found = numbers(card)
    for split in ("train", "heldout"):
        exact = found[f"{split}: candidates against labels, same id"]
        recall, precision = map(float, re.fullmatch(r"recall ([\d.]+), precision ([\d.]+)", exact).groups())
        assert recall >= 0.5
        assert 0.2 <= precision <= 0.4
    assert found["clusters in both splits"] == found["names that hold a GO id"] == "0"
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 6_000_000


def test_the_card_has_the_hashes_of_the_shipped_files(records, ontology, card):
    assert sha256_hex(gzip.decompress((DATA / "ontology.tsv.gz").read_bytes())) == ontology.sha
    text = gzip.decompress((DATA / "proteins.jsonl.gz").read_bytes())
    assert text == write_records(records, ontology)
    assert sha256_hex(text)[:16] == numbers(card)["sha of the proteins"]
    for name in ("ontology.tsv.gz", "proteins.jsonl.gz"):  # no time of writing in the gzip header
        assert (DATA / name).read_bytes()[4:8] == b"\0\0\0\0"


def test_a_stale_card_is_noticed(monkeypatch, tmp_path, capsys, card):
    (tmp_path / "README.md").write_text(card.replace("| 0 |", "| 1 |", 1), encoding="utf-8")
    monkeypatch.setattr(script, "DATA", tmp_path)
    assert script.main(["--check"]) == 1
    assert "does not have the numbers" in capsys.readouterr().out


def test_records_keep_the_rules(records, ontology):
    assert len(records) >= 2_000
    assert len({record.id for record in records}) == len(records)
    roots = {ontology.id(root) for root in ontology.roots.values()}
    for record in records:
        assert record.domains, record
        assert script.eligible(record.labels), record
        assert script.recall(record.labels, record.candidates) >= script.LEAST_RECALL, record
        for aspect in ASPECTS:
            assert len(set(record.candidates[aspect])) == len(record.candidates[aspect]) == 4, record
            for go_id in (*record.labels[aspect], *record.candidates[aspect]):
                found = ontology.canonical(go_id)
                assert (found.status, ontology.aspect(found.index)) == ("current", aspect), record
                assert go_id not in roots | {"GO:0005515"}, record
            indices = [ontology.index_of(go_id) for go_id in record.labels[aspect]]
            above = {int(a) for index in indices for a in ontology.ancestors(index) if a != index}
            assert not above & set(indices), record  # the most specific labels only


def test_neither_copying_nor_any_place_in_the_list_gives_the_answer(records):
    """What is right stands as often in each of the four places: no pattern of places solves the task."""
    hits = [0, 0, 0, 0]
    for record in records:
        for aspect in ASPECTS:
            for place, go_id in enumerate(record.candidates[aspect]):
                hits[place] += go_id in record.labels[aspect]
    assert max(hits) < 1.1 * min(hits)
    assert not any(record.candidates == record.labels for record in records)


def toy_genes(ontology):
    """Return six genes with two domains; the terms are real."""
    kinase, atp, nucleus, cytosol, repair = (
        ontology.index_of(go_id) for go_id in ("GO:0004672", "GO:0005524", "GO:0005634", "GO:0005829", "GO:0006281")
    )
    rows = [
        ("ncbi-1", "AAK1", {"PF1", "PF2"}, {kinase: True, nucleus: True}),
        ("ncbi-2", "AAK2", {"PF1", "PF2"}, {kinase: True, atp: False, cytosol: True}),
        ("ncbi-3", "BBR1", {"PF1"}, {repair: True, atp: True}),
        ("ncbi-4", "CCX", {"PF3"}, {nucleus: True, repair: True}),
        ("ncbi-5", "DDY", {"PF3", "PF4", "PF5"}, {cytosol: True, kinase: False}),
        ("ncbi-6", "EEZ", {"PF9"}, {atp: True, cytosol: True, repair: True}),
    ]
    return [script.Gene(name, symbol, symbol, domains, terms) for name, symbol, domains, terms in rows]


def test_no_gene_s_own_annotation_reaches_its_candidates(ontology):
    genes = toy_genes(ontology)
    before = script.candidates(genes, ontology, frozenset())
    for number, gene in enumerate(genes):
        bare = [*genes[:number], replace(gene, terms={}), *genes[number + 1 :]]
        weights = script.relatives(bare, frozenset()).toarray()
        assert (weights == script.relatives(genes, frozenset()).toarray()).all()
        assert weights[number, number] == 0
        own = script.Frequencies(genes, ontology)
        without = script.Frequencies(bare, ontology)
        assert all(
            [e for e in own.urns[a] if e[0] != gene.id] == without.urns[a] for a in ASPECTS
        )  # what is drawn from holds the rest alone
    assert "GO:0004672" in before["ncbi-1"]["mf"]  # what its nearest relative carries


def test_train_candidates_know_nothing_of_heldout_genes(ontology):
    genes = toy_genes(ontology)
    hidden = frozenset({"ncbi-2", "ncbi-4"})
    before = script.candidates(genes, ontology, hidden)
    changed = [replace(g, terms={ontology.index_of("GO:0003677"): True}) if g.id in hidden else g for g in genes]
    after = script.candidates(changed, ontology, hidden)
    assert all(after[g.id] == before[g.id] for g in genes if g.id not in hidden)
    weights = script.relatives(genes, hidden).toarray()
    assert weights[1].sum() == pytest.approx(1.0)  # a held-out gene reads all its relatives


def test_labels_are_experimental_and_most_specific(ontology):
    index = ontology.index_of
    terms = {index("GO:0004672"): True, index("GO:0004713"): True, index("GO:0005634"): False}
    gene = script.Gene("ncbi-7", "X", "x", {"PF1"}, terms)
    assert script.labels_of(gene, ontology) == {"mf": ("GO:0004713",), "bp": (), "cc": ()}


def test_clusters_join_near_copies():
    def cluster(*members):
        return clusters([Member(*m) for m in members])

    same = cluster(("a", "X", frozenset("AB")), ("b", "Y", frozenset("AB")), ("c", "Z", frozenset("ABC")))
    assert set(same.values()) == {"a"}
    half = cluster(("a", "X", frozenset("A")), ("b", "Y", frozenset("AB")))
    assert half == {"a": "a", "b": "b"}
    family = cluster(("a", "ADRA1A", frozenset("A")), ("b", "ADRA1B", frozenset("AB")))
    assert family == {"a": "a", "b": "a"}
    stranger = cluster(("a", "ADRA1A", frozenset("A")), ("b", "ADRA1B", frozenset("B")))
    assert stranger == {"a": "a", "b": "b"}
    nothing = cluster(("a", "", frozenset()), ("b", "", frozenset()))
    assert nothing == {"a": "a", "b": "b"}
    assert [stem(gene) for gene in ("ADRA1A", "TP53", "EGFR", "P2", "PPP1R14D")] == ["ADRA", "TP", "EGFR", "", "PPP1R"]


def test_clusters_join_similar_sequences():
    rng = random.Random(7)
    letters = "ACDEFGHIKLMNPQRSTVWY"
    first = "".join(rng.choices(letters, k=400))
    near = "".join(c if rng.random() < 0.9 else rng.choice(letters) for c in first)
    other = "".join(rng.choices(letters, k=400))
    members = [Member(n, "", frozenset(), sample_kmers(s)) for n, s in (("a", first), ("b", near), ("c", other))]
    assert clusters(members) == {"a": "a", "b": "a", "c": "c"}
    assert sample_kmers("QQQQQQQQQQQQQQQQQQQQ") == sample_kmers("") == sample_kmers("MKV") == frozenset()


def test_whole_clusters_are_held_out_up_to_the_target():
    cluster_of = {f"p{n}": f"c{n // 3}" for n in range(300)} | {f"big{n}": "big" for n in range(40)}
    chosen = held_out(cluster_of, 60)
    assert len(chosen) == 60
    assert not any(name.startswith("big") for name in chosen)
    taken = {cluster_of[name] for name in chosen}
    assert all((cluster in taken) == (name in chosen) for name, cluster in cluster_of.items())
    assert held_out(dict(reversed(cluster_of.items())), 60) == chosen


def test_records_of_another_ontology_or_format_are_refused(records, ontology):
    text = write_records(records[:2], ontology)
    assert read_records(text, ontology) == records[:2]
    with pytest.raises(RefusedError, match="protein data set"):
        read_records(text.replace(ontology.sha.encode(), b"0" * 64), ontology)
    with pytest.raises(ConfigError, match="format"):
        read_records(text.replace(b"proteins 1", b"proteins 9"), ontology)
    with pytest.raises(ConfigError, match="JSON"):
        read_records(text[:-20], ontology)
    with pytest.raises(ConfigError, match="cluster"):
        read_records(text.replace(b'"cluster"', b'"cl"'), ontology)


def test_tasks_hold_what_a_scorer_needs(records, ontology):
    for record in records[:50]:
        task = task_of(record, ontology)
        assert task_labels(task) == {aspect: list(record.labels[aspect]) for aspect in ASPECTS}
        assert task_candidates(task) == {aspect: list(record.candidates[aspect]) for aspect in ASPECTS}
        assert task.label == "+".join(aspect for aspect in ASPECTS if record.labels[aspect])
    bare = replace(records[0], candidates=dict.fromkeys(ASPECTS, ()), domains=())
    assert task_candidates(task_of(bare, ontology)) == {aspect: [] for aspect in ASPECTS}
    assert task_of(bare, ontology).fields["domains"] == "none"
