"""Where an ontology comes from: OBO text, the compact shipped text, or tables of a GO database.

Every reader gives `Tables`, plain values without a graph; `ontology.build` makes the graph. The OBO
reader is our own because it needs seven tags of the format and nothing else: the full go.obo loads in
a tenth of the time and memory of the general libraries (docs/environments/bioreason-go.md has the
comparison), and those drop alternative or obsolete ids by default.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from harness.core.errors import ConfigError, NotFoundError

Aspect = Literal["mf", "bp", "cc"]
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)
ASPECT_NAMES: dict[Aspect, str] = {
    "mf": "molecular_function",
    "bp": "biological_process",
    "cc": "cellular_component",
}
UNKNOWN_RELEASE = "unknown"
COMPACT_MAGIC = "go-ontology 1"

_NAMESPACES: dict[bytes, Aspect] = {name.encode(): aspect for aspect, name in ASPECT_NAMES.items()}
_SINGLE = frozenset({b"id", b"name", b"namespace", b"is_obsolete"})
_LINE = re.compile(
    rb"\n(?:\[([^\]\n]*)\]|(id|name|namespace|is_obsolete|alt_id|is_a|replaced_by|relationship(?=: part_of ))"
    rb": ([^\r\n]*))"
)
_DATE = re.compile(rb"\d{4}-\d{2}-\d{2}")
_ESCAPE = re.compile(r"\\(.)")
_OBO_HINT = "expected go-basic.obo or go.obo of a GO release"
_EXPORT_HINT = "expected terms, edges, alt_ids and obsolete .tsv.gz, each with a header line"


class Term(NamedTuple):
    """One current term; a tuple, since tens of thousands are made at once.

    Args:
        is_a: ids of its parents, as the source has them.
        part_of: ids of the wholes it is part of; may lie in another aspect.
    """

    id: str
    name: str
    aspect: Aspect
    is_a: tuple[str, ...] = ()
    part_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tables:
    """What a source says.

    Args:
        release: date of the release, `unknown` where the source has none.
        terms: current terms in any order.
        alternatives: alternative id to the primary id.
        obsolete: obsolete id to its `replaced_by` ids, where the source has them.
    """

    release: str
    terms: tuple[Term, ...]
    alternatives: Mapping[str, str]
    obsolete: Mapping[str, tuple[str, ...]]


def _first_word(value: bytes) -> str:
    # `GO:0000001 {is_inferred="true"} ! name`: the id is the first word
    return value.split(None, 1)[0].decode("utf-8") if value.strip() else ""


def _text(value: bytes) -> str:
    text = value.decode("utf-8")
    return _ESCAPE.sub(r"\1", text) if "\\" in text else text


class _Reader:
    """Collects the stanzas of one OBO file."""

    def __init__(self) -> None:
        self.release = UNKNOWN_RELEASE
        self.default: bytes = b""
        self.terms: dict[str, Term] = {}
        self.alternatives: dict[str, str] = {}
        self.obsolete: dict[str, tuple[str, ...]] = {}

    def header(self, text: bytes) -> None:
        """Take the lines before the first stanza."""
        for line in text.splitlines():
            tag, _, value = line.partition(b": ")
            if tag == b"data-version" and (date := _DATE.search(value)):
                self.release = date[0].decode()
            elif tag == b"default-namespace":
                self.default = value.strip()

    def add(self, single: Mapping[bytes, bytes], repeated: Mapping[bytes, list[bytes]]) -> None:
        """Take one [Term] stanza."""
        if b"id" not in single:
            raise ConfigError("OBO: a [Term] has no id", _OBO_HINT)
        name = _first_word(single[b"id"])
        if name in self.terms or name in self.obsolete:
            raise ConfigError(f"OBO: the term {name[:40]} stands twice", _OBO_HINT)
        for alternative in repeated.get(b"alt_id", ()):
            self.alternatives[_first_word(alternative)] = name
        if single.get(b"is_obsolete", b"").strip() == b"true":
            self.obsolete[name] = tuple(_first_word(value) for value in repeated.get(b"replaced_by", ()))
            return
        namespace = single.get(b"namespace", self.default).strip()
        if namespace not in _NAMESPACES:
            raise ConfigError(f"OBO: {name[:40]} has the namespace {namespace.decode()[:40]!r}", _OBO_HINT)
        part_of = (_first_word(value.partition(b" ")[2]) for value in repeated.get(b"relationship", ()))
        self.terms[name] = Term(
            name,
            _text(single.get(b"name", b"")),
            _NAMESPACES[namespace],
            tuple(_first_word(value) for value in repeated.get(b"is_a", ())),
            tuple(part_of),
        )


def read_obo(data: bytes | mmap) -> Tables:
    """Read an OBO file: [Term] stanzas and the release in the header; other stanzas are skipped.

    Raises:
        ConfigError: when a term has no id, stands twice or has a namespace that is no GO aspect, or there is no term.
    """
    if data[:1] == b"[":
        data = b"\n" + data[:]  # every line that counts follows a line end
    reader = _Reader()
    single: dict[bytes, bytes] = {}
    repeated: dict[bytes, list[bytes]] = {}
    wanted = False
    try:
        reader.header(data[: max(0, data.find(b"\n["))])
        for match in _LINE.finditer(data):  # one pass in C: most lines of the file are none of these
            stanza, tag, value = match.groups()
            if tag is None:
                if wanted:
                    reader.add(single, repeated)
                wanted, single, repeated = stanza == b"Term", {}, {}
            elif tag in _SINGLE:
                single[tag] = value
            else:
                repeated.setdefault(tag, []).append(value)
        if wanted:
            reader.add(single, repeated)
    except UnicodeDecodeError as error:
        raise ConfigError(f"OBO: not UTF-8: {error.reason}", _OBO_HINT) from error
    if not reader.terms:
        raise ConfigError("OBO: there is no [Term] in it", _OBO_HINT)
    return Tables(reader.release, tuple(reader.terms.values()), reader.alternatives, reader.obsolete)


def write_compact(tables: Tables) -> bytes:
    """Return tables as the compact text, in one canonical order; its SHA-256 names an ontology.

    Lines of cells joined by tabs: a header with the release, `T id aspect name is_a part_of` (parents joined by
    spaces), `A alternative primary`, `O obsolete replaced_by`, each kind in the order of its ids.
    """
    lines = [f"{COMPACT_MAGIC}\t{tables.release}"]
    for term in sorted(tables.terms, key=lambda term: term.id):
        parents = " ".join(sorted(term.is_a)), " ".join(sorted(term.part_of))
        lines.append("\t".join(("T", term.id, term.aspect, " ".join(term.name.split()), *parents)))
    lines += [f"A\t{alternative}\t{primary}" for alternative, primary in sorted(tables.alternatives.items())]
    lines += [f"O\t{name}\t{' '.join(sorted(replaced))}" for name, replaced in sorted(tables.obsolete.items())]
    return ("\n".join(lines) + "\n").encode()


def read_compact(data: bytes) -> Tables:
    """Read what `write_compact` wrote.

    Raises:
        ConfigError: when it is something else.
    """
    head, *lines = data.decode("utf-8").split("\n")
    magic, _, release = head.partition("\t")
    if magic != COMPACT_MAGIC or lines[-1:] != [""]:
        raise ConfigError("not a compact ontology, or cut off", "reinstall the package")
    terms: list[Term] = []
    alternatives: dict[str, str] = {}
    obsolete: dict[str, tuple[str, ...]] = {}
    for line in lines[:-1]:
        kind, name, *cells = line.split("\t")
        if kind == "T":
            aspect, title, is_a, part_of = cells
            terms.append(Term(name, title, aspect, tuple(is_a.split()), tuple(part_of.split())))  # type: ignore[arg-type]
        elif kind == "A":
            alternatives[name] = cells[0]
        else:
            obsolete[name] = tuple(cells[0].split())
    return Tables(release, tuple(terms), alternatives, obsolete)


def _rows(folder: Path, name: str, columns: int) -> Iterator[list[str]]:
    path = folder / f"{name}.tsv.gz"
    if not path.is_file():
        raise NotFoundError(f"no file {path.name} in {folder}", _EXPORT_HINT)
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        next(file, None)
        for number, line in enumerate(file, 2):
            cells = line.rstrip("\n").split("\t")
            if len(cells) != columns:
                raise ConfigError(f"{path.name}:{number}: {len(cells)} columns instead of {columns}", _EXPORT_HINT)
            yield cells


def read_export(folder: Path, release: str) -> Tables:
    """Read the tables of a GO database exported as TSV; relations other than `isa` and `part of` are left out.

    Args:
        folder: holds terms (id, aspect, name), edges (child, relation, parent), alt_ids and obsolete .tsv.gz.
        release: date of the release; the tables do not have it.

    Raises:
        NotFoundError: when a table is missing.
        ConfigError: when a row has the wrong columns or an unknown aspect.
    """
    parents: dict[str, dict[str, list[str]]] = {"isa": {}, "part of": {}}
    for child, relation, parent in _rows(folder, "edges", 3):
        if relation in parents:
            parents[relation].setdefault(child, []).append(parent)
    terms = []
    for name, aspect, title in _rows(folder, "terms", 3):
        if aspect.lower() not in ASPECTS:
            raise ConfigError(f"terms.tsv.gz: {name} has the aspect {aspect[:20]!r}", _EXPORT_HINT)
        is_a, part_of = (tuple(parents[relation].get(name, ())) for relation in ("isa", "part of"))
        terms.append(Term(name, title, aspect.lower(), is_a, part_of))  # type: ignore[arg-type]
    alternatives = {row[0]: row[1] for row in _rows(folder, "alt_ids", 2)}
    obsolete: dict[str, tuple[str, ...]] = {name: () for name, _, _ in _rows(folder, "obsolete", 3)}
    return Tables(release, tuple(terms), alternatives, obsolete)
