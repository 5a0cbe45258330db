"""Records in the layout of BioReason-Pro: read, checked, audited for fields that carry the answer, split.

Columns (all but `protein_id` may be missing or empty): `protein_names`, `organism`, `sequence`,
`interpro_formatted` (one `- IPR000719: Protein kinase domain (domain) [712-979]` a line), `ppi_formatted`
(partners), `go_pred` (guesses), `go_mf`, `go_bp`, `go_cc` (labels, as a list, an array, NaN, or the text of a
list), `subcellular_location` and `protein_function`. Other columns are never read.

Location and function are written from the same curation as the labels. The audit says how often a field spells an
id, or the name, of a label; what does so in more than one record of a hundred is dropped unless it is asked for.
A domain is evidence even where it is named like a term, so for it only ids count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.errors import ConfigError, RefusedError
from harness.envs.bioreason_go.gaf import read_gaf
from harness.envs.bioreason_go.ontology import Ontology
from harness.envs.bioreason_go.records import ProteinRecord
from harness.envs.bioreason_go.rows import read_rows
from harness.envs.bioreason_go.splits import Member, clusters, held_out, sample_kmers
from harness.envs.bioreason_go.terms import ASPECTS, Aspect

LABEL_COLUMNS: dict[Aspect, str] = {aspect: f"go_{aspect}" for aspect in ASPECTS}
NOTES = ("subcellular_location", "protein_function")
EVIDENCE = ("protein_names", "organism", "interpro_formatted", "ppi_formatted")
PROTEIN_BINDING = "GO:0005515"
LEAK_SHARE = 0.01
UNKNOWN_SHARE = 0.01
_SHORTEST_NAME = 4
_ID = re.compile(r"(?<![0-9A-Za-z:])GO:[0-9]{7}(?![0-9A-Za-z])")
_DOMAIN = re.compile(r"^[-*\s]*(IPR[0-9]{6})\s*:?\s*(.*?)\s*(?:\[[^\]]*\])?\s*$", re.MULTILINE)
_NOTHING = frozenset({"", "[]", "nan", "none", "null", "na"})
_HINT = "see docs/environments/bioreason-go.md for the columns"


@dataclass(frozen=True, slots=True)
class FieldAudit:
    """How often a field carries the answer: shares of the records in [0, 1], and whether it was dropped."""

    field: str
    spells_id: float
    spells_name: float
    leaks: bool
    dropped: bool


@dataclass(frozen=True, slots=True)
class Audit:
    """What was read, what was left out, and which fields carry the answer."""

    rows: int
    proteins: int
    without_labels: int
    repeated: int
    left_out: Mapping[str, int]
    """Label ids left out: root, protein_binding, unknown, obsolete, misplaced, general (an ancestor of another)."""
    fields: tuple[FieldAudit, ...]

    def as_notes(self) -> dict[str, str]:
        """Return the audit as texts by name."""
        notes = {
            "records": f"{self.rows} rows, {self.repeated} repeated, {self.without_labels} without labels",
            "label ids left out": ", ".join(f"{count} {kind}" for kind, count in self.left_out.items()) or "none",
        }
        for one in self.fields:
            if one.leaks:
                fate = "dropped" if one.dropped else "KEPT"
                notes[f"field {one.field}"] = (
                    f"carries the answer ({one.spells_id:.1%} of records spell an id of a label, "
                    f"{one.spells_name:.1%} a name), {fate}"
                )
        return notes


def text_of(value: Any) -> str:
    """Return a cell as text; empty for None, NaN and what stands for nothing."""
    if value is None or value != value:  # NaN is not equal to itself
        return ""
    text = str(value).strip()
    return "" if text.lower() in _NOTHING else text


def ids_of(value: Any, where: str) -> list[str]:
    """Return the ids of a cell: a list, an array, NaN, or a text that holds ids; repeats once, order kept.

    Raises:
        ConfigError: when the cell holds something that is no id.
    """
    if hasattr(value, "tolist"):  # a numpy array, or a scalar of it
        value = value.tolist()
    if isinstance(value, list | tuple):
        entries = [str(entry).strip() for entry in value]
    else:
        text = text_of(value)
        entries = _ID.findall(text)
        if text and not entries:
            raise ConfigError(f"{where}: {text[:60]!r} holds no GO id", _HINT)
    bad = [entry for entry in entries if not _ID.fullmatch(entry)]
    if bad:
        raise ConfigError(f"{where}: {bad[0][:40]!r} is no GO id", _HINT)
    return list(dict.fromkeys(entries))


class _Labels:
    """Turns raw ids into labels and counts what it leaves out."""

    def __init__(self, ontology: Ontology) -> None:
        self.ontology = ontology
        self.left_out: Counter[str] = Counter()
        self.seen: dict[str, str] = {}

    def labels(self, raw: Mapping[Aspect, Iterable[str]]) -> dict[Aspect, list[str]]:
        """Return the most specific current ids of each aspect, ascending."""
        return {aspect: self._of_aspect(aspect, ids) for aspect, ids in raw.items()}

    def _of_aspect(self, aspect: Aspect, ids: Iterable[str]) -> list[str]:
        ontology, terms = self.ontology, set()
        for go_id in ids:
            found = ontology.canonical(go_id)
            self.seen[go_id] = found.status
            if found.index is None:
                self.left_out[found.status] += 1
            elif ontology.aspect(found.index) != aspect:
                self.left_out["misplaced"] += 1
            elif found.index == ontology.roots.get(aspect):
                self.left_out["root"] += 1
            elif found.id == PROTEIN_BINDING:
                self.left_out["protein_binding"] += 1
            else:
                terms.add(found.index)
        above = {int(a) for index in terms for a in ontology.ancestors(index) if a != index}
        self.left_out["general"] += len(terms & above)
        return [ontology.id(index) for index in sorted(terms - above)]

    def check_release(self) -> None:
        """Refuse labels that the ontology does not know: they were made with a later release."""
        unknown = sorted(go_id for go_id, status in self.seen.items() if status == "unknown")
        if len(unknown) > UNKNOWN_SHARE * len(self.seen):
            raise RefusedError(
                f"{len(unknown)} of {len(self.seen)} label ids, first {unknown[0]}, are unknown to the ontology "
                f"of {self.ontology.release}",
                "set env.bioreason-go.args.ontology to the OBO file of the release the records were made with",
            )


def _candidates(text: str, ontology: Ontology) -> dict[Aspect, list[str]]:
    """Return the guessed ids by the aspect of the term; ids the ontology does not have are no guesses."""
    guesses: dict[Aspect, list[str]] = {aspect: [] for aspect in ASPECTS}
    for go_id in dict.fromkeys(_ID.findall(text)):
        index = ontology.index_of(go_id)
        if index is not None:
            guesses[ontology.aspect(index)].append(go_id)
    return guesses


def _partners(text: str) -> tuple[str, ...]:
    return tuple(line for line in (line.strip(" \t-*") for line in text.split("\n")) if line)


def _record(row: Mapping[str, Any], labels: Mapping[Aspect, list[str]], ontology: Ontology) -> ProteinRecord:
    texts = {name: text_of(row.get(name)) for name in (*EVIDENCE, *NOTES, "go_pred")}
    return ProteinRecord(
        id=text_of(row["protein_id"]),
        gene="",
        name=texts["protein_names"],
        organism=texts["organism"],
        domains=tuple(f"{name} {title}".strip() for name, title in _DOMAIN.findall(texts["interpro_formatted"])),
        partners=_partners(texts["ppi_formatted"]),
        candidates=_candidates(texts["go_pred"], ontology),
        labels=labels,
        cluster="",
        split="",
        notes={name: texts[name] for name in NOTES if texts[name]},
    )


def _merged(
    rows: Sequence[Mapping[str, Any]], annotated: Mapping[str, list[str]] | None, ontology: Ontology
) -> tuple[dict[str, Mapping[str, Any]], dict[str, dict[Aspect, list[str]]]]:
    """Return for each protein its first row, and the raw label ids by aspect over all of its rows."""
    first: dict[str, Mapping[str, Any]] = {}
    raw: dict[str, dict[Aspect, list[str]]] = {}
    for number, row in enumerate(rows):
        name = text_of(row.get("protein_id"))
        if not name:
            raise ConfigError(f"row {number} has no protein_id", _HINT)
        first.setdefault(name, row)
        known = raw.setdefault(name, {aspect: [] for aspect in ASPECTS})
        if annotated is None:
            for aspect, column in LABEL_COLUMNS.items():
                known[aspect] += ids_of(row.get(column), f"{name}, {column}")
        elif row is first[name]:
            for go_id in annotated.get(name, ()):
                index = ontology.index_of(go_id)
                known["mf" if index is None else ontology.aspect(index)].append(go_id)
    return first, raw


def audit_fields(
    rows: Iterable[tuple[Mapping[str, Any], ProteinRecord]], ontology: Ontology, drop: bool
) -> tuple[FieldAudit, ...]:
    """Return the audit of every field that a prompt could show, beside the guesses."""
    pairs = [(row, record, _spellings(record, ontology)) for row, record in rows]
    audits = []
    for name in (*EVIDENCE, *NOTES):
        ids = names = 0
        for row, _, (right, patterns) in pairs:
            text = text_of(row.get(name))
            ids += bool(right & set(_ID.findall(text)))
            names += bool(text) and patterns is not None and patterns.search(text.lower()) is not None
        total = max(1, len(pairs))
        leaks = ids > LEAK_SHARE * total or (name in NOTES and names > LEAK_SHARE * total)
        audits.append(FieldAudit(name, ids / total, names / total, leaks, leaks and drop))
    return tuple(audits)


def _spellings(record: ProteinRecord, ontology: Ontology) -> tuple[set[str], re.Pattern[str] | None]:
    """Return the label ids of a protein, and a pattern of their names in lower case, without ` activity`."""
    right = {go_id for aspect in ASPECTS for go_id in record.labels[aspect]}
    indices = [ontology.index_of(go_id) for go_id in right]
    names = {ontology.name(index).lower().removesuffix(" activity") for index in indices if index is not None}
    long = sorted(re.escape(name) for name in names if len(name) >= _SHORTEST_NAME)
    return right, re.compile(rf"\b(?:{'|'.join(long)})\b") if long else None


def _without(record: ProteinRecord, dropped: frozenset[str]) -> ProteinRecord:
    """Return a record without the fields that carry the answer."""
    return replace(
        record,
        name="" if "protein_names" in dropped else record.name,
        organism="" if "organism" in dropped else record.organism,
        domains=() if "interpro_formatted" in dropped else record.domains,
        partners=() if "ppi_formatted" in dropped else record.partners,
        notes={name: text for name, text in record.notes.items() if name not in dropped},
    )


def _split(
    records: Sequence[ProteinRecord], first: Mapping[str, Mapping[str, Any]], heldout: int
) -> list[ProteinRecord]:
    members = [
        Member(
            record.id,
            record.gene,
            frozenset(line.partition(" ")[0] for line in record.domains),
            sample_kmers(text_of(first[record.id].get("sequence"))),
        )
        for record in records
    ]
    cluster_of = clusters(members)
    chosen = held_out(cluster_of, heldout)
    return [
        replace(record, cluster=cluster_of[record.id], split="heldout" if record.id in chosen else "train")
        for record in records
    ]


def build_records(
    rows: Sequence[Mapping[str, Any]],
    ontology: Ontology,
    *,
    annotated: Mapping[str, list[str]] | None = None,
    drop: bool = True,
    heldout: int,
) -> tuple[list[ProteinRecord], Audit]:
    """Return the proteins that have labels, split, and the audit.

    Args:
        rows: in the layout of the module; a protein in several rows gets the labels of all.
        annotated: raw label ids by protein, in place of the label columns.
        drop: leave fields that carry the answer out of the prompt.
        heldout: number of proteins to hold out.

    Raises:
        ConfigError: when a row has no id or a label cell holds no ids, or no protein has labels.
        RefusedError: when the labels were made with another release of the ontology.
    """
    first, raw = _merged(rows, annotated, ontology)
    reader = _Labels(ontology)
    records = [_record(row, reader.labels(raw[name]), ontology) for name, row in first.items()]
    reader.check_release()
    kept = [record for record in records if any(record.labels.values())]
    if not kept:
        raise ConfigError("no record has a label", _HINT)
    fields = audit_fields(((first[record.id], record) for record in kept), ontology, drop)
    split = _split(kept, first, heldout)
    dropped = frozenset(one.field for one in fields if one.dropped)
    left_out = {kind: count for kind, count in sorted(reader.left_out.items()) if count}
    audit = Audit(len(rows), len(kept), len(records) - len(kept), len(rows) - len(first), left_out, fields)
    return [_without(record, dropped) for record in split], audit


def load_records(
    *,
    path: str | None,
    hub: str | None,
    revision: str | None,
    gaf: str | None,
    ontology: Ontology,
    drop: bool,
    heldout: int,
) -> tuple[list[ProteinRecord], Audit]:
    """Read records from a file, a folder or the Hub; exactly one of `path` and `hub` is given.

    Raises:
        ConfigError, NotFoundError, RefusedError, MissingExtraError, InfraError: as `read_rows`, `read_gaf`
            and `build_records`.
    """
    rows = read_rows(path, hub, revision)
    annotated = read_gaf(Path(gaf), ontology) if gaf else None
    return build_records(rows, ontology, annotated=annotated, drop=drop, heldout=heldout)
