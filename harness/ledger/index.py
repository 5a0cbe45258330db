"""The state of a large ledger without parsing all of it.

`read_state` gives what `Ledger.state` gives. A file that was not touched since it was indexed is known by
its facts; any other one is read and hashed, and where it begins with the bytes that were folded last time,
only new lines are parsed. What a list of runs needs (status, decision, hypothesis, …) comes from the index,
and a run's events are parsed from the ledger when something else is asked of it. Whatever this cannot vouch
for is left to the whole fold.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.errors import HarnessError
from harness.core.lazy import lazy
from harness.core.memory import no_collection
from harness.ledger import cache
from harness.ledger.disk import network_warning, read_locked
from harness.ledger.events import PROGRAM, Event, parse_line
from harness.ledger.fold import LOCAL_KINDS, RunState, State, fold, fold_ordered, in_order
from harness.ledger.halves import Elsewhere
from harness.ledger.heads import Head, entries, heads_among, make_mark
from harness.ledger.numbering import contests
from harness.ledger.store import Ledger

MEMBERS = ("status", "decision", "decided_at", "created_at", "tags", "idea")
"""Members of a `RunState` that the index holds: those that are asked of every run, and need no long data parsed."""
SUMMARY = (*MEMBERS, "kind", "hypothesis", "parent")
"""Members that `summaries` gives."""
_ID = slice(13, 39)  # of a line as this writer spells it: {"v":1,"id":"…"
_SETTLED_NS = 3_000_000_000
"""How long a file must have rested before its facts are believed: two changes can share one tick of its clock."""
Places = list[int]
"""Of each line of a run, in the fold's order, its first byte and its length, one after the other."""
Row = list[Any]
"""A run in the index: the values of `MEMBERS`, the places of its lines, and its heads (None: the last event)."""
Placed = dict[str, tuple[Event, list[int]]]
"""Events by their hash, each with the first byte of its line and its length."""


class Reading(NamedTuple):
    """A state and what a reader should be told about the file."""

    state: State
    warnings: list[str]


class _Bytes(NamedTuple):
    """All bytes of a ledger and the facts of its file."""

    path: Path
    data: bytes
    stat: os.stat_result

    def line(self, start: int, length: int) -> bytes:
        """Return the bytes of one line."""
        return self.data[start : start + length]


