"""SQL over the ledger's tables: DuckDB in memory, closed off from files, network and extensions.

The tables are copied in first; then access to the outside is switched off and the settings are
locked, so that no statement can switch it on again. Only a single SELECT is run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.core.errors import MissingExtraError, StoppedError, UsageError
from harness.ledger.tables import COLUMNS, TABLES, Table

if TYPE_CHECKING:
    import duckdb

EXTRA = "query"
MEMORY = "1GB"
MAX_SQL = 100_000
"""Characters of a statement."""
_HELP = f'tables: {", ".join(TABLES)}; `harness query "DESCRIBE runs"` lists columns'
_LOCKED = (
    "enable_external_access = false",
    "allow_community_extensions = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "python_enable_replacements = false",
    f"memory_limit = '{MEMORY}'",
    "lock_configuration = true",  # last: nothing can be set after it
)


class Answer(NamedTuple):
    """Rows of a query, `more` when the limit cut them; `columns` maps names to DuckDB's types."""

    columns: dict[str, str]
    rows: list[tuple[Any, ...]]
    more: bool


def load_duckdb() -> Any:
    """Import DuckDB.

    Raises:
        MissingExtraError: when it is not installed.
    """
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise MissingExtraError(EXTRA, "duckdb") from error
    return duckdb


def tables_of(sql: str) -> list[str]:
    """Return the tables a statement may need; filling one that it does not name would cost time for nothing."""
    lowered = sql.lower()
    # query_table('…') and the like can put a name together.
    return list(TABLES) if "query" in lowered else [name for name in TABLES if name in lowered]


def query(tables: Iterable[Table], sql: str, *, limit: int | None, timeout_s: float) -> Answer:
    """Run one SELECT over tables and return its rows.

    Args:
        tables: what can be asked; the other tables of the ledger are there and empty.
        sql: one statement.
        limit: rows returned at most; None for all.
        timeout_s: seconds after which it is stopped.

    Raises:
        MissingExtraError: without DuckDB.
        UsageError: when it is no single SELECT, or wrong; the message is DuckDB's.
        StoppedError: when it takes too long or too much memory.
    """
    duckdb = load_duckdb()
    if len(sql) > MAX_SQL:
        raise UsageError(f"the statement has {len(sql)} characters, more than {MAX_SQL}", _HELP)
    with _database(duckdb, tables) as connection:
        try:
            _check_select(connection, sql)
            with _deadline(connection, timeout_s):
                relation = connection.sql(sql)
                # The limit goes into the plan: rows beyond it are never made.
                rows = relation.fetchall() if limit is None else relation.limit(limit + 1).fetchall()
            columns = _unique([(column[0], str(column[1])) for column in relation.description])
        except duckdb.InterruptException as error:
            raise StoppedError(
                f"the query took longer than {timeout_s:g} s",
                "--timeout SECONDS allows more; a narrower query is better",
            ) from error
        except duckdb.OutOfMemoryException as error:
            raise StoppedError(f"the query needs more than {MEMORY} of memory", "ask for less at once") from error
        except duckdb.Error as error:
            raise UsageError(_message(error), _HELP) from error
    more = limit is not None and len(rows) > limit
    return Answer(columns, rows[:limit], more)


def _check_select(connection: Any, sql: str) -> None:
    kinds = [statement.type.name for statement in connection.extract_statements(sql)]
    if kinds != ["SELECT"]:
        found = "nothing" if not kinds else " and ".join(kinds[:3])
        raise UsageError(f"one SELECT is needed, this is {found}", f"the ledger is only read here; {_HELP}")


def _message(error: Exception) -> str:
    """Return DuckDB's message on one line, without the excerpt of the statement."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())[:1000]


def _unique(columns: list[tuple[str, str]]) -> dict[str, str]:
    """Return columns by name; a name that comes again gets a number, as in `a_2`."""
    found: dict[str, str] = {}
    for name, kind in columns:
        own, number = name, 2
        while own in found:
            own, number = f"{name}_{number}", number + 1
        found[own] = kind
    return found


@contextlib.contextmanager
def _deadline(connection: Any, timeout_s: float) -> Iterator[None]:
    timer = threading.Timer(timeout_s, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _database(duckdb: Any, tables: Iterable[Table]) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a database in memory that holds the tables and can reach nothing else."""
    connection = duckdb.connect(":memory:")
    try:
        _fill(connection, tables)
        for setting in _LOCKED:
            connection.execute(f"SET {setting}")
        yield connection
    finally:
        connection.close()


def _fill(connection: Any, tables: Iterable[Table]) -> None:
    for name, columns in COLUMNS.items():
        definition = ", ".join(f'"{key}" {kind}' for key, kind in columns.items())
        connection.execute(f"CREATE TABLE {name} ({definition})")
    for table in tables:
        if not table.rows:
            continue
        cells = ", ".join(f"unnest(?::{kind}[])" for kind in table.columns.values())
        lists = [list(column) for column in zip(*table.rows, strict=True)]  # row by row would take minutes
        connection.execute(f"INSERT INTO {table.name} SELECT {cells}", lists)


def write_parquet(table: Table, path: Path) -> None:
    """Write a table as Parquet.

    Args:
        table: what to write.
        path: a new file; quoting in its name is taken care of.

    Raises:
        MissingExtraError: without DuckDB.
    """
    duckdb = load_duckdb()
    connection = duckdb.connect(":memory:")
    try:
        _fill(connection, [table])
        connection.table(table.name).write_parquet(str(path), compression="zstd")
    finally:
        connection.close()
