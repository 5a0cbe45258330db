"""`harness query`: SQL over the ledger, read-only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Cell, Line, Result, Styled, rows_document, table
from harness.cli.shared import All, Limit, command, new_app
from harness.cli.state import program, read_state
from harness.core.errors import UsageError
from harness.core.names import did_you_mean

if TYPE_CHECKING:
    from harness.ledger.sql import Answer

APPS = {"query": new_app()}
FORMATS = ("table", "csv")
_SIGNED = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_NUMBERS = {*_SIGNED, *(f"U{kind}" for kind in _SIGNED), "DOUBLE", "FLOAT", "DECIMAL"}


@command(
    APPS["query"],
    "query",
    'harness query "SELECT run, decision, gain FROM runs WHERE gain_low > 0 ORDER BY gain DESC"',
    "harness query \"SELECT run, config->>'$.lora.alpha' AS alpha, reward FROM runs\" --format csv",
    "harness query \"SELECT run, step, value FROM metrics WHERE metric LIKE '%/reward/mean'\" --json",
    'harness query "DESCRIBE evals"',
)
def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT, or `-` to read it from standard input.")],
    form: Annotated[str, typer.Option("--format", help="How to print the rows: table or csv.")] = "table",
    limit: Limit = 100,
    everything: All = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds after which the query is stopped.")] = 30.0,
) -> Result:
    """Ask the ledger in SQL, read-only.

    Tables: runs, events, evals (one row per eval and metric) and metrics (one row per run, step and
    training metric). DuckDB answers in memory, from copies: a statement reaches no file, no network and no
    extension. Nested data are JSON text, `data->>'$.reason'` reads them.
    """
    from harness.ledger import sql as database

    if form not in FORMATS:
        raise UsageError(f"no format {form[:80]!r}", did_you_mean(form, FORMATS, f"one of {', '.join(FORMATS)}"))
    database.load_duckdb()
    if sql == "-" and sys.stdin is None:
        raise UsageError("standard input is closed, so there is no statement to read", "give it as the argument")
    text = sys.stdin.read(database.MAX_SQL + 1) if sql == "-" else sql
    from harness.cli.asked import gather

    here = program()
    tables = gather(here, read_state(here), database.tables_of(text))
    answer = database.query(tables, text, limit=None if everything else limit, timeout_s=timeout)
    rows = [{name: plain(value) for name, value in zip(answer.columns, row, strict=True)} for row in answer.rows]
    data = rows_document(rows, {"shown": len(rows)}, answer.more) | {"columns": answer.columns}
    return Result(data, lambda: _lines(answer, rows, form), multiline=form != "table")


def plain(value: Any) -> Any:
    """Return a value of DuckDB as JSON knows it: dates, decimals and the like as text, numbers as numbers."""
    from datetime import date, time
    from decimal import Decimal

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Decimal):
        number = float(value)
        return number if Decimal(repr(number)) == value else str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def _lines(answer: Answer, rows: Sequence[dict[str, Any]], form: str) -> list[Line]:
    if form == "csv":
        from harness.cli.spreadsheet import csv_text

        cells = ([_text(value) for value in row.values()] for row in rows)
        return [csv_text(list(answer.columns), cells).removesuffix("\n")]
    numbers = [name for name, kind in answer.columns.items() if _is_number(kind)]
    grid = [[_cell(value) for value in row.values()] for row in rows]
    lines = table(list(answer.columns), grid, right=" ".join(numbers))
    if answer.more:
        lines.append(Styled(f"first {len(rows)} rows; --limit N or --all shows more", "dim"))
    elif not rows:
        lines.append(Styled("no rows", "dim"))
    return lines


def _is_number(kind: str) -> bool:
    return kind.partition("(")[0] in _NUMBERS


def _text(value: Any) -> Any:
    """Return nested values as JSON text, as a cell holds them."""
    import json

    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(_text(value))
