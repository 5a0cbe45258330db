"""Close an attempt whose process is gone: `finished` with the outcome `crashed` and how that is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.errors import CannotTellError, RefusedError, UsageError
from harness.core.failures import failure_of_exit
from harness.ledger.events import Event, NewEvent
from harness.ledger.fold import RunState, State
from harness.ledger.life import crash_data, live_status, liveness, open_attempt
from harness.ledger.store import Ledger


@dataclass(frozen=True, slots=True)
class Told:
    """What a person or a scheduler knows that this machine cannot see.

    Args:
        host: the other host whose process is known to be gone; None to believe this machine's eyes only.
        reason: how that is known; needed with `host`.
        exit_status: of the process, as a scheduler reports it; None when nobody saw it.
    """

    host: str | None = None
    reason: str = ""
    exit_status: int | None = None


def closing_data(run: RunState, folder: Path, told: Told | None = None) -> dict[str, Any] | None:
    """Return the `finished` data that close a run's open attempt; None when no attempt is open.

    Args:
        run: state of the run.
        folder: the run's folder under outputs/.
        told: what is known from elsewhere.

    Raises:
        RefusedError: when its process lives.
        CannotTellError: when this machine cannot know, and `told` names no host.
        UsageError: when `told` names another host than the attempt's, or no reason.
    """
    told = told or Told()
    seen = liveness(run)
    if seen is None:
        return None
    if seen.alive:
        raise RefusedError(
            f"{run.run} is running: {seen.why}", f"`harness stop {run.run}` ends it, `harness wait` waits"
        )
    why = seen.why if seen.alive is False else _believed(run, seen.why, told)
    if told.reason.strip() and seen.alive is False:
        why = f"{why}; {told.reason.strip()}"
    if told.exit_status is not None:
        why = f"{why}; exit status {told.exit_status}"
    failure = failure_of_exit(told.exit_status)
    return crash_data(run, folder, failure and str(failure), why)


def _believed(run: RunState, why: str, told: Told) -> str:
    """Return the reason to close an attempt that this machine cannot see."""
    host = str((open_attempt(run) or {}).get("host"))
    if told.host is None:
        raise _unknown(run, why)
    if told.host != host:
        raise UsageError(f"{run.run} runs on {host}, not on {told.host[:80]}", f"--force-host {host}")
    if not told.reason.strip():
        raise UsageError(
            f"to call a process on {host} dead takes a reason", '--reason "the node was taken out of the cluster"'
        )
    return f"declared dead: {told.reason.strip()}"


def check_known(run: RunState) -> None:
    """Check that this machine can tell whether a run's open attempt lives.

    Raises:
        CannotTellError: when its process belongs to another host or container.
    """
    seen = liveness(run)
    if seen is not None and seen.alive is None:
        raise _unknown(run, seen.why)


def _unknown(run: RunState, why: str) -> CannotTellError:
    host = (open_attempt(run) or {}).get("host")
    return CannotTellError(
        f"whether {run.run} still runs cannot be told from here: {why}",
        f"`harness stop {run.run}` or `harness recover {run.run}` there; if that machine is gone for good: "
        f'`harness recover {run.run} --force-host {host} --reason "…"`',
    )


def close(ledger: Ledger, runs: list[str], folder_of: Callable[[str], Path], told: Told | None = None) -> list[Event]:
    """Close the open attempts of runs under the ledger's lock; runs without one are left as they are.

    Args:
        ledger: the program's.
        runs: run ids; each must exist.
        folder_of: from a run id to its folder under outputs/.
        told: what is known from elsewhere.

    Raises:
        As `closing_data`; the ledger is then untouched.
    """

    def build(state: State) -> list[NewEvent]:
        data = {run: closing_data(state.runs[run], folder_of(run), told) for run in runs}
        return [NewEvent(run, "finished", found) for run, found in data.items() if found is not None]

    return ledger.append_locked(build)


def stale_runs(state: State) -> list[str]:
    """Return the runs whose process is known to be gone and whose attempt has no end."""
    return [run.run for run in state.runs.values() if live_status(run) == "stale"]
