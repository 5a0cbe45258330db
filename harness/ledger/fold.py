"""State as a fold over events, in whatever order their lines stand in the file.

Git merges lines in its own order, so nothing here depends on position: events are sorted by
time and id, an event never before the ones its `prev` names, and exact duplicates drop out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from harness.core.errors import LedgerCorruptError
from harness.core.lazy import lazy
from harness.ledger.events import KINDS, PROGRAM, RENUMBERED, Event, UnknownEventError
from harness.ledger.numbering import Numbering, contests, heads, separate

LOCAL_KINDS = KINDS - {"promoted", RENUMBERED}
"""Kinds that change nothing outside their own run."""

_ENDED = {"completed", "failed", "interrupted", "crashed", "stopped"}


class RunState:
    """What the ledger says of one run. Every member is derived from `events` when first asked for."""

    def __init__(self, run: str, events: list[Event]) -> None:
        """Hold the run's events, already in order."""
        self.run = run
        self.events = events

    def __repr__(self) -> str:
        return f"RunState({self.run!r}, {self.status}, {len(self.events)} events)"

    @lazy
    def _by_kind(self) -> dict[str, list[Event]]:
        groups: dict[str, list[Event]] = {}
        for event in self.events:
            groups.setdefault(event.kind, []).append(event)
        return groups

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the run's events of these kinds, in order."""
        if len(kinds) == 1:
            return list(self._by_kind.get(kinds[0], ()))
        return [event for event in self.events if event.kind in kinds]

    def _last(self, kind: str) -> Event | None:
        events = self._by_kind.get(kind)
        return events[-1] if events else None

    @lazy
    def created(self) -> dict[str, Any]:
        """Data of the `created` (or `imported`) event; empty when the run has none."""
        births = self.of_kind("created") or self.of_kind("imported")
        return births[0].data if births else {}

    @lazy
    def root(self) -> str:
        """Hash of the run's first event; it stays when the run gets another number."""
        return self.events[0].sha

    @lazy
    def created_at(self) -> str:
        """Time of the run's first event."""
        return self.events[0].at

    @lazy
    def kind(self) -> str:
        """`training`, `prompt_search` or `import`."""
        return str(self.created.get("type", "import" if self.of_kind("imported") else "training"))

    @lazy
    def hypothesis(self) -> str:
        """What the run tests."""
        return str(self.created.get("hypothesis") or "")

    @lazy
    def parent(self) -> str | None:
        """The run whose config this one changes."""
        return self.created.get("parent")

    @lazy
    def idea(self) -> str | None:
        """Id of the `proposed` event that the run took up."""
        births = self.of_kind("created")
        if births and b'"idea":"' not in births[0].line:  # asked of every run, and few have one
            return None
        return self.created.get("idea")

    @lazy
    def config_sha(self) -> str | None:
        """Hash of the config the run was created with."""
        return self.created.get("config_sha")

    @lazy
    def attempts(self) -> list[dict[str, Any]]:
        """`started` data with `at`, completed by `finished` data and `finished_at`; `outcome` None while open."""
        attempts: dict[Any, dict[str, Any]] = {}
        for event in self.of_kind("started", "finished"):
            number = event.data.get("attempt")
            entry = attempts.setdefault(
                number,
                {"attempt": number, "host": None, "pid": None, "at": event.at, "outcome": None, "failure": None},
            )
            if event.kind == "started":
                # A second start under one number is another execution: what the first one reached no longer counts.
                entry |= {"outcome": None, "failure": None, "finished_at": None} | event.data | {"at": event.at}
            else:
                entry |= event.data | {"finished_at": event.at}
        return list(attempts.values())

    @lazy
    def evals(self) -> list[dict[str, Any]]:
        """Data of the `evaluated` events."""
        return [event.data for event in self.of_kind("evaluated")]

    @lazy
    def decisions(self) -> list[dict[str, Any]]:
        """Data of the `decided` events with `at` and `actor`."""
        return [_stamped(event) for event in self.of_kind("decided")]

    @lazy
    def decision(self) -> str | None:
        """The last decision."""
        last = self._last("decided")
        return last.data.get("decision") if last is not None else None

    @lazy
    def reason(self) -> str | None:
        """The reason of the last decision."""
        last = self._last("decided")
        return last.data.get("reason") if last is not None else None

    @lazy
    def decided_at(self) -> str | None:
        """When the last decision was made."""
        last = self._last("decided")
        return last.at if last is not None else None

    @lazy
    def gated(self) -> list[dict[str, Any]]:
        """Data of the `gated` events with `at` and `actor`: what the gates said each time."""
        return [_stamped(event) for event in self.of_kind("gated")]

    @lazy
    def promoted(self) -> dict[str, Any] | None:
        """Data of the last `promoted` event with `at` and `actor`; None when the run was never promoted."""
        last = self._last("promoted")
        return _stamped(last) if last is not None else None

    @lazy
    def notes(self) -> list[dict[str, Any]]:
        """`text` with `at` and `actor` of each note."""
        return [_stamped(event) for event in self.of_kind("noted")]

    @lazy
    def tags(self) -> tuple[str, ...]:
        """Names the run carries now, sorted; of several `tagged` events for one name the last holds."""
        last = {str(e.data.get("tag")): not e.data.get("removed") for e in self.of_kind("tagged")}
        return tuple(sorted(tag for tag, carried in last.items() if carried))

    @lazy
    def status(self) -> str:
        """Where the last attempt stands: created, running, completed, failed, interrupted, crashed or stopped.

        `running` means started and not finished; `process.is_alive` tells whether that is still true.
        """
        executions = self.of_kind("started", "finished")
        if not executions:
            births = self.of_kind("imported")
            if not births:
                return "created"
            ended = births[0].data.get("outcome")  # as far as its source told
            return ended if ended in _ENDED else "completed"
        if executions[-1].kind == "started":
            return "running"
        outcome = executions[-1].data.get("outcome") if len(executions) == 2 else self.attempts[-1]["outcome"]
        if outcome is None:
            return "running"
        return outcome if outcome in _ENDED else "failed"


