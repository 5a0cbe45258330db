"""Rows of a table from a local file, a folder of files, or a data set on the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from harness.core.errors import ConfigError, InfraError, MissingExtraError, NotFoundError
from harness.envs.rows import json_lines, parquet_rows

PATH_VARIABLE = "HARNESS_BIOREASON_GO"
_HINT = "give a .parquet or .jsonl file, or a folder of .parquet files"


def read_rows(path: str | None, hub: str | None, revision: str | None = None) -> list[dict[str, Any]]:
    """Read all rows of a file or folder, or of the parquet files of a data set on the Hub.

    Args:
        path: local file or folder; the variable HARNESS_BIOREASON_GO when neither is given.
        hub: id of a data set.
        revision: commit of the data set, 40 hex digits.

    Raises:
        ConfigError: when both or neither is given, or a file cannot be read.
        NotFoundError: when there is nothing at `path`, or no such data set.
        MissingExtraError: when the package that reads it is not installed.
        InfraError: when the Hub does not answer.
    """
    if path and hub:
        raise ConfigError("bioreason-go: both `path` and `hub` are given", "leave one of them out")
    path = path or (None if hub else os.environ.get(PATH_VARIABLE))
    if hub:
        return read_folder(fetch(hub, revision))
    if not path:
        raise ConfigError(
            "bioreason-go: records need a path or a data set on the Hub",
            f"set env.bioreason-go.args.path or .hub, or the variable {PATH_VARIABLE}",
        )
    place = Path(path)
    if place.is_dir():
        return read_folder(place)
    if not place.exists():
        raise NotFoundError(f"no records at {place}", _HINT)
    readers = {".parquet": read_parquet, ".jsonl": read_jsonl}
    if place.suffix not in readers:
        raise ConfigError(f"cannot read {place.name}: not .parquet or .jsonl", _HINT)
    return readers[place.suffix](place)


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """Read the parquet files of a folder and of those below it, in the order of their paths."""
    paths = sorted(folder.rglob("*.parquet"))
    if not paths:
        raise NotFoundError(f"no parquet file in {folder}", _HINT)
    return [row for path in paths for row in read_parquet(path)]


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Read one parquet file."""
    return parquet_rows(path, _HINT)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, one object each."""
    return [row for _, row in json_lines(path, _HINT)]


def fetch(hub: str, revision: str | None) -> Path:
    """Return the folder with the parquet files of a data set on the Hub at a pinned commit."""
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ConfigError(
            f"bioreason-go: data set {hub[:80]!r} comes from the Hub, but its revision is {revision!r}",
            "pin the commit: set env.bioreason-go.args.revision to 40 hex digits",
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise MissingExtraError("train", "huggingface-hub") from None
    try:
        return Path(snapshot_download(hub, revision=revision, repo_type="dataset", allow_patterns=["*.parquet"]))
    except HFValidationError as error:
        raise ConfigError(f"{hub[:80]!r} is no id of a data set", "ids look like OWNER/NAME") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InfraError(
            f"cannot fetch the data set {hub}@{revision}: {type(error).__name__}",
            "check the network and the id, then try again",
        ) from error
