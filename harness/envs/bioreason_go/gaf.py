"""Annotations from a GAF file (Gene Association File 2.x): which terms experiments gave to which protein."""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.core.errors import ConfigError, NotFoundError, RefusedError
from harness.envs.bioreason_go.ontology import Ontology

EXPERIMENTAL = frozenset({"EXP", "IDA", "IPI", "IMP", "IGI", "IEP"})
COLUMNS = 15
"""Columns that every row of GAF 1.0 and later has."""
_RELEASE = re.compile(r"^!\s*go-version:.*?(\d{4}-\d{2}-\d{2})")
_HINT = "expected a GAF 2.x file, plain or .gz, as the Gene Ontology publishes them"


def _lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            yield from file
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", _HINT) from error


def read_gaf(path: Path, ontology: Ontology) -> dict[str, list[str]]:
    """Return the ids with experimental evidence by protein id, each once, in the order of the file.

    Rows with the qualifier NOT and rows with any other evidence are left out. The ids are as the file has them.

    Raises:
        NotFoundError: when there is no such file.
        ConfigError: when a row has too few columns, or no row is an annotation.
        RefusedError: when the file names another release of the ontology.
    """
    if not path.is_file():
        raise NotFoundError(f"no annotations at {path}", "give the path of a GAF file")
    return parse_gaf(_lines(path), ontology, path.name)


def parse_gaf(lines: Iterable[str], ontology: Ontology, name: str = "GAF") -> dict[str, list[str]]:
    """Return what `read_gaf` returns, from the lines of a file."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    rows = 0
    for number, line in enumerate(lines, 1):
        if line.startswith("!"):
            release = _RELEASE.match(line)
            if release and release[1] != ontology.release:
                raise RefusedError(
                    f"{name} was made with the ontology of {release[1]}, but this is the release {ontology.release}",
                    "set env.bioreason-go.args.ontology to the OBO file of that release",
                )
            continue
        if not line.strip():
            continue
        cells = line.rstrip("\r\n").split("\t")
        if len(cells) < COLUMNS:
            raise ConfigError(f"{name}:{number}: {len(cells)} columns, at least {COLUMNS} expected", _HINT)
        rows += 1
        protein, qualifier, go_id, evidence = cells[1], cells[3], cells[4], cells[6]
        if evidence in EXPERIMENTAL and "NOT" not in qualifier.split("|"):
            found[protein][go_id] = None
    if not rows:
        raise ConfigError(f"{name} holds no annotation", _HINT)
    return {protein: list(ids) for protein, ids in found.items()}
