"""The state of a large ledger without parsing all of it.

`read_state` gives what `Ledger.state` gives. The bytes of the ledger are always read and hashed; where
they begin with the bytes that were folded last time, only new lines are parsed. What a list of runs
needs (status, decision, hypothesis, …) comes from the index, and a run's events are parsed from the
ledger when something else is asked of it. Whatever this cannot vouch for is left to the whole fold.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.errors import HarnessError
from harness.core.memory import no_collection
from harness.ledger import cache
from harness.ledger.disk import network_warning, read_locked
from harness.ledger.events import KINDS, PROGRAM, RENUMBERED, Event, parse_line
from harness.ledger.fold import RunState, State, fold, in_order
from harness.ledger.heads import Head, entries, heads_among, make_mark
from harness.ledger.numbering import contests
from harness.ledger.store import Ledger

MEMBERS = ("status", "decision", "decided_at", "kind", "hypothesis", "parent", "created_at", "tags", "idea")
"""Members of a `RunState` that the index holds."""
_LOCAL_KINDS = KINDS - {"promoted", RENUMBERED}
"""Kinds that change nothing outside their own run."""
_ID = slice(13, 39)  # of a line as this writer spells it: {"v":1,"id":"…"
Places = list[list[int]]
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


def read_state(path: Path) -> Reading:
    """Return the state of a ledger, through its index when the ledger is large.

    Raises:
        As `Ledger.state`.
    """
    data, stat = read_locked(path)
    if stat is None or len(data) < cache.WORTH_BYTES or not data.endswith(b"\n"):
        return _whole(path)
    source = _Bytes(path, data, stat)
    with no_collection():
        try:
            known = _recall(source)
        except (HarnessError, ValueError, KeyError, TypeError, IndexError):
            known = None  # the whole fold says what is wrong, if anything is wrong with the ledger
        if known is None:
            return _build(source)
        warning = network_warning(path)
        return Reading(known.state(), [warning] if warning else [])


def summaries(path: Path) -> list[dict[str, Any]]:
    """Return what lists need of every run, in the order of run numbers: `run` and `MEMBERS`.

    Args:
        path: the ledger.

    Raises:
        As `Ledger.state`.
    """
    return [{"run": run.run} | _summary(run) for run in read_state(path).state.runs.values()]


def _summary(run: RunState) -> dict[str, Any]:
    return {name: getattr(run, name) for name in MEMBERS}


def _row(run: RunState, placed: list[tuple[Event, list[int]]]) -> dict[str, Any]:
    return _summary(run) | {"places": [place for _, place in placed], "heads": heads_among(placed)}


def _whole(path: Path) -> Reading:
    ledger = Ledger(path)
    return Reading(ledger.state(), ledger.warnings)


class _LazyRun(RunState):
    """A run whose events are parsed when they are asked for."""

    def __init__(self, run: str, members: dict[str, Any], load: Callable[[str, Places], list[Event]]) -> None:
        # Everything a RunState derives is a cached property, so what stands here is not derived again.
        self.__dict__ = members
        self.run = run
        self._load = load

    def __getattr__(self, name: str) -> Any:
        if name != "events":
            raise AttributeError(name)
        self.events: list[Event] = self._load(self.run, self.__dict__["places"])
        return self.events


class _Known:
    """What the index says of a ledger, brought up to date.

    Args:
        data: all bytes of the ledger.
        meta: `bytes` and `digest` of the part that was indexed, and facts about it.
        rows: of each run, its members, with the places of its lines under `places`.
        program: places of the lines about the program.
    """

    def __init__(self, data: bytes, meta: dict[str, Any], rows: dict[str, dict[str, Any]], program: Places) -> None:
        self.data = data
        self.meta = meta
        self.rows = rows
        self.program = program

    def events(self, run: str, places: Iterable[list[int]]) -> list[Event]:
        """Parse a run's lines.

        Raises:
            ValueError: when they are not what the index says.
        """
        found = [parse_line(self.data[start : start + length]) for start, length in places]
        if any(event.run != run for event in found):
            raise ValueError("the index names lines of another run")
        return found

    def state(self) -> State:
        """Return the state, its runs lazy."""
        whole: list[State] = []

        def events_of(run: str, places: Places) -> list[Event]:
            try:
                return self.events(run, places)
            except ValueError:  # an index with right check sums and wrong places: somebody made it
                if not whole:
                    whole.append(fold(map(parse_line, self.data.split(b"\n")[:-1])))
                return whole[0].runs[run].events

        for members in self.rows.values():
            members["tags"] = tuple(members["tags"])
        names = sorted(self.rows, key=lambda name: (len(name), name))
        runs: dict[str, RunState] = {name: _LazyRun(name, self.rows[name], events_of) for name in names}
        return State(runs, self.events(PROGRAM, self.program), self.meta["champion"])

    def grow(self) -> dict[str, Placed] | None:
        """Take in the lines behind the indexed part.

        Returns:
            The events of the runs they concern, or None when they change more than their own runs.
        """
        begin = self.meta["bytes"]
        ids = {line[_ID] for line in self.data[:begin].split(b"\n")}
        groups: dict[str, Placed] = {}
        for event, place in _placed_lines(self.data, begin):
            if event.kind not in _LOCAL_KINDS or event.line[_ID] != event.id.encode() or event.line[_ID] in ids:
                return None
            ids.add(event.line[_ID])
            if event.run not in groups:
                groups[event.run] = self._known_events(event.run)
            group = groups[event.run]
            if contests(event, group or None) or not _follows(event, group):
                return None
            group[event.sha] = (event, place)
        for run, group in groups.items():
            self._fold_run(run, group)
        return groups

    def _known_events(self, run: str) -> Placed:
        places = self.program if run == PROGRAM else self.rows[run]["places"] if run in self.rows else []
        return {event.sha: (event, place) for event, place in zip(self.events(run, places), places, strict=True)}

    def _fold_run(self, run: str, group: Placed) -> None:
        ordered = in_order([event for event, _ in group.values()])
        if run == PROGRAM:
            self.program = [group[event.sha][1] for event in ordered]
        else:
            self.rows[run] = _row(RunState(run, ordered), [group[event.sha] for event in ordered])


def _follows(event: Event, group: Placed) -> bool:
    """Tell whether an event comes after those its `prev` names, all of its own run, by its time and id too."""
    return all(sha in group and (group[sha][0].at, group[sha][0].id) < (event.at, event.id) for sha in event.prev)


def _placed_lines(data: bytes, begin: int = 0) -> Iterator[tuple[Event, list[int]]]:
    """Parse the lines from a byte on and give each its place."""
    for line in data[begin:].split(b"\n")[:-1]:
        yield parse_line(line), [begin, len(line)]
        begin += len(line) + 1


def _recall(source: _Bytes) -> _Known | None:
    """Read the index, take in what the ledger has gained since, and store that; None when it is of no use."""
    known: _Known | None = None
    with cache.opened(source.path) as stored:
        meta: Any = stored.get("meta") if stored is not None else None
        if stored is None or meta is None or not _fits(meta, source.data):
            return None
        rows = stored.under("run/")
        if len(rows) != meta["runs"]:
            return None
        known = _Known(source.data, meta, rows, stored.get("program") or [])
    if known is None or known.meta["bytes"] == len(source.data):
        return known
    groups = known.grow()
    if groups is None:
        return None
    known.meta |= _meta(source.data, known.meta["champion"], len(known.rows))
    heads = {run: heads_among(group.values()) for run, group in groups.items()}
    rows = {run: known.rows[run] for run in groups if run != PROGRAM}
    _store(source, known.meta, known.program, rows, heads)
    return known


def _fits(meta: Any, data: bytes) -> bool:
    if not isinstance(meta, dict) or meta.get("writer") != cache.writer() or len(data) < meta["bytes"]:
        return False
    return hashlib.sha256(memoryview(data)[: meta["bytes"]]).hexdigest() == meta["digest"]


def _meta(data: bytes, champion: str | None, runs: int) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    return {"writer": cache.writer(), "bytes": len(data), "digest": digest, "champion": champion, "runs": runs}


def _build(source: _Bytes) -> Reading:
    """Fold all of the ledger and store what the next reader needs."""
    try:
        placed: Placed = {}
        for event, place in _placed_lines(source.data):
            placed.setdefault(event.sha, (event, place))
        state = fold(event for event, _ in placed.values())
    except (HarnessError, ValueError):
        return _whole(source.path)  # which names line and byte
    warning = network_warning(source.path)
    if _is_plain(placed):
        rows = {name: _row(run, [placed[event.sha] for event in run.events]) for name, run in state.runs.items()}
        about = [placed[event.sha] for event in state.program_events]
        meta = _meta(source.data, state.champion, len(rows))
        heads = {PROGRAM: heads_among(about)} if about else {}
        _store(source, meta, [place for _, place in about], rows, heads, clear=["run/", "heads/"])
    return Reading(state, [warning] if warning else [])


def _is_plain(placed: Placed) -> bool:
    """Tell whether each run can be folded alone: no contested number, no link out of a run, no foreign spelling."""
    begun: set[str] = set()
    for event, _ in placed.values():
        run = event.run
        if contests(event, run if run in begun else None) or event.line[_ID] != event.id.encode():
            return False
        for sha in event.prev:
            if sha not in placed or placed[sha][0].run != run:
                return False
        begun.add(run)
    return True


def _store(
    source: _Bytes,
    meta: Mapping[str, Any],
    program: Places,
    rows: Mapping[str, Any],
    heads: Mapping[str, Iterable[Head]],
    clear: Iterable[str] = (),
) -> None:
    last = source.data[source.data.rfind(b"\n", 0, -1) + 1 : -1]
    found = [("meta", meta), ("program", program), *((f"run/{name}", row) for name, row in rows.items())]
    mark = make_mark(source.stat, source.data.count(b"\n"), last)
    with cache.opened(source.path, create=True) as stored:
        if stored is not None:
            stored.put([*found, *entries(mark, heads)], clear=clear)
