"""The ledger file: appended under a lock, flushed before it is acknowledged, never rewritten.

One `os.write` on `O_APPEND` per append, under `flock` on the file itself, length checked and cut
back when short. Open files, clocks and processes live here; what events mean lives in `fold`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from harness.core.errors import BusyError, InfraError, LedgerCorruptError, NotFoundError, RefusedError
from harness.core.files import disk_hint, fsync_dir
from harness.core.ids import new_ulid
from harness.core.memory import no_collection
from harness.ledger import cache
from harness.ledger.actor import current_actor
from harness.ledger.disk import flush, lock, network_warning, read_from
from harness.ledger.events import (
    FIRST_KINDS,
    KINDS,
    PROGRAM,
    Actor,
    Event,
    NewEvent,
    UnknownEventError,
    format_time,
    make_event,
    parse_line,
)
from harness.ledger.fold import State, fold, grown, in_order, refuse_unknown
from harness.ledger.heads import LAG_BYTES, Head, entries, find_heads, find_mark, make_mark
from harness.ledger.numbering import contests, heads, separate

_RESTORE = "`harness ledger verify` lists every damage; restore the file with `git checkout -- {name}` or `git log -p`"
_unsynced: set[str] = set()
"""Ledgers this process must not append to any more: the kernel may have dropped what it could not flush."""


class Ledger:
    """The event file of one program. Safe for threads and processes; reads are incremental.

    Args:
        path: `runs.jsonl`; created by the first append.
        wait_s: how long to wait for another writer, in seconds.
        clock: Unix time in nanoseconds.
    """

    _by_id: dict[str, Event]
    _heads: dict[str, list[str]]  # of each run, the events that no other event names
    _places: dict[str, tuple[int, int]]  # of those events, where the line begins and its length
    _named: set[str]
    _torn: bytes
    _open_tail: bool  # the last line is whole but for its newline
    _good: int  # bytes up to the end of the last whole line
    _lines: int
    _last: bytes
    _stamp: tuple[int, ...]
    _too_new: Event | None  # a critical event of an unknown kind
    _contested: bool  # a run number was given up or taken twice
    _folded: tuple[int, State | None]  # how many events the last state was folded from, and that state
    _behind_mark: bool  # only lines after the mark were read, which is enough for an append to one run

    def __init__(self, path: Path | str, *, wait_s: float = 30.0, clock: Callable[[], int] = time.time_ns) -> None:
        self.path = Path(path)
        self.warnings: list[str] = []
        self._wait_s = wait_s
        self._clock = clock
        self._mutex = threading.RLock()
        self._locked = False
        self._asked_network = False
        self._marked = 0  # bytes up to the mark, as far as this object knows
        self._forget()

    # Reading

    def events(self) -> list[Event]:
        """Return every event once, in file order.

        Raises:
            LedgerCorruptError: on damage anywhere but in a torn last line, with line and byte.
            UnknownEventError: when a newer version of harness wrote it.
        """
        with self._mutex:
            self._read()
            return list(self._by_id.values())

    def state(self) -> State:
        """Return the fold of all events. Raises as `events` and `fold` do."""
        return fold(self.events())

    def torn(self) -> bytes:
        """Return the bytes of a torn last line; empty when there is none."""
        with self._mutex:
            self._read()
            return self._torn

    # Writing

    def append(
        self, run: str, kind: str, data: Mapping[str, Any], *, actor: Actor | None = None, critical: bool = False
    ) -> Event:
        """Append one event; when this returns it survives a crash of the process and of the machine.

        Raises:
            UsageError: when the event breaks the format.
            UnknownEventError: when the ledger holds events this version must not act on.
            NotFoundError, RefusedError: when the run does not exist, or is created twice.
            LedgerCorruptError: when the ledger is damaged.
            BusyError: when another process holds the lock too long.
            InfraError: when the disk is full or fails; the file is as before, unless the message says otherwise.
        """
        new = NewEvent(run, kind, data, critical, actor or current_actor())
        return self._append(lambda: [new], None if kind in FIRST_KINDS else run)[0]

    def append_locked(self, build: Callable[[State], list[NewEvent]]) -> list[Event]:
        """Read, decide and append under one lock, all events in one write.

        Args:
            build: from the state to the events; must be quick, every other writer waits. An exception
                leaves the ledger untouched.

        Raises:
            As `append`, and what `build` raises.
        """
        actor = current_actor()  # may ask git, so before the lock
        return self._append(lambda: [replace(new, actor=new.actor or actor) for new in build(self._fold())])

    def _fold(self) -> State:
        """Return the state, folding only what was added since the last `append_locked` where that will do."""
        before, state = self._folded
        if state is not None and not self._contested:
            added = list(islice(reversed(self._by_id.values()), len(self._by_id) - before))
            state = grown(state, reversed(added))
        if state is None or self._contested:
            state = fold(self._by_id.values())
        self._folded = (len(self._by_id), state)
        return state

    def _append(self, build: Callable[[], list[NewEvent]], only: str | None = None) -> list[Event]:
        """Append what `build` returns; `only` names the run when it concerns no other and does not begin it."""
        with self._mutex:
            with self._exclusive() as descriptor:
                self._refuse_after_failed_sync()
                self._refresh_for(descriptor, only)
                if self._too_new is not None:
                    refuse_unknown(self._too_new)
                events = self._make(build())
                if events:
                    self._repair(descriptor)
                    self._write(descriptor, events)
            self._move_mark()
            return events

    def _make(self, news: list[NewEvent]) -> list[Event]:
        now = self._clock()
        at, milliseconds = format_time(now), now // 1_000_000
        fresh: dict[str, list[str]] = {}
        events = []
        for new in news:
            before = fresh.get(new.run, self._heads_of(new.run)) if new.follows is None else [*new.follows]
            if before is None and new.run != PROGRAM and new.kind not in FIRST_KINDS:
                raise NotFoundError(f"{new.run} is not in {self.path.name}", "`harness list` shows the runs")
            if before is not None and new.kind == "created":
                raise RefusedError(f"{new.run} exists already", "`harness new-run` takes the next free number")
            event = make_event(new, id=new_ulid(milliseconds), at=at, prev=sorted(before or ()))
            fresh[new.run] = [event.sha]
            events.append(event)
        return events

    def _heads_of(self, run: str) -> list[str] | None:
        """Return the hashes of the events that a new one of the run follows; None when there is no such run.

        Raises:
            RefusedError: when two branches took its number, so that nobody knows which run is meant.
            NotFoundError: when it has another number now.
        """
        if not self._contested or run == PROGRAM:
            return self._last_of(run)
        numbering = separate(in_order(list(self._by_id.values())))
        if run in numbering.collisions:
            raise RefusedError(
                f"{run} was created on two branches, and both of its runs are here", f"harness ledger renumber {run}"
            )
        if run not in numbering.runs and run in numbering.former:
            raise NotFoundError(
                f"{run} has the number {numbering.former[run]} now", f"`harness show {numbering.former[run]}`"
            )
        return heads(numbering.runs[run]) if run in numbering.runs else None

    def _write(self, descriptor: int, events: list[Event]) -> None:
        payload = b"".join(event.line + b"\n" for event in events)
        if self._open_tail:
            payload = b"\n" + payload
        size = os.fstat(descriptor).st_size
        problem: OSError | None = None
        try:
            written = os.write(descriptor, payload)
            if written != len(payload):
                problem = OSError(errno.ENOSPC, f"only {written} of {len(payload)} bytes could be written")
        except OSError as error:
            problem = error
        if problem is not None:
            self._forget()
            with contextlib.suppress(OSError):  # what is left then is a torn tail, which the next append repairs
                os.ftruncate(descriptor, size)
            message = f"cannot append to {self.path}: {problem.strerror}; nothing was recorded"
            raise InfraError(message, disk_hint(problem)) from problem
        self._sync(descriptor, created=size == 0)
        if self._open_tail:
            self._forget()
            return
        start = size
        for event in events:
            self._add(event, start)
            start += len(event.line) + 1
        self._good = size + len(payload)
        self._lines += len(events)
        self._remember(descriptor, events[-1].line)

    def _sync(self, descriptor: int, created: bool) -> None:
        try:
            flush(descriptor)
            if created:
                fsync_dir(self.path.parent)
        except OSError as error:
            # After a failed fsync the kernel may have dropped the pages and the next fsync would "succeed".
            _unsynced.add(os.path.realpath(self.path))
            self._forget()
            raise InfraError(
                f"the disk did not confirm the last append to {self.path} ({error.strerror}); "
                "it may or may not be recorded, and this process appends no more",
                "check the disk (`dmesg`, `harness doctor`), then `harness ledger verify` before you go on",
            ) from error

    def _refuse_after_failed_sync(self) -> None:
        if os.path.realpath(self.path) in _unsynced:
            raise InfraError(
                f"an earlier append to {self.path} was not confirmed by the disk; this process appends no more",
                "check the disk, then start again; `harness ledger verify` shows what was recorded",
            )

    def _repair(self, descriptor: int) -> None:
        """Move a torn tail aside, so that no record is ever glued to it."""
        if not self._torn:
            return
        folder = self.path.parent / "outputs"  # git-ignored in every program
        number = 1
        while (folder / f"{self.path.name}.torn-{number}").exists():
            number += 1
        aside = folder / f"{self.path.name}.torn-{number}"
        try:
            folder.mkdir(exist_ok=True)
            with aside.open("xb") as file:
                file.write(self._torn)
                file.flush()
                os.fsync(file.fileno())
            fsync_dir(folder)
            os.ftruncate(descriptor, self._good)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise InfraError(
                f"cannot set the torn tail of {self.path} aside: {error.strerror}", disk_hint(error)
            ) from error
        self.warnings.append(f"{len(self._torn)} bytes of a torn last line were moved to {aside}")
        self._torn = b""

    # The lock

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[int]:
        if self._locked:
            raise BusyError("an append inside an append would wait for itself", "return all events from `build`")
        try:
            descriptor = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT, fcntl.LOCK_EX)
        except FileNotFoundError:
            raise NotFoundError(f"the folder of {self.path} does not exist", "`harness init` makes a program") from None
        self._locked = True
        try:
            yield descriptor
        finally:
            self._locked = False
            os.close(descriptor)

    def _open(self, flags: int, mode: int) -> int:
        """Open and lock the file that the path names now: git replaces files by rename."""
        while True:
            try:
                descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise InfraError(f"cannot open {self.path}: {error.strerror}", disk_hint(error)) from error
            try:
                lock(descriptor, mode, self._wait_s, self.path.name)
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    return descriptor
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    # The cache

    def _forget(self) -> None:
        self._by_id = {}
        self._heads = {}
        self._places = {}
        self._named = set()
        self._torn = b""
        self._open_tail = False
        self._good = 0
        self._lines = 0
        self._last = b""
        self._stamp = ()
        self._too_new = None
        self._contested = False
        self._folded = (0, None)
        self._behind_mark = False

    def _read(self) -> None:
        if self._locked:  # called from `build`, which holds the lock already
            return
        try:
            descriptor = self._open(os.O_RDONLY, fcntl.LOCK_SH)
        except FileNotFoundError:
            self._forget()
            return
        try:
            self._refresh_for(descriptor, None)
        finally:
            os.close(descriptor)

    def _refresh_for(self, descriptor: int, only: str | None) -> None:
        """Bring the cache up to date; for an append to the run `only`, lines behind the mark and its heads will do."""
        self._note_network()
        if only is not None and not self._stamp:
            self._skip_to_mark(descriptor)
        if self._behind_mark:
            with contextlib.suppress(cache.BrokenError):
                if only is not None and self._has_heads(descriptor, only):
                    return
            self._forget()
        self._refresh(descriptor)

    def _has_heads(self, descriptor: int, run: str) -> bool:
        self._refresh(descriptor)
        return self._last_of(run) is not None and not self._contested

    def _note_network(self) -> None:
        if not self._asked_network:
            self._asked_network = True
            if warning := network_warning(self.path):
                self.warnings.append(warning)

    def _skip_to_mark(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size < cache.WORTH_BYTES:
            return
        found = find_mark(self.path, descriptor)
        if found is not None:
            mark, last = found
            self._behind_mark = True
            self._good, self._lines, self._last = mark.bytes, mark.lines, last + b"\n"
            self._stamp = (mark.device, mark.inode, mark.bytes, mark.changed_ns)
            self._marked = mark.bytes

    def _last_of(self, run: str) -> list[str] | None:
        """Return the heads of a run, asking the index when its lines were not read."""
        if self._behind_mark and run not in self._heads:
            found = find_heads(self.path, run)
            if found is not None:
                self._heads[run] = [head.sha for head in found]
                self._places |= {head.sha: (head.start, head.length) for head in found}
        return self._heads.get(run)

    def _move_mark(self) -> None:
        """Note how far the ledger was read, once in a while; nothing depends on it."""
        if self._good < max(cache.WORTH_BYTES, self._marked + LAG_BYTES) or self._good != self._stamp[2]:
            return
        if self._too_new is not None or self._contested:
            return
        if not self._behind_mark and not self._named <= {event.sha for event in self._by_id.values()}:
            return
        self._marked = self._good
        mark = make_mark(self._stamp, self._lines, self._last[:-1])
        found = {run: [Head(sha, *self._places[sha]) for sha in shas] for run, shas in self._heads.items()}
        with cache.opened(self.path, create=True) as stored:
            if stored is not None:
                stored.put(entries(mark, found), clear=[] if self._behind_mark else ["heads/"])

    def _refresh(self, descriptor: int) -> None:
        """Bring the cache up to date: nothing to do, only new lines, or all of them."""
        stat = os.fstat(descriptor)
        if self._stamp == (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns):
            return
        grown = self._stamp[:2] == (stat.st_dev, stat.st_ino) and stat.st_size > self._stamp[2] and not self._open_tail
        if not grown or os.pread(descriptor, len(self._last), self._good - len(self._last)) != self._last:
            self._forget()
        try:
            last = self._load(read_from(descriptor, self._good))
        except BaseException:
            self._forget()
            raise
        self._remember(descriptor, last)

    def _remember(self, descriptor: int, last: bytes) -> None:
        stat = os.fstat(descriptor)
        self._stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if last:
            self._last = last + b"\n"

    def _load(self, data: bytes) -> bytes:
        """Take the lines of `data`, which stand at `_good`; return the last whole one."""
        lines = data.split(b"\n")
        tail = lines.pop()
        self._torn, self._open_tail = b"", False
        offset = self._good
        with no_collection():
            for number, line in enumerate(lines, self._lines + 1):
                try:
                    self._add(parse_line(line), offset)
                except (ValueError, UnknownEventError) as error:
                    raise self._located(error, number, offset) from error
                offset += len(line) + 1
        self._good += len(data) - len(tail)
        self._lines += len(lines)
        if tail:
            self._take_tail(tail)
        return lines[-1] if lines else b""

    def _take_tail(self, tail: bytes) -> None:
        """Keep a whole event that lacks only its newline; anything else is a torn write."""
        try:
            self._add(parse_line(tail), self._good)
            self._open_tail = True
            message = f"the last line of {self.path.name} lacks its newline; it is complete and counts"
        except ValueError:
            self._torn = tail
            message = (
                f"the last line of {self.path.name} is torn ({len(tail)} bytes at byte {self._good}) and is left out; "
                "the next append moves it aside"
            )
        if message not in self.warnings:
            self.warnings.append(message)

    def _located(self, error: Exception, line: int, offset: int) -> Exception:
        place = f"{self.path} line {line} (byte {offset})"
        if isinstance(error, UnknownEventError):
            return UnknownEventError(f"{place}: {error}", error.hint)
        return LedgerCorruptError(f"{place} is damaged: {error}", _RESTORE.format(name=self.path.name))

    def _add(self, event: Event, start: int) -> None:
        known = self._by_id.setdefault(event.id, event)
        if known is not event:
            if known.sha != event.sha:
                raise ValueError(f"another event of {known.run} has the same id {event.id}; one of them was edited")
            return
        if event.critical and event.kind not in KINDS:
            self._too_new = event
        self._named.update(event.prev)
        last = self._last_of(event.run)
        self._contested = self._contested or contests(event, last)
        if last is None:
            last = self._heads[event.run] = []
        for sha in event.prev:
            if sha in last:
                last.remove(sha)
                del self._places[sha]
        # A merge may put a child before its parent; a mark may be older than the heads beside it.
        if event.sha not in self._named and event.sha not in last:
            last.append(event.sha)
            self._places[event.sha] = (start, len(event.line))
