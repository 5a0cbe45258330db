"""What an append to a large ledger needs without reading all of it: the events it follows, and where to read on.

A mark says how far a ledger was read; the last events of each run stand beside it with their places.
Nothing is believed that the ledger's own bytes do not confirm: the last line before the mark and every
event that is followed are read again, hash and all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from harness.ledger import cache
from harness.ledger.events import Event, parse_line

LAG_BYTES = 256 * 1024
"""How much an append reads at most behind the mark before it moves the mark."""


class Head(NamedTuple):
    """An event of a run that no other one follows, and where its line stands."""

    sha: str
    start: int
    length: int


class Mark(NamedTuple):
    """How far a ledger was read.

    Args:
        device, inode, changed_ns: which file, and its modification time then.
        bytes, lines: up to the end of a whole line.
        last_length, last_sha: of that line, without its newline.
    """

    device: int
    inode: int
    changed_ns: int
    bytes: int
    lines: int
    last_length: int
    last_sha: str


def make_mark(stat: os.stat_result | Sequence[int], lines: int, last: bytes) -> Mark:
    """Describe a ledger that was read to its end.

    Args:
        stat: of the file, or `(device, inode, size, mtime_ns)`.
        lines: how many it has.
        last: the last one, without its newline.
    """
    if isinstance(stat, os.stat_result):
        stat = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    device, inode, size, changed_ns = stat
    return Mark(device, inode, changed_ns, size, lines, len(last), sha256(last).hexdigest())


def find_mark(ledger: Path, descriptor: int) -> tuple[Mark, bytes] | None:
    """Return the mark and the line before it; None when this file does not continue what was marked.

    Args:
        ledger: its path.
        descriptor: the open file.
    """
    found: Any = None
    with cache.opened(ledger) as stored:
        found = stored.get("mark") if stored is not None else None
    if not isinstance(found, dict) or found.pop("writer", None) != cache.writer():
        return None
    mark = Mark(**found)
    stat = os.fstat(descriptor)
    if (stat.st_dev, stat.st_ino) != (mark.device, mark.inode) or stat.st_size < mark.bytes:
        return None
    last = os.pread(descriptor, mark.last_length + 1, mark.bytes - mark.last_length - 1)
    if last[-1:] != b"\n" or sha256(last[:-1]).hexdigest() != mark.last_sha:
        return None
    return mark, last[:-1]


def find_heads(ledger: Path, run: str) -> list[Head] | None:
    """Return the heads of a run as of the mark; None when it has none there.

    Raises:
        cache.BrokenError: when the ledger does not have these lines.
    """
    found: Any = None
    with cache.opened(ledger) as stored:
        if stored is not None:
            found = stored.get(f"heads/{run}")
            if found is None and (row := stored.get(f"run/{run}")) is not None:
                found = row["heads"]  # as they were when all of the ledger was folded; none have come since
    if found is None:
        return None
    heads = [Head(*head) for head in found]
    descriptor = os.open(ledger, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for head in heads:
            try:
                event = parse_line(os.pread(descriptor, head.length, head.start))
            except ValueError as error:
                raise cache.BrokenError(f"no event at byte {head.start}") from error
            if (event.sha, event.run) != (head.sha, run):
                raise cache.BrokenError(f"another event at byte {head.start}")
    finally:
        os.close(descriptor)
    return heads


def entries(mark: Mark, heads: Mapping[str, Iterable[Head]]) -> list[tuple[str, Any]]:
    """Return what the cache stores for a mark and the heads of runs."""
    rows: list[tuple[str, Any]] = [(f"heads/{run}", [list(head) for head in found]) for run, found in heads.items()]
    return [*rows, ("mark", mark._asdict() | {"writer": cache.writer()})]


def heads_among(placed: Iterable[tuple[Event, Sequence[int]]]) -> list[Head]:
    """Return the heads among events of one run, given with their places."""
    known = list(placed)
    followed = {sha for event, _ in known for sha in event.prev}
    return [Head(event.sha, *place) for event, place in known if event.sha not in followed]
