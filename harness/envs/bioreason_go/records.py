"""A protein as the environment knows it, and the task made from it.

The shipped proteins are one gzip file of JSON lines: a header that names the format, the ontology and its
hash, then one record a line in the order of their ids. `data/README.md` is their data card and
`scripts/build_bioreason_go.py` makes them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from harness.core.canonical import canonical_json, strict_loads
from harness.core.errors import ConfigError
from harness.core.types import Task
from harness.envs.bioreason_go.ontology import Ontology, load_shipped
from harness.envs.bioreason_go.terms import ASPECTS, Aspect

ENV = "bioreason-go"
FORMAT = "bioreason-go proteins 1"
NOTHING = "none"
MOST_LINES = 8
"""Domains and partners that a prompt shows at most."""
Lists = Mapping[Aspect, Sequence[str]]
_HINT = "build the data again with scripts/build_bioreason_go.py"


@dataclass(frozen=True, slots=True)
class ProteinRecord:
    """One protein: what is known of it, what is guessed, and what is right.

    Args:
        id: unique and stable, `ncbi-1956` or the protein id of the source.
        gene: symbol; empty when the source has none.
        name: what the source calls it; may be empty.
        domains: ids, or lines of domains with their names.
        partners: interaction partners, as lines of text.
        candidates: guessed ids by aspect, to be judged; never made from the protein's own annotation.
        labels: right primary ids by aspect, the most specific ones, roots left out; may be empty.
        cluster: proteins that may be near copies of each other share it.
        split: `train` or `heldout`.
        notes: further texts about the protein by name, such as its location, where the source has them.
    """

    id: str
    gene: str
    name: str
    organism: str
    domains: tuple[str, ...]
    candidates: Lists
    labels: Lists
    cluster: str
    split: str
    partners: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def write_records(records: Iterable[ProteinRecord], ontology: Ontology) -> bytes:
    """Return the text of shipped records, in the order of their ids; the same bytes for the same records."""
    head = {"format": FORMAT, "ontology": ontology.sha, "release": ontology.release}
    lines = [canonical_json(head)]
    for record in sorted(records, key=lambda one: one.id):
        row = {
            "id": record.id,
            "gene": record.gene,
            "name": record.name,
            "organism": record.organism,
            "domains": list(record.domains),
            "cluster": record.cluster,
            "split": record.split,
            "labels": {aspect: list(record.labels[aspect]) for aspect in ASPECTS},
            "candidates": {aspect: list(record.candidates[aspect]) for aspect in ASPECTS},
        }
        lines.append(canonical_json(row))
    return ("\n".join(lines) + "\n").encode()


def read_records(data: bytes, ontology: Ontology) -> tuple[ProteinRecord, ...]:
    """Read what `write_records` wrote.

    Raises:
        ConfigError: when it is something else.
        RefusedError: when it was made with another ontology.
    """
    head, *lines = data.decode("utf-8").rstrip("\n").split("\n")
    try:
        header = strict_loads(head)
        rows = [json.loads(line) for line in lines]
        if header["format"] != FORMAT:
            raise ConfigError(f"proteins: the format is {str(header['format'])[:60]!r}", _HINT)
        ontology.require(str(header["ontology"]), "the protein data set")
        return tuple(_record(row) for row in rows)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"proteins: {error} is missing or of a wrong type", _HINT) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"proteins: not JSON lines: {error}", _HINT) from error


def _record(row: Mapping[str, Any]) -> ProteinRecord:
    return ProteinRecord(
        id=row["id"],
        gene=row["gene"],
        name=row["name"],
        organism=row["organism"],
        domains=tuple(row["domains"]),
        candidates={aspect: tuple(row["candidates"][aspect]) for aspect in ASPECTS},
        labels={aspect: tuple(row["labels"][aspect]) for aspect in ASPECTS},
        cluster=row["cluster"],
        split=row["split"],
    )


@lru_cache(maxsize=1)
def load_shipped_records() -> tuple[ProteinRecord, ...]:
    """Load the proteins in the package."""
    data = (files("harness.envs.bioreason_go") / "data" / "proteins.jsonl.gz").read_bytes()
    return read_records(gzip.decompress(data), load_shipped())


def candidate_lines(ids: Sequence[str], ontology: Ontology) -> str:
    """Return candidates as the prompt shows them, `GO:0004672 protein kinase activity`, one a line."""
    lines = []
    for go_id in ids:
        index = ontology.index_of(go_id)
        lines.append(go_id if index is None else f"{go_id} {ontology.name(index)}")
    return "\n".join(lines) or NOTHING


def task_of(record: ProteinRecord, ontology: Ontology) -> Task:
    """Return the task of a protein; its answer holds the labels by aspect as JSON."""
    labels = {aspect: list(record.labels.get(aspect, ())) for aspect in ASPECTS}
    guesses: dict[str, str] = {a: candidate_lines(record.candidates.get(a, ()), ontology) for a in ASPECTS}
    fields = {
        "gene": record.gene or record.id,
        "name": record.name or record.gene or record.id,
        "organism": record.organism or NOTHING,
        "domains": "\n".join(record.domains[:MOST_LINES]) or NOTHING,
        "partners": "\n".join(record.partners[:MOST_LINES]) or NOTHING,
        "notes": "\n".join(f"{name}: {' '.join(text.split())}" for name, text in record.notes.items()) or NOTHING,
        **guesses,
    }
    return Task(
        id=record.id,
        env=ENV,
        split=record.split,
        fields=fields,
        answer=canonical_json(labels),
        label="+".join(aspect for aspect in ASPECTS if labels[aspect]),
        cluster=record.cluster,
        meta={"gene": record.gene, "release": ontology.release},
    )


def task_labels(task: Task) -> dict[Aspect, list[str]]:
    """Return the right ids of a task by aspect."""
    labels = json.loads(task.answer)
    return {aspect: list(labels.get(aspect, ())) for aspect in ASPECTS}


def task_candidates(task: Task) -> dict[Aspect, list[str]]:
    """Return the guessed ids of a task by aspect, in the order the prompt shows them."""
    shown = {aspect: task.fields.get(aspect, NOTHING) for aspect in ASPECTS}
    return {
        aspect: [] if text == NOTHING else [line.partition(" ")[0] for line in text.split("\n")]
        for aspect, text in shown.items()
    }