class State:
    """What the ledger says of the program."""

    def __init__(
        self,
        runs: dict[str, RunState],
        program_events: list[Event],
        champion: str | None,
        numbering: Numbering | None = None,
    ) -> None:
        """Hold the runs, sorted by id, and the events of the program itself."""
        self.runs = runs
        self.program_events = program_events
        self.champion = champion
        self.collisions = {} if numbering is None else _states(numbering.collisions)
        """Of each number that several runs have, the younger ones; `runs` has the oldest."""
        self.former = {} if numbering is None else numbering.former
        """Of each number that a run gave up, the number it has now."""

    @lazy
    def amendments(self) -> list[dict[str, Any]]:
        """Data of the `amended` events with `at` and `actor`."""
        return [_stamped(event) for event in self.program_events if event.kind == "amended"]

    @lazy
    def notes(self) -> list[dict[str, Any]]:
        """Notes on the program, with `at` and `actor`."""
        return [_stamped(event) for event in self.program_events if event.kind == "noted"]

    @lazy
    def ideas(self) -> list[dict[str, Any]]:
        """Hypotheses that `harness next` left and nobody took up or dropped, oldest first; with `id`, `at`, `actor`."""
        events = [event for event in self.program_events if event.kind == "proposed"]
        if not events:
            return []
        gone = {event.data.get("dropped") for event in events}
        gone |= {run.idea for run in self.runs.values()}
        left = [event for event in events if event.data.get("hypothesis") and event.id not in gone]
        return [_stamped(event) | {"id": event.id} for event in left]


def _stamped(event: Event) -> dict[str, Any]:
    return event.data | {"at": event.at, "actor": {"kind": event.actor.kind, "name": event.actor.name}}


def fold(events: Iterable[Event]) -> State:
    """Fold events, in any order, to the state of the program.

    Raises:
        LedgerCorruptError: when two different events share an id.
        UnknownEventError: on a critical event of a kind this version does not know.
    """
    return fold_ordered(in_order(unique(events)))


