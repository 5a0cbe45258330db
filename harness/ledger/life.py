"""The life of a run as this machine can see it: stale attempts, and how they are closed.

A killed process writes no `finished` event, so its attempt looks as if it ran for ever. What can be
told from here (the process is gone) is shown as `stale since …` and stays a view until
`harness recover`, or the next launch, puts it on record. Nothing here calls an attempt dead that
runs on another host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.ledger.events import format_time
from harness.ledger.fold import RunState
from harness.ledger.process import Liveness, look
from harness.ledger.superseded import read_rows

STALE = "stale"
"""The status of a run whose attempt has no end and whose process is gone."""


class Stale(NamedTuple):
    """An attempt without an end whose process is gone.

    Args:
        since: its last sign of life: the last event, metrics row or log line it wrote (RFC 3339).
        why: how that is known.
    """

    since: str
    why: str


def open_attempt(run: RunState) -> dict[str, Any] | None:
    """Return the last attempt when it has no end on record; None otherwise."""
    last = run.attempts[-1] if run.status == "running" else None
    return last if last is not None and last.get("outcome") is None else None


def liveness(run: RunState) -> Liveness | None:
    """Return whether the process of the open attempt lives; None when no attempt is open."""
    attempt = open_attempt(run)
    return None if attempt is None else look(attempt)


def live_status(run: RunState) -> str:
    """Return the run's status; `stale` instead of `running` when its process is gone."""
    seen = liveness(run)
    return STALE if seen is not None and seen.alive is False else run.status


def stale(run: RunState, folder: Path | None = None) -> Stale | None:
    """Return since when a run is stale and how that is known; None when it is not.

    Args:
        run: state of the run.
        folder: its folder under outputs/, whose files tell more than the ledger; None leaves them out.
    """
    seen = liveness(run)
    if seen is None or seen.alive is not False:
        return None
    return Stale(last_sign(run, folder), seen.why)


def last_sign(run: RunState, folder: Path | None) -> str:
    """Return when the open attempt last wrote anything: an event, a metrics row, a line of its log."""
    attempt = open_attempt(run) or {}
    mine = [e.at for e in run.of_kind("started", "evaluated") if e.data.get("attempt") == attempt.get("attempt")]
    signs = mine or [run.events[-1].at]
    if folder is not None:
        number = attempt.get("attempt")
        log = folder / "logs" / f"attempt_{number}.log"
        if log.is_file():
            signs.append(format_time(log.stat().st_mtime_ns))
        # Rows carry the time of the process that wrote them; the file's own time may be a copy's.
        times = [row.get("time") for row in read_rows(folder / "metrics.jsonl") if row.get("attempt") == number]
        signs += [format_time(round(at * 1000) * 1_000_000) for at in times if isinstance(at, int | float)]
    return max(signs)


def crash_data(run: RunState, folder: Path, failure: str | None, reason: str) -> dict[str, Any]:
    """Return the `finished` data that close the open attempt of a run whose process left no word.

    Args:
        run: state of the run; its last attempt is open.
        folder: the run's folder under outputs/; what it lacks is recorded as unknown.
        failure: failure class; None when the process was told to stop.
        reason: how it is known that the process is gone.
    """
    attempt = open_attempt(run) or {}
    number = attempt.get("attempt")
    steps = [row["step"] for row in read_rows(folder / "metrics.jsonl") if row.get("attempt") == number]
    since = last_sign(run, folder)
    return {
        "attempt": number,
        "outcome": "crashed",
        "failure": failure,
        "reason": f"{reason}; last sign of life {since}",
        "step": max(steps, default=attempt.get("resumed_from") or 0) if folder.is_dir() else None,
        "wall_s": _seconds_between(str(attempt.get("at", since)), since),
        "stale_since": since,
    }


def _seconds_between(start: str, end: str) -> float:
    from datetime import datetime

    seconds = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    return round(max(seconds, 0.0), 3)


def stale_members(run: RunState, folder: Path | None) -> Mapping[str, Any]:
    """Return `stale_since` and `stale_reason` for `--json`; None both when the run is not stale."""
    found = stale(run, folder)
    return {"stale_since": found and found.since, "stale_reason": found and found.why}
