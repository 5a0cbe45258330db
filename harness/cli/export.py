"""`harness export`: the ledger's tables as CSV, Parquet or JSON."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Result, mutation_document, rows_document
from harness.cli.shared import Force, command, new_app
from harness.cli.state import program, read_state
from harness.core.canonical import encode_non_finite
from harness.core.errors import UsageError
from harness.core.names import did_you_mean

if TYPE_CHECKING:
    from harness.ledger.tables import Table

APPS = {"export": new_app()}
FORMATS = ("csv", "parquet", "json")


@command(
    APPS["export"],
    "export",
    "harness export --format csv --out runs.csv",
    "harness export --table metrics --format parquet --out metrics.parquet",
    "harness export --table evals --format json",
)
def export(
    form: Annotated[str, typer.Option("--format", help="csv, parquet or json.")] = "csv",
    name: Annotated[str, typer.Option("--table", help="runs, events, evals or metrics.")] = "runs",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; else standard output.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="CSV: keep text that a spreadsheet runs as a formula.")] = False,
    force: Force = False,
) -> Result:
    """Write runs, evals, events or metrics as CSV, Parquet or JSON.

    In CSV, text that a spreadsheet would run as a formula (it begins with = + - @, a tab or a line end) gets
    an apostrophe before it, and control characters are removed; numbers stay numbers. JSON and Parquet hold
    the exact text. Every row is written, there is no limit.
    """
    from harness.cli.asked import gather
    from harness.cli.files import check_target
    from harness.ledger.tables import TABLES

    for value, known, noun in ((form, FORMATS, "format"), (name, TABLES, "table")):
        if value not in known:
            raise UsageError(f"no {noun} {value[:80]!r}", did_you_mean(value, known, f"one of {', '.join(known)}"))
    if form == "parquet" and out is None:
        raise UsageError("Parquet is not text, so it needs a file", "--out runs.parquet")
    here = program()
    if out is not None:
        check_target(here, out, force=force)
    (found,) = gather(here, read_state(here), [name])
    if out is None:
        return _printed(found, form, raw)
    from harness.cli.files import write_answer

    data = _parquet(found) if form == "parquet" else _text(found, form, raw).encode()
    write_answer(here, out, data, force=force)
    detail = {"table": name, "format": form, "rows": len(found.rows), "bytes": len(data)}
    document = mutation_document(str(out), applied=True, dry_run=False, detail=detail)
    return Result(document, [f"{len(found.rows)} {name} written to {out}"])


def _printed(found: Table, form: str, raw: bool) -> Result:
    document = rows_document(_objects(found), {"total": len(found.rows)}, False)
    return Result(document, lambda: [_text(found, form, raw).removesuffix("\n")], multiline=True)


def _objects(found: Table) -> list[dict[str, Any]]:
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def _text(found: Table, form: str, raw: bool) -> str:
    if form == "csv":
        from harness.cli.spreadsheet import csv_text

        return csv_text(list(found.columns), found.rows, raw=raw)
    rows = (json.dumps(encode_non_finite(row), allow_nan=False) for row in _objects(found))
    return "[\n" + ",\n".join(rows) + "\n]\n"


def _parquet(found: Table) -> bytes:
    """Return the table as Parquet; DuckDB writes files only, so it passes through a folder of its own."""
    from harness.ledger.sql import write_parquet

    with tempfile.TemporaryDirectory() as folder:
        path = Path(os.path.join(folder, "table.parquet"))
        write_parquet(found, path)
        return path.read_bytes()