class _Open:
    """A ledger that need not be read, since its file is as it was."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def line(self, start: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, start)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def read_state(path: Path) -> Reading:
    """Return the state of a ledger, through its index when the ledger is large.

    Raises:
        As `Ledger.state`.
    """
    with no_collection():
        state = _indexed(path)
    if state is None:
        ledger = Ledger(path)
        return Reading(ledger.state(), ledger.warnings)
    warning = network_warning(path)
    return Reading(state, [warning] if warning else [])


def _indexed(path: Path) -> State | None:
    """Return the state of a large ledger; None when it is small, or nothing here can be sure of it."""
    try:
        if path.stat().st_size < cache.WORTH_BYTES:
            return None
        known = _recall(path)
        if known is not None and _is_untouched(known, path):
            return known.state()
        data, stat = read_locked(path)
        if stat is None or not data.endswith(b"\n"):
            return None
        source = _Bytes(path, data, stat)
        state = _brought_up_to_date(known, source) if known is not None else None
        return state if state is not None else _build(source)
    except (HarnessError, OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # the whole fold says what is wrong, if anything is wrong with the ledger


def summaries(path: Path) -> list[dict[str, Any]]:
    """Return what lists need of every run, in the order of run numbers: `run` and `SUMMARY`.

    Args:
        path: the ledger.

    Raises:
        As `Ledger.state`.
    """
    runs = read_state(path).state.runs.values()
    return [{"run": run.run} | {name: getattr(run, name) for name in SUMMARY} for run in runs]


def _row(run: RunState, placed: list[tuple[Event, list[int]]]) -> Row:
    heads = heads_among(placed)
    usual = len(heads) == 1 and heads[0].sha == placed[-1][0].sha
    row = [[getattr(run, name) for name in MEMBERS], _flat(placed), None if usual else heads]
    for event in run.events:
        event.let_go()  # a list shows a hundred of ten thousand runs
    return row


def _flat(placed: Iterable[tuple[Event, list[int]]]) -> Places:
    return [number for _, place in placed for number in place]


class _LazyRun(RunState):
    """A run whose events are parsed when they are asked for."""

    def __init__(self, run: str, row: Row, load: Callable[[str, Places], list[Event]]) -> None:
        self.run = run
        self._row = row
        self._load = load

    def __getattr__(self, name: str) -> Any:
        if name != "events":
            raise AttributeError(name)
        self.events: list[Event] = self._load(self.run, self._row[1])
        return self.events


def _from_row(name: str, place: int) -> lazy[Any]:
    """Make the member that takes its value from the index instead of the events."""
    if name == "tags":
        return lazy(lambda run: tuple(run._row[0][place]), name)
    return lazy(lambda run: run._row[0][place], name)


for _place, _name in enumerate(MEMBERS):
    setattr(_LazyRun, _name, _from_row(_name, _place))


class _Known:
    """What the index says of a ledger.

    Args:
        path: of the ledger.
        meta: `bytes` and `digest` of the part that was indexed, and facts about it.
        rows: of each run.
        program: places of the lines about the program.
    """

    source: _Bytes | _Open

    def __init__(self, path: Path, meta: dict[str, Any], rows: dict[str, Row], program: Places) -> None:
        self.path = path
        self.meta = meta
        self.rows = rows
        self.program = program

    def events(self, run: str, places: Places) -> list[Event]:
        """Parse a run's lines.

        Raises:
            ValueError: when they are not what the index says.
        """
        line = self.source.line
        found = [parse_line(line(start, length)) for start, length in zip(places[::2], places[1::2], strict=True)]
        if any(event.run != run for event in found):
            raise ValueError("the index names lines of another run")
        return found

    def state(self) -> State:
        """Return the state, its runs lazy."""
        whole: list[State] = []

        def load(run: str, places: Places) -> list[Event]:
            try:
                return self.events(run, places)
            except ValueError:  # an index with right check sums and wrong places: somebody made it
                if not whole:
                    whole.append(Ledger(self.path).state())
                return whole[0].runs[run].events

        names = sorted(sorted(self.rows), key=len)
        runs: dict[str, RunState] = {name: _LazyRun(name, self.rows[name], load) for name in names}
        return State(runs, self.events(PROGRAM, self.program), self.meta["champion"])

    def grow(self, source: _Bytes) -> dict[str, Placed] | None:
        """Take in the lines behind the indexed part.

        Returns:
            The events of the runs they concern, or None when they change more than their own runs.
        """
        begin = self.meta["bytes"]
        ids = {line[_ID] for line in source.data[:begin].split(b"\n")}
        groups: dict[str, Placed] = {}
        for event, place in _placed_lines(source.data, begin):
            if event.kind not in LOCAL_KINDS or event.line[_ID] != event.id.encode() or event.line[_ID] in ids:
                return None
            ids.add(event.line[_ID])
            if event.run not in groups:
                groups[event.run] = self._known_events(event.run)
            group = groups[event.run]
            if contests(event, group or None) or not _follows(event, group):
                return None
            group[event.sha] = (event, place)
        for run, group in groups.items():
            placed = [group[event.sha] for event in in_order([event for event, _ in group.values()])]
            if run == PROGRAM:
                self.program = _flat(placed)
            else:
                self.rows[run] = _row(RunState(run, [event for event, _ in placed]), placed)
        return groups

    def _known_events(self, run: str) -> Placed:
        places = self.program if run == PROGRAM else self.rows[run][1] if run in self.rows else []
        pairs = [list(pair) for pair in zip(places[::2], places[1::2], strict=True)]
        return {event.sha: (event, place) for event, place in zip(self.events(run, places), pairs, strict=True)}


def _follows(event: Event, group: Placed) -> bool:
    """Tell whether an event comes after those its `prev` names, all of its own run, by its time and id too."""
    return all(sha in group and (group[sha][0].at, group[sha][0].id) < (event.at, event.id) for sha in event.prev)


def _placed_lines(data: bytes, begin: int = 0) -> Iterator[tuple[Event, list[int]]]:
    """Parse the lines from a byte on and give each its place."""
    for line in data[begin:].split(b"\n")[:-1]:
        yield parse_line(line), [begin, len(line)]
        begin += len(line) + 1


def _recall(path: Path) -> _Known | None:
    """Read the index; None when there is none of this code's making."""
    known: _Known | None = None
    with cache.opened(path) as stored:
        if stored is None:
            return None
        meta = stored.get("meta")
        if isinstance(meta, dict) and meta.get("writer") == cache.writer():
            rows = stored.under("run/")
            if len(rows) == meta["runs"]:
                known = _Known(path, meta, rows, stored.get("program") or [])
    return known


