"""Compare the files that events name with the hashes they were recorded with."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.config.changes import diff
from harness.config.load import META_KEYS, config_sha, load_config
from harness.config.schema import RunConfig
from harness.core.canonical import sha256_file
from harness.core.errors import HarnessError, InfraError
from harness.core.files import disk_hint
from harness.ledger.findings import Finding
from harness.ledger.fold import RunState, State

REPORT_FILES = ("report.md", "report.html", "rollouts.md", "data/")
"""What a committed report consists of; plots come and go with the metrics."""

NAMING_KEYS = ("config", "files", "file_sha", "metrics_sha", "certificate")
"""Members that name a file, or its hash, in the data of an event."""


def artefact_findings(state: State, root: Path, naming: Collection[str]) -> Iterator[Finding]:
    """Check every file that events name; of several events that name one path, the newest counts.

    Runs that share a number are left out: nobody knows whose files these are until one is renumbered.

    Args:
        state: the fold of the ledger.
        root: the resolved folder that paths are relative to.
        naming: hashes of the events whose data have one of `NAMING_KEYS`; others are not parsed again.

    Raises:
        InfraError: when a file cannot be read.
    """
    absent = []
    for run in state.runs.values():
        if run.run in state.collisions:
            continue
        yield from _committed(run, root, naming)
        recorded = _recorded_metrics(run, naming)
        if recorded is None:
            continue
        metrics = root / "outputs" / run.run / "metrics.jsonl"
        if not metrics.is_file():
            absent.append(run.run)
        elif _sha(metrics) != recorded:
            text = f"outputs/{run.run}/metrics.jsonl differs from what the ledger recorded"
            yield Finding("changed_file", "note", text, run=run.run)
    if absent:
        shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        text = f"metrics, rollouts and adapters stay in outputs/ where a run was trained; not here: those of {shown}"
        yield Finding("not_here", "note", text)


def report_findings(state: State, root: Path, tracked: Iterable[str], where: str) -> Iterator[Finding]:
    """Tell which files of committed reports are gone.

    Args:
        state: the fold of the ledger.
        root: the program's folder.
        tracked: paths below `analysis/` in a commit.
        where: how to name that commit.
    """
    for name in tracked:
        parts = name.split("/", 2)
        if len(parts) < 3 or parts[1] not in state.runs or not parts[2].startswith(REPORT_FILES):
            continue
        if not (root / name).is_file():
            text = f"{name} (report of {parts[1]}) is in {where} and is missing here"
            yield Finding("missing_file", "error", text, run=parts[1])


def _recorded_metrics(run: RunState, naming: Collection[str]) -> str | None:
    """Return the hash of the metrics as the last attempt left them; None while one runs, or when it told none."""
    executions = run.of_kind("started", "finished")
    last = executions[-1] if executions else None
    if last is None or last.kind != "finished" or last.sha not in naming:
        return None
    return last.data.get("metrics_sha")


def _committed(run: RunState, root: Path, naming: Collection[str]) -> Iterator[Finding]:
    named: dict[str, tuple[str, str]] = {}
    created = run.created if any(event.sha in naming for event in run.of_kind("created", "imported")) else {}
    lists = [("imported file", created.get("files"))]
    lists += [("file of a search", event.data.get("files")) for event in run.of_kind("finished") if event.sha in naming]
    for what, files in lists:
        for entry in files if isinstance(files, list) else ():
            if isinstance(entry, dict) and entry.get("file"):
                named[str(entry["file"])] = (what, str(entry.get("sha")))
    for data in (event.data for event in run.of_kind("evaluated") if event.sha in naming):
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
    if created.get("config"):
        yield from _config(run, str(created["config"]), root)


def _sha(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise InfraError(f"cannot read {path}: {error.strerror}", disk_hint(error)) from error


def _locate(run: str, name: str, what: str, root: Path) -> tuple[Path | None, list[Finding]]:
    path = Path(os.path.realpath(root / name))  # unlike resolve(), takes names no file system does
    if not path.is_relative_to(root):
        text = f"{run} names {name[:200]!r}, which is outside the program"
        return None, [Finding("bad_path", "error", text, run=run)]
    if path.is_file():
        return path, []
    if path.is_relative_to(root / "outputs"):  # never committed, so another clone cannot have it
        return None, [Finding("not_here", "note", f"{name} ({what} of {run}) is not here", run=run)]
    return None, [Finding("missing_file", "error", f"{name} ({what} of {run}) is missing", run=run)]


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
    basis = _basis(run, starts, str(expected))
    keys = _moved(basis, config) if basis else []
    if basis and not keys:
        return
    shown = f": {', '.join(keys)}" if keys else ""
    text = f"{name} (config of {run.run}) was changed after the ledger recorded it{shown}"
    yield Finding("changed_file", severity, text, run=run.run)


def _basis(run: RunState, starts: list[dict[str, Any]], expected: str) -> dict[str, Any]:
    """Return the config behind the expected hash, as far as an event holds it."""
    if starts and (basis := (starts[-1].get("basis") or {}).get("config")):
        return dict(basis)
    return dict((run.created.get("basis") or {}).get("config") or {}) if expected == run.config_sha else {}


def _moved(basis: dict[str, Any], config: RunConfig) -> list[str]:
    reasons = [key for key in META_KEYS if key in basis and basis[key] != getattr(config, key)]
    return reasons + [change.key for change in diff(basis, config)]
