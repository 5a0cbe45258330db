"""Read a ledger's lines once for its index, all of them or one half, and make the entries of the runs.

The halves of a ledger that only grew stand in the fold's order, one after the other. A child then reads the second
half and sends back the finished entries of the runs that begin there; what it cannot tell alone, the parent reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.core.errors import HarnessError
from harness.ledger import cache
from harness.ledger.events import PROGRAM, Event, parse_line
from harness.ledger.fold import LOCAL_KINDS, RunState
from harness.ledger.heads import heads_among
from harness.ledger.numbering import contests

MEMBERS = ("status", "decision", "decided_at", "created_at", "tags", "idea")
"""Members of a `RunState` that the index holds: those that are asked of every run, and need no long data parsed."""
Places = list[int]
"""Of each line of a run, in the fold's order, its first byte and its length, one after the other."""
Row = list[Any]
"""A run in the index: the values of `MEMBERS`, the places of its lines, and its heads (None: the last event)."""
Placed = dict[str, tuple[Event, list[int]]]
"""Events by their hash, each with the first byte of its line and its length."""


@dataclass(slots=True)
class Span:
    """What stands between two bytes of a ledger.

    Args:
        placed: the events, each once.
        strays: runs with an event that follows something which does not stand before it in its own run, here.
        special: runs with an event that concerns more than its run.
        plain: no number is contested, no line is spelt in another way than the writer's.
        ascending: ids and times rise from line to line.
        first, last: (id, time) of the first and the last event.
    """

    placed: Placed = field(default_factory=dict)
    strays: set[str] = field(default_factory=set)
    special: set[str] = field(default_factory=set)
    plain: bool = True
    ascending: bool = True
    first: tuple[str, str] = ("", "")
    last: tuple[str, str] = ("", "")


class Half(NamedTuple):
    """What the second half of a ledger gives.

    Args:
        first: (id, time) of its first event.
        entries: of the runs that begin and stay there.
        left: first byte and length of each line of the other runs, in the order of the file.
        grown: those runs.
    """

    first: tuple[str, str]
    entries: list[cache.Entry]
    left: list[list[int]]
    grown: list[str]

    def rows(self) -> list[Row]:
        """Return the rows in the entries."""
        rows: list[Row] = json.loads("[" + ",".join([text for _, text, _ in self.entries]) + "]")
        return rows


def row_of(run: RunState, placed: list[tuple[Event, list[int]]]) -> Row:
    """Return what the index holds of a run.

    Args:
        run: its state.
        placed: its events with their places, in the fold's order.
    """
    heads = heads_among(placed)
    usual = len(heads) == 1 and heads[0].sha == placed[-1][0].sha
    row = [[getattr(run, name) for name in MEMBERS], flat(placed), None if usual else heads]
    for event in run.events:
        event.let_go()  # a list shows a hundred of ten thousand runs
    return row


def entry_of(run: RunState, placed: list[tuple[Event, list[int]]]) -> cache.Entry:
    """Return the entry of a run; see `row_of`."""
    return cache.entry(f"run/{run.run}", row_of(run, placed))


def flat(placed: Iterable[tuple[Event, list[int]]]) -> Places:
    """Return the places of events as one list."""
    return [number for _, place in placed for number in place]


def placed_lines(data: bytes, begin: int = 0, end: int | None = None) -> Iterator[tuple[Event, list[int]]]:
    """Parse the lines between two bytes and give each its place."""
    for line in data[begin:end].split(b"\n")[:-1]:
        yield parse_line(line), [begin, len(line)]
        begin += len(line) + 1


def gather(data: bytes, begin: int = 0, end: int | None = None) -> Span:
    """Parse the lines between two bytes.

    Raises:
        HarnessError, ValueError: on damage, without line and byte.
    """
    span = Span()
    placed, strays = span.placed, span.strays
    begun: set[str] = set()
    last_id = last_at = ""
    for event, place in placed_lines(data, begin, end):
        if event.sha in placed:
            continue
        if event.kind not in LOCAL_KINDS or not event.prev:
            span.plain = span.plain and not contests(event, True if event.run in begun else None)
            begun.add(event.run)
            if event.kind not in LOCAL_KINDS:
                span.special.add(event.run)
        if event.start == 0:
            span.plain = False
        for sha in event.prev:
            known = placed.get(sha)
            if known is None or known[0].run != event.run:
                strays.add(event.run)
        if event.id <= last_id or event.at < last_at:
            span.ascending = False
        if not last_id:
            span.first = (event.id, event.at)
        last_id, last_at = event.id, event.at
        placed[event.sha] = (event, place)
    span.last = (last_id, last_at)
    return span


def entries_of(placed: Placed, without: Collection[str]) -> dict[str, cache.Entry]:
    """Return the entries of runs whose events stand in the fold's order.

    Args:
        placed: the events.
        without: runs that are left out.
    """
    groups: dict[str, list[tuple[Event, list[int]]]] = {}
    for item in placed.values():
        if item[0].run not in without:
            groups.setdefault(item[0].run, []).append(item)
    return {run: entry_of(RunState(run, [event for event, _ in group]), group) for run, group in groups.items()}


def later_half(data: bytes, begin: int) -> Half | None:
    """Read a ledger from a byte on; None where it is damaged, or says more than the order of its lines."""
    try:
        span = gather(data, begin)
    except (HarnessError, ValueError):
        return None
    if not span.plain or not span.ascending:
        return None
    left = span.strays | span.special | {PROGRAM}
    entries = list(entries_of(span.placed, left).values())
    others = [place for event, place in span.placed.values() if event.run in left]
    return Half(span.first, entries, others, sorted(left))


def join(span: Span, data: bytes, half: Half) -> bool:
    """Add what the second half left over to the first; tell whether the two make one ledger in order.

    Args:
        span: the first half; it is changed.
        data: all of the ledger.
        half: the second half.
    """
    if half.first[0] <= span.last[0] or half.first[1] < span.last[1]:
        return False
    for begin, length in half.left:
        event = parse_line(data[begin : begin + length])
        if any(sha not in span.placed or span.placed[sha][0].run != event.run for sha in event.prev):
            return False
        span.placed[event.sha] = (event, [begin, length])
    here = {event.run for event, _ in span.placed.values()}
    return not any(key.removeprefix("run/") in here for key, _, _ in half.entries)


def stay_inside(placed: Placed) -> bool:
    """Tell whether every event follows events of its own run only, all of which are here."""
    for event, _ in placed.values():
        for sha in event.prev:
            known = placed.get(sha)
            if known is None or known[0].run != event.run:
                return False
    return True
