"""What attempts of every kind share, trainings and searches: the device they hold, their log, how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError, StoppedError
from harness.core.failures import rule_for
from harness.core.files import file_lock
from harness.core.paths import cache_dir
from harness.core.redact import redact

Report = Callable[[dict[str, Any]], None]
WAIT_FOREVER_S = 10.0**9


@contextmanager
def held_device(kind: str, wait: bool, report: Report) -> Iterator[None]:
    """Hold the devices of one kind of this machine for one run; who waits for them is told so.

    Args:
        kind: `cpu`, `cuda` or `mps`.
        wait: wait for them instead of giving up at once.
        report: called when the wait begins.

    Raises:
        BusyError: another run has them.
    """
    lock = cache_dir() / "locks" / f"{kind}.lock"
    waiting = {"phase": "wait", "message": f"another run has the device {kind}; this one starts after it"}
    patience, what = WAIT_FOREVER_S if wait else 0, f"the device {kind}:"
    with file_lock(lock, wait_s=patience, what=what, on_wait=lambda: report(waiting)):
        yield


def logged(path: Path, report: Report) -> Report:
    """Return a report that also appends a line to the attempt's log; texts in it hold no secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def both(update: dict[str, Any]) -> None:
        update = {key: redact(value) if isinstance(value, str) else value for key, value in update.items()}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pairs = " ".join(f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}" for k, v in update.items())
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{stamp} {pairs}\n")
        report(update)

    return both


def ending(error: BaseException) -> dict[str, Any]:
    """Return what `finished` says of an attempt that this error ended: outcome, failure class and reason."""
    rule = rule_for(error)
    return {"outcome": str(rule.outcome), "failure": rule.failure and str(rule.failure), "reason": describe(error)}


def describe(error: BaseException) -> str:
    """Return one line about an exception, without secrets."""
    if isinstance(error, StoppedError):
        return redact(f"{error.message}. {error.hint}")
    if isinstance(error, HarnessError):
        return redact(error.message)[:500]
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped by a signal"
    return f"{type(error).__name__}: {redact(str(error))[:300]}"
