"""Records in the layout of BioReason-Pro: every shape a column comes in, the audit, GAF labels, files and Hub."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.core.errors import ConfigError, InfraError, MissingExtraError, NotFoundError, RefusedError
from harness.envs.bioreason_go.environment import BioReasonGo, BioReasonGoArgs
from harness.envs.bioreason_go.gaf import read_gaf
from harness.envs.bioreason_go.ontology import load_shipped
from harness.envs.bioreason_go.pro import build_records, ids_of, text_of
from harness.envs.bioreason_go.records import task_candidates, task_labels
from harness.envs.bioreason_go.rows import fetch, read_rows

KINASE, TYROSINE, SIGNAL, MEMBRANE = "GO:0004672", "GO:0004713", "GO:0007169", "GO:0005886"
ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def row(number, **changes):
    rng = random.Random(number)
    return {
        "protein_id": f"P{number:05d}",
        "protein_names": "Receptor tyrosine-protein kinase",
        "organism": "Homo sapiens (Human)",
        "length": 120,
        "sequence": "".join(rng.choices(ACIDS, k=120)),
        "subcellular_location": float("nan"),
        "protein_function": None,
        "interpro_formatted": f"- IPR{number:06d}: Protein kinase domain (domain) [712-979]\n"
        f"- IPR{number + 500:06d}: X",
        "ppi_formatted": "- GRB2\n- SHC1",
        "go_pred": "Molecular Function (MF): GO:0004672 (protein kinase activity), GO:0005524 (ATP binding)\n"
        "Cellular Component (CC): GO:0005886 (plasma membrane)",
        "go_mf": [KINASE, TYROSINE],
        "go_bp": np.array([SIGNAL]),
        "go_cc": "['GO:0005886', 'GO:0005575']",
        "go_ids": [KINASE],
    } | changes


@pytest.fixture(scope="module")
def ontology():
    return load_shipped()


@pytest.mark.parametrize(
    ("cell", "ids"),
    [
        ([KINASE, SIGNAL, KINASE], [KINASE, SIGNAL]),
        ((KINASE,), [KINASE]),
        (np.array([KINASE, SIGNAL], dtype=object), [KINASE, SIGNAL]),
        (np.array([]), []),
        (np.float64("nan"), []),
        (float("nan"), []),
        (None, []),
        ([], []),
        ("", []),
        ("[]", []),
        ("nan", []),
        (f"['{KINASE}', \"{SIGNAL}\"]", [KINASE, SIGNAL]),
        (f"{KINASE}; {SIGNAL}", [KINASE, SIGNAL]),
    ],
)
def test_label_columns_come_in_many_shapes(cell, ids):
    assert ids_of(cell, "here") == ids


@pytest.mark.parametrize("cell", ["kinase", ["GO:46721"], ["GO:00046721"], [KINASE, 7], "GO:00046721", ["GO:٠٠٠٤٦٧٢"]])
def test_what_is_no_id_is_named(cell):
    with pytest.raises(ConfigError, match=r"P1, go_mf: .* GO id"):
        ids_of(cell, "P1, go_mf")


def test_empty_cells_are_empty_text():
    assert [text_of(value) for value in (None, float("nan"), " ", "NaN", "None", "[]", 0)] == [
        "",
        "",
        "",
        "",
        "",
        "",
        "0",
    ]


def test_a_row_becomes_a_record(ontology):
    records, audit = build_records([row(1), row(2, go_mf=None, go_bp="nan", go_cc=[MEMBRANE])], ontology, heldout=1)
    first, second = records
    assert first.labels == {"mf": [TYROSINE], "bp": [SIGNAL], "cc": [MEMBRANE]}
    assert second.labels == {"mf": [], "bp": [], "cc": [MEMBRANE]}
    assert first.candidates == {"mf": [KINASE, "GO:0005524"], "bp": [], "cc": [MEMBRANE]}
    assert first.domains == ("IPR000001 Protein kinase domain (domain)", "IPR000501 X")
    assert first.partners == ("GRB2", "SHC1")
    assert dict(audit.left_out) == {"general": 1, "root": 1}
    assert {record.split for record in records} == {"train", "heldout"}


def test_repeats_are_one_protein_and_unlabelled_rows_are_counted(ontology):
    rows = [row(1, go_bp=None), row(1, go_mf=None), row(2, go_mf=None, go_bp=None, go_cc=["GO:0005575"])]
    records, audit = build_records(rows, ontology, heldout=1)
    assert [record.labels["bp"] for record in records] == [[SIGNAL]]
    assert (audit.rows, audit.proteins, audit.repeated, audit.without_labels) == (3, 1, 1, 1)
    assert "3 rows, 1 repeated, 1 without labels" in audit.as_notes()["records"]
    with pytest.raises(ConfigError, match="no record has a label"):
        build_records([row(2, go_mf=None, go_bp=None, go_cc=None)], ontology, heldout=1)
    with pytest.raises(ConfigError, match="row 1 has no protein_id"):
        build_records([row(1), row(2, protein_id=None)], ontology, heldout=1)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (["GO:0005515"], "protein_binding"),
        (["GO:0003674"], "root"),
        ([SIGNAL], "misplaced"),
        (["GO:0000005"], "obsolete"),
    ],
)
def test_labels_that_are_none_are_counted(ontology, cell, kind):
    records, audit = build_records([row(1, go_mf=cell)], ontology, heldout=1)
    assert records[0].labels["mf"] == []
    assert audit.left_out[kind] == 1 + (kind == "root")  # the cell of `go_cc` has a root too


def test_labels_of_a_later_release_are_refused(ontology):
    with pytest.raises(RefusedError, match="GO:9999999, are unknown") as caught:
        build_records([row(1, go_mf=["GO:9999999"])], ontology, heldout=1)
    assert "args.ontology" in caught.value.hint


def test_e3_19_fields_that_carry_the_answer_are_named_and_dropped(ontology):
    rows = [row(n, subcellular_location="Plasma membrane.", protein_function="Phosphorylates.") for n in range(1, 9)]
    rows[0]["interpro_formatted"] += f"\n- IPR000999: Kinase {TYROSINE}"
    records, audit = build_records(rows, ontology, heldout=2)
    fields = {one.field: one for one in audit.fields}
    assert fields["subcellular_location"].leaks
    assert fields["subcellular_location"].spells_name == 1.0
    assert fields["interpro_formatted"].spells_id == pytest.approx(1 / 8)
    assert fields["interpro_formatted"].dropped
    assert not fields["protein_function"].leaks
    assert not fields["protein_names"].leaks
    assert "dropped" in audit.as_notes()["field subcellular_location"]
    assert all(record.domains == () and "subcellular_location" not in record.notes for record in records)
    kept, audit = build_records(rows, ontology, heldout=2, drop=False)
    assert "KEPT" in audit.as_notes()["field subcellular_location"]
    assert all(record.notes["subcellular_location"] and record.domains for record in kept)


GAF = (
    "!gaf-version: 2.2\n!go-version: releases/2022-07-01\n"
    f"UniProtKB\tP00001\tEGFR\tenables\t{TYROSINE}\tPMID:1\tIDA\t\tF\tx\t\tprotein\ttaxon:9606\t2020\tX\t\t\n"
    f"UniProtKB\tP00001\tEGFR\tNOT|enables\t{KINASE}\tPMID:1\tIDA\t\tF\tx\t\tprotein\ttaxon:9606\t2020\tX\t\t\n"
    f"UniProtKB\tP00001\tEGFR\tlocated_in\t{MEMBRANE}\tPMID:1\tIEA\t\tC\tx\t\tprotein\ttaxon:9606\t2020\tX\t\t\n"
    f"UniProtKB\tP00002\tX\tlocated_in\t{MEMBRANE}\tPMID:1\tIMP\t\tC\tx\t\tprotein\ttaxon:9606\t2020\tX\t\t\n"
)


def test_gaf_annotations_are_the_labels(tmp_path, ontology):
    path = tmp_path / "human.gaf"
    path.write_text(GAF)
    found = read_gaf(path, ontology)
    assert found == {"P00001": [TYROSINE], "P00002": [MEMBRANE]}
    records, audit = build_records([row(1), row(2), row(3)], ontology, annotated=found, heldout=1)
    assert [record.labels for record in records] == [
        {"mf": [TYROSINE], "bp": [], "cc": []},
        {"mf": [], "bp": [], "cc": [MEMBRANE]},
    ]
    assert audit.without_labels == 1


def test_bad_gaf_files_are_named(tmp_path, ontology):
    path = tmp_path / "a.gaf"
    with pytest.raises(NotFoundError, match=r"a\.gaf"):
        read_gaf(path, ontology)
    path.write_text(GAF.replace("2022-07-01", "2023-01-01"))
    with pytest.raises(RefusedError, match="2023-01-01"):
        read_gaf(path, ontology)
    path.write_text("UniProtKB\tP1\n")
    with pytest.raises(ConfigError, match=r"a\.gaf:1: 2 columns"):
        read_gaf(path, ontology)
    path.write_text("!gaf-version: 2.2\n")
    with pytest.raises(ConfigError, match="holds no annotation"):
        read_gaf(path, ontology)
    (tmp_path / "b.gaf.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_gaf(tmp_path / "b.gaf.gz", ontology)


def plain(rows):
    """Return rows as JSON can hold them."""
    return [
        {k: None if v != v else v for k, v in one.items() if not hasattr(v, "tolist")} | {"go_bp": [SIGNAL]}
        for one in rows
    ]


def test_the_environment_reads_json_lines(tmp_path):
    rows = plain([row(number, protein_id=f"Q{number}") for number in range(40)])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    from_json = BioReasonGo(BioReasonGoArgs(source="records", path=str(tmp_path / "rows.jsonl"), heldout=8))
    assert len(from_json.tasks("heldout")) == 8
    assert len(from_json.tasks("train")) == 32
    assert not from_json.redistributable
    assert from_json.data_notes()["records"].startswith("40 rows")
    task = from_json.tasks("heldout")[0]
    assert task_labels(task) == {"mf": [TYROSINE], "bp": [SIGNAL], "cc": [MEMBRANE]}
    assert task_candidates(task)["mf"] == [KINASE, "GO:0005524"]
    question = from_json.start(task).messages[-1].content
    assert "partners: GRB2; SHC1" in question
    assert "bp:" not in question  # nothing was guessed


def test_the_environment_reads_a_folder_of_parquet(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    rows = plain([row(number, protein_id=f"Q{number}") for number in range(40)])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:25]), tmp_path / "data" / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows[25:]), tmp_path / "data" / "b.parquet")
    monkeypatch.setenv("HARNESS_BIOREASON_GO", str(tmp_path))
    from_folder = BioReasonGo(BioReasonGoArgs(source="records", heldout=8))
    from_json = BioReasonGo(BioReasonGoArgs(source="records", path=str(tmp_path / "rows.jsonl"), heldout=8))
    assert from_folder.tasks("heldout") == from_json.tasks("heldout")
    (tmp_path / "c.parquet").write_text("x")
    with pytest.raises(ConfigError, match="not a parquet file"):
        read_rows(str(tmp_path / "c.parquet"), None)


def test_bad_sources_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("HARNESS_BIOREASON_GO", raising=False)
    with pytest.raises(ConfigError, match="need a path"):
        read_rows(None, None)
    with pytest.raises(ConfigError, match="both"):
        read_rows("a", "b/c")
    with pytest.raises(NotFoundError, match="nowhere"):
        read_rows(str(tmp_path / "nowhere"), None)
    with pytest.raises(NotFoundError, match="no parquet file"):
        read_rows(str(tmp_path), None)
    for name, text, message in (
        ("a.csv", "x", "not .parquet or .jsonl"),
        ("a.jsonl", "{", "a.jsonl:1 is not JSON"),
        ("b.jsonl", "[]", "is no object"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_rows(str(tmp_path / name), None)
    with pytest.raises(ConfigError, match="source is shipped"):
        BioReasonGo(BioReasonGoArgs(path="x"))


def test_the_hub_needs_a_pinned_commit_and_its_failures_are_told(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    with pytest.raises(ConfigError, match="revision is None"):
        fetch("owner/name", None)
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch("owner/name", "a" * 40) == Path(tmp_path)
    assert asked == {
        "name": "owner/name",
        "revision": "a" * 40,
        "repo_type": "dataset",
        "allow_patterns": ["*.parquet"],
    }

    def fail(name, **options):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(InfraError, match="cannot fetch the data set"):
        fetch("owner/name", "a" * 40)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="huggingface-hub"):
        fetch("owner/name", "a" * 40)