def _is_untouched(known: _Known, path: Path) -> bool:
    """Tell whether the file's facts are those of the bytes that were indexed; then they need not be read."""
    if known.meta["file"] is None or network_warning(path) is not None:  # other machines' changes show late
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    known.source = _Open(descriptor)
    return known.meta["file"] == _facts(os.fstat(descriptor))


def _facts(stat: os.stat_result) -> list[int]:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _brought_up_to_date(known: _Known, source: _Bytes) -> State | None:
    """Take in what the ledger has gained, and store that; None when it does not begin as the index says."""
    size = known.meta["bytes"]
    if len(source.data) < size:
        return None
    digest = hashlib.sha256(memoryview(source.data)[:size]).hexdigest()
    if digest != known.meta["digest"]:
        return None
    known.source = source
    groups = known.grow(source) if len(source.data) > size else {}
    if groups is None:
        return None
    meta = _meta(source, known.meta["champion"], len(known.rows))
    if groups or meta["file"] is not None:
        heads = {run: heads_among(group.values()) for run, group in groups.items()}
        rows = [cache.entry(f"run/{run}", known.rows[run]) for run in groups if run != PROGRAM]
        _store(source, meta, known.program, rows, heads)
    return known.state()


def _meta(source: _Bytes, champion: str | None, runs: int) -> dict[str, Any]:
    rested = time.time_ns() - max(source.stat.st_mtime_ns, source.stat.st_ctime_ns) > _SETTLED_NS
    return {
        "writer": cache.writer(),
        "bytes": len(source.data),
        "digest": hashlib.sha256(source.data).hexdigest(),
        "file": _facts(source.stat) if rested else None,
        "champion": champion,
        "runs": runs,
    }


def _build(source: _Bytes) -> State:
    """Fold all of the ledger, and store what the next reader needs when every run can be folded alone.

    Raises:
        HarnessError, ValueError: on damage, without line and byte.
    """
    placed, ordered, plain = _gathered(source.data)
    events = [event for event, _ in placed.values()]
    state = fold_ordered(events) if ordered else fold(events)
    if not plain:
        return state
    names = list(state.runs)
    half = len(names) // 2

    def entry(name: str) -> cache.Entry:
        run = state.runs[name]
        return cache.entry(f"run/{name}", _row(run, [placed[event.sha] for event in run.events]))

    rest = Elsewhere(entry, names[half:])
    try:
        rows = [entry(name) for name in names[:half]]
    finally:
        rows += rest.answers()
    about = [placed[event.sha] for event in state.program_events]
    heads = {PROGRAM: heads_among(about)} if about else {}
    _store(source, _meta(source, state.champion, len(rows)), _flat(about), rows, heads, clear=["run/", "heads/"])
    return state


def _gathered(data: bytes) -> tuple[Placed, bool, bool]:
    """Parse all lines.

    Returns:
        The events; whether they stand in the fold's order, each id once, as without merges they do; and whether each
        run can be folded alone: no number is contested, no link leaves a run, no line is spelt otherwise.
    """
    placed: Placed = {}
    begun: set[str] = set()
    ordered = plain = follows = True
    last_id = last_at = ""
    for event, place in _placed_lines(data):
        if event.sha in placed:
            continue
        if plain and (event.kind not in LOCAL_KINDS or not event.prev):
            plain = not contests(event, True if event.run in begun else None)
            begun.add(event.run)
        plain = plain and event.start > 0
        for sha in event.prev:
            known = placed.get(sha)
            follows = follows and known is not None and known[0].run == event.run
        ordered = ordered and event.id > last_id and event.at >= last_at
        last_id, last_at = event.id, event.at
        placed[event.sha] = (event, place)
    return placed, ordered and follows, plain and (follows or _stay_inside(placed))


def _stay_inside(placed: Placed) -> bool:
    """Tell whether every event follows events of its own run only, all of which are here."""
    for event, _ in placed.values():
        for sha in event.prev:
            known = placed.get(sha)
            if known is None or known[0].run != event.run:
                return False
    return True


def _store(
    source: _Bytes,
    meta: Mapping[str, Any],
    program: Places,
    rows: Sequence[cache.Entry],
    heads: Mapping[str, Iterable[Head]],
    clear: Iterable[str] = (),
) -> None:
    last = source.data[source.data.rfind(b"\n", 0, -1) + 1 : -1]
    mark = make_mark(source.stat, source.data.count(b"\n"), last)
    found = [("meta", meta), ("program", program), *entries(mark, heads)]
    with cache.opened(source.path, create=True) as stored:
        if stored is not None:
            stored.put(found, rows, clear=clear)
