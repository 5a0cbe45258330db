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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.errors import HarnessError
from harness.core.lazy import lazy
from harness.core.memory import no_collection
from harness.ledger import cache
from harness.ledger.disk import network_warning, read_locked
from harness.ledger.events import PROGRAM, Event, parse_line
from harness.ledger.fold import LOCAL_KINDS, RunState, State, fold, fold_ordered, in_order
from harness.ledger.gather import (
    MEMBERS,
    Half,
    Placed,
    Places,
    Row,
    entries_of,
    entry_of,
    flat,
    gather,
    join,
    later_half,
    placed_lines,
    row_of,
    stay_inside,
)
from harness.ledger.halves import Elsewhere
from harness.ledger.heads import Head, entries, heads_among, make_mark
from harness.ledger.numbering import contests
from harness.ledger.store import Ledger

SUMMARY = (*MEMBERS, "kind", "hypothesis", "parent")
"""Members that `summaries` gives."""
TWO_PARTS_BYTES = 4 << 20
"""Size from which a child reads one half."""
_ID = slice(13, 39)  # of a line as this writer spells it: {"v":1,"id":"…"
_SETTLED_NS = 3_000_000_000
"""How long a file must have rested before its facts are believed: two changes can share one tick of its clock."""


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
        for event, place in placed_lines(source.data, begin):
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
                self.program = flat(placed)
            else:
                self.rows[run] = row_of(RunState(run, [event for event, _ in placed]), placed)
        return groups

    def _known_events(self, run: str) -> Placed:
        places = self.program if run == PROGRAM else self.rows[run][1] if run in self.rows else []
        pairs = [list(pair) for pair in zip(places[::2], places[1::2], strict=True)]
        return {event.sha: (event, place) for event, place in zip(self.events(run, places), pairs, strict=True)}


def _follows(event: Event, group: Placed) -> bool:
    """Tell whether an event comes after those its `prev` names, all of its own run, by its time and id too."""
    return all(sha in group and (group[sha][0].at, group[sha][0].id) < (event.at, event.id) for sha in event.prev)


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
    return _in_two_parts(source) or _in_one_part(source)


def _in_one_part(source: _Bytes) -> State:
    span = gather(source.data)
    events = [event for event, _ in span.placed.values()]
    state = fold_ordered(events) if span.ascending and not span.strays else fold(events)
    if span.plain and (not span.strays or stay_inside(span.placed)):
        _store_built(source, state, span.placed)
    return state


def _in_two_parts(source: _Bytes) -> State | None:
    """Let a child read the second half; None where the two are not simply one after the other, or there is no child."""
    data = source.data
    if len(data) < TWO_PARTS_BYTES:
        return None
    middle = data.find(b"\n", len(data) // 2) + 1
    child = Elsewhere(lambda begin: later_half(data, begin), [middle], worth=1)
    if not child.started:
        return None
    try:
        span = gather(data, 0, middle)
        early = entries_of(span.placed, {PROGRAM})
    finally:
        (answer,) = child.answers()
    half = Half(*answer) if answer is not None else None
    if half is None or not span.plain or not span.ascending or span.strays or not join(span, data, half):
        return None
    state = fold_ordered([event for event, _ in span.placed.values()])
    if state.collisions or state.former:
        return None
    for run in half.grown:
        early.pop(run, None)
    early |= {key.removeprefix("run/"): (key, text, check_sum) for key, text, check_sum in half.entries}
    _store_built(source, state, span.placed, early)
    rows = dict(zip((key.removeprefix("run/") for key, _, _ in half.entries), half.rows(), strict=True))
    later = _Known(source.path, {"champion": None}, rows, [])
    later.source = source
    runs = state.runs | later.state().runs
    return State({name: runs[name] for name in sorted(sorted(runs), key=len)}, state.program_events, state.champion)


def _store_built(source: _Bytes, state: State, placed: Placed, known: Mapping[str, cache.Entry] | None = None) -> None:
    """Store the entries of all runs: those already known, and those of the state's other runs."""
    made = dict(known or {})
    others = {
        run.run: [placed[event.sha] for event in run.events] for run in state.runs.values() if run.run not in made
    }
    made |= {run: entry_of(state.runs[run], events) for run, events in others.items()}
    about = [placed[event.sha] for event in state.program_events]
    heads = {PROGRAM: heads_among(about)} if about else {}
    rows = list(made.values())
    _store(source, _meta(source, state.champion, len(rows)), flat(about), rows, heads, clear=["run/", "heads/"])


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
