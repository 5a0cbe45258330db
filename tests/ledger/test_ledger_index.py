"""The index: the same state as the whole fold, whatever happened to the index or to the ledger."""

from __future__ import annotations

import gc
import os
import sqlite3
import time

import pytest

from harness.core.errors import LedgerCorruptError, NotFoundError, RefusedError
from harness.ledger import Ledger, NewEvent, UnknownEventError, cache, gather, halves, heads, index, store
from harness.ledger.verify import verify

RUNS = 4


@pytest.fixture(autouse=True, params=["one part", "two parts"])
def _always(monkeypatch, request) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    if request.param == "two parts":
        monkeypatch.setattr(index, "TWO_PARTS_BYTES", 1)
        monkeypatch.setattr(halves, "_may_fork", lambda: True)


def fill(ledger: Ledger, runs: int = RUNS) -> None:
    for number in range(1, runs + 1):
        run = f"run-{number:03d}"
        parent = f"run-{number - 1:03d}" if number > 1 else None
        ledger.append(run, "created", {"type": "training", "hypothesis": f"h{number} é", "parent": parent})
        ledger.append(run, "started", {"attempt": 1, "host": "h", "pid": 1, "pid_start": "1"})
        ledger.append(run, "finished", {"attempt": 1, "outcome": "completed"})
        ledger.append(run, "decided", {"decision": "keep", "reason": "r"})
    ledger.append("program", "noted", {"text": "n"})


def facts(state) -> tuple:
    runs = [
        (name, run.run, [getattr(run, member) for member in index.MEMBERS], [event.line for event in run.events])
        for name, run in state.runs.items()
    ]
    collisions = {number: [run.root for run in others] for number, others in state.collisions.items()}
    return runs, state.champion, [event.line for event in state.program_events], collisions, state.former


def watch(monkeypatch, module) -> list[bytes]:
    """Return the lines that a module parses from now on."""
    parsed: list[bytes] = []
    real = module.parse_line

    def parse_line(line):
        parsed.append(line)
        return real(line)

    monkeypatch.setattr(module, "parse_line", parse_line)
    return parsed


def marked(path):
    """Return the mark and the line before it."""
    with path.open("rb") as file:
        found = heads.find_mark(path, file.fileno())
    assert found is not None
    return found


def check(path) -> bool:
    """Compare with the whole fold; return whether the index was used."""
    found = index.read_state(path).state
    assert facts(found) == facts(Ledger(path).state())
    return all(isinstance(run, index._LazyRun) for run in found.runs.values())


def test_the_second_reading_comes_from_the_index_and_is_the_same(ledger, path, monkeypatch) -> None:
    fill(ledger)
    assert not check(path)
    assert check(path)
    parsed = watch(monkeypatch, index)
    state = index.read_state(path).state
    assert [run.status for run in state.runs.values()] == ["completed"] * RUNS
    assert len(parsed) == 1  # the note on the program
    assert len(state.runs["run-002"].events) == 4 and len(parsed) == 5
    rows = index.summaries(path)
    assert [row["run"] for row in rows] == ["run-001", "run-002", "run-003", "run-004"]
    assert rows[1]["hypothesis"] == "h2 é" and rows[1]["tags"] == ()


def test_what_was_added_is_taken_in_and_stored(ledger, path, monkeypatch) -> None:
    fill(ledger)
    index.read_state(path)
    ledger.append("run-002", "decided", {"decision": "reject", "reason": "no"})
    ledger.append("run-003", "tagged", {"tag": "good"})
    ledger.append("program", "noted", {"text": "again"})
    ledger.append("run-005", "created", {"hypothesis": "new"})
    parsed, new = watch(monkeypatch, index), watch(monkeypatch, gather)
    state = index.read_state(path).state
    assert state.runs["run-002"].decision == "reject" and state.runs["run-003"].tags == ("good",)
    assert state.runs["run-005"].status == "created"
    assert len(new) == 4 and len(parsed) == 4 + 4 + 1 + 2  # two runs, the program before and after
    assert check(path)
    monkeypatch.undo()
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    monkeypatch.setattr(index._Known, "grow", lambda self, source: pytest.fail("stored already"))
    assert check(path)


