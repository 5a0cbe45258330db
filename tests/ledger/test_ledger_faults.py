"""Disks that fill or fail, processes that die, and many writers at once."""

from __future__ import annotations

import json
import os
import re

import pytest

from harness.core.errors import ExitCode, InfraError
from harness.core.ids import run_number
from harness.ledger import Ledger, store
from harness.ledger.verify import verify


@pytest.fixture(autouse=True)
def _forget_failed_syncs():
    yield
    store._unsynced.clear()


def fill(ledger: Ledger) -> bytes:
    ledger.append("run-001", "created", {"hypothesis": "h"})
    ledger.append("run-001", "noted", {"text": "n"})
    return ledger.path.read_bytes()


SMALL_FILES = """
import resource, sys
from harness.core.errors import InfraError
from harness.ledger import Ledger, NewEvent
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
ledger = Ledger(sys.argv[1])
try:
    ledger.append_locked(lambda state: [NewEvent("run-001", "noted", {"text": "x" * 300})] * 2)
except InfraError as error:
    print(error.exit_code.value, error, "|", error.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(ledger.append("run-001", "noted", {"text": "space again"}).id)
"""


@pytest.mark.parametrize("room", [0, 1, 300, 700])
def test_a_full_disk_leaves_the_old_bytes_and_the_retry_works(ledger, path, script, room) -> None:
    before = fill(ledger)
    out, err = script(SMALL_FILES, path, len(before) + room).communicate(timeout=60)
    assert err == ""
    refused, retried = out.splitlines()
    assert refused.startswith(f"{ExitCode.INFRA.value} cannot append") and "nothing was recorded" in refused
    assert "free some disk space" in refused
    after = path.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 3 and retried.encode() in after
    assert verify(path) == [] and not (path.parent / "outputs").exists()


@pytest.mark.parametrize("wrote", [0, 1, 10, 200])
def test_a_short_write_is_cut_back(ledger, path, monkeypatch, wrote) -> None:
    before = fill(ledger)
    real = os.write
    monkeypatch.setattr(store.os, "write", lambda fd, data: real(fd, data[:wrote]) if wrote else 0)
    with pytest.raises(InfraError, match=f"only {wrote} of"):
        ledger.append("run-001", "noted", {"text": "lost"})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert ledger.append("run-001", "noted", {}).prev == (ledger.events()[1].sha,)


def test_when_even_cutting_back_fails_the_next_append_repairs(ledger, path, monkeypatch) -> None:
    before = fill(ledger)
    real = os.write

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store.os, "write", lambda fd, data: real(fd, data[:20]))
    monkeypatch.setattr(store.os, "ftruncate", broken)
    with pytest.raises(InfraError):
        ledger.append("run-001", "noted", {})
    monkeypatch.undo()
    assert len(path.read_bytes()) == len(before) + 20
    ledger.append("run-001", "noted", {})
    assert (path.parent / "outputs" / "runs.jsonl.torn-1").stat().st_size == 20
    assert len(Ledger(path).events()) == 3 and verify(path) == []


def test_a_tail_that_cannot_be_set_aside_stays(ledger, path) -> None:
    before = fill(ledger)
    path.write_bytes(before[:-10])
    (path.parent / "outputs").write_text("in the way")
    with pytest.raises(InfraError, match="torn tail"):
        ledger.append("run-001", "noted", {})
    assert path.read_bytes() == before[:-10]


def fail_sync(monkeypatch, on_call: int) -> list[int]:
    calls: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == on_call:
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(store.os, "fsync", fsync)
    return calls


@pytest.mark.parametrize("on_call", [1, 2])  # the file, the folder of a new file
def test_a_failed_sync_is_not_retried_and_ends_appending_by_this_process(path, monkeypatch, on_call) -> None:
    calls = fail_sync(monkeypatch, on_call)
    ledger = Ledger(path)
    with pytest.raises(InfraError, match="may or may not be recorded") as caught:
        ledger.append("run-001", "created", {})
    assert caught.value.exit_code == ExitCode.INFRA and len(calls) == on_call
    monkeypatch.undo()
    data = path.read_bytes()
    for other in (ledger, Ledger(path), Ledger(path.parent / "." / "runs.jsonl")):
        with pytest.raises(InfraError, match="appends no more"):
            other.append("run-002", "created", {})
    assert path.read_bytes() == data and len(calls) == on_call
    assert len(ledger.events()) == 1  # reading goes on


