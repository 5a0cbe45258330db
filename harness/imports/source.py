"""Reading what others wrote: bounded in size, number and depth, never through a link, never outside one folder."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from harness.core.canonical import content_sha
from harness.core.errors import HarnessError, NotFoundError

MIB = 1 << 20
MAX_FILE_BYTES = 256 * MIB
"""Largest file read as a whole; larger ones are refused by name."""
MAX_TEXT_BYTES = 4 * MIB
"""Largest config, metadata or parameter file."""
MAX_FILES = 50_000
"""Entries looked at below a source."""
MAX_DEPTH = 8
MAX_POINTS = 2_000_000
"""Metric values of one run."""
MAX_KEYS = 10_000
"""Metrics of one run."""
MAX_RUNS = 2_000
"""Runs of one source."""
MAX_STEP = 1 << 53


class SourceError(HarnessError, ValueError):
    """A source that cannot be imported: damaged, too large, hostile, or of another format."""

    code = "source"


class Source:
    """One file or folder to import from.

    The path itself may be a link, since the user named it; below it links are skipped and counted.

    Args:
        path: what the user named.

    Raises:
        NotFoundError: when there is nothing.
        SourceError: when it is neither a file nor a folder.
    """

    def __init__(self, path: Path) -> None:
        try:
            resolved = path.expanduser().resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise NotFoundError(f"there is no {path}", "name a file or a folder to import from") from error
        if not resolved.is_dir() and not resolved.is_file():
            raise SourceError(f"{path} is neither a file nor a folder")
        self.path = path
        self.root = resolved if resolved.is_dir() else resolved.parent
        self.only = "" if resolved.is_dir() else resolved.name
        self.notes: list[str] = []
        self._files: list[str] | None = None

    @property
    def name(self) -> str:
        """Last part of the path: what the ledger records, since a whole path tells of the machine."""
        return self.only or self.root.name

    def files(self) -> list[str]:
        """Return every regular file below, relative with forward slashes, sorted.

        Raises:
            SourceError: on more than `MAX_FILES` entries.
        """
        if self._files is None:
            self._files = [self.only] if self.only else sorted(self._walk())
        return self._files

    def _walk(self) -> Iterator[str]:
        queue: list[tuple[Path, int]] = [(self.root, 0)]
        seen = links = deep = 0
        while queue:
            folder, depth = queue.pop()
            try:
                entries = list(os.scandir(folder))
            except OSError as error:
                raise SourceError(f"cannot read the folder {folder.name}: {error.strerror}") from error
            for entry in entries:
                seen += 1
                if seen > MAX_FILES:
                    raise SourceError(f"{self.path} has more than {MAX_FILES} entries", "name a folder further down")
                path = Path(entry.path)
                if entry.is_symlink():
                    links += 1
                elif entry.is_dir(follow_symlinks=False):
                    deep += depth + 1 >= MAX_DEPTH
                    queue += [(path, depth + 1)] if depth + 1 < MAX_DEPTH else []
                elif entry.is_file(follow_symlinks=False):
                    yield path.relative_to(self.root).as_posix()
        if links:
            self.notes.append(f"{links} symbolic link(s), which are never followed")
        if deep:
            self.notes.append(f"{deep} folder(s) deeper than {MAX_DEPTH} levels")

    def below(self, folder: str) -> list[str]:
        """Return the files below a folder (`.` is the source itself)."""
        return self.files() if folder in ("", ".") else [name for name in self.files() if name.startswith(folder + "/")]

    def has(self, name: str) -> bool:
        """Say whether a regular file of this relative name is there."""
        return name in set(self.files())

    def read(self, name: str, limit: int = MAX_FILE_BYTES) -> bytes:
        """Return a file's bytes.

        Args:
            name: relative name, as `files` lists it.
            limit: bytes; a larger file is refused.

        Raises:
            SourceError: when it is a link, leaves the source, is no regular file, or is too large.
        """
        path = self.locate(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"cannot read {name}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise SourceError(f"{name} is not a regular file")
            data = file.read(limit + 1) if found.st_size <= limit else b""
            if found.st_size > limit or len(data) > limit:
                raise SourceError(f"{name} is larger than {limit // MIB or 1} MiB", "import a smaller excerpt of it")
        return data

    def locate(self, name: str) -> Path:
        """Return the path of a relative name.

        Raises:
            SourceError: when it leaves the source or goes through a link.
        """
        parts = PurePosixPath(name).parts
        path = self.root.joinpath(*parts)
        inside = not name.startswith("/") and ".." not in parts and "\0" not in name
        if not inside or path.parent.resolve() != path.parent or not path.is_relative_to(self.root):
            raise SourceError(f"{name[:200]!r} leads out of {self.name}")
        return path

    def text(self, name: str, limit: int = MAX_TEXT_BYTES) -> str:
        """Return a file as UTF-8 text without a byte order mark; raises as `read` does."""
        try:
            return self.read(name, limit).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SourceError(f"{name} is no UTF-8 text (byte {error.start})") from error

    def sha(self, names: Iterable[str]) -> str:
        """Return one hash over the names and bytes of files: two equal sources have equal hashes."""
        return content_sha([[name, hashlib.sha256(self.read(name)).hexdigest()] for name in sorted(names)])


def lenient_json(data: bytes | str, where: str) -> Any:
    """Parse JSON as Python writes it, NaN and infinities included; of duplicate keys the last counts.

    Raises:
        SourceError: naming `where`, on anything that is not JSON, or nested too deeply.
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        return json.loads(text, parse_constant=float)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise SourceError(f"{where} is damaged: {reason}") from error


def number(value: Any) -> float | None:
    """Return a logged value as float; booleans, text and integers beyond a float are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def step_or_none(value: Any) -> int | None:
    """Return a step that was logged as 3 or 3.0; None for anything that is no step."""
    found = number(value)
    if found is None or found != found or not 0 <= found < MAX_STEP or found != int(found):
        return None
    return int(found)
