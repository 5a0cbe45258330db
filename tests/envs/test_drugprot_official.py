"""The official layout: real documents, planted damage, ambiguous pairs, the document split, the metric."""

import json
import os
from pathlib import Path

import pytest

from harness.core.errors import ConfigError, MissingExtraError, NotFoundError
from harness.envs.drugprot.labels import letter_of
from harness.envs.drugprot.official import (
    Entity,
    build_corpus,
    build_document,
    read_documents,
    read_parquet,
    split_of,
    surface_pairs,
)

SHARED = Path(os.environ.get("HARNESS_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
TSV = SHARED / "drugprot" / "bioc_train_subset"
ROWS = SHARED / "drugprot" / "parquet_rows" / "drugprot_train_463.jsonl"
TOY = SHARED / "drugprot" / "official_toy"
needs_data = pytest.mark.skipif(
    not TSV.exists(), reason=f"no real DrugProt data at {TSV}; set HARNESS_SHARED_DATA to the shared data folder"
)


@pytest.fixture(scope="module")
def documents():
    return read_documents(TSV)


@needs_data
def test_463_real_documents_with_all_offsets(documents):
    assert len(documents) == 463
    assert sum(len(d.entities) for d in documents) == 11_863
    assert all(d.text[e.start : e.end] == e.text for d in documents for e in d.entities.values())
    assert sum(len(d.relations) for d in documents) == 2_327
    assert {e.type for d in documents for e in d.entities.values()} == {"CHEMICAL", "GENE-Y", "GENE-N"}


@needs_data
def test_rows_of_the_parquet_edition_agree_with_the_tsv(documents):
    assert read_documents(ROWS) == documents


@needs_data
def test_real_corpus_counts(documents):
    corpus = build_corpus(documents)
    stats = corpus.stats
    assert stats.surface_pairs == 1_901
    assert stats.ambiguous_dropped == 84
    assert stats.train + stats.heldout == 1_901 - 84
    assert stats.documents_without_relations == sum(not d.relations for d in documents)
    pairs = {split: {task.meta["pair"] for task in tasks} for split, tasks in corpus.tasks.items()}
    assert stats.recurring_pairs == len(pairs["train"] & pairs["heldout"])
    assert {t.cluster for t in corpus.tasks["train"]}.isdisjoint(t.cluster for t in corpus.tasks["heldout"])
    ids = [task.id for tasks in corpus.tasks.values() for task in tasks]
    assert len(set(ids)) == len(ids)


@needs_data
def test_excluded_pairs_leave_the_heldout_split_only(documents):
    whole = build_corpus(documents)
    pair = whole.tasks["heldout"][0].meta["pair"]
    part = build_corpus(documents, {pair, *(t.meta["pair"] for t in whole.tasks["train"][:5])})
    assert part.tasks["train"] == whole.tasks["train"]
    assert pair not in {t.meta["pair"] for t in part.tasks["heldout"]}
    assert part.stats.embedded_dropped == len(whole.tasks["heldout"]) - len(part.tasks["heldout"]) >= 1


def document(pmid="1", relations=(("INHIBITOR", "T1", "T2"),), abstract="Zinc α𝛽 blocks KIT and kit."):
    text = f"On zinc. {abstract}"
    mentions = [("T1", "CHEMICAL", "Zinc"), ("T2", "GENE-Y", "KIT"), ("T3", "GENE-N", "kit")]
    entities = [Entity(i, kind, text.index(t), text.index(t) + len(t), t) for i, kind, t in mentions]
    return build_document(pmid, "On zinc.", abstract, entities, relations)


def write_tsv(folder, *, entities=None, relations="1\tINHIBITOR\tArg1:T1\tArg2:T2\n"):
    folder.mkdir(exist_ok=True)
    source = document()
    rows = "".join(f"1\t{e.id}\t{e.type}\t{e.start}\t{e.end}\t{e.text}\n" for e in source.entities.values())
    text = f"1\t{source.title}\t{source.abstract}\n"
    (folder / "drugprot_training_abstracs.tsv").write_text(text, encoding="utf-8", newline="")
    (folder / "drugprot_training_entities.tsv").write_text(entities or rows, encoding="utf-8", newline="")
    (folder / "drugprot_training_relations.tsv").write_text(relations, encoding="utf-8", newline="")
    return folder


def row(**changes):
    source = document()
    return {
        "pmid": "1",
        "title": source.title,
        "abstract": source.abstract,
        "text": source.text,
        "entities": [
            {"id": e.id, "type": e.type, "text": e.text, "start": e.start, "end": e.end}
            for e in source.entities.values()
        ],
        "relations": [{"type": "INHIBITOR", "arg1": "T1", "arg2": "T2"}],
        **changes,
    }


def test_tsv_with_code_points_beyond_the_basic_plane(tmp_path):
    assert read_documents(write_tsv(tmp_path)) == [document()]


def test_line_separator_inside_an_abstract_is_text(tmp_path):
    folder = write_tsv(tmp_path)
    path = folder / "drugprot_training_abstracs.tsv"
    path.write_bytes(path.read_bytes().replace(b"kit.", "kit.\u2028More\x85.".encode()))
    assert read_documents(folder)[0].abstract.endswith("\u2028More\x85.")


def test_windows_line_ends(tmp_path):
    folder = write_tsv(tmp_path)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_documents(folder) == [document()]


@pytest.mark.parametrize(
    ("entities", "relations", "message"),
    [
        ("1\tT1\tCHEMICAL\t0\t4\tZinc\n", "", "offsets 0-4"),
        ("1\tT1\tCHEMICAL\tx\t4\tZinc\n", "", "not a number"),
        ("1\tT1\tCHEMICAL\t9\t13\n", "", "5 columns instead of 6"),
        ("1\tT1\tDRUG\t9\t13\tZinc\n", "", "entity type"),
        ("2\tT1\tCHEMICAL\t9\t13\tZinc\n", "", "no text"),
        ("1\tT1\tCHEMICAL\t9\t13\tZinc\n" * 2, "", "two entities"),
        (None, "1\tINHIBITS\tArg1:T1\tArg2:T2\n", "not one of the 13"),
        (None, "1\tINHIBITOR\tArg1:T1\tArg2:T9\n", "not one of the 13"),
        (None, "1\tINHIBITOR\tArg1:T2\tArg2:T3\n", "not one of the 13"),
        (None, "1\tINHIBITOR\tT1\tT2\n", "does not start with Arg1:"),
    ],
)
def test_damaged_tsv_is_refused(tmp_path, entities, relations, message):
    with pytest.raises(ConfigError, match=message):
        read_documents(write_tsv(tmp_path, entities=entities, relations=relations))


def test_missing_and_double_files(tmp_path):
    folder = write_tsv(tmp_path)
    (folder / "pred_relations.tsv").write_text("")
    with pytest.raises(ConfigError, match="several files"):
        read_documents(folder)
    (folder / "drugprot_training_entities.tsv").unlink()
    with pytest.raises(NotFoundError, match="entit"):
        read_documents(folder)
    with pytest.raises(NotFoundError, match="nowhere"):
        read_documents(tmp_path / "nowhere")
    (folder / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match=r"a\.csv"):
        read_documents(folder / "a.csv")


def test_not_utf8(tmp_path):
    folder = write_tsv(tmp_path)
    (folder / "drugprot_training_abstracs.tsv").write_bytes(b"1\tOn zinc.\tZinc \xb5 KIT kit\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_documents(folder)


def test_jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(), ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_documents(path) == [document()]
    path.write_text(json.dumps(row()) + "\n" + json.dumps(row()) + "\n")
    with pytest.raises(ConfigError, match="twice"):
        read_documents(path)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"pmid": "1", "pmid": "2"}', json.dumps(row(entities=None)), json.dumps(row(relations=[1]))],
)
def test_damaged_jsonl_is_refused(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1"):
        read_documents(tmp_path / "rows.jsonl")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (the group dev)")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([row()]), tmp_path / "rows.parquet")
    assert read_documents(tmp_path / "rows.parquet") == [document()]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="not a parquet file"):
        read_documents(tmp_path / "bad.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow") as caught:
        read_parquet(tmp_path / "rows.parquet")
    assert "[parquet]" in caught.value.hint


def test_arguments_in_either_order_and_repeats():
    swapped = document(relations=(("INHIBITOR", "T2", "T1"), ("INHIBITOR", "T1", "T2")))
    assert swapped.relations == (("INHIBITOR", "T1", "T2"),)


def test_surface_pairs_ignore_place_and_case():
    relations = (("INHIBITOR", "T1", "T2"), ("SUBSTRATE", "T1", "T3"))
    assert surface_pairs(document(relations=relations)) == [("Zinc", "KIT", frozenset({"INHIBITOR", "SUBSTRATE"}))]
    stats = build_corpus([document(relations=relations)]).stats
    assert (stats.surface_pairs, stats.ambiguous_dropped, stats.train + stats.heldout) == (1, 1, 0)
    same = build_corpus([document(relations=(("INHIBITOR", "T1", "T2"), ("INHIBITOR", "T1", "T3")))])
    assert same.stats.train + same.stats.heldout == 1


def test_split_is_by_document_and_recurring_pairs_are_counted():
    pmids = [str(n) for n in range(400)]
    held = [pmid for pmid in pmids if split_of(pmid) == "heldout"]
    assert 70 <= len(held) <= 130
    corpus = build_corpus([document(pmid=pmid) for pmid in pmids])
    assert {t.cluster for t in corpus.tasks["heldout"]} == set(held)
    assert corpus.stats.recurring_pairs == 1
    assert corpus.stats.recurring_heldout == len(held)
    task = corpus.tasks["heldout"][0]
    assert (task.answer, task.label, task.meta["pair"]) == (letter_of("INHIBITOR"), "INHIBITOR", "zinc | kit")
