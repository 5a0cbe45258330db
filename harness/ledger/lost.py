"""What an earlier copy shows and the file alone cannot: events that are gone, and events that were replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.ledger.events import Event, UnknownEventError, parse_line
from harness.ledger.findings import Finding


@dataclass(frozen=True, slots=True)
class Base:
    """The ledger of another commit, which must be a subset of this one.

    Args:
        name: how the user named the commit.
        data: its ledger; None when it has none.
        own: hashes of the events that this branch has had; what is missing of others was never merged.
    """

    name: str
    data: bytes | None
    own: frozenset[str]


def shas(data: bytes | None) -> frozenset[str]:
    """Return the hashes of the whole events in a ledger."""
    return frozenset(event.sha for event in _events(data or b"")[0])


def lost_against(base: Base, here: Mapping[str, Event]) -> Iterator[Finding]:
    """Compare with the ledger of a base.

    Args:
        base: what must be here.
        here: the events of this ledger by id.
    """
    if base.data is None:
        yield Finding("bad_base", "note", f"{base.name} has no ledger, so nothing of it can be missing here")
        return
    events, damaged = _events(base.data)
    if damaged:
        text = f"{damaged} lines of the ledger in {base.name} are damaged and could not be compared"
        yield Finding("bad_base", "note", text)
    known = {event.sha for event in here.values()}
    gone = [event for event in events if event.sha not in known]
    for event in gone:
        if event.id in here:
            text = f"event {event.id} ({event.kind} of {event.run}) is not the one in {base.name}: it was replaced"
            yield Finding("rewritten", "error", text, run=event.run)
    gone = [event for event in gone if event.id not in here]
    unseen = [event for event in gone if event.sha not in base.own]
    if unseen:
        text = f"events of {base.name} are not merged yet: {len(unseen)} ({_names(unseen)}); merge {base.name} first"
        yield Finding("behind", "error", text)
    yield from _lost([event for event in gone if event.sha in base.own], here, base.name)


def _lost(gone: Sequence[Event], here: Mapping[str, Event], name: str) -> Iterator[Finding]:
    left = {event.run for event in here.values()}
    followed = {sha for event in here.values() for sha in event.prev}
    for run in dict.fromkeys(event.run for event in gone):
        events = [event for event in gone if event.run == run]
        kinds = ", ".join(dict.fromkeys(event.kind for event in events))
        if run not in left:
            text = f"{run} is in {name} and is gone here with all of its events: {len(events)}"
            yield Finding("lost_run", "error", text, run=run)
            continue
        where = "from within" if any(event.sha in followed for event in events) else "from the end of"
        text = f"events ({kinds}) that {name} has are gone {where} {run}: {len(events)}"
        yield Finding("lost_event", "error", text, run=run)


def lost_heads(heads: Mapping[str, Sequence[str]], here: Iterable[Event]) -> Iterator[Finding]:
    """Check that events recorded as the last ones of their runs are still here.

    An event vouches for everything it follows, so the last events vouch for the whole ledger.

    Args:
        heads: hashes by run; the run may be empty when only the hash was noted.
        here: the events of this ledger.
    """
    known = {event.sha for event in here}
    for run, wanted in heads.items():
        gone = [sha for sha in wanted if sha not in known]
        if gone:
            who = f"of {run} " if run else ""
            text = f"the recorded last event {who}is not here: {', '.join(sha[:12] for sha in gone)}"
            yield Finding("lost_event", "error", text, run=run or None)


def _events(data: bytes) -> tuple[list[Event], int]:
    found: dict[bytes, Event] = {}
    damaged = 0
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            found[line] = parse_line(line)
        except (ValueError, UnknownEventError):
            damaged += 1
    return list(found.values()), damaged


def _names(events: Sequence[Event]) -> str:
    runs = list(dict.fromkeys(event.run for event in events))
    return ", ".join(runs[:8]) + (f" and {len(runs) - 8} more" if len(runs) > 8 else "")
