"""`harness ledger renumber`: give one of two runs that took the same number another one.

The event comes first and decides; moving files follows from it and can be repeated, so that a process
killed in the middle is finished by running the command again (`harness.program.relocate`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.core.errors import HarnessError, NotFoundError, RefusedError, UsageError
from harness.core.ids import run_id, run_number
from harness.core.names import did_you_mean
from harness.ledger import Actor, Event, Ledger, NewEvent, RunState, State
from harness.ledger.events import RENUMBERED, UnknownEventError, parse_line
from harness.ledger.fold import fold
from harness.ledger.history import commit_of, every_version, file_at
from harness.ledger.life import liveness
from harness.ledger.numbering import heads
from harness.program.model import Program
from harness.program.relocate import relocate

_NUMBER = re.compile(rb'"(?:run|to)":"(run-(?:[0-9]{3}|[1-9][0-9]{3,8}))"')
DEFAULT_BASES = ("origin/HEAD", "origin/main", "origin/master")
"""Commits that others have, looked for in this order when none is named."""


@dataclass(slots=True)
class Renumbering:
    """What was done, or would be.

    Args:
        base: the commit whose events keep their numbers; None when this clone has none.
        moves: (old, new) of every run that got another number now.
        settled: (old, new) of every run whose files were looked after.
        files: what was moved or written, one sentence each.
        notes: what the user should know.
    """

    base: str | None
    moves: list[tuple[str, str]] = field(default_factory=list)
    settled: list[tuple[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def renumber(
    program: Program,
    run: str,
    *,
    to: str | None = None,
    base: str | None = None,
    dry_run: bool = False,
    actor: Actor | None = None,
) -> Renumbering:
    """Solve a collision of run numbers; repeating it finishes what was interrupted.

    Runs whose events the base has keep the number. Without a base that has it, the oldest keeps it.

    Args:
        program: the program.
        run: the number that two branches took.
        to: the new number; the next free one when None.
        base: a commit whose events others may have already; `DEFAULT_BASES` when None.
        dry_run: touch nothing and say which run would get which number.
        actor: who; told from the environment when None.

    Raises:
        RefusedError: when the run collides with nothing, every run of the number is in the base, or one is running.
        UsageError: for a number that is taken or is none.
        CannotTellError: when git does not know the base.
        NotFoundError: when there is no such run.
    """
    for number in filter(None, (run, to)):
        run_number(number)
    name, theirs = _base(program, base)
    done = Renumbering(name)
    ledger = Ledger(program.ledger)
    elsewhere = _numbers_elsewhere(program)

    def build(state: State) -> list[NewEvent]:
        news = _decide(state, theirs, run, to, done, elsewhere)
        done.moves = [(run, str(new.data["to"])) for new in news]
        return [] if dry_run else news

    if dry_run:
        build(ledger.state())
        return done
    ledger.append_locked(
        lambda state: [NewEvent(n.run, n.kind, n.data, n.critical, actor, n.follows) for n in build(state)]
    )
    state = ledger.state()
    for old, moved in _renumbered(state, run):
        done.settled.append((old, moved.run))
        relocate(program, state, moved, old, done.files, done.notes)
    return done


def _base(program: Program, base: str | None) -> tuple[str | None, State]:
    """Return the commit that others have and what its ledger says; damage in it is passed over."""
    commit = None
    for name in (base,) if base else DEFAULT_BASES:
        try:
            commit = commit_of(program.root, name)
            break
        except HarnessError:
            if base:
                raise
    if commit is None:
        return None, fold([])
    events: dict[str, Event] = {}
    for line in (file_at(program.root, commit, program.relative(program.ledger)) or b"").split(b"\n"):
        try:
            event = parse_line(line)
        except (ValueError, UnknownEventError):
            continue
        events.setdefault(event.id, event)
    return name, fold(events.values())


def _every_run(state: State) -> list[RunState]:
    return [*state.runs.values(), *(run for runs in state.collisions.values() for run in runs)]


def _decide(
    state: State, theirs: State, run: str, to: str | None, done: Renumbering, elsewhere: set[str]
) -> list[NewEvent]:
    """Return the events that solve the collision; none when they are recorded already."""
    here = [found for found in _every_run(state) if found.run == run]
    taken = [found.root for found in _every_run(theirs) if found.run == run]
    if len({*taken, *(found.root for found in here)}) < 2 or not here:
        if not _renumbered(state, run):
            _refuse_alone(state, run, bool(here), done.base)
        return []
    known = {event.sha for found in _every_run(theirs) for event in found.events}
    mine = [found for found in here if found.root not in known]
    movers = mine if taken else sorted(here, key=lambda found: (found.created_at, found.events[0].id))[1:]
    if not movers:
        raise RefusedError(
            f"every run with the number {run} is in {done.base} already, where others may have used it",
            f"name a commit from before they were merged: harness ledger renumber {run} --base COMMIT",
        )
    if to is not None and len(movers) > 1:
        raise UsageError(f"{len(movers)} runs leave the number {run}", "leave out --to; each gets the next free number")
    _refuse_running(movers)
    free = _free_numbers(state, theirs, to, len(movers), elsewhere)
    return [_event(state, known, found, number, done) for found, number in zip(movers, free, strict=True)]


def _refuse_alone(state: State, run: str, exists: bool, base: str | None) -> None:
    if not exists:
        raise NotFoundError(f"{run} does not exist", did_you_mean(run, state.runs, "`harness list` shows the runs"))
    clashes = ", ".join(state.collisions)
    where = f"here and in {base}" if base else "here; no base branch is known, name one with --base"
    raise RefusedError(
        f"{run} collides with no other run {where}, and other runs keep their numbers",
        f"these collide: {clashes}" if clashes else "`harness ledger verify` lists collisions",
    )


def _refuse_running(movers: Iterable[RunState]) -> None:
    for found in movers:
        seen = liveness(found)
        if seen is not None and seen.alive is not False:
            raise RefusedError(
                f"{found.run} ({found.hypothesis[:60]}) is running, or may be: {seen.why}",
                f"`harness stop {found.run}` ends it; `harness recover {found.run}` closes a dead one",
            )


def _numbers_elsewhere(program: Program) -> set[str]:
    """Return the numbers on every branch this clone knows, so that the new one collides with none of them."""
    versions = every_version(program.root, program.relative(program.ledger))
    return {match.decode() for data in versions for match in _NUMBER.findall(data)}


def _free_numbers(state: State, theirs: State, to: str | None, count: int, elsewhere: set[str]) -> list[str]:
    used = {found.run for side in (state, theirs) for found in _every_run(side)} | {*state.former, *theirs.former}
    if to is not None:
        if to in used:
            raise UsageError(f"the number {to} is taken", "leave out --to for the next free one")
        return [to]
    last = max(map(run_number, used | elsewhere))
    return [run_id(last + 1 + place) for place in range(count)]


def _event(state: State, known: set[str], found: RunState, number: str, done: Renumbering) -> NewEvent:
    references = []
    for child in _every_run(state):
        named = {child.created.get(key) for key in ("parent", "replicate_of")}
        if found.run not in named or found.run in (child.created.get("links") or {}) or child.root in known:
            continue  # links tell which run is meant; a child in the base means the base's
        if child.created_at < found.created_at or (not known and found.run in state.collisions):
            done.notes.append(f"{child.run} names {found.run} as its parent, and is taken to mean the older run")
        else:
            references.append(child.root)
    data: Mapping[str, object] = {
        "from": found.run,
        "to": number,
        "root": found.root,
        "references": references,
        "base": done.base,
    }
    return NewEvent(found.run, RENUMBERED, data, critical=True, follows=tuple(sorted(heads(found.events))))


def _renumbered(state: State, run: str) -> list[tuple[str, RunState]]:
    """Return the runs that had a number, or got it, each with the number it gave up last."""
    found = []
    for moved in state.runs.values():
        moves = moved.of_kind(RENUMBERED)
        if moves and run in {str(event.data.get(key)) for event in moves for key in ("from", "to")}:
            found.append((str(moves[-1].data.get("from")), moved))
    return found
