"""A small checked store beside a large ledger: what reading all of it once has shown.

Never a source of truth. It lies in `outputs/`, which git ignores, and holds only what can be computed
again; one that is missing, damaged, foreign or of another version is as good as none. Every value
carries its own check sum, since SQLite does not notice a changed byte inside a row.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import __version__

WORTH_BYTES = 1 << 20
"""Size from which a ledger has an index; a smaller one is read faster than the index is opened."""
CHUNK = 10_000
"""Entries read at once; the text of all of a million events' runs would stand in memory beside what it says."""
_encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode
Entry = tuple[str, str, int]
_TABLE = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT, check_sum INTEGER) WITHOUT ROWID"


class BrokenError(Exception):
    """The store holds something that this code did not write."""


def location(ledger: Path) -> Path:
    """Return where the index of a ledger lies."""
    return ledger.parent / "outputs" / f".{ledger.name}.index"


def writer() -> str:
    """Name the code that computes what is stored: another version, or an edited module, computes anew."""
    parts = [__version__]
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(Path(__file__).parent), key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                stat = entry.stat()
                parts.append(f"{entry.name}:{stat.st_size}:{stat.st_mtime_ns}")
    return f"{zlib.crc32(' '.join(parts).encode()):08x}"


def _sum(key: str, value: str) -> int:
    return zlib.crc32(f"{key} {value}".encode())


class Cache:
    """One open index; used in a `with` block by one thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, key: str) -> Any:
        """Return a value; None when there is none.

        Raises:
            BrokenError: when it is not what was stored.
        """
        row = self._connection.execute("SELECT value, check_sum FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        return json.loads(_checked(key, *row))

    def under(self, prefix: str) -> dict[str, Any]:
        """Return every value whose key begins with `prefix`, which ends in `/`, by the rest of its key.

        Raises:
            BrokenError: when one is not what was stored.
        """
        query = "SELECT key, value, check_sum FROM entries WHERE key >= ? AND key < ?"
        cursor = self._connection.execute(query, (prefix, prefix[:-1] + "0"))  # "0" follows "/"
        found: dict[str, Any] = {}
        crc32 = zlib.crc32
        while rows := cursor.fetchmany(CHUNK):
            if not all(crc32(f"{key} {value}".encode()) == check_sum for key, value, check_sum in rows):  # as `_sum`
                raise BrokenError(f"an entry under {prefix!r} was changed")
            values = json.loads("[" + ",".join([row[1] for row in rows]) + "]")
            found.update(zip([row[0][len(prefix) :] for row in rows], values, strict=True))
        return found

    def put(
        self, values: Iterable[tuple[str, Any]], entries: Iterable[Entry] = (), *, clear: Iterable[str] = ()
    ) -> None:
        """Store values, and entries made of such before, in one transaction.

        Args:
            values: with their keys.
            entries: as `entry` made them.
            clear: beginnings of keys, each ending in `/`, whose entries are removed first.
        """
        rows = [*(entry(*item) for item in values), *entries]
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for prefix in clear:
                self._connection.execute("DELETE FROM entries WHERE key >= ? AND key < ?", (prefix, prefix[:-1] + "0"))
            self._connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)


def entry(key: str, value: Any) -> Entry:
    """Return a value as the store holds it: key, JSON, check sum."""
    text = _encode(value)
    return key, text, _sum(key, text)


def _checked(key: object, value: object, check_sum: object) -> str:
    if not isinstance(key, str) or not isinstance(value, str) or _sum(key, value) != check_sum:
        raise BrokenError(f"entry {str(key)[:80]!r} was changed")
    return value


@contextlib.contextmanager
def opened(ledger: Path, *, create: bool = False) -> Iterator[Cache | None]:
    """Open the index of a ledger; yields None when there is none that can be used.

    Whatever fails inside ends the block quietly: an index is never a reason for a command to fail.

    Args:
        ledger: the ledger's path.
        create: make it, or make it anew when it is damaged.
    """
    path = location(ledger)
    connection = _connect(path, create)
    try:
        yield None if connection is None else Cache(connection)
    except (sqlite3.Error, BrokenError, OSError, ValueError) as error:
        if create and not isinstance(error, sqlite3.OperationalError | OSError):  # busy or a full disk is no damage
            _remove(path)
    finally:
        if connection is not None:
            connection.close()


def _connect(path: Path, create: bool) -> sqlite3.Connection | None:
    if not create and not path.is_file():
        return None
    for last in (False, True):
        connection = None
        try:
            if create:
                path.parent.mkdir(exist_ok=True)
            mode = "rwc" if create else "rw"
            # A busy index is not waited for. Transactions are begun by hand.
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=0, isolation_level=None
            )
            if create:
                connection.execute(_TABLE)
            connection.execute("SELECT key, value, check_sum FROM entries LIMIT 1").fetchone()
            return connection
        except (sqlite3.Error, OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            if last or not create or "locked" in str(error):
                return None
            _remove(path)
    return None


def _remove(path: Path) -> None:
    for name in (path, path.with_name(f"{path.name}-journal")):
        with contextlib.suppress(OSError):
            name.unlink()