def fold_ordered(ordered: list[Event]) -> State:
    """Do what `fold` does with events in the order of `in_order`, each of them once."""
    groups: dict[str, list[Event]] = {}
    promoted: list[Event] = []
    numbering = None
    contested = False
    for event in ordered:
        group = groups.setdefault(event.run, [])
        if not event.prev or event.kind not in LOCAL_KINDS:
            refuse_unknown(event)
            contested = contested or contests(event, group or None)
            if event.kind == "promoted":
                promoted.append(event)
        group.append(event)
    program_events = groups.pop(PROGRAM, [])
    if contested:
        numbering = separate(ordered)
        groups = numbering.runs
        promoted = [found for event in promoted if (found := numbering.shown(event)) is not None]
    champion = promoted[-1].run if promoted else None
    runs = {name: RunState(name, groups[name]) for name in sorted(groups, key=_by_number)}
    return State(runs, program_events, champion, numbering)


def grown(state: State, events: Iterable[Event]) -> State | None:
    """Return what `fold` gives when these events are added, without folding the others again.

    An event that follows the last ones of its run comes after all of them in every order, and moves nothing else.

    Args:
        state: of the earlier events, none of which contests a number; it is left as it is.
        events: new ones, in the order in which they were appended.

    Returns:
        The state, or None when an event does not follow all that its run had, or concerns more than its run.
    """
    runs, program_events = dict(state.runs), state.program_events
    for event in events:
        about = event.run == PROGRAM
        known = program_events if about else runs[event.run].events if event.run in runs else []
        if event.kind not in LOCAL_KINDS or contests(event, known or None) or set(event.prev) != set(heads(known)):
            return None
        if about:
            program_events = [*known, event]
        else:
            runs[event.run] = RunState(event.run, [*known, event])
    if len(runs) > len(state.runs):
        runs = {name: runs[name] for name in sorted(runs, key=_by_number)}
    return State(runs, program_events, state.champion)


def _by_number(name: str) -> tuple[int, str]:
    """Sort shorter ids first, so that run-1000 comes after run-999."""
    return len(name), name


def _states(collisions: dict[str, list[list[Event]]]) -> dict[str, list[RunState]]:
    return {number: [RunState(number, events) for events in runs] for number, runs in sorted(collisions.items())}


def refuse_unknown(event: Event) -> None:
    """Raise UnknownEventError when the event changes state in a way this version does not know."""
    if event.critical and event.kind not in KINDS:
        raise UnknownEventError(
            f"event {event.id} of {event.run} is of the kind {event.kind!r}, which changes state "
            "and which this version of harness does not know",
            "pip install -U post-training-harness",
        )


def unique(events: Iterable[Event]) -> list[Event]:
    """Drop exact duplicates.

    Raises:
        LedgerCorruptError: when two different events share an id.
    """
    seen: dict[str, Event] = {}
    for event in events:
        if seen.setdefault(event.id, event).sha != event.sha:
            raise LedgerCorruptError(
                f"two different events of {event.run} share the id {event.id}; one of them was edited",
                "`harness ledger verify` names the lines; restore the file with git",
            )
    return list(seen.values())


def in_order(events: list[Event]) -> list[Event]:
    """Sort by time and id, but never an event before one that its `prev` names (clocks differ)."""
    ordered = sorted(events, key=attrgetter("at", "id"))
    places = {event.sha: place for place, event in enumerate(ordered)}
    for place, event in enumerate(ordered):
        for sha in event.prev:
            if places.get(sha, -1) > place:
                return _by_links(ordered)
    return ordered


def _by_links(ordered: list[Event]) -> list[Event]:
    """Sort topologically along `prev`, the earliest ready event first (Kahn 1962)."""
    index = {event.sha: position for position, event in enumerate(ordered)}
    waiting = [sum(sha in index for sha in set(event.prev)) for event in ordered]
    children: dict[str, list[int]] = {}
    for position, event in enumerate(ordered):
        for sha in set(event.prev):
            children.setdefault(sha, []).append(position)
    ready = [position for position, count in enumerate(waiting) if count == 0]
    result = []
    while ready:
        event = ordered[heapq.heappop(ready)]
        result.append(event)
        for child in children.get(event.sha, ()):
            waiting[child] -= 1
            if waiting[child] == 0:
                heapq.heappush(ready, child)
    return result  # no cycle is possible: a hash cannot name one that contains it
