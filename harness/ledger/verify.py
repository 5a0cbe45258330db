"""Look for everything that can be wrong with a ledger and report all of it, instead of the first.

Each line is judged alone (hash, strict JSON), then the lines together (ids, links, run numbers),
then the committed files that events name by hash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.changes import diff
from harness.config.load import config_sha, load_config
from harness.core.canonical import sha256_file
from harness.core.errors import HarnessError, InfraError
from harness.core.files import disk_hint
from harness.ledger.events import FIRST_KINDS, KINDS, PROGRAM, Event, UnknownEventError, parse_line
from harness.ledger.fold import RunState, fold


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Args:
        kind: `damage`, `torn`, `no_newline`, `too_new`, `duplicate_id`, `repeated`, `missing_event`, `wrong_link`,
            `no_creation`, `run_collision`, `bad_path`, `missing_file`, `changed_file`.
        severity: `error` means that the ledger does not verify; `note` does not.
        message: self-contained sentence.
        line: 1-based line in the ledger; None when the finding is about several or none.
        offset: byte at which that line begins.
        run: the run concerned.
    """

    kind: str
    severity: str
    message: str
    line: int | None = None
    offset: int | None = None
    run: str | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    event: Event
    line: int
    offset: int


def verify(path: Path, root: Path | None = None) -> list[Finding]:
    """Check a ledger and the committed files it names.

    Args:
        path: the ledger; a file that does not exist is an empty ledger.
        root: folder that event paths are relative to; the ledger's own when None.

    Returns:
        Findings in the order of the file; it verifies when none is an `error`.

    Raises:
        InfraError: when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            with contextlib.suppress(OSError):  # a file system without locks can still be read
                fcntl.flock(file, fcntl.LOCK_SH)  # or half of a running append would look torn
            data = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InfraError(f"cannot read {path}: {error.strerror}", disk_hint(error)) from error
    placed, findings = _lines(data)
    first: dict[str, _Placed] = {}
    for item in placed:
        findings.extend(_identity(item, first))
    kept = list(first.values())
    findings.extend(_links(kept))
    findings.extend(_births(kept))
    findings.sort(key=lambda finding: finding.offset or 0)
    # A critical event of an unknown kind is reported above; the files it may name are not known.
    state = fold(item.event for item in kept if item.event.kind in KINDS)
    folder = (path.parent if root is None else root).resolve()
    for run in state.runs.values():
        findings.extend(_files(run, folder))
    return findings


def _lines(data: bytes) -> tuple[list[_Placed], list[Finding]]:
    placed: list[_Placed] = []
    findings: list[Finding] = []
    lines = data.split(b"\n")
    tail = lines.pop()
    offset = 0
    for number, line in enumerate(lines, 1):
        try:
            event = parse_line(line)
            _ = event.data  # parsed strictly here, on first use elsewhere
            placed.append(_Placed(event, number, offset))
        except UnknownEventError as error:
            findings.append(Finding("too_new", "error", f"line {number}: {error}", number, offset))
        except ValueError as error:
            findings.append(Finding("damage", "error", f"line {number} is damaged: {error}", number, offset))
        offset += len(line) + 1
    if tail:
        number = len(lines) + 1
        try:
            event = parse_line(tail)
            _ = event.data
            placed.append(_Placed(event, number, offset))
            message = f"line {number} is complete but lacks its newline; the next append adds it"
            findings.append(Finding("no_newline", "note", message, number, offset))
        except (ValueError, UnknownEventError):
            message = f"line {number} is torn ({len(tail)} bytes); the next append moves it to outputs/"
            findings.append(Finding("torn", "error", message, number, offset))
    return placed, findings


def _identity(item: _Placed, first: dict[str, _Placed]) -> Iterator[Finding]:
    """Compare with an earlier line of the same id, and check that the kind is known where it must be."""
    event, line, offset = item.event, item.line, item.offset
    known = first.setdefault(event.id, item)
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


def _links(kept: list[_Placed]) -> Iterator[Finding]:
    runs = {item.event.sha: item.event.run for item in kept}
    for item in kept:
        event = item.event
        for sha in event.prev:
            if sha not in runs:
                text = f"line {item.line} ({event.kind} of {event.run}) follows event {sha[:12]}, which is not here"
                yield Finding("missing_event", "error", text, item.line, item.offset, event.run)
            elif runs[sha] != event.run:
                text = f"line {item.line} ({event.kind} of {event.run}) follows an event of {runs[sha]}"
                yield Finding("wrong_link", "error", text, item.line, item.offset, event.run)


def _births(kept: list[_Placed]) -> Iterator[Finding]:
    """Every run is created once; two branches that both take a number collide."""
    created: dict[str, list[_Placed]] = {}
    first: dict[str, _Placed] = {}
    born: set[str] = set()
    for item in kept:
        event = item.event
        first.setdefault(event.run, item)
        if event.kind in FIRST_KINDS:
            born.add(event.run)
        if event.kind == "created":
            created.setdefault(event.run, []).append(item)
    for run, items in created.items():
        if len(items) > 1:
            places = " and ".join(str(item.line) for item in items)
            text = f"{run} is created {len(items)} times, at lines {places}; two branches took the same number"
            yield Finding("run_collision", "error", text, items[1].line, items[1].offset, run)
    for run, item in first.items():
        if run != PROGRAM and run not in born:
            text = f"{run} has events from line {item.line} on, but none that creates it"
            yield Finding("no_creation", "error", text, item.line, item.offset, run)


def _files(run: RunState, root: Path) -> Iterator[Finding]:
    """Check the committed files a run's events name; the newest event of a path counts."""
    named: dict[str, tuple[str, str]] = {}
    for data in run.evals:
        if data.get("file") and data.get("file_sha"):
            named[str(data["file"])] = ("items of an eval", str(data["file_sha"]))
    if run.promoted and run.promoted.get("certificate") and run.promoted.get("certificate_sha"):
        named[str(run.promoted["certificate"])] = ("certificate", str(run.promoted["certificate_sha"]))
    for name, (what, sha) in named.items():
        path, findings = _locate(run.run, name, what, root)
        yield from findings
        if path is not None and _sha(path) != sha:
            text = f"{name} ({what} of {run.run}) was changed after the ledger recorded it"
            yield Finding("changed_file", "error", text, run=run.run)
    if run.created.get("config"):
        yield from _config(run, str(run.created["config"]), root)


