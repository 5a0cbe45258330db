"""Merge two versions of a ledger, as git's merge driver: the union of their events, byte for byte.

A line is its own identity: its hash covers its bytes. So a merge needs the common ancestor only for the
order of the lines, and to notice what one side took away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.ledger.events import Event, UnknownEventError, parse_line
from harness.ledger.fold import in_order
from harness.ledger.numbering import separate


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge comes to.

    Args:
        data: the merged ledger; None when nothing may be written.
        problems: what a person has to solve; the merge is clean when there is none.
        notes: what was done that is worth knowing.
        events: how many events the result has.
    """

    data: bytes | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    events: int


def merge(base: bytes, ours: bytes, theirs: bytes) -> Merged:
    """Return the union of the events of both sides; the order of the sides does not matter.

    The ancestor's lines come first, in its order, then what is new, by time and never before what it follows.
    Damage, a torn last line and an edited event are refused. Two runs with one number are merged and named: no
    line has to change to solve that.

    Args:
        base: the common ancestor; empty when there is none. Damage in it does not matter.
        ours: the current version.
        theirs: the other one.
    """
    known: dict[bytes, Event] = {}
    problems: list[str] = []
    before = _lines(base, known)
    mine, other = (_checked(data, name, known, problems) for data, name in ((ours, "ours"), (theirs, "theirs")))
    sides = {"ours": mine, "theirs": other}
    wanted = dict.fromkeys([*before, *mine, *other])
    problems += _edits(wanted, sides, known)
    if problems:
        return Merged(None, tuple(problems), (), 0)
    new = in_order([known[line] for line in wanted if line not in before])
    lines = [*before, *(event.line for event in new)]
    clashes = _collisions(lines, known) - _collisions(mine, known) - _collisions(other, known)
    problems = [
        f"{number} was created on both branches; both are kept, and `harness ledger renumber {number}` tells them apart"
        for number in sorted(clashes)
    ]
    notes = [
        f"events that {name} had dropped are kept: {count}"
        for name, lines_of in sides.items()
        if (count := sum(line not in lines_of for line in before))
    ]
    return Merged(b"".join(line + b"\n" for line in lines), tuple(problems), tuple(notes), len(lines))


def _lines(data: bytes, known: dict[bytes, Event]) -> dict[bytes, None]:
    """Return the whole events of the ancestor once; a merge of its own may have left damage in it."""
    found: dict[bytes, None] = {}
    for line in data.split(b"\n"):
        try:
            known[line] = parse_line(line)
        except (ValueError, UnknownEventError):
            continue
        found[line] = None
    return found


def _checked(data: bytes, name: str, known: dict[bytes, Event], problems: list[str]) -> dict[bytes, None]:
    """Return the events of one side once, and tell what in it is no event."""
    lines = data.split(b"\n")
    tail = lines.pop()
    found: dict[bytes, None] = {}
    for number, line in enumerate([*lines, tail] if tail else lines, 1):
        try:
            if line not in known:
                known[line] = parse_line(line)
                _ = known[line].data
            found[line] = None
        except UnknownEventError as error:
            problems.append(f"{name}, line {number}: {error}; {error.hint}")
        except ValueError as error:
            torn = number > len(lines)
            what = f"is torn ({len(line)} bytes)" if torn else f"is damaged: {error}"
            problems.append(f"{name}, line {number} {what}")
    return found


def _edits(wanted: Iterable[bytes], sides: Mapping[str, Mapping[bytes, None]], known: dict[bytes, Event]) -> list[str]:
    """Name every event of which there are two versions."""
    first: dict[str, bytes] = {}
    found = []
    for line in wanted:
        event = known[line]
        other = first.setdefault(event.id, line)
        if other != line:
            where = " and ".join(name for name, lines in sides.items() if line in lines or other in lines)
            found.append(f"event {event.id} ({event.kind} of {event.run}) has two versions in {where}; one was edited")
    return found


def _collisions(lines: Iterable[bytes], known: dict[bytes, Event]) -> set[str]:
    return set(separate(in_order([known[line] for line in lines])).collisions)
