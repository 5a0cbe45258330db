"""Every place where something can go wrong, one after the other: calls, bytes, disks, processes."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess

import pytest

from harness.core import files
from harness.core.errors import HarnessError, InfraError, LedgerCorruptError
from harness.core.files import atomic_write
from harness.ledger import Ledger, NewEvent, cache, store
from harness.ledger.events import parse_line
from harness.ledger.lost import Base, shas
from harness.ledger.verify import check, verify
from tests.ledger.test_ledger_faults import FORK, kill_loop

CALLS = ("write", "fsync", "ftruncate", "replace")


class Failing:
    """Lets the N-th of these system calls fail, short or with an error, and every other one pass."""

    def __init__(self, monkeypatch, nth: int, short: bool) -> None:
        self.calls: list[str] = []
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name), nth, short))

    def _wrap(self, name, real, nth, short):
        def call(*arguments, **keywords):
            self.calls.append(name)
            if len(self.calls) != nth:
                return real(*arguments, **keywords)
            if short and name == "write":
                return real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(5, "Input/output error")

        return call


def work(path, acknowledged: list[str]) -> None:
    """Create a ledger, repair a torn tail, append alone and in a batch; stop at the first failure."""
    ledger = Ledger(path)
    acknowledged.append(ledger.append("run-001", "created", {"hypothesis": "h"}).id)
    acknowledged.append(ledger.append("run-001", "noted", {"text": "one"}).id)
    with path.open("ab") as file:
        file.write(b'{"v":1,"id":"torn')
    acknowledged.append(ledger.append("run-001", "noted", {"text": "after the torn tail"}).id)
    batch = [NewEvent("run-002", "created", {}), NewEvent("run-002", "noted", {"text": "x" * 300})]
    acknowledged += [event.id for event in ledger.append_locked(lambda state: batch)]


@pytest.mark.parametrize("short", [False, True], ids=["error", "short"])
def test_whatever_call_fails_no_acknowledged_event_is_lost(tmp_path, monkeypatch, short) -> None:
    nth, calls = 0, 1
    while nth < calls:
        nth += 1
        folder = tmp_path / f"{nth}"
        folder.mkdir()
        path = folder / "runs.jsonl"
        acknowledged: list[str] = []
        with monkeypatch.context() as patched:
            failing = Failing(patched, nth, short)
            with contextlib.suppress(InfraError):
                work(path, acknowledged)
                assert short or nth > len(failing.calls)  # a call that failed never looks like success
            calls = max(calls, len(failing.calls) + 1)
        unsynced = bool(store._unsynced)
        store._unsynced.clear()
        after = Ledger(path)  # as the next process sees it
        present = [event.id for event in after.events()]
        assert present[: len(acknowledged)] == acknowledged, failing.calls
        assert len(present) <= len(acknowledged) + (2 if unsynced else 0), failing.calls
        run = "run-001" if present else "program"
        added = after.append(run, "noted", {"text": "goes on"})
        assert [event.id for event in Ledger(path).events()] == [*present, added.id] and verify(path) == []
    assert calls > 10


def test_a_failed_replacement_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    target = tmp_path / "page.md"
    for nth in range(1, 4):
        target.write_bytes(b"old")
        with monkeypatch.context() as patched:
            patched.setattr(files.Path, "replace", lambda self, to: os.replace(self, to))
            failing = Failing(patched, nth, short=False)
            with pytest.raises(InfraError):
                atomic_write(target, b"new")
        assert target.read_bytes() == (b"new" if failing.calls == ["fsync", "replace", "fsync"] else b"old")
        assert os.listdir(tmp_path) == ["page.md"]


def fill(path, count: int) -> bytes:
    ledger = Ledger(path)
    ledger.append("run-001", "created", {"hypothesis": "h"})
    for number in range(1, count):
        ledger.append("run-001", "noted", {"text": f"note {number} é"})
    return path.read_bytes()


def test_a_record_cut_at_every_byte_is_noticed_with_an_index_too(path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    from harness.ledger import index

    data = fill(path, 3)
    index.read_state(path)
    start = data.rindex(b"\n", 0, -1) + 1
    for cut in range(start + 1, len(data)):
        path.write_bytes(data[:cut])
        state, warnings = index.read_state(path)
        assert len(state.runs["run-001"].events) == (3 if cut == len(data) - 1 else 2)
        assert len(warnings) == 1
        assert verify(path)[0].kind == ("no_newline" if cut == len(data) - 1 else "torn")


def change_bytes(path, data: bytes, positions, draw: random.Random) -> None:
    for position in positions:
        changed = bytes([data[position] ^ draw.randrange(1, 256)])
        path.write_bytes(data[:position] + changed + data[position + 1 :])
        assert {finding.kind for finding in verify(path)} & {"damage", "torn"}, position
        if position < data.rindex(b"\n", 0, -1):  # further on it is a torn tail, which readers leave out and report
            with pytest.raises(LedgerCorruptError):
                Ledger(path).events()
            with pytest.raises(LedgerCorruptError):
                Ledger(path).append("run-001", "noted", {})


def test_a_changed_byte_is_noticed_by_readers_writers_and_verify(path) -> None:
    data = fill(path, 20)
    draw = random.Random(7)
    change_bytes(path, data, sorted(draw.sample(range(len(data)), 60)), draw)


def every_byte_changed_is_found_by_verify(path, data: bytes, draw: random.Random) -> None:
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ draw.randrange(1, 256)]) + data[position + 1 :])
        assert {finding.kind for finding in verify(path)} & {"damage", "torn"}, position


def test_every_byte_changed_once_is_found_by_verify(path) -> None:
    every_byte_changed_is_found_by_verify(path, fill(path, 3), random.Random(9))


@pytest.mark.slow
def test_every_byte_of_two_hundred_events_changed_once_is_found_by_verify(path) -> None:
    every_byte_changed_is_found_by_verify(path, fill(path, 200), random.Random(10))


@pytest.mark.slow
def test_every_byte_of_two_hundred_events_changed_once_is_noticed(path) -> None:
    data = fill(path, 200)
    draw = random.Random(8)
    breaks = [position for position, byte in enumerate(data) if byte == 10]
    change_bytes(path, data, [*draw.sample(range(len(data)), 2000), *breaks], draw)
    lines = data.split(b"\n")[:-1]
    for line in lines:  # and each byte of each line alone
        for position in range(len(line)):
            changed = bytes([line[position] ^ draw.randrange(1, 256)])
            with pytest.raises(ValueError):
                parse_line(line[:position] + changed + line[position + 1 :])


def interleaved(path, runs: int, notes: int) -> list[bytes]:
    """Fill a ledger with runs that go on in turns, and some events about the program; return its lines."""
    ledger = Ledger(path)
    for number in range(1, runs + 1):
        ledger.append(f"run-{number:03d}", "created", {"hypothesis": "h"})
    for note in range(notes):
        ledger.append("program", "noted", {"text": f"{note}"})
        for number in range(1, runs + 1):
            ledger.append(f"run-{number:03d}", "noted", {"text": f"{note}"})
    return path.read_bytes().splitlines(keepends=True)


def test_whole_records_lost_at_the_end_are_found_against_every_earlier_copy(path) -> None:
    lines = interleaved(path, runs=3, notes=4)
    whole = b"".join(lines)
    base, heads = Base("main", whole, shas(whole)), check(path).heads()
    for kept in range(len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        alone = check(path).findings
        against = [finding.kind for finding in check(path, base=base).findings]
        recorded = [finding.kind for finding in check(path, recorded=heads).findings]
        assert alone == []  # what docs/ledger.md says cannot be seen without an earlier copy
        assert set(against) <= {"lost_event", "lost_run"} and against, kept
        assert set(recorded) == {"lost_event"}, kept
        gone = {line.split(b'"run":"')[1].split(b'"')[0].decode() for line in lines[kept:]}
        assert {f.run for f in check(path, base=base).findings} == gone
        assert {f.run for f in check(path, recorded=heads).findings} == gone


def test_whole_runs_that_were_deleted_are_found_against_every_earlier_copy(path) -> None:
    lines = interleaved(path, runs=4, notes=2)
    whole = b"".join(lines)
    base, heads = Base("main", whole, shas(whole)), check(path).heads()
    for chosen in range(1, 16):  # every set of the four runs
        gone = {f"run-{number + 1:03d}" for number in range(4) if chosen >> number & 1}
        path.write_bytes(b"".join(line for line in lines if not any(run.encode() in line for run in gone)))
        assert check(path).findings == []
        against, recorded = check(path, base=base).findings, check(path, recorded=heads).findings
        assert [(f.kind, f.run) for f in against] == [("lost_run", run) for run in sorted(gone)]
        assert [(f.kind, f.run) for f in recorded] == [("lost_event", run) for run in sorted(gone)]


LIMITED = """
import resource, sys
from harness.core.errors import InfraError
from harness.ledger import Ledger, NewEvent
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
ledger = Ledger(sys.argv[1])
refused = 0
for number in range(6):
    try:
        print(ledger.append("run-001", "noted", {"text": "x" * (100 * number)}).id)
    except InfraError:
        refused += 1
