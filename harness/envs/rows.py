"""Rows of tables that others wrote: JSON lines and parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.core.canonical import strict_loads
from harness.core.errors import ConfigError, MissingExtraError


def json_lines(path: Path, hint: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a file of JSON lines with its place `FILE:LINE`; blank lines are left out.

    Args:
        path: the file, as errors name it.
        hint: what a line should be.

    Raises:
        ConfigError: when a line is no JSON object.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = strict_loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}", hint) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is no object", hint)
        yield where, row


def parquet_rows(path: Path, hint: str) -> list[dict[str, Any]]:
    """Return the rows of one parquet file.

    Args:
        path: the file.
        hint: what it should be.

    Raises:
        MissingExtraError: when pyarrow is not installed.
        ConfigError: when it is no parquet file.
    """
    try:
        from pyarrow import ArrowInvalid
        from pyarrow import parquet as pq
    except ImportError:
        raise MissingExtraError("parquet", "pyarrow") from None
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise ConfigError(f"{path} is not a parquet file: {error}", hint) from error
    return rows
