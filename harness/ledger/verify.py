"""Look for everything that can be wrong with a ledger and report all of it, instead of the first.

Each line is judged alone (hash, strict JSON), then the lines together (ids, links, run numbers), then what
an earlier copy says, and the committed files that events name by hash.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from harness.core.errors import InfraError
from harness.core.files import disk_hint
from harness.core.memory import no_collection
from harness.ledger.artefacts import NAMING_KEYS, artefact_findings
from harness.ledger.events import FIRST_KINDS, KINDS, PROGRAM, RENUMBERED, Event, UnknownEventError, parse_line
from harness.ledger.findings import Finding, Placed
from harness.ledger.fold import State, fold, in_order
from harness.ledger.halves import Elsewhere
from harness.ledger.lost import Base, lost_against, lost_heads
from harness.ledger.numbering import Numbering, contests, heads, new_number, separate

__all__ = ["Check", "Finding", "check", "verify"]

OWN_SHARE = 0.4
"""Part of the lines whose data the parent parses beside the hashes of all, while a child parses the others'."""
MAX_DAMAGED = 1000
"""Damaged lines that are described one by one; a file that is no ledger at all may have millions."""


class Check:
    """A verified ledger: what was found, and what it says.

    Args:
        findings: in the order of the file; it verifies when none is an `error`.
        placed: the events, once each.
    """

    def __init__(self, findings: list[Finding], placed: Sequence[Placed] = ()) -> None:
        self.findings = findings
        self.events = [item.event for item in placed]
        # A critical event of an unknown kind is reported; what it does to the state is not known.
        self.state: State = fold(event for event in self.events if event.kind in KINDS or not event.critical)

    def heads(self) -> dict[str, list[str]]:
        """Return the hashes of each run's last events, the program's own included: a record to verify against."""
        groups = {PROGRAM: self.state.program_events} | {run.run: run.events for run in self.state.runs.values()}
        for number, others in self.state.collisions.items():
            groups[number] = [*groups[number], *(event for run in others for event in run.events)]
        return {run: sorted(heads(events)) for run, events in groups.items() if events}


def verify(path: Path, root: Path | None = None) -> list[Finding]:
    """Check a ledger and the committed files it names; see `check`."""
    return check(path, root).findings


def check(
    path: Path,
    root: Path | None = None,
    *,
    base: Base | None = None,
    recorded: Mapping[str, Sequence[str]] | None = None,
) -> Check:
    """Check a ledger, the committed files it names, and that nothing of earlier copies is gone.

    Args:
        path: the ledger; a file that does not exist is an empty ledger.
        root: folder that event paths are relative to; the ledger's own when None.
        base: the ledger of a commit that this one must contain.
        recorded: hashes of last events by run, as `Check.heads` gave them earlier.

    Raises:
        InfraError: when a file cannot be read.
    """
    data = _read(path)
    with no_collection():
        placed, findings = _lines(data)
        first: dict[str, Placed] = {}
        for item in placed:
            if first.setdefault(item.event.id, item) is not item or item.event.critical:
                findings.extend(_identity(item, first[item.event.id]))
        kept = list(first.values())
        numbering = _numbering([item.event for item in kept])
        findings.extend(_links(kept, numbering))
        findings.extend(_births(kept, numbering))
        findings.extend(_forks(kept))
        findings.sort(key=lambda finding: finding.offset or 0)
        done = Check(findings, kept)
        events = {item.event.id: item.event for item in kept}
        if base is not None:
            findings.extend(lost_against(base, events))
        if recorded:
            findings.extend(lost_heads(recorded, events.values()))
        naming = {item.event.sha for item in kept if item.naming}
        findings.extend(artefact_findings(done.state, (path.parent if root is None else root).resolve(), naming))
    return done


def _numbering(events: list[Event]) -> Numbering:
    groups: dict[str, list[Event]] = {}
    contested = False
    for event in events:
        group = groups.setdefault(event.run, [])
        contested = contested or contests(event, group or None)
        group.append(event)
    groups.pop(PROGRAM, None)
    return separate(in_order(events)) if contested else Numbering(groups)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            with contextlib.suppress(OSError):  # a file system without locks can still be read
                fcntl.flock(file, fcntl.LOCK_SH)  # or half of a running append would look torn
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise InfraError(f"cannot read {path}: {error.strerror}", disk_hint(error)) from error


def _lines(data: bytes) -> tuple[list[Placed], list[Finding]]:
    placed: list[Placed] = []
    findings: list[Finding] = []
    lines = data.split(b"\n")
    tail = lines.pop()
    offset = damaged = 0
    for number, (line, event, naming) in enumerate(zip(lines, *_judged(lines), strict=True), 1):
        if event is not None and naming is not None:
            placed.append(Placed(event, number, offset, naming))
        else:
            kind, text = _damage(line)
            damaged += kind == "damage"
            if kind != "damage" or damaged <= MAX_DAMAGED:
                findings.append(Finding(kind, "error", f"line {number}{text}", number, offset))
        offset += len(line) + 1
    if damaged > MAX_DAMAGED:
        findings.append(Finding("damage", "error", f"{damaged - MAX_DAMAGED} more lines are damaged", None, offset))
    if tail:
        number = len(lines) + 1
        try:
            event = parse_line(tail)
            placed.append(Placed(event, number, offset, _names_files(event)))
            message = f"line {number} is complete but lacks its newline; the next append adds it"
            findings.append(Finding("no_newline", "note", message, number, offset))
        except (ValueError, UnknownEventError):
            message = f"line {number} is torn ({len(tail)} bytes); the next append moves it to outputs/"
            findings.append(Finding("torn", "error", message, number, offset))
    return placed, findings