def test_a_file_that_rested_is_not_read_again(ledger, path, monkeypatch) -> None:
    fill(ledger)
    monkeypatch.setattr(index, "_SETTLED_NS", -(10**18))
    index.read_state(path)
    with monkeypatch.context() as patched:
        patched.setattr(index, "read_locked", lambda path: pytest.fail("read"))
        assert check(path)
        patched.setattr(index, "network_warning", lambda path: "far away")
        read = []

        def read_locked(path):
            read.append(path)
            return path.read_bytes(), path.stat()

        patched.setattr(index, "read_locked", read_locked)
        assert index.read_state(path).warnings == ["far away"] and read == [path]
    data, stat = path.read_bytes(), path.stat()
    path.write_bytes(data.replace(b"h2", b"h9", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the size and the time of the edit are as before
    with pytest.raises(LedgerCorruptError, match="line 5"):
        index.read_state(path)


def test_a_file_just_written_is_read_again_until_it_has_rested(ledger, path, monkeypatch) -> None:
    fill(ledger)
    index.read_state(path)
    with cache.opened(path) as stored:
        assert stored.get("meta")["file"] is None
    monkeypatch.setattr(index, "_SETTLED_NS", -(10**18))
    assert check(path)
    with cache.opened(path) as stored:
        assert stored.get("meta")["file"] is not None
    monkeypatch.setattr(index, "read_locked", lambda path: pytest.fail("read"))
    assert check(path)


@pytest.mark.parametrize("kind", ["promoted", "repeated", "clock", "numbers", "copy"])
def test_what_concerns_more_than_one_run_is_folded_whole(ledger, path, kind, event) -> None:
    fill(ledger)
    index.read_state(path)
    last = ledger.events()[-2]
    if kind == "promoted":
        ledger.append("run-002", "promoted", {"verdict": "pass"})
    elif kind == "clock":  # a machine whose clock is years behind
        Ledger(path, clock=lambda: 10**18).append("run-004", "decided", {"decision": "rerun", "reason": "c"})
    else:
        added = {
            "repeated": last,
            "numbers": event(run="run-002", kind="created", number=7, second=9),
            "copy": event(run=last.run, number=8, second=-9, prev=[last.sha]),
        }[kind]
        with path.open("ab") as file:
            file.write(added.line + b"\n")
    check(path)
    assert check(path) is (kind != "numbers")


def test_files_are_closed_when_states_go(ledger, path, monkeypatch) -> None:
    fill(ledger)
    monkeypatch.setattr(index, "_SETTLED_NS", -(10**18))
    index.read_state(path)
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        assert check(path)
    gc.collect()
    assert len(os.listdir("/dev/fd")) <= before + 1


def test_damage_in_the_indexed_part_is_named(ledger, path) -> None:
    fill(ledger)
    index.read_state(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"h2", b"h9", 1))
    for _ in range(2):
        with pytest.raises(LedgerCorruptError, match=r"line 5 \(byte"):
            index.read_state(path)
    path.write_bytes(data[: data.index(b"\n") + 1] + b"junk\n" + data)
    with pytest.raises(LedgerCorruptError, match="line 2"):
        index.read_state(path)


def test_an_edited_copy_at_the_end_is_damage(ledger, path, event) -> None:
    fill(ledger)
    first = event(kind="created", run="run-009", number=1)
    with path.open("ab") as file:
        file.write(first.line + b"\n")
        index.read_state(path)
        file.write(event(run="run-002", number=1, data={"text": "other"}).line + b"\n")
    with pytest.raises(LedgerCorruptError, match="same id"):
        index.read_state(path)


def test_a_critical_unknown_event_is_refused(ledger, path, event) -> None:
    fill(ledger)
    index.read_state(path)
    with path.open("ab") as file:
        file.write(event(kind="unheard", number=1, critical=True).line + b"\n")
    with pytest.raises(UnknownEventError):
        index.read_state(path)


def test_a_torn_tail_is_left_out_and_told(ledger, path) -> None:
    fill(ledger)
    index.read_state(path)
    path.write_bytes(path.read_bytes()[:-9])
    state, warnings = index.read_state(path)
    assert len(warnings) == 1 and "torn" in warnings[0] and state.program_events == []


def test_any_changed_byte_of_the_index_changes_no_answer(ledger, path) -> None:
    fill(ledger, 2)
    index.read_state(path)
    place = cache.location(path)
    good = place.read_bytes()
    used = [i for i, byte in enumerate(good) if byte]
    expected = facts(Ledger(path).state())
    for position in [*used[:100:5], *used[100::97]]:
        place.write_bytes(good[:position] + bytes([good[position] ^ 0x11]) + good[position + 1 :])
        assert facts(index.read_state(path).state) == expected, position
        Ledger(path).append("run-001", "noted", {"text": str(position)})
        expected = facts(Ledger(path).state())
        assert verify(path) == []


@pytest.mark.parametrize("foreign", ["text", "other database", "folder", "empty", "other version", "no folder"])
def test_a_foreign_index_is_replaced_or_ignored(ledger, path, foreign, monkeypatch) -> None:
    fill(ledger)
    place = cache.location(path)
    if foreign == "other version":
        index.read_state(path)
        monkeypatch.setattr(cache, "writer", lambda: "later")
    elif foreign == "no folder":
        place.parent.write_text("in the way")
    else:
        place.parent.mkdir(exist_ok=True)
        if foreign == "text":
            place.write_text("not a database, but a long text " * 100)
        elif foreign == "other database":
            with sqlite3.connect(place) as connection:
                connection.execute("CREATE TABLE entries (something TEXT)")
            connection.close()
        elif foreign == "folder":
            place.mkdir()
        else:
            place.write_bytes(b"")
    assert not check(path)
    assert check(path) is (foreign not in ("folder", "no folder"))


def test_a_busy_index_is_not_waited_for(ledger, path) -> None:
    fill(ledger)
    index.read_state(path)
    ledger.append("run-001", "noted", {"text": "new"})
    with sqlite3.connect(cache.location(path), isolation_level=None) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert not check(path)
        Ledger(path).append("run-001", "noted", {"text": "newer"})
        connection.execute("ROLLBACK")
    connection.close()
    assert check(path) and len(Ledger(path).events()) == 4 * RUNS + 3


def test_an_index_with_wrong_places_is_found_out(ledger, path) -> None:
    fill(ledger)
    index.read_state(path)
    with cache.opened(path, create=True) as stored:
        row = stored.get("run/run-001")
        other = stored.get("run/run-002")
        stored.put([("run/run-001", [row[0], other[1], None]), ("run/run-003", [row[0], [3, 9], None])])
    with pytest.raises(NotFoundError):
        Ledger(path).append("run-007", "noted", {})
    assert len(Ledger(path).append("run-003", "noted", {"text": "n"}).prev) == 1 and verify(path) == []
    state = index.read_state(path).state
    assert [event.run for event in state.runs["run-001"].events] == ["run-001"] * 4
    assert [event.run for event in state.runs["run-003"].events] == ["run-003"] * 5


def test_a_small_ledger_has_no_index(ledger, path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1 << 20)
    fill(ledger)
    index.read_state(path)
    assert not cache.location(path).parent.exists()


# Appends behind the mark


def test_a_first_append_reads_only_what_is_behind_the_mark(ledger, path, monkeypatch) -> None:
    fill(ledger)
    index.read_state(path)
    last = ledger.append("run-002", "noted", {"text": "behind the mark"})
    parsed = watch(monkeypatch, store)
    fresh = Ledger(path)
    added = fresh.append("run-002", "noted", {"text": "a"})
    assert parsed == [last.line] and added.prev == (last.sha,)
    assert fresh.append("run-002", "noted", {"text": "b"}).prev == (added.sha,)
    third = Ledger(path).append("run-003", "noted", {"text": "c"})
    assert third.prev == (ledger.state().runs["run-003"].events[-2].sha,)
    note = Ledger(path).append("program", "noted", {"text": "d"})
    assert note.prev == (ledger.state().program_events[0].sha,)
    assert len(fresh.events()) == 4 * RUNS + 6 and fresh.events() == Ledger(path).events()  # the whole file when asked
    assert verify(path) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_an_append_behind_the_mark_leaves_no_file_open(ledger, path) -> None:
    fill(ledger)
    index.read_state(path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Ledger(path).append("run-002", "noted", {"text": "x"})
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mark_does_not_hide_what_an_append_must_refuse(ledger, path, event) -> None:
    fill(ledger)
    index.read_state(path)
    with pytest.raises(NotFoundError):
        Ledger(path).append("run-009", "noted", {})
    with pytest.raises(RefusedError):
        Ledger(path).append("run-002", "created", {})
    with path.open("ab") as file:
        file.write(event(kind="unheard", number=1, critical=True).line + b"\n")
    with pytest.raises(UnknownEventError):
        Ledger(path).append("run-002", "noted", {})


@pytest.mark.parametrize("how", ["in place", "replaced", "shorter", "last line", "heads"])
def test_a_ledger_that_is_not_what_was_marked_is_read_whole(ledger, path, tmp_path, how, event) -> None:
    fill(ledger)
    index.read_state(path)
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "in place":  # the run's last event is another one of the same length
        path.write_bytes(b"".join(lines[:7] + lines[8:]) + event(run="run-002", number=1, second=9).line + b"\n")
        os.utime(path, ns=(1, 1))
    elif how == "replaced":
        (tmp_path / "other").write_bytes(b"".join(lines[4:] + lines[:4]))
        os.replace(tmp_path / "other", path)
    elif how == "shorter":
        path.write_bytes(b"".join(lines[:8]))
    elif how == "last line":
        path.write_bytes(b"".join([*lines[:-1], event(run="program", number=2).line + b"\n", *lines[-1:]]))
    else:
        with cache.opened(path, create=True) as stored:
            stored.put([("heads/run-002", [["0" * 64, 5, 80]])])
    expected = Ledger(path).state().runs["run-002"].events
    followed = {sha for event in expected for sha in event.prev}
    added = Ledger(path).append("run-002", "noted", {"text": "after"})
    assert set(added.prev) == {event.sha for event in expected} - followed
    assert [finding for finding in verify(path) if finding.kind != "no_creation"] == []


@pytest.mark.parametrize("other", ["of another run", "of this run"])
def test_a_head_that_is_another_event_is_not_followed(ledger, path, other) -> None:
    fill(ledger)
    index.read_state(path)
    lines = path.read_bytes().splitlines(keepends=True)
    number = 4 if other == "of another run" else 5  # the creation of run-002, or the event after it
    place = [sum(map(len, lines[:number])), len(lines[number]) - 1]
    run = "run-001" if other == "of another run" else "run-002"
    sha = ledger.events()[number].sha if other == "of another run" else "0" * 64
    with cache.opened(path, create=True) as stored:
        stored.put([(f"heads/{run}", [[sha, *place]])])
    fresh = Ledger(path)
    last = ledger.state().runs[run].events[-1]
    assert fresh.append(run, "noted", {"text": "after"}).prev == (last.sha,)
    assert not fresh._behind_mark and verify(path) == []


def test_an_append_to_a_run_renumbered_behind_the_mark_follows_it(ledger, path, event) -> None:
    fill(ledger)
    index.read_state(path)
    last = ledger.state().runs["run-004"].events[-1]
    moved = event(run="run-004", kind="renumbered", data={"to": "run-009"}, number=3, prev=[last.sha], critical=True)
    with path.open("ab") as file:
        file.write(moved.line + b"\n")
    with pytest.raises(NotFoundError, match="run-009"):
        Ledger(path).append("run-004", "noted", {"text": "x"})
    assert Ledger(path).append("run-009", "noted", {"text": "x"}).prev == (moved.sha,)
    assert not check(path) and not check(path)


def test_damage_that_appeared_since_the_mark_stops_an_append(ledger, path) -> None:
    fill(ledger)
    index.read_state(path)
    path.write_bytes(path.read_bytes().replace(b"h2", b"h9", 1))
    with pytest.raises(LedgerCorruptError, match="line 5"):
        Ledger(path).append("run-003", "noted", {})


def test_appends_move_the_mark_now_and_then(ledger, path, monkeypatch) -> None:
    monkeypatch.setattr(store, "LAG_BYTES", 3000)
    fill(ledger)
    moved = 0
    for number in range(40):
        fresh = Ledger(path)
        fresh.append(f"run-{number % RUNS + 1:03d}", "noted", {"text": f"{number}"})
        mark, last = marked(path)
        assert path.stat().st_size - mark.bytes < 3000 + 1000 and path.read_bytes()[: mark.bytes].endswith(last + b"\n")
        assert mark.lines == path.read_bytes()[: mark.bytes].count(b"\n")
        moved += mark.bytes == path.stat().st_size
        check(path) if number % 13 == 0 else None
    assert 1 < moved < 30 and verify(path) == []
    assert check(path)


def test_a_fork_in_the_indexed_part_is_joined(event, path) -> None:
    birth = event(kind="created", number=1)
    left = event(number=2, second=1, prev=[birth.sha])
    right = event(number=3, second=2, prev=[birth.sha])
    path.write_bytes(b"".join(e.line + b"\n" for e in (birth, right, left)))
    index.read_state(path)
    fresh = Ledger(path)
    assert fresh.append("run-001", "noted", {"text": "j"}).prev == tuple(sorted([left.sha, right.sha]))
    assert fresh._behind_mark


def test_a_child_before_its_parent_sets_no_mark(event, path) -> None:
    birth = event(kind="created", number=1)
    child = event(number=2, second=1, prev=["f" * 64])
    path.write_bytes(birth.line + b"\n" + child.line + b"\n")
    check(path)
    Ledger(path).append("run-001", "noted", {"text": "a"})
    with path.open("rb") as file:
        assert heads.find_mark(path, file.fileno()) is None


def test_parallel_builds_see_all_runs_with_an_index(ledger, path) -> None:
    fill(ledger)
    index.read_state(path)
    fresh = Ledger(path)
    fresh.append("run-001", "noted", {"text": "behind the mark"})
    seen: list[str] = []

    def build(state):
        seen.extend(state.runs)
        return [NewEvent("run-009", "created", {})]

    fresh.append_locked(build)
    assert seen == [f"run-{number:03d}" for number in range(1, RUNS + 1)]


def test_two_parts_give_what_one_gives_for_a_ledger_that_grew_and_for_a_merged_one(ledger, path, monkeypatch) -> None:
    monkeypatch.setattr(index, "TWO_PARTS_BYTES", 1)
    monkeypatch.setattr(halves, "_may_fork", lambda: True)
    append = ledger.append

    def later(*event):
        time.sleep(0.002)  # two events of one millisecond have no order of their own
        return append(*event)

    monkeypatch.setattr(ledger, "append", later)
    fill(ledger, 9)
    ledger.append("run-001", "noted", {"text": "long after the others"})
    ledger.append("run-002", "promoted", {"certificate": None})
    ledger.append("run-009", "promoted", {"certificate": None})
    lines = path.read_bytes().splitlines(keepends=True)
    seen = []
    real = index._in_two_parts

    def seeing(source):
        seen.append(real(source))
        return seen[-1]

    monkeypatch.setattr(index, "_in_two_parts", seeing)
    check(path)
    assert seen.pop() is not None
    assert check(path)
    for order in (lines[20:] + lines[:20], lines[::-1], lines[:5] + lines[30:] + lines[5:30], [*lines, lines[3]]):
        path.write_bytes(b"".join(order))
        check(path)
        assert seen.pop() is None
    assert not seen