print(refused)
"""


@pytest.mark.parametrize("room", [500, 1500])
def test_a_file_size_limit_ends_in_refusals_and_whole_lines(path, script, room) -> None:
    before = fill(path, 2)
    out, err = script(LIMITED, path, len(before) + room).communicate(timeout=60)
    *acknowledged, refused = out.split()
    assert err == "" and int(refused) >= 1 and len(acknowledged) + int(refused) == 6
    assert path.read_bytes().startswith(before) and verify(path) == []
    assert [event.id for event in Ledger(path).events()][2:] == acknowledged


def test_a_full_disk_ends_in_refusals_and_whole_lines(tmp_path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this system lets nobody mount a small disk")
    try:
        path = disk / "runs.jsonl"
        ledger = Ledger(path)
        acknowledged = [ledger.append("run-001", "created", {}).id]
        with pytest.raises(InfraError, match="nothing was recorded"):
            for _ in range(100):
                acknowledged.append(ledger.append("run-001", "noted", {"text": "x" * 3000}).id)
        assert [event.id for event in Ledger(path).events()] == acknowledged and verify(path) == []
        with pytest.raises(InfraError, match="nothing was recorded"):
            Ledger(path).append("run-001", "noted", {"text": "y" * 3000})
        assert path.read_bytes().endswith(b"\n")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def hammer(path, script, processes: int, rounds: int) -> None:
    child = script(FORK, path, processes, rounds, "hammer")
    out, err = child.communicate(timeout=1800)
    assert err == "" and child.returncode == 0
    acknowledged = out.split()
    events = Ledger(path).events()
    assert len(acknowledged) == len(set(acknowledged)) == processes * rounds
    assert {event.id for event in events} == set(acknowledged)
    # One lock means one order: every event follows exactly the one before it.
    assert [event.prev for event in events[1:]] == [(event.sha,) for event in events[:-1]]
    assert verify(path) == []


def test_four_processes_lose_duplicate_and_tear_nothing(path, script) -> None:
    hammer(path, script, 4, 50)


@pytest.mark.slow
def test_sixteen_processes_lose_duplicate_and_tear_nothing(path, script) -> None:
    hammer(path, script, 16, 500)


def test_acknowledged_events_survive_twenty_kills(path, script) -> None:
    kill_loop(path, script, 20, seed=3)


def test_an_index_left_by_a_killed_writer_misleads_nobody(path, monkeypatch) -> None:
    """The index is written after the append: a kill between the two leaves it behind the ledger."""
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    monkeypatch.setattr(store, "LAG_BYTES", 1)
    fill(path, 5)
    old = cache.location(path).read_bytes()
    Ledger(path).append("run-001", "noted", {"text": "a"})
    cache.location(path).write_bytes(old)
    added = Ledger(path).append("run-001", "noted", {"text": "b"})
    assert added.prev == (Ledger(path).events()[-2].sha,) and verify(path) == []
    for size in range(0, len(old), 1024):  # cut where a kill or a full disk can cut it
        cache.location(path).write_bytes(old[:size])
        with contextlib.suppress(HarnessError):
            Ledger(path).append("run-001", "noted", {"text": f"{size}"})
    assert verify(path) == [] and len(Ledger(path).events()) == 7 + -(-len(old) // 1024)