def _judged(lines: Sequence[bytes]) -> tuple[list[Event | None], list[bool | None]]:
    """Parse lines; return their events, and whether the data name files; None in either where a line is damaged."""
    own = int(len(lines) * OWN_SHARE)
    rest = Elsewhere(lambda line: _naming(_parsed(line)), lines[own:])
    try:
        events = [_parsed(line) for line in lines]
        naming = [_naming(event) for event in events[:own]]
    finally:
        others = rest.answers()
    return events, naming + others


def _parsed(line: bytes) -> Event | None:
    try:
        return parse_line(line)
    except (ValueError, UnknownEventError):
        return None


def _naming(event: Event | None) -> bool | None:
    try:
        return None if event is None else _names_files(event)
    except ValueError:
        return None


def _names_files(event: Event) -> bool:
    """Parse the data strictly, and tell whether `artefact_findings` will ask for them again."""
    naming = not event.data.keys().isdisjoint(NAMING_KEYS)
    event.let_go()  # parsed data of every event would fill memory
    return naming


def _damage(line: bytes) -> tuple[str, str]:
    """Say why a line is no event: the kind of finding, and what follows the line's number."""
    try:
        _names_files(parse_line(line))
    except UnknownEventError as error:
        return "too_new", f": {error}"
    except ValueError as error:
        return "damage", f" is damaged: {error}"
    return "damage", " is damaged: it was read in one way and then in another; the memory of this machine is at fault"


def _identity(item: Placed, known: Placed) -> Iterator[Finding]:
    """Compare with an earlier line of the same id, and check that the kind is known where it must be."""
    event, line, offset = item.event, item.line, item.offset
    if known is not item:
        if known.event.sha == event.sha:
            text = f"line {line} repeats line {known.line} exactly, as a merge can leave it; it counts once"
            yield Finding("repeated", "note", text, line, offset, event.run)
        else:
            text = f"lines {known.line} and {line} are different events with one id, {event.id}; one of them was edited"
            yield Finding("duplicate_id", "error", text, line, offset, event.run)
    if event.critical and event.kind not in KINDS:
        text = f"line {line} is of the kind {event.kind!r}, which changes state and is not known here; upgrade harness"
        yield Finding("too_new", "error", text, line, offset, event.run)


def _links(kept: list[Placed], numbering: Numbering) -> Iterator[Finding]:
    known = {item.event.sha: item.event.run for item in kept}
    for item in kept:
        event = item.event
        for sha in event.prev:
            run = known.get(sha)
            if run is None:
                text = f"line {item.line} ({event.kind} of {event.run}) follows event {sha[:12]}, which is not here"
                yield Finding("missing_event", "error", text, item.line, item.offset, event.run)
            elif run != event.run and event.run not in numbering.had.get(numbering.roots.get(sha, ""), ()):
                text = f"line {item.line} ({event.kind} of {event.run}) follows an event of {run}"
                yield Finding("wrong_link", "error", text, item.line, item.offset, event.run)
        if event.kind == RENUMBERED and new_number(event) is None:
            text = f"line {item.line} gives {event.run} a number that is no run id; it keeps its own"
            yield Finding("bad_number", "error", text, item.line, item.offset, event.run)


def _births(kept: list[Placed], numbering: Numbering) -> Iterator[Finding]:
    """Every run is created once; two branches that both take a number collide."""
    unborn = [
        (run, events)
        for run, events in numbering.runs.items()
        if not any(event.kind in FIRST_KINDS for event in events)
    ]
    places = {item.event.sha: item for item in kept} if unborn or numbering.collisions else {}
    for run, others in numbering.collisions.items():
        items = sorted((places[events[0].sha] for events in (numbering.runs[run], *others)), key=lambda i: i.line)
        lines = " and ".join(str(item.line) for item in items)
        text = (
            f"{run} is created {len(items)} times, at lines {lines}; two branches took the same number; "
            f"`harness ledger renumber {run}` gives the younger one another"
        )
        yield Finding("run_collision", "error", text, items[1].line, items[1].offset, run)
    for run, events in unborn:
        item = min((places[event.sha] for event in events), key=lambda item: item.line)
        text = f"{run} has events from line {item.line} on, but none that creates it"
        yield Finding("no_creation", "error", text, item.line, item.offset, run)


def _forks(kept: list[Placed]) -> Iterator[Finding]:
    """Tell where two branches went on with one run, each without knowing of the other."""
    counts = Counter(chain.from_iterable(item.event.prev for item in kept))
    followers: dict[str, list[Placed]] = {sha: [] for sha, count in counts.items() if count > 1}
    for item in kept if followers else ():
        for sha in item.event.prev:
            if sha in followers:
                followers[sha].append(item)
    for item in kept if followers else ():
        if after := followers.get(item.event.sha):
            lines = " and ".join(f"{found.line} ({found.event.kind})" for found in after)
            text = f"lines {lines} both follow line {item.line} of {item.event.run}, as two branches leave it"
            yield Finding("fork", "note", text, item.line, item.offset, item.event.run)