def test_the_file_is_synced_before_an_append_returns_and_the_folder_once(path, monkeypatch) -> None:
    calls = fail_sync(monkeypatch, 0)
    ledger = Ledger(path)
    ledger.append("run-001", "created", {})
    assert len(calls) == 2
    ledger.append("run-001", "noted", {})
    assert len(calls) == 3


def test_a_read_only_file_is_explained(ledger, path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    fill(ledger)
    path.chmod(0o444)
    with pytest.raises(InfraError, match="cannot open") as caught:
        ledger.append("run-001", "noted", {})
    assert "owner" in caught.value.hint
    assert len(Ledger(path).events()) == 2


def test_a_folder_in_the_place_of_the_ledger_is_explained(path) -> None:
    path.mkdir()
    with pytest.raises(InfraError, match="cannot"):
        Ledger(path).append("run-001", "created", {})


FORK = """
import os, sys
from harness.core.ids import run_id, run_number
from harness.ledger import Ledger, NewEvent
path, workers, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def hammer(worker):
    ledger = Ledger(path, wait_s=60)
    for number in range(rounds):
        yield ledger.append("program", "noted", {"text": f"{worker}-{number}"}).id

def allocate(worker):
    def build(state):
        number = max(map(run_number, state.runs), default=0) + 1
        return [NewEvent(run_id(number), "created", {"hypothesis": str(worker)})]
    yield Ledger(path, wait_s=60).append_locked(build)[0].run

work = {"hammer": hammer, "allocate": allocate}[sys.argv[4]]
children = []
for worker in range(workers):
    child = os.fork()
    if child == 0:
        for acknowledged in work(worker):
            os.write(1, (acknowledged + "\\n").encode())
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_twenty_parallel_allocations_give_twenty_numbers(path, script) -> None:
    child = script(FORK, path, 20, 1, "allocate")
    out, err = child.communicate(timeout=120)
    assert err == "" and child.returncode == 0
    assert sorted(map(run_number, out.split())) == list(range(1, 21))
    assert len(Ledger(path).state().runs) == 20 and verify(path) == []


KILLS = """
import os, random, select, signal, sys, time
from harness.ledger import Ledger
path, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
for _ in range(kills):
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        ledger = Ledger(path)
        while True:
            event = ledger.append("program", "noted", {"text": "x" * 2000})
            os.write(start, (event.id + "\\n").encode())
    os.close(start)
    select.select([end], [], [], 10)
    time.sleep(draw.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while block := os.read(end, 65536):
        sys.stdout.write(block.decode())
    os.close(end)
"""


def kill_loop(path, script, kills: int, seed: int) -> None:
    out, err = script(KILLS, path, kills, seed).communicate(timeout=600)
    assert err == ""
    acknowledged = out.split()
    ledger = Ledger(path, wait_s=1)  # a dead holder's lock is gone
    present = {event.id for event in ledger.events()}
    assert len(acknowledged) >= kills
    assert set(acknowledged) <= present
    assert len(present) <= len(acknowledged) + kills  # at most the one each kill left unacknowledged
    ledger.append("program", "noted", {"text": "after"})
    assert verify(path) == []


@pytest.mark.slow
def test_acknowledged_events_survive_a_thousand_kills(path, script) -> None:
    kill_loop(path, script, 1000, seed=2)


def test_the_error_of_a_full_disk_is_one_envelope(ledger, monkeypatch) -> None:
    """What a command prints with --json comes from these members."""
    fill(ledger)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "write", full)
    with pytest.raises(InfraError) as caught:
        ledger.append("run-001", "noted", {})
    envelope = json.loads(
        json.dumps({"kind": caught.value.code, "message": str(caught.value), "hint": caught.value.hint})
    )
    assert envelope["kind"] == "infra" and re.search("No space left", envelope["message"])
