"""State as a fold over events, in whatever order their lines stand in the file.

Git merges lines in its own order, so nothing here depends on position: events are sorted by
time and id, an event never before the ones its `prev` names, and exact duplicates drop out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from harness.core.errors import LedgerCorruptError
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

    @cached_property
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

    @cached_property
    def created(self) -> dict[str, Any]:
        """Data of the `created` (or `imported`) event; empty when the run has none."""
        births = self.of_kind("created") or self.of_kind("imported")
        return births[0].data if births else {}

    @cached_property
    def root(self) -> str:
        """Hash of the run's first event; it stays when the run gets another number."""
        return self.events[0].sha

    @cached_property
    def created_at(self) -> str:
        """Time of the run's first event."""
        return self.events[0].at

    @cached_property
    def kind(self) -> str:
        """`training`, `prompt_search` or `import`."""
        return str(self.created.get("type", "import" if self.of_kind("imported") else "training"))

    @cached_property
    def hypothesis(self) -> str:
        """What the run tests."""
        return str(self.created.get("hypothesis") or "")

    @cached_property
    def parent(self) -> str | None:
        """The run whose config this one changes."""
        return self.created.get("parent")

    @cached_property
    def idea(self) -> str | None:
        """Id of the `proposed` event that the run took up."""
        return self.created.get("idea")

    @cached_property
    def config_sha(self) -> str | None:
        """Hash of the config the run was created with."""
        return self.created.get("config_sha")

    @cached_property
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

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        """Data of the `evaluated` events."""
        return [event.data for event in self.of_kind("evaluated")]

    @cached_property
    def decisions(self) -> list[dict[str, Any]]:
        """Data of the `decided` events with `at` and `actor`."""
        return [_stamped(event) for event in self.of_kind("decided")]

    @cached_property
    def decision(self) -> str | None:
        """The last decision."""
        return self.decisions[-1].get("decision") if self.decisions else None

    @cached_property
    def reason(self) -> str | None:
        """The reason of the last decision."""
        return self.decisions[-1].get("reason") if self.decisions else None

    @cached_property
    def decided_at(self) -> str | None:
        """When the last decision was made."""
        return self.decisions[-1]["at"] if self.decisions else None

    @cached_property
    def gated(self) -> list[dict[str, Any]]:
        """Data of the `gated` events with `at` and `actor`: what the gates said each time."""
        return [_stamped(event) for event in self.of_kind("gated")]

    @cached_property
    def promoted(self) -> dict[str, Any] | None:
        """Data of the last `promoted` event with `at` and `actor`; None when the run was never promoted."""
        events = self.of_kind("promoted")
        return _stamped(events[-1]) if events else None

    @cached_property
    def notes(self) -> list[dict[str, Any]]:
        """`text` with `at` and `actor` of each note."""
        return [_stamped(event) for event in self.of_kind("noted")]

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """Names the run carries now, sorted; of several `tagged` events for one name the last holds."""
        last = {str(e.data.get("tag")): not e.data.get("removed") for e in self.of_kind("tagged")}
        return tuple(sorted(tag for tag, carried in last.items() if carried))

    @cached_property
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

    @cached_property
    def amendments(self) -> list[dict[str, Any]]:
        """Data of the `amended` events with `at` and `actor`."""
        return [_stamped(event) for event in self.program_events if event.kind == "amended"]

    @cached_property
    def notes(self) -> list[dict[str, Any]]:
        """Notes on the program, with `at` and `actor`."""
        return [_stamped(event) for event in self.program_events if event.kind == "noted"]

    @cached_property
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
    groups: dict[str, list[Event]] = {}
    promoted: list[Event] = []
    numbering = None
    contested = False
    ordered = in_order(unique(events))
    for event in ordered:
        refuse_unknown(event)
        group = groups.setdefault(event.run, [])
        contested = contested or contests(event, group or None)
        group.append(event)
        if event.kind == "promoted":
            promoted.append(event)
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
    ordered = sorted(events, key=lambda event: (event.at, event.id))
    seen: set[str] = set()
    known = {event.sha for event in events}
    for event in ordered:
        for sha in event.prev:
            if sha not in seen and sha in known:
                return _by_links(ordered)
        seen.add(event.sha)
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
