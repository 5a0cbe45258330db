"""The file: appends, links, incremental reads, torn tails, damage."""

from __future__ import annotations

import os
import threading

import pytest

from harness.core.errors import BusyError, ExitCode, LedgerCorruptError, NotFoundError, RefusedError, UsageError
from harness.ledger import Ledger, NewEvent, UnknownEventError, fold, store
from harness.ledger.verify import verify


def fill(ledger: Ledger, runs: int = 2) -> list:
    events = []
    for number in range(1, runs + 1):
        events.append(ledger.append(f"run-{number:03d}", "created", {"type": "training", "hypothesis": f"h{number} é"}))
        events.append(ledger.append(f"run-{number:03d}", "noted", {"text": "n"}))
    return events


def lines_of(path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_append_and_read_back(ledger, path) -> None:
    written = fill(ledger)
    assert ledger.events() == written == Ledger(path).events()
    assert path.read_bytes() == b"".join(event.line + b"\n" for event in written)
    assert written[0].prev == ()
    assert written[1].prev == (written[0].sha,)
    assert written[2].prev == ()  # each run is a chain of its own
    assert verify(path) == []
    assert ledger.warnings == []


def test_an_absent_ledger_is_empty_and_reading_makes_no_file(ledger, path) -> None:
    assert ledger.events() == []
    assert ledger.state().runs == {}
    assert ledger.torn() == b""
    assert not path.exists()


def test_readers_see_what_other_ledgers_append(ledger, path) -> None:
    fill(ledger)
    other = Ledger(path)
    assert len(other.events()) == 4
    event = ledger.append("run-002", "decided", {"decision": "keep", "reason": "r"})
    assert other.events()[-1] == event
    answer = other.append("run-002", "noted", {"text": "seen"})
    assert answer.prev == (event.sha,)
    assert ledger.state().runs["run-002"].decision == "keep"


def test_a_replaced_or_shortened_file_is_read_again(ledger, path, tmp_path) -> None:
    fill(ledger)
    whole = lines_of(path)
    path.write_bytes(b"".join(whole[:2]))  # shorter, same inode
    assert list(ledger.state().runs) == ["run-001"]
    replacement = tmp_path / "other"
    replacement.write_bytes(b"".join(whole[2:] + whole[:2]))
    os.replace(replacement, path)  # what git does
    assert [event.line + b"\n" for event in ledger.events()] == whole[2:] + whole[:2]
    assert ledger.append("run-001", "noted", {"text": "m"}).prev == (ledger.events()[3].sha,)


def test_an_edit_of_the_same_length_is_seen_by_an_open_ledger(ledger, path) -> None:
    fill(ledger)
    ledger.events()
    path.write_bytes(path.read_bytes().replace(b"h1", b"h9"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(LedgerCorruptError):
        ledger.events()


def test_both_heads_of_a_fork_are_named_by_the_next_event(event, path) -> None:
    birth = event(kind="created", number=1)
    left = event(number=2, second=1, prev=[birth.sha])
    right = event(number=3, second=2, prev=[birth.sha])
    path.write_bytes(b"".join(e.line + b"\n" for e in (right, birth, left)))  # a merge may put children first
    joined = Ledger(path).append("run-001", "noted", {"text": "joined"})
    assert joined.prev == tuple(sorted([left.sha, right.sha]))
    assert Ledger(path).append("run-001", "noted", {"text": "after"}).prev == (joined.sha,)


def test_append_locked_sees_the_state_and_writes_all_or_nothing(ledger, path) -> None:
    fill(ledger)

    def build(state):
        assert list(state.runs) == ["run-001", "run-002"]
        return [
            NewEvent("run-003", "created", {}),
            NewEvent("run-003", "noted", {"text": "t"}),
            NewEvent("run-001", "noted", {}),
        ]

    events = ledger.append_locked(build)
    assert events[1].prev == (events[0].sha,)
    assert events == Ledger(path).events()[-3:]
    before = path.read_bytes()
    with pytest.raises(UsageError):
        ledger.append_locked(
            lambda state: [NewEvent("run-004", "created", {}), NewEvent("run-004", "noted", {"x": {1}})]
        )
    with pytest.raises(KeyError):
        ledger.append_locked(lambda state: [NewEvent(state.runs["run-009"].run, "noted", {})])
    assert ledger.append_locked(lambda state: []) == []
    assert path.read_bytes() == before


def test_append_locked_folds_only_what_is_new_and_sees_everything(ledger, path, monkeypatch) -> None:
    fill(ledger)
    folds = []
    seen = []

    def counted(events):
        folds.append(1)
        return fold(events)

    monkeypatch.setattr(store, "fold", counted)

    def build(state):
        seen.append({name: [event.sha for event in run.events] for name, run in state.runs.items()})
        return [NewEvent(f"run-{len(state.runs) + 1:03d}", "created", {})]

    def everything():
        return {name: [event.sha for event in run.events] for name, run in fold(Ledger(path).events()).runs.items()}

    for folded in (1, 1, 1):
        before = everything()
        ledger.append_locked(build)
        assert seen[-1] == before and len(folds) == folded
        Ledger(path).append("run-001", "noted", {"text": "by another process"})
        Ledger(path).append("program", "amended", {"file": "PLAN.md"})
    ledger.append("run-003", "promoted", {})  # which run leads depends on all of them
    for folded in (2, 2):
        before = everything()
        ledger.append_locked(build)
        assert seen[-1] == before and len(folds) == folded
    path.write_bytes(path.read_bytes().split(b"\n", 1)[0] + b"\n")  # an older copy
    ledger.append_locked(build)
    assert list(seen[-1]) == ["run-001"] and len(folds) == 3


def test_build_may_read_but_not_append(ledger) -> None:
    fill(ledger)
    seen = []

    def look(state):
        seen.extend(ledger.events())
        return []

    ledger.append_locked(look)
    assert len(seen) == 4
    with pytest.raises(BusyError, match="wait for itself"):
        ledger.append_locked(lambda state: [ledger.append("run-001", "noted", {})])


def test_a_run_is_created_once_and_first(ledger, tmp_path) -> None:
    with pytest.raises(NotFoundError, match="run-001"):
        ledger.append("run-001", "started", {"attempt": 1})
    ledger.append("program", "noted", {"text": "the program needs no creation"})
    ledger.append("run-001", "created", {})
    with pytest.raises(RefusedError, match="exists already"):
        ledger.append("run-001", "created", {})
    with pytest.raises(NotFoundError, match="folder"):
        Ledger(tmp_path / "absent" / "runs.jsonl").append("run-001", "created", {})


def test_a_held_lock_is_waited_for_and_then_reported(ledger, path) -> None:
    fill(ledger)
    inside, leave = threading.Event(), threading.Event()

    def hold(state):
        inside.set()
        leave.wait(5)
        return []

    holder = threading.Thread(target=ledger.append_locked, args=(hold,))
    holder.start()
    inside.wait(5)
    with pytest.raises(BusyError) as caught:
        Ledger(path, wait_s=0.05).append("run-001", "noted", {})
    assert caught.value.exit_code == ExitCode.BUSY
    with pytest.raises(BusyError):
        Ledger(path, wait_s=0).events()
    leave.set()
    holder.join()
    assert Ledger(path, wait_s=0).append("run-001", "noted", {}).kind == "noted"


def test_a_tail_torn_at_every_byte_is_left_out_reported_and_repaired(ledger, path) -> None:
    events = fill(ledger)
    data = path.read_bytes()
    start = len(data) - len(events[-1].line) - 1
    for cut in range(start + 1, len(data) - 1):
        path.write_bytes(data[:cut])
        reader = Ledger(path)
        assert reader.events() == events[:-1]
        assert reader.torn() == data[start:cut]
        assert len(reader.warnings) == 1 and f"byte {start}" in reader.warnings[0]
        assert [finding.kind for finding in verify(path)] == ["torn"]
        assert path.read_bytes() == data[:cut]  # reading repairs nothing
        if cut % 29 == 0:
            reader.append("run-001", "noted", {"text": "after"})
            aside = sorted((path.parent / "outputs").iterdir(), key=lambda p: p.stat().st_mtime_ns)[-1]
            assert aside.name.startswith("runs.jsonl.torn-") and aside.read_bytes() == data[start:cut]
            assert str(aside) in reader.warnings[-1]
            assert path.read_bytes()[:start] == data[:start]
            assert len(Ledger(path).events()) == 4 and verify(path) == []


def test_a_last_line_without_its_newline_is_whole_and_counts(ledger, path) -> None:
    events = fill(ledger)
    path.write_bytes(path.read_bytes()[:-1])
    reader = Ledger(path)
    assert reader.events() == events
    assert reader.torn() == b"" and "newline" in reader.warnings[0]
    assert [(finding.kind, finding.severity) for finding in verify(path)] == [("no_newline", "note")]
    added = reader.append("run-002", "noted", {"text": "after"})
    assert added.prev == (events[-1].sha,)
    assert reader.events() == [*events, added] == Ledger(path).events()
    assert verify(path) == []


def test_damage_before_the_tail_names_line_and_byte_and_stops_everything(ledger, path) -> None:
    events = fill(ledger)
    data = path.read_bytes()
    offsets = [0]
    for event in events:
        offsets.append(offsets[-1] + len(event.line) + 1)
    for position in range(0, len(data) - 1, 7):
        if data[position] == 10:
            continue
        number = next(i for i, offset in enumerate(offsets) if offset > position)
        damaged = data[:position] + bytes([data[position] ^ 0x04]) + data[position + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(
            LedgerCorruptError, match=rf"runs\.jsonl line {number} \(byte {offsets[number - 1]}\)"
        ) as caught:
            Ledger(path).events()
        assert caught.value.exit_code == ExitCode.LEDGER_CORRUPT and "verify" in caught.value.hint
        with pytest.raises(LedgerCorruptError):
            Ledger(path).append("run-001", "noted", {})
        findings = verify(path)
        assert (findings[0].kind, findings[0].line, findings[0].offset) == ("damage", number, offsets[number - 1])
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("junk", [b"\n", b"<<<<<<< ours\n", b"not json\n", b'{"v":1}\n', b"\x00\n"])
def test_a_foreign_line_in_the_middle_is_damage(ledger, path, junk) -> None:
    fill(ledger)
    lines = lines_of(path)
    path.write_bytes(lines[0] + junk + b"".join(lines[1:]))
    with pytest.raises(LedgerCorruptError, match="line 2"):
        Ledger(path).events()


def test_glued_records_are_damage(ledger, path) -> None:
    fill(ledger)
    lines = lines_of(path)
    path.write_bytes(lines[0] + lines[1].rstrip(b"\n") + lines[2] + lines[3])
    with pytest.raises(LedgerCorruptError, match="line 2"):
        Ledger(path).events()


def test_repeated_lines_count_once_and_an_edited_copy_is_damage(event, path) -> None:
    birth, note = event(kind="created", number=1), event(number=2, data={"text": "a"})
    path.write_bytes(b"".join(e.line + b"\n" for e in (birth, note, birth)))
    assert Ledger(path).events() == [birth, note]
    edited = event(number=2, data={"text": "b"})
    path.write_bytes(b"".join(e.line + b"\n" for e in (birth, note, edited)))
    with pytest.raises(LedgerCorruptError, match=r"line 3.*same id"):
        Ledger(path).events()


def test_unknown_kinds_are_kept_and_critical_ones_refused(event, path) -> None:
    birth = event(kind="created", number=1)
    strange = event(kind="celebrated", number=2, second=1, prev=[birth.sha], data={"cake": True})
    path.write_bytes(birth.line + b"\n" + strange.line + b"\n")
    ledger = Ledger(path)
    assert ledger.state().runs["run-001"].events == [birth, strange]
    assert ledger.append("run-001", "noted", {}).prev == (strange.sha,)
    assert lines_of(path)[1] == strange.line + b"\n"
    fatal = event(kind="superseded", number=3, critical=True, data={"to": "run-009"})
    with path.open("ab") as file:
        file.write(fatal.line + b"\n")
    for act in (
        ledger.state,
        lambda: Ledger(path).append("run-001", "noted", {}),
        lambda: ledger.append("run-001", "noted", {}),
    ):
        with pytest.raises(UnknownEventError, match="superseded") as caught:
            act()
        assert "upgrade" in caught.value.hint or "-U" in caught.value.hint
    assert len(Ledger(path).events()) == 4  # the raw events can still be listed
