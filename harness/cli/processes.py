"""`harness wait` and `harness stop`: a launch seen from another process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from harness.cli.output import Result, mutation_document, settings
from harness.cli.shared import RunArg, command, new_app
from harness.cli.state import find_run, program, read_state
from harness.cli.views import read_detached, styled
from harness.core.errors import BusyError, CannotTellError, ExitCode, RefusedError
from harness.ledger.process import is_alive, look

APPS = {name: new_app() for name in ("wait", "stop")}
POLL_S = 0.5


def live_process(attempts: list[dict[str, Any]], detached: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool | None]:
    """Return the process that works on a run, and whether it lives (None: this machine cannot know).

    The last attempt of the ledger counts while it is open; before its event is written, the process
    that `launch --detach` recorded.
    """
    if attempts and attempts[-1].get("outcome") is None:
        last = attempts[-1]
        alive = is_alive(last)
        if alive is not False:
            return last, alive
    if detached and is_alive(detached):
        return detached, True
    return (attempts[-1] if attempts else detached), False


@command(APPS["wait"], "wait", "harness wait run-002", "harness wait run-002 --timeout 600 --json")
def wait(
    run: RunArg,
    timeout: Annotated[float, typer.Option(help="Seconds to wait at most; 0 waits without end.", min=0)] = 0.0,
) -> Result:
    """Wait until a run has ended.

    Exit code 0 when its last attempt completed, 4 when a budget or a watchdog stopped it, 71 when the
    machine failed or its process died without a word, 1 when it failed or was interrupted, 3 when nothing
    is running and nothing was, and 75 when it still runs after --timeout.
    """
    here = program()
    deadline = time.monotonic() + timeout if timeout else None
    while True:
        found = find_run(read_state(here), run)
        process, alive = live_process(found.attempts, read_detached(here.run_dir(run)))
        if alive is False:
            # The process may have written its last event between the two looks.
            return _ended(run, find_run(read_state(here), run).attempts, process)
        left = POLL_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            where = f"pid {process.get('pid')} on {process.get('host')}"
            raise BusyError(f"{run} still runs after {timeout:g} s ({where})", f"`harness wait {run}` goes on waiting")
        time.sleep(min(POLL_S, left))


def _ended(run: str, attempts: list[dict[str, Any]], process: Mapping[str, Any]) -> Result:
    if not attempts and process.get("log"):
        raise CannotTellError(f"the background launch of {run} ended before its first event", f"read {process['log']}")
    if not attempts:
        raise CannotTellError(f"{run} was never launched", f"harness launch {run}")
    last = attempts[-1]
    outcome = last.get("outcome") or "stale"
    codes = {"completed": ExitCode.OK, "stopped": ExitCode.STOPPED, "stale": ExitCode.INFRA}
    code = codes.get(outcome, ExitCode.NO)
    if outcome in ("failed", "crashed") and last.get("failure") in ("infra", "tool"):
        code = ExitCode.INFRA
    keys = ("attempt", "step", "reason", "failure", "at", "finished_at")
    data = {"run": run, "ended": True, "outcome": outcome} | {key: last.get(key) for key in keys}
    reason = f": {last['reason']}" if last.get("reason") else ""
    if outcome == "stale":
        data["hint"] = f"`harness recover {run}` closes it, `harness launch {run} --resume` goes on"
        died = f" ({look(last).why}); {data['hint']}"
        return Result(data, [(f"{run} attempt {last['attempt']} ", styled(outcome), died)], code)
    return Result(
        data, [(f"{run} attempt {last['attempt']} ", styled(outcome), f" at step {last.get('step')}{reason}")], code
    )


@command(APPS["stop"], "stop", "harness stop run-002", "harness stop run-002 --timeout 60 --json")
def stop(
    run: RunArg,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end; 0 returns at once.", min=0)] = 60.0,
) -> Result:
    """Ask a running launch to stop; it can be resumed.

    Sends SIGTERM to the process the ledger names, after checking that it is that very process on this
    machine. Stopping a run that does not run changes nothing and succeeds.
    """
    here = program()
    found = find_run(read_state(here), run)
    process, alive = live_process(found.attempts, read_detached(here.run_dir(run)))
    if alive is None:
        raise RefusedError(
            f"{run} runs on {process.get('host')}, or its process cannot be told from others here",
            f"`harness stop {run}` on that machine",
        )
    if alive is False:
        data = mutation_document(run, applied=False, dry_run=False, detail={"running": False})
        return Result(data, [f"{run} does not run; nothing to stop"])
    pid = int(process["pid"])
    with contextlib.suppress(ProcessLookupError):  # it may end between the check and the signal
        os.kill(pid, signal.SIGTERM)
    gone = _poll(lambda: is_alive(process) is not True, timeout)
    detail = {"pid": pid, "signal": "SIGTERM", "running": not gone}
    data = mutation_document(run, applied=True, dry_run=False, detail=detail)
    if timeout and not gone:
        error = BusyError(f"{run} (pid {pid}) has not ended {timeout:g} s after SIGTERM", f"`harness wait {run}`")
        if settings.json:
            return Result(data | {"hint": error.hint}, exit_code=ExitCode.BUSY)
        raise error
    state = "stopped" if gone else "told to stop"
    return Result(data, [f"{run} (pid {pid}) {state}; `harness launch {run} --resume` continues"])


def _poll(done: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
