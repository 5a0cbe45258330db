"""Which run an event belongs to when two branches took one number.

Lines are never rewritten, so the number on a line is only the one its writer knew. A run is the events
that follow, by `prev`, the event that began it; a critical `renumbered` event among them gives the run
another number. Runs whose numbers nobody contests never come here: `contests` is asked first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.core.ids import RUN_PATTERN
from harness.ledger.events import FIRST_KINDS, PROGRAM, RENUMBERED, Event

_NAMING_KEYS = ("parent", "replicate_of")
"""Members of an event's data that name another run."""


@dataclass(slots=True)
class Numbering:
    """Runs by the number they have now.

    Args:
        runs: of each number, the events of its run, relabelled; of several runs with one number, the oldest.
        collisions: of each number that several runs have, the younger ones, oldest first.
        former: of each number that a run gave up, the number it has now.
        roots: of each event of a contested number, the hash of the event that began its run.
        numbers: of each such hash, the number the run has now.
        had: of each such hash, every number the run ever had.
    """

    runs: dict[str, list[Event]]
    collisions: dict[str, list[list[Event]]] = field(default_factory=dict)
    former: dict[str, str] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    had: dict[str, set[str]] = field(default_factory=dict)

    def shown(self, event: Event) -> Event | None:
        """Return an event under the number its run has now; None when an older run has that number too."""
        number = self.numbers.get(self.roots.get(event.sha, ""), event.run)
        return next((found for found in self.runs.get(number, ()) if found.sha == event.sha), None)


@dataclass(slots=True)
class _Run:
    root: Event
    number: str
    events: list[Event]
    before: set[str]  # numbers it had

    @property
    def age(self) -> tuple[str, str]:
        return self.root.at, self.root.id


def is_root(event: Event) -> bool:
    """Tell whether an event begins a run: of a kind that may, and following nothing."""
    return not event.prev and event.kind in FIRST_KINDS and event.run != PROGRAM


def contests(event: Event, before: object) -> bool:
    """Tell whether an event gives a number up or takes one that is taken; then runs must be told by links.

    Args:
        event: the next one.
        before: whatever is known of events with the same number on their line; None when there is none.
    """
    return event.kind == RENUMBERED or (not event.prev and before is not None and event.run != PROGRAM)


def separate(ordered: Sequence[Event]) -> Numbering:
    """Sort events to the runs they belong to.

    Args:
        ordered: every event once, none before one that it follows; those of the program are left out.
    """
    groups: dict[str, list[Event]] = {}
    for event in ordered:
        if event.run != PROGRAM:
            groups.setdefault(event.run, []).append(event)
    affected = _affected(groups)
    runs, roots = _runs(event for event in ordered if event.run in affected)
    result = Numbering({number: events for number, events in groups.items() if number not in affected}, roots=roots)
    for run in sorted(runs, key=lambda run: run.age):
        result.numbers[run.root.sha] = run.number
        result.had[run.root.sha] = run.before
        for number in run.before - {run.number}:
            result.former[number] = run.number
        events = [_relabelled(event, run.number) for event in run.events]
        if run.number in result.runs:
            result.collisions.setdefault(run.number, []).append(events)
        else:
            result.runs[run.number] = events
    for event in ordered:
        if event.run in affected and event.sha not in roots:  # what it follows is lost; `verify` says so
            result.runs.setdefault(event.run, []).append(event)
    _rename_references(result, runs)
    return result


def _affected(groups: Mapping[str, list[Event]]) -> set[str]:
    found: set[str] = set()
    for number, events in groups.items():
        moves = [event for event in events if event.kind == RENUMBERED]
        if moves or sum(map(is_root, events)) > 1:
            found.add(number)
        found.update(filter(None, map(new_number, moves)))
    return found


def _runs(ordered: Iterable[Event]) -> tuple[list[_Run], dict[str, str]]:
    """Follow `prev` from the events that began a run; return the runs and the root of every event reached."""
    runs: dict[str, _Run] = {}
    roots: dict[str, str] = {}
    for event in ordered:
        if is_root(event):
            roots[event.sha] = event.sha
            runs[event.sha] = _Run(event, event.run, [event], {event.run})
        elif before := [runs[roots[sha]] for sha in event.prev if sha in roots]:
            # One that follows both runs was written before anybody noticed: the older run keeps it.
            run = min(before, key=lambda run: run.age)
            roots[event.sha] = run.root.sha
            _take(run, event)
    return list(runs.values()), roots


def _take(run: _Run, event: Event) -> None:
    run.events.append(event)
    target = new_number(event)
    if target is not None:
        run.before.add(target)
        run.number = target


def new_number(event: Event) -> str | None:
    """Return the number that a `renumbered` event gives; None for every other event, and for a malformed one."""
    target = event.data.get("to") if event.kind == RENUMBERED else None
    return target if isinstance(target, str) and RUN_PATTERN.fullmatch(target) else None


def _relabelled(event: Event, number: str) -> Event:
    """Return the event under its run's number, with the paths of the run's own files moved along."""
    if event.run == number:
        return event
    moved = event.data if event.kind == RENUMBERED else _renamed(event.data, event.run, number, own=True)
    return replace(event, run=number, _data=moved)


def _rename_references(result: Numbering, runs: list[_Run]) -> None:
    """Let the children of a renumbered run name it by its new number.

    A `created` event holds the hashes of the runs it names in `links`. Where it is too old for that, the
    `renumbered` event lists the runs that meant it in `references`.
    """
    moved = {run.root.sha: run for run in runs if run.before != {run.number}}
    old_names = {name for run in moved.values() for name in run.before - {run.number}}
    listed = {
        str(child): run
        for run in moved.values()
        for event in run.events
        if event.kind == RENUMBERED
        for child in event.data.get("references") or ()
    }
    marks = [(f'"{name}"'.encode(), name) for name in old_names]
    groups = [*result.runs.values(), *(events for others in result.collisions.values() for events in others)]
    for events in groups:
        names = {name for mark, name in marks if mark in events[0].line}
        if not names:
            continue
        links = events[0].data.get("links") or {}
        for name in names:
            run = moved.get(str(links.get(name))) or (listed.get(events[0].sha) if name not in links else None)
            if run is not None and name in run.before:
                events[:] = [
                    replace(event, _data=_renamed(event.data, name, run.number, own=False)) for event in events
                ]


def _renamed(value: Any, old: str, new: str, *, own: bool, key: str = "") -> Any:
    """Return data with a run's number replaced where it is one: in paths (`own`), or as the name of a parent."""
    if isinstance(value, Mapping):
        return {name: _renamed(item, old, new, own=own, key=name) for name, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, old, new, own=own) for item in value]
    if not isinstance(value, str):
        return value
    if own:
        for folder, end in (("rl", ".toml"), ("analysis", "/"), ("outputs", "/")):
            start = f"{folder}/{old}{end}"
            if value.startswith(start) and (end == "/" or value == start):
                return f"{folder}/{new}{end}{value[len(start) :]}"
        return value
    return new if key in _NAMING_KEYS and value == old else value


def heads(events: Iterable[Event]) -> list[str]:
    """Return the hashes of the events that no other one of them follows."""
    known = list(events)
    followed = {sha for event in known for sha in event.prev}
    return [event.sha for event in known if event.sha not in followed]
