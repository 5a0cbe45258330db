"""The ontology: OBO text with its traps, closures inside an aspect, and the counts of the whole 2022 release."""

import gzip
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from harness.core.errors import ConfigError, NotFoundError, RefusedError
from harness.envs.bioreason_go.ontology import build, load_export, load_obo, load_shipped
from harness.envs.bioreason_go.terms import Tables, Term, read_compact, read_obo, write_compact

SHARED = Path(os.environ.get("HARNESS_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
GO = SHARED / "go"
needs_data = pytest.mark.skipif(not GO.exists(), reason=f"no GO data at {GO}; set HARNESS_SHARED_DATA")

OBO = rb"""format-version: 1.2
data-version: releases/2024-01-17
default-namespace: gene_ontology

[Term]
id: GO:0008150
name: biological_process
namespace: biological_process

[Term]
id: GO:0003674
name: molecular_function
namespace: molecular_function

[Term]
id: GO:0000003
name: catalysis\, of\: a {thing}
namespace: molecular_function
alt_id: GO:0000103
alt_id: GO:0000009
is_a: GO:0003674 {is_inferred="true"} ! molecular_function
relationship: part_of GO:0000004 ! a process: across the aspects

[Term]
id: GO:0000004
name: process
namespace: biological_process
is_a: GO:0008150 ! biological_process
relationship: regulates GO:0000005 ! never followed

[Term]
id: GO:0000005
name: part
namespace: biological_process
is_a: GO:0008150
relationship: part_of GO:0000004
relationship: has_part GO:0000003

[Term]
id: GO:0000006
name: below both
namespace: biological_process
is_a: GO:0000004
is_a: GO:0000005
relationship: part_of GO:0000004

[Term]
id: GO:0000007
name: obsolete one
namespace: biological_process
is_obsolete: true
replaced_by: GO:0000004
consider: GO:0000005

[Term]
id: GO:0000008
name: obsolete, replaced by an alternative id and by nothing known
namespace: biological_process
is_obsolete: true
replaced_by: GO:0000103
replaced_by: GO:7777777

[Term]
id: GO:0000009
name: obsolete, and an alternative id of a current term
namespace: molecular_function
is_obsolete: true

[Typedef]
id: part_of
name: part of
namespace: external
xref: BFO:0000050
is_transitive: true
"""


@pytest.fixture(scope="module")
def small():
    return load_obo(OBO)


def ids(ontology, indices):
    return [ontology.id(int(index)) for index in indices]


def test_release_terms_and_roots(small):
    assert small.release == "2024-01-17"
    assert small.terms == ("GO:0000003", "GO:0000004", "GO:0000005", "GO:0000006", "GO:0003674", "GO:0008150")
    assert small.name(0) == "catalysis, of: a {thing}"
    assert small.aspect(0) == "mf"
    assert {aspect: small.id(root) for aspect, root in small.roots.items()} == {"mf": "GO:0003674", "bp": "GO:0008150"}


def test_closure_follows_is_a_and_part_of_inside_the_aspect(small):
    assert ids(small, small.ancestors(small.index_of("GO:0000003"))) == ["GO:0000003", "GO:0003674"]
    assert ids(small, small.ancestors(small.index_of("GO:0000005"))) == ["GO:0000004", "GO:0000005", "GO:0008150"]
    below = small.index_of("GO:0000006")
    assert ids(small, small.ancestors(below)) == ["GO:0000004", "GO:0000005", "GO:0000006", "GO:0008150"]
    assert ids(small, small.parents[below]) == ["GO:0000004", "GO:0000005"]
    both = small.closure([below, small.index_of("GO:0000003")])
    assert ids(small, both) == [*ids(small, small.ancestors(below))[:0], *sorted(small.terms)]
    assert small.closure([]).tolist() == []
    dense = small.closure_matrix.toarray()
    assert dense.sum() == len(small.indices)
    assert all(dense[i].nonzero()[0].tolist() == small.ancestors(i).tolist() for i in range(len(small)))


@pytest.mark.parametrize(
    ("asked", "status", "primary", "replaced"),
    [
        ("GO:0000003", "current", "GO:0000003", ()),
        ("GO:0000103", "alt", "GO:0000003", ()),
        ("GO:0000009", "alt", "GO:0000003", ()),  # also an obsolete term: the alternative wins
        ("GO:0000007", "obsolete", "GO:0000007", ("GO:0000004",)),  # `consider` is no replacement
        ("GO:0000008", "obsolete", "GO:0000008", ("GO:0000003",)),
        ("GO:9999999", "unknown", "GO:9999999", ()),
        ("go:0000003", "unknown", "go:0000003", ()),
        ("GO:00000031", "unknown", "GO:00000031", ()),
        (" GO:0000003", "unknown", " GO:0000003", ()),
        ("", "unknown", "", ()),
    ],
)
def test_every_id_has_a_defined_meaning(small, asked, status, primary, replaced):
    resolved = small.canonical(asked)
    assert (resolved.status, resolved.id, resolved.replaced_by) == (status, primary, replaced)
    known = status in ("current", "alt")
    assert resolved.index == small.index_of(asked) == (small.terms.index(primary) if known else None)


def test_the_hash_sees_content_and_not_layout(small):
    assert load_obo(OBO.replace(b"\n", b"\r\n")).sha == small.sha
    stanzas = OBO.split(b"\n[")
    moved = b"\n[".join([stanzas[0], *reversed(stanzas[1:-1]), stanzas[-1]])
    assert load_obo(moved).sha == small.sha
    for old, new in (
        (b"2024-01-17", b"2024-01-18"),
        (b"name: process", b"name: other"),
        (b"alt_id: GO:0000103\n", b""),
        (b"relationship: part_of GO:0000004\n\n", b"\n"),
        (b"replaced_by: GO:0000004", b"replaced_by: GO:0000005"),
    ):
        assert old in OBO
        assert load_obo(OBO.replace(old, new, 1)).sha != small.sha, old


def test_a_data_set_of_another_release_is_refused(small):
    small.require(small.sha, "the data set")
    other = load_obo(OBO.replace(b"2024-01-17", b"2024-02-17"))
    with pytest.raises(RefusedError, match="the data set was made with the ontology") as caught:
        other.require(small.sha, "the data set")
    assert "build the data set again" in caught.value.hint


def test_the_compact_text_is_the_whole_content(small):
    text = write_compact(read_obo(OBO))
    again = build(read_compact(text))
    assert (again.sha, again.terms, again.parents, again.obsolete) == (
        small.sha,
        small.terms,
        small.parents,
        small.obsolete,
    )
    with pytest.raises(ConfigError, match="cut off"):
        read_compact(text[:-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no \\[Term\\]"),
        (b"<html>not found</html>", "no \\[Term\\]"),
        (b"[Term]\nname: x\n", "no id"),
        (b"[Term]\nid: GO:1\nname: x\n", "namespace"),
        (b"[Term]\nid: GO:1\nnamespace: cellular_component\n\n[Term]\nid: GO:1\nis_obsolete: true\n", "twice"),
        (b"[Term]\nid: GO:1\nnamespace: cellular_component\nis_a: GO:2\n", "'GO:2', which is no current term"),
        (
            b"[Term]\nid: GO:1\nnamespace: cellular_component\nis_a: GO:2\n\n"
            b"[Term]\nid: GO:2\nnamespace: cellular_component\nis_a: GO:1\n",
            "circle",
        ),
        (b"[Term]\nid: GO:1\nname: \xff\nnamespace: cellular_component\n", "UTF-8"),
    ],
)
def test_bad_files_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        load_obo(text)


def test_paths_and_repeats(tmp_path, small):
    path = tmp_path / "go.obo"
    path.write_bytes(OBO)
    assert load_obo(path).sha == small.sha
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        load_obo(path)
    with pytest.raises(NotFoundError, match=r"no\.obo"):
        load_obo(tmp_path / "no.obo")
    with pytest.raises(ConfigError, match="twice"):
        build(Tables("x", (Term("GO:1", "a", "mf"), Term("GO:1", "b", "mf")), {}, {}))


def test_the_shipped_release():
    shipped = load_shipped()
    assert shipped.release == "2022-07-01"
    assert Counter(shipped.aspects) == {"bp": 28_140, "mf": 11_238, "cc": 4_180}
    assert {shipped.name(root) for root in shipped.roots.values()} == {
        "molecular_function",
        "biological_process",
        "cellular_component",
    }
    assert shipped.canonical("GO:0000004").status == "alt"
    assert shipped.canonical("GO:0000004").id == "GO:0008150"
    assert shipped.canonical("GO:0000005").status == "obsolete"
    kinase = {shipped.name(int(i)) for i in shipped.ancestors(shipped.terms.index("GO:0004713"))}
    assert {"protein tyrosine kinase activity", "protein kinase activity", "molecular_function"} <= kinase
    for aspect, root in shipped.roots.items():  # every term reaches the root of its aspect, and that root only
        reached = np.isin(shipped.indices, [root])
        assert reached.sum() == Counter(shipped.aspects)[aspect]


@needs_data
def test_the_whole_export_gives_the_documented_counts():
    export = load_export(GO / "godb_export", "2022-07-01")
    assert len(export) == 43_558
    assert Counter(export.aspects) == {"bp": 28_140, "mf": 11_238, "cc": 4_180}
    assert sum(export.canonical(name).status == "alt" for name in _column("alt_ids")) == 3_450
    assert sum(export.canonical(name).status == "obsolete" for name in _column("obsolete")) == 3_910
    assert len(_column("edges")) == 85_713
    assert export.sha == load_shipped().sha
    names = _independent_ancestors({"GO:0004713", "GO:0048008", "GO:0005886", "GO:0006468", "GO:0070374"})
    for start, expected in names.items():
        assert set(ids(export, export.ancestors(export.terms.index(start)))) == expected


def _column(table, column=0):
    with gzip.open(GO / "godb_export" / f"{table}.tsv.gz", "rt", encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t")[column] for line in file][1:]


def _independent_ancestors(starts):
    """Walk the export's edges upwards, one id at a time."""
    above = {}
    for child, relation, parent in zip(_column("edges"), _column("edges", 1), _column("edges", 2), strict=True):
        if relation in ("isa", "part of"):
            above.setdefault(child, set()).add(parent)
    result = {}
    for start in starts:
        seen, queue = {start}, [start]
        while queue:
            new = above.get(queue.pop(), set()) - seen
            seen |= new
            queue += new
        result[start] = seen
    return result


@needs_data
@pytest.mark.parametrize(
    ("file", "terms", "release"),
    [
        ("goatools/ssWang_fig1.obo", 7, "2007-07-01"),
        ("goatools/yangRWC_fig1a.obo", 15, "unknown"),
        ("goatools/mini_obo.obo", 10, "unknown"),
        ("goatools/heartjogging.obo", 33, "2018-03-02"),
        ("goslim/goslim_generic_biol466.obo", 140, "2026-05-19"),
    ],
)
def test_files_of_other_releases_load(file, terms, release):
    ontology = load_obo(GO / file)
    assert (len(ontology), ontology.release) == (terms, release)


@needs_data
def test_a_cut_out_that_lacks_parents_is_refused():
    with pytest.raises(ConfigError, match="no current term") as caught:
        load_obo(GO / "goatools" / "i86.obo")
    assert "whole release" in caught.value.hint
