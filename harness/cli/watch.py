"""`harness watch`: what the watchdogs say of a run that was trained here or imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.cli.output import Line, Result, Styled, table
from harness.cli.shared import RunArg, command, new_app
from harness.cli.state import find_run, program, read_state
from harness.core.errors import ExitCode

if TYPE_CHECKING:
    from harness.reports.watch import Watched

app = new_app()
APPS = {"watch": app}


@command(app, "watch", "harness watch run-002", "harness watch run-002 --json")
def watch(run: RunArg) -> Result:
    """Show a run's record to the watchdogs, as they would have seen it.

    Exit code 0 when they leave it alone or only mark it, 1 when they would stop it. Limits are those of
    `[watchdog]` in the run's file, for an imported run the defaults; docs/watchdogs.md explains each rule.
    """
    from harness.reports.watch import watch_run

    here = program()
    state = read_state(here)
    find_run(state, run)
    seen = watch_run(here, state, run)
    stops = [finding for finding in seen.findings if finding.action == "stop"]
    data: dict[str, Any] = {
        "run": run,
        "verdict": "stop" if stops else "mark" if seen.findings else "clear",
        "findings": [finding.to_json() for finding in seen.findings],
        "steps": seen.rows,
        "heldout": [
            {"step": p.step, "env": p.env, "difference": p.difference, "error": p.error, "degrees": p.degrees}
            for p in seen.heldout
        ],
        "noise": seen.noise,
    }
    return Result(data, lambda: _lines(run, seen), ExitCode.NO if stops else ExitCode.OK)


def _lines(run: str, seen: Watched) -> list[Line]:
    noise = seen.noise or "nothing: no items and no repeated evaluations of the base model"
    lines: list[Line] = [f"{run}: {seen.rows} steps; held-out noise from {noise}"]
    if seen.heldout:
        rows = [
            (p.env, str(p.step), f"{p.difference:+.4f}", f"{p.error:.4f}", f"{p.difference / p.error:+.1f}")
            for p in seen.heldout
        ]
        header = ["env", "step", "difference", "error", "errors"]
        lines += ["", *table(header, rows, right="step difference error errors"), ""]
    for finding in seen.findings:
        style = "bad" if finding.action == "stop" else "warn"
        lines.append((Styled(finding.action, style), f"  step {finding.step}  {finding.rule}: {finding.reason}"))
    return lines if seen.findings else [*lines, (Styled("clear", "good"), ": no watchdog says anything")]
