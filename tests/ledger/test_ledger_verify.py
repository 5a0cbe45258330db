"""Every kind of damage gets a finding of its own, and a healthy ledger gets none."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.config.load import config_sha, load_config, resolved
from harness.core.canonical import sha256_file, sha256_hex
from harness.ledger import Ledger
from harness.ledger.events import line_sha
from harness.ledger.lost import Base, shas
from harness.ledger.verify import Finding, check, verify

DOCS = Path(__file__).parents[2] / "docs" / "ledger.md"
CONFIG = 'hypothesis = "h"\n\n[[env]]\nid = "drugprot"\n\n[lora]\nalpha = 32.0\n'


def kinds(path) -> list[str]:
    return [finding.kind for finding in verify(path)]


def write(path, *events) -> None:
    path.write_bytes(b"".join(event.line + b"\n" for event in events))


def test_an_absent_and_an_empty_ledger_verify(path) -> None:
    assert verify(path) == []
    path.touch()
    assert verify(path) == []


def test_several_damages_are_all_reported(event, path) -> None:
    birth = event(kind="created", number=1)
    note = event(number=2, second=1, prev=[birth.sha])
    lines = [birth.line, b"<<<<<<< ours", note.line.replace(b"x", b"y", 1), b"", note.line, b'{"torn":']
    path.write_bytes(b"\n".join(lines))
    found = verify(path)
    assert [(f.kind, f.line) for f in found] == [("damage", 2), ("damage", 3), ("damage", 4), ("torn", 6)]
    starts = {number: sum(len(line) + 1 for line in lines[: number - 1]) for number in (2, 3, 4, 6)}
    assert [(f.line, f.offset) for f in found] == list(starts.items())
    assert all(f.severity == "error" for f in found)


def test_a_child_that_takes_a_part_changes_no_finding(event, path, monkeypatch) -> None:
    from harness.ledger import halves

    birth = event(kind="created", number=1)
    notes = [event(number=n, second=n, prev=[birth.sha], data={"text": f"note {n}"}) for n in range(2, 40)]
    lines = [birth.line, *(note.line for note in notes)]
    lines[4] = lines[4].replace(b"note", b"n0te")
    lines[30] = lines[30].replace(b"note", b"n0te")
    path.write_bytes(b"\n".join(lines) + b"\n")
    monkeypatch.setattr(halves, "_may_fork", lambda: False)
    alone = verify(path)
    monkeypatch.setattr(halves, "_may_fork", lambda: True)
    monkeypatch.setattr(halves, "WORTH_ITEMS", 2)
    assert verify(path) == alone
    assert [f.line for f in alone if f.kind == "damage"] == [5, 31]


def test_a_line_spelt_by_another_writer_keeps_its_data(event, path) -> None:
    head = (
        b'{"v": 1,"id":"01M8Q0CT17RKVDN2T2XRCK3A4N","run":"run-001","kind":"created","at":"2026-01-01T00:00:00.000Z",'
    )
    head += b'"actor":{"kind":"ci","name":"x"},"prev":[],"data":{"hypothesis":"h"}'
    sha = line_sha(head + b',"sha":"' + b"0" * 64 + b'"}')
    others = [event("run-002", "created", number=2, second=2)]
    others += [event("run-002", number=number, second=number, prev=[others[0].sha]) for number in range(3, 6)]
    write(path, *others)
    path.write_bytes(head + b',"sha":"' + sha.encode() + b'"}\n' + path.read_bytes())
    done = check(path)
    assert not [f for f in done.findings if f.severity == "error"] and done.state.runs["run-001"].hypothesis == "h"


def test_an_event_too_new_is_named_after_any_number_of_damaged_lines(event, path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["harness.ledger.verify"], "MAX_DAMAGED", 2)
    later = event(kind="created", number=1).line.replace(b'{"v":1,', b'{"v":2,')
    later = later[:-66] + line_sha(later).encode() + b'"}'
    path.write_bytes(b"x\n" * 4 + later + b"\n")
    assert kinds(path) == ["damage", "damage", "too_new", "damage"]


def test_identity_findings(event, path) -> None:
    birth, a, b = (
        event(kind="created", number=1),
        event(number=2, data={"text": "a"}),
        event(number=2, data={"text": "b"}),
    )
    write(path, birth, a, birth, b)
    found = verify(path)
    assert [(f.kind, f.severity, f.line) for f in found] == [("repeated", "note", 3), ("duplicate_id", "error", 4)]


def test_link_findings(event, path) -> None:
    birth = event(kind="created", number=1)
    gone = event(number=2, second=1, prev=[birth.sha])
    child = event(number=3, second=2, prev=[gone.sha])
    other = event("run-002", "created", number=4, second=3)
    crossed = event("run-002", number=5, second=4, prev=[birth.sha])
    write(path, birth, child, other, crossed)
    assert [(f.kind, f.line, f.run) for f in verify(path)] == [
        ("missing_event", 2, "run-001"),
        ("wrong_link", 4, "run-002"),
    ]


def test_a_deleted_creation_is_found(event, path) -> None:
    birth = event(kind="created", number=1)
    write(path, event(number=2, prev=[birth.sha]))
    assert kinds(path) == ["missing_event", "no_creation"]


def test_two_branches_that_took_one_number_collide(event, path) -> None:
    write(path, event(kind="created", number=1), event(kind="created", number=2, data={"hypothesis": "other"}))
    (found,) = verify(path)
    assert (found.kind, found.line, found.run) == ("run_collision", 2, "run-001")
    assert "lines 1 and 2" in found.message


def test_unknown_kinds_verify_and_critical_ones_do_not(event, path) -> None:
    birth = event(kind="created", number=1)
    write(path, birth, event(kind="sparkled", number=2, second=1, prev=[birth.sha]))
    assert verify(path) == []
    write(path, birth, event(kind="sparkled", number=2, second=1, prev=[birth.sha], critical=True))
    assert kinds(path) == ["too_new"]


def test_forks_are_told_apart_from_damage(event, path) -> None:
    birth = event(kind="created", number=1)
    sides = [event(number=number, second=number, prev=[birth.sha]) for number in (2, 3)]
    write(path, birth, *sides)
    assert [(f.kind, f.severity, f.line) for f in verify(path)] == [("fork", "note", 1)]


def test_a_renumbered_run_verifies_and_a_bad_number_does_not(event, path) -> None:
    birth = event(kind="created", number=1)
    unaware = event(number=2, second=2, prev=[birth.sha])
    moved = event(kind="renumbered", number=3, second=1, prev=[birth.sha], critical=True, data={"to": "run-007"})
    later = event("run-007", number=4, second=3, prev=sorted([unaware.sha, moved.sha]))
    write(path, birth, unaware, moved, later)
    assert kinds(path) == ["fork"]
    stranger = event("run-008", number=5, second=4, prev=[moved.sha])
    write(path, birth, moved, stranger)
    assert kinds(path) == ["wrong_link", "no_creation"]
    bad = event(kind="renumbered", number=3, second=1, prev=[birth.sha], critical=True, data={"to": "../run-007"})
    write(path, birth, bad)
    assert kinds(path) == ["bad_number"]


def lost(path, base: bytes | None, own: bytes = b"") -> list[tuple[str, str]]:
    done = check(path, base=Base("main", base, shas(own or base)))
    return [(finding.kind, finding.message) for finding in done.findings if finding.severity == "error"]


def test_what_a_base_shows(event, path) -> None:
    one, two = event(kind="created", number=1), event("run-002", "created", number=2)
    notes = [event(number=3 + place, second=1 + place, data={"text": str(place)}) for place in range(3)]
    chain = [one]
    for place, note in enumerate(notes):
        chain.append(event(number=3 + place, second=1 + place, prev=[chain[-1].sha], data=note.data))
    text = b"".join(e.line + b"\n" for e in [*chain, two])
    write(path, *chain, two)
    assert lost(path, text) == [] and lost(path, text + b"damaged\n") == [] and lost(path, None) == []
    write(path, *chain[:2], two)
    assert lost(path, text) == [("lost_event", "events (noted) that main has are gone from the end of run-001: 2")]
    write(path, chain[0], *chain[2:], two)
    assert [kind for kind, _ in lost(path, text)] == ["missing_event", "lost_event"]
    assert "from within run-001" in lost(path, text)[1][1]
    write(path, *chain)
    assert [kind for kind, _ in lost(path, text)] == ["lost_run"]
    path.unlink()
    assert [kind for kind, _ in lost(path, text)] == ["lost_run", "lost_run"]


def test_a_replaced_event_is_found_although_every_hash_is_right(event, path) -> None:
    birth = event(kind="created", number=1)
    note, forged = (event(number=2, second=1, prev=[birth.sha], data={"text": text}) for text in ("bad", "good"))
    write(path, birth, forged)
    assert verify(path) == []
    assert [kind for kind, _ in lost(path, birth.line + b"\n" + note.line + b"\n")] == ["rewritten"]


def test_events_that_were_never_merged_are_not_called_lost(event, path) -> None:
    birth = event(kind="created", number=1)
    write(path, birth)
    newer = birth.line + b"\n" + event(number=2, second=1, prev=[birth.sha]).line + b"\n"
    ((kind, message),) = lost(path, newer, own=birth.line + b"\n")
    assert kind == "behind" and "merge main first" in message


def test_recorded_heads_vouch_for_everything_before_them(event, path) -> None:
    birth = event(kind="created", number=1)
    note = event(number=2, second=1, prev=[birth.sha])
    amended = event("program", "amended", number=3, data={"file": "GOAL.md", "new_sha": "0"})
    write(path, birth, note, amended)
    heads = check(path).heads()
    assert heads == {"program": [amended.sha], "run-001": [note.sha]}
    more = event(number=4, second=2, prev=[note.sha])
    write(path, more, amended, birth, note)
    assert not check(path, recorded=heads).findings
    for left in ([birth, note], [birth, amended], [amended]):
        write(path, *left)
        assert "lost_event" in {finding.kind for finding in check(path, recorded=heads).findings}
    write(path, birth, amended)
    assert [f.kind for f in check(path, recorded={"": [note.sha]}).findings] == ["lost_event"]


def test_what_lives_in_outputs_is_not_here(ledger, path, tmp_path) -> None:
    for run in ("run-001", "run-002"):
        ledger.append(run, "created", {})
        ledger.append(run, "started", {"attempt": 1})
        ledger.append(run, "finished", {"attempt": 1, "outcome": "completed", "metrics_sha": sha256_hex(b"{}\n")})
    (found,) = verify(path)
    assert (found.kind, found.severity) == ("not_here", "note") and "run-001, run-002" in found.message
    for run in ("run-001", "run-002"):
        (tmp_path / "outputs" / run).mkdir(parents=True)
        (tmp_path / "outputs" / run / "metrics.jsonl").write_text("{}\n")
    assert verify(path) == []
    (tmp_path / "outputs/run-002/metrics.jsonl").write_text('{"step": 1}\n')
    assert [(f.kind, f.severity, f.run) for f in verify(path)] == [("changed_file", "note", "run-002")]
    ledger.append("run-001", "evaluated", {"attempt": 1, "file": "outputs/run-001/x.jsonl", "file_sha": "0" * 64})
    assert [f.kind for f in verify(path)] == ["not_here", "changed_file"]


def test_a_config_whose_reason_was_rewritten(ledger, path, tmp_path) -> None:
    with_run(ledger, tmp_path)
    (tmp_path / "rl/run-001.toml").write_text(CONFIG.replace('"h"', '"what came out"'))
    (found,) = verify(path)
    assert (found.kind, found.severity) == ("changed_file", "error") and found.message.endswith(": hypothesis")


def with_run(ledger: Ledger, root, started: bool = True) -> None:
    (root / "rl").mkdir()
    (root / "rl/run-001.toml").write_text(CONFIG)
    config = load_config(root / "rl/run-001.toml")
    created = {"config": "rl/run-001.toml", "config_sha": config_sha(config), "basis": {"config": resolved(config)}}
    ledger.append("run-001", "created", created)
    if started:
        ledger.append("run-001", "started", {"attempt": 1, "config_sha": config_sha(config)})


def test_a_config_is_compared_by_meaning(ledger, path, tmp_path) -> None:
    with_run(ledger, tmp_path)
    file = tmp_path / "rl/run-001.toml"
    assert verify(path) == []
    file.write_text("# a comment\n" + CONFIG.replace("32.0", "32"))
    assert verify(path) == []
    file.write_text(CONFIG.replace("32.0", "64.0"))
    (found,) = verify(path)
    assert (found.kind, found.severity, found.run) == ("changed_file", "error", "run-001")
    assert "lora.alpha" in found.message
    file.write_text("[lora\n")
    assert kinds(path) == ["changed_file"]
    file.unlink()
    assert kinds(path) == ["missing_file"]


def test_a_stored_config_without_a_key_of_today_still_verifies(ledger, path, tmp_path) -> None:
    """A later version of harness adds keys; old runs must not look tampered with."""
    with_run(ledger, tmp_path, started=False)
    basis = dict(ledger.events()[0].data["basis"]["config"])
    del basis["budget"]
    path.unlink()
    sha = "0" * 64  # what the older version computed
    ledger.append("run-001", "created", {"config": "rl/run-001.toml", "config_sha": sha, "basis": {"config": basis}})
    ledger.append("run-001", "started", {"attempt": 1, "config_sha": sha})
    assert verify(path) == []
    (tmp_path / "rl/run-001.toml").write_text(CONFIG.replace("32.0", "64.0"))
    assert kinds(path) == ["changed_file"]


def test_a_config_may_be_edited_until_it_is_launched(ledger, path, tmp_path) -> None:
    with_run(ledger, tmp_path, started=False)
    (tmp_path / "rl/run-001.toml").write_text(CONFIG.replace("32.0", "64.0"))
    assert [(f.kind, f.severity) for f in verify(path)] == [("changed_file", "note")]


def test_items_of_evals_and_certificates_are_checked_by_hash(ledger, path, tmp_path) -> None:
    items, certificate = tmp_path / "items.jsonl", tmp_path / "certificate.json"
    items.write_text("old\n")
    old = sha256_file(items)
    items.write_text("new\n")
    certificate.write_text("{}\n")
    ledger.append("run-001", "created", {})
    for sha in (old, sha256_file(items)):  # a resumed attempt evaluates the step again: the newest event counts
        ledger.append("run-001", "evaluated", {"attempt": 1, "file": "items.jsonl", "file_sha": sha})
    ledger.append(
        "run-001", "promoted", {"certificate": "certificate.json", "certificate_sha": sha256_file(certificate)}
    )
    assert verify(path) == []
    items.write_text("newer\n")
    certificate.unlink()
    assert kinds(path) == ["changed_file", "missing_file"]


def test_paths_do_not_leave_the_program(ledger, path, tmp_path) -> None:
    ledger.append("run-001", "created", {})
    (tmp_path / "link").symlink_to("/etc")
    for name in ("../secret", "/etc/passwd", "link/passwd"):
        ledger.append("run-001", "evaluated", {"attempt": 1, "file": name, "file_sha": "0" * 64})
    assert kinds(path) == ["bad_path"] * 3


def test_the_documented_check_needs_nothing_but_the_format(ledger, path, tmp_path, monkeypatch) -> None:
    """The snippet in docs/ledger.md accepts a good ledger and notices a changed byte."""
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    ledger.append("run-001", "created", {"hypothesis": "größer"})
    ledger.append("run-001", "noted", {"text": "n"})
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})  # noqa: S102 - the text of our own documentation
    path.write_bytes(path.read_bytes().replace(b'"n"', b'"m"'))
    with pytest.raises(AssertionError):
        exec(snippet, {})  # noqa: S102


def test_every_finding_kind_is_documented() -> None:
    assert Finding.__doc__ is not None
    kinds_in_code = set(re.findall(r"`([a-z_]+)`", Finding.__doc__.split("severity")[0]))
    table = DOCS.read_text().split("## Verify")[1].split("## What")[0]
    assert kinds_in_code - {"kind"} == set(
        re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.M)))
    )


def test_a_config_that_is_a_link_to_itself_is_missing(ledger, path, tmp_path) -> None:
    with_run(ledger, tmp_path)
    config = tmp_path / "rl/run-001.toml"
    config.unlink()
    config.symlink_to(config)
    assert kinds(path) == ["missing_file"]


def test_a_file_that_is_no_ledger_is_not_described_line_by_line(path, monkeypatch) -> None:
    monkeypatch.setattr("harness.ledger.verify.MAX_DAMAGED", 3)
    path.write_bytes(b"no event\n" * 3)
    assert [finding.line for finding in verify(path)] == [1, 2, 3]
    path.write_bytes(b"no event\n" * 10)
    findings = verify(path)
    assert [finding.line for finding in findings] == [1, 2, 3, None]
    assert findings[-1].message == "7 more lines are damaged" and findings[-1].severity == "error"