def _sha(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise InfraError(f"cannot read {path}: {error.strerror}", disk_hint(error)) from error


def _locate(run: str, name: str, what: str, root: Path) -> tuple[Path | None, list[Finding]]:
    path = Path(os.path.realpath(root / name))
    if not path.is_relative_to(root):
        return None, [
            Finding("bad_path", "error", f"{run} names {name[:200]!r}, which is outside the program", run=run)
        ]
    if not path.is_file():
        return None, [Finding("missing_file", "error", f"{name} ({what} of {run}) is missing", run=run)]
    return path, []


def _config(run: RunState, name: str, root: Path) -> Iterator[Finding]:
    """Compare a config by meaning: comments may change, and new keys with their defaults may come."""
    path, findings = _locate(run.run, name, "config", root)
    yield from findings
    if path is None:
        return
    # Until the first launch a config may still be edited; launch checks and records it again.
    starts = [event.data for event in run.of_kind("started") if event.data.get("config_sha")]
    expected = starts[-1]["config_sha"] if starts else run.config_sha
    severity = "error" if starts else "note"
    try:
        config = load_config(path)
    except HarnessError as error:
        yield Finding("changed_file", severity, f"{name} (config of {run.run}) does not parse: {error}", run=run.run)
        return
    if expected is None or config_sha(config) == expected:
        return
    basis: dict[str, Any] = (run.created.get("basis") or {}).get("config") or {}
    if basis and expected == run.config_sha and not (keys := [change.key for change in diff(basis, config)]):
        return
    shown = f": {', '.join(keys)}" if basis and expected == run.config_sha else ""
    text = f"{name} (config of {run.run}) was changed after the ledger recorded it{shown}"
    yield Finding("changed_file", severity, text, run=run.run)
