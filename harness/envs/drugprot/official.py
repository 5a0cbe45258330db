"""The official DrugProt release as tasks: TSV files, or rows of the parquet edition.

A folder holds `*abstra*.tsv` (pmid, title, abstract), `*entit*.tsv` (pmid, id, type, start, end,
text) and `*relation*.tsv` (pmid, type, Arg1:id, Arg2:id); the release itself spells "abstracs". No header, UTF-8.
Offsets count code points over title + one character + abstract, end exclusive, and are all checked.
A `.jsonl` or `.parquet` file holds rows {pmid, title, abstract, text, entities, relations}.

A question names its chemical and its protein by their surface text, so mentions that differ only
in place or case are one pair. Where such a pair has more than one relation in a document it is
dropped there: scoring one arbitrary label of several would be noise. `OfficialStats` has the count.

Splits are by document (SHA-256 of the PMID, a quarter held out): an abstract is in one split
only. The same pair may be in abstracts of both; how many are is counted as well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError, NotFoundError
from harness.core.types import Task
from harness.envs.drugprot.labels import LABELS, LETTERS, letter_of
from harness.envs.rows import json_lines, parquet_rows

HELDOUT_PERCENT = 25
ENTITY_TYPES = frozenset({"CHEMICAL", "GENE", "GENE-Y", "GENE-N"})
_LAYOUT_HINT = "the folder of the official release holds abstracts, entities and relations TSVs; see docs"


@dataclass(frozen=True, slots=True)
class Entity:
    """One mention; offsets in code points of the document text, end exclusive."""

    id: str
    type: str
    start: int
    end: int
    text: str

    @property
    def is_chemical(self) -> bool:
        """Whether this is the chemical side of a relation."""
        return self.type == "CHEMICAL"


@dataclass(frozen=True, slots=True)
class Document:
    """One abstract with its mentions and its (type, chemical id, protein id) relations."""

    pmid: str
    title: str
    abstract: str
    entities: Mapping[str, Entity]
    relations: tuple[tuple[str, str, str], ...]

    @property
    def text(self) -> str:
        """Title, one space, abstract: what offsets count over and what the model reads."""
        return f"{self.title} {self.abstract}"


@dataclass(frozen=True, slots=True)
class OfficialStats:
    """What was read, what was left out, and what recurs across the split."""

    documents: int
    documents_without_relations: int
    relations: int
    surface_pairs: int
    ambiguous_dropped: int
    embedded_dropped: int
    train: int
    heldout: int
    recurring_pairs: int
    """Distinct held-out pairs (names without case) that also occur in a train document."""
    recurring_heldout: int
    """Held-out tasks with such a pair."""

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class OfficialCorpus:
    """Tasks by split, and the counts that belong beside any result on them."""

    tasks: dict[str, tuple[Task, ...]]
    stats: OfficialStats


def build_document(
    pmid: str, title: str, abstract: str, entities: Iterable[Entity], relations: Iterable[tuple[str, str, str]]
) -> Document:
    """Return a checked document; relation arguments may come in either order, repeats count once.

    Raises:
        ConfigError: on an unknown type, an offset that does not give the mention's text, or a
            relation that does not join a chemical and a protein of this document.
    """
    by_id: dict[str, Entity] = {}
    text = f"{title} {abstract}"
    for entity in entities:
        if entity.type not in ENTITY_TYPES:
            raise ConfigError(f"document {pmid}, {entity.id}: unknown entity type {entity.type[:40]!r}", _LAYOUT_HINT)
        if entity.id in by_id:
            raise ConfigError(f"document {pmid}: two entities are called {entity.id}", _LAYOUT_HINT)
        if text[entity.start : entity.end] != entity.text:
            raise ConfigError(
                f"document {pmid}, {entity.id}: offsets {entity.start}-{entity.end} give "
                f"{text[entity.start : entity.end][:40]!r}, not {entity.text[:40]!r}",
                "offsets count code points over title, one character, abstract; was the text normalised?",
            )
        by_id[entity.id] = entity
    checked: dict[tuple[str, str, str], None] = {}
    for label, first, second in relations:
        pair = [by_id[i] for i in (first, second) if i in by_id]
        if label not in LABELS or len(pair) != 2 or pair[0].is_chemical == pair[1].is_chemical:
            raise ConfigError(
                f"document {pmid}: relation {label[:40]!r} of {first[:20]} and {second[:20]} is not one of the 13 "
                "types between a chemical and a protein of the document",
                _LAYOUT_HINT,
            )
        chemical, protein = pair if pair[0].is_chemical else reversed(pair)
        checked[label, chemical.id, protein.id] = None
    return Document(pmid, title, abstract, by_id, tuple(checked))


def _rows(path: Path, columns: int) -> Iterator[list[str]]:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", _LAYOUT_HINT) from error
    # Not splitlines: abstracts may hold U+2028 and other characters it would break at.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        cells = line.removesuffix("\r").split("\t", columns - 1)
        if len(cells) != columns:
            raise ConfigError(f"{path}:{number}: {len(cells)} columns instead of {columns}", _LAYOUT_HINT)
        yield cells


def _number(cell: Any, where: str) -> int:
    try:
        return int(cell)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: offset {str(cell)[:40]!r} is not a number", _LAYOUT_HINT) from None


def _argument(cell: str, name: str, where: str) -> str:
    if not cell.startswith(f"{name}:"):
        raise ConfigError(f"{where}: argument {cell[:40]!r} does not start with {name}:", _LAYOUT_HINT)
    return cell.removeprefix(f"{name}:")


def read_tsv(folder: Path) -> list[Document]:
    """Read the three TSV files of a folder, documents in file order.

    Raises:
        NotFoundError: when a file is missing.
        ConfigError: when there are two candidates for one, or a row is not as the module describes.
    """
    paths = []
    for pattern in ("*abstra*.tsv", "*entit*.tsv", "*relation*.tsv"):
        found = sorted(folder.glob(pattern))
        if not found:
            raise NotFoundError(f"no file {pattern} in {folder}", _LAYOUT_HINT)
        if len(found) > 1:
            raise ConfigError(f"several files {pattern} in {folder}: {', '.join(p.name for p in found)}", _LAYOUT_HINT)
        paths.append(found[0])
    texts = {row[0]: row for row in _rows(paths[0], 3)}
    entities: dict[str, list[Entity]] = defaultdict(list)
    for pmid, name, kind, start, end, text in _rows(paths[1], 6):
        where = f"{paths[1].name}, {pmid} {name}"
        entities[pmid].append(Entity(name, kind, _number(start, where), _number(end, where), text))
    relations: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for pmid, label, first, second in _rows(paths[2], 4):
        where = f"{paths[2].name}, {pmid}"
        relations[pmid].append((label, _argument(first, "Arg1", where), _argument(second, "Arg2", where)))
    strays = (set(entities) | set(relations)) - set(texts)
    if strays:
        raise ConfigError(f"{len(strays)} documents have annotations but no text, first {min(strays)}", _LAYOUT_HINT)
    return [
        build_document(pmid, title, abstract, entities[pmid], relations[pmid])
        for pmid, title, abstract in texts.values()
    ]


def _document_of_row(row: Mapping[str, Any], where: str) -> Document:
    try:
        entities = [
            Entity(str(e["id"]), str(e["type"]), _number(e["start"], where), _number(e["end"], where), str(e["text"]))
            for e in row["entities"]
        ]
        relations = [(str(r["type"]), str(r["arg1"]), str(r["arg2"])) for r in row["relations"]]
        pmid, title, abstract = str(row["pmid"]), str(row["title"]), str(row["abstract"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where} is not a DrugProt row: {error}", _LAYOUT_HINT) from error
    return build_document(pmid, title, abstract, entities, relations)


def read_jsonl(path: Path) -> list[Document]:
    """Read rows of the parquet edition from JSON lines.

    Raises:
        ConfigError: when a line is not such a row.
    """
    return [_document_of_row(row, where) for where, row in json_lines(path, _LAYOUT_HINT)]


def read_parquet(path: Path) -> list[Document]:
    """Read the parquet edition.

    Raises:
        MissingExtraError: when pyarrow is not installed.
        ConfigError: when the file or a row is not as the module describes.
    """
    rows = parquet_rows(path, _LAYOUT_HINT)
    return [_document_of_row(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def read_documents(path: Path) -> list[Document]:
    """Read a folder of TSVs, or a .jsonl or .parquet file.

    Raises:
        NotFoundError: when there is nothing at `path`.
        ConfigError: when what is there cannot be read.
    """
    if path.is_dir():
        documents = read_tsv(path)
    elif not path.exists():
        raise NotFoundError(f"no DrugProt data at {path}", "set env.drugprot.args.path to the release's folder or file")
    else:
        readers = {".jsonl": read_jsonl, ".parquet": read_parquet}
        if path.suffix not in readers:
            raise ConfigError(f"cannot read {path.name}: not a folder, .jsonl or .parquet", _LAYOUT_HINT)
        documents = readers[path.suffix](path)
    twice = len(documents) - len({d.pmid for d in documents})
    if twice:
        raise ConfigError(f"{path}: {twice} documents occur twice", "keep one row for each PMID")
    return documents


def pair_key(chemical: str, protein: str) -> str:
    """Return a pair as one key, without case; spelt like `Fact.pair`, so the corpora can be compared."""
    return f"{chemical} | {protein}".casefold()


def surface_pairs(document: Document) -> list[tuple[str, str, frozenset[str]]]:
    """Return the related (chemical text, protein text, labels) of a document, compared without case.

    The spelling is that of the pair's first relation.
    """
    spelling: dict[str, tuple[str, str]] = {}
    labels: dict[str, set[str]] = defaultdict(set)
    for label, chemical, protein in document.relations:
        texts = document.entities[chemical].text, document.entities[protein].text
        key = pair_key(*texts)
        spelling.setdefault(key, texts)
        labels[key].add(label)
    return [(*texts, frozenset(labels[key])) for key, texts in spelling.items()]


def split_of(pmid: str) -> str:
    """Return the split of a document, by the hash of its PMID."""
    return "heldout" if int(sha256_hex(f"drugprot/{pmid}")[:8], 16) % 100 < HELDOUT_PERCENT else "train"


def _task(document: Document, chemical: str, protein: str, label: str) -> Task:
    name = sha256_hex(json.dumps([chemical, protein]))[:10]
    return Task(
        id=f"pmid-{document.pmid}-{name}",
        env="drugprot",
        split=split_of(document.pmid),
        fields={"abstract": document.text, "chemical": chemical, "protein": protein, "letters": LETTERS},
        answer=letter_of(label),
        label=label,
        cluster=document.pmid,
        meta={"source": f"PMID:{document.pmid}", "pair": pair_key(chemical, protein)},
    )


def build_corpus(documents: Sequence[Document], exclude: AbstractSet[str] = frozenset()) -> OfficialCorpus:
    """Return the tasks of the documents, in hash order.

    Args:
        documents: checked documents.
        exclude: pairs ("chemical | protein", without case) to leave out of the held-out split.
    """
    tasks: dict[str, list[Task]] = {"train": [], "heldout": []}
    pairs = ambiguous = embedded = 0
    for document in documents:
        for chemical, protein, labels in surface_pairs(document):
            pairs += 1
            if len(labels) > 1:
                ambiguous += 1
            elif split_of(document.pmid) == "heldout" and pair_key(chemical, protein) in exclude:
                embedded += 1
            else:
                task = _task(document, chemical, protein, next(iter(labels)))
                tasks[task.split].append(task)
    train_pairs = {task.meta["pair"] for task in tasks["train"]}
    recurring = [task.meta["pair"] for task in tasks["heldout"] if task.meta["pair"] in train_pairs]
    stats = OfficialStats(
        documents=len(documents),
        documents_without_relations=sum(not d.relations for d in documents),
        relations=sum(len(d.relations) for d in documents),
        surface_pairs=pairs,
        ambiguous_dropped=ambiguous,
        embedded_dropped=embedded,
        train=len(tasks["train"]),
        heldout=len(tasks["heldout"]),
        recurring_pairs=len(set(recurring)),
        recurring_heldout=len(recurring),
    )
    # Hash order: the first N items are a random sample of the documents, the same everywhere.
    ordered = {s: tuple(sorted(ts, key=lambda task: sha256_hex(f"order/{task.id}"))) for s, ts in tasks.items()}
    return OfficialCorpus(ordered, stats)


def load_official(path: Path, exclude: AbstractSet[str] = frozenset()) -> OfficialCorpus:
    """Read official data and build its tasks.

    Raises:
        NotFoundError, ConfigError, MissingExtraError: as `read_documents`.
    """
    return build_corpus(read_documents(path), exclude)
