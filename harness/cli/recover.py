"""`harness recover`: put on record that a launch died without a word."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from harness.cli.output import Line, Result, mutation_document
from harness.cli.shared import DryRun, command, complete_runs, new_app
from harness.cli.state import find_run, program, read_state, refresh_thread
from harness.cli.views import styled
from harness.core.errors import UsageError

APPS = {"recover": new_app()}


@command(
    APPS["recover"],
    "recover",
    "harness recover",
    "harness recover run-002 --exit-status 137",
    'harness recover run-002 --force-host node-7 --reason "the node was taken out of the cluster"',
)
def recover(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run id; every stale run when left out.", autocompletion=complete_runs),
    ] = "",
    force_host: Annotated[
        str | None, typer.Option(metavar="NAME", help="Call the run's process on this other host dead.")
    ] = None,
    reason: Annotated[str, typer.Option(help="How that is known; recorded for good.")] = "",
    exit_status: Annotated[
        int | None, typer.Option(metavar="N", help="Exit status that a scheduler saw; decides the failure class.")
    ] = None,
    dry_run: DryRun = False,
) -> Result:
    """Close a run whose process died without a word.

    A killed process (SIGKILL, power loss, out of memory) leaves its run open: `harness status` shows it as
    stale. This appends `finished` with the outcome `crashed` and how it is known. A process that lives
    is refused, and one on another host is never called dead unless --force-host names that host and
    --reason says why. `harness launch RUN --resume` goes on afterwards.
    """
    from harness.ledger import Ledger
    from harness.ledger.recover import Told, close, closing_data, stale_runs

    here = program()
    state = read_state(here)
    if not run and (force_host is not None or reason or exit_status is not None):
        raise UsageError("what is known of one process closes one run", 'harness recover RUN --reason "…"')
    if run:
        find_run(state, run)
    chosen = [run] if run else stale_runs(state)
    told = Told(force_host, reason, exit_status)
    if dry_run:
        found = [(name, closing_data(state.runs[name], here.run_dir(name), told)) for name in chosen]
        closed: list[dict[str, Any]] = [{"run": name} | data for name, data in found if data is not None]
    else:
        events = close(Ledger(here.ledger), chosen, here.run_dir, told)
        closed = [{"run": event.run, "event": event.id} | event.data for event in events]
        if events:
            refresh_thread(here)
    data = mutation_document(
        run or "stale runs", applied=bool(closed) and not dry_run, dry_run=dry_run, detail={"closed": closed}
    )
    return Result(data, _lines(closed, run, dry_run))


def _lines(closed: list[dict[str, Any]], run: str, dry_run: bool) -> list[Line]:
    if not closed:
        return [f"{run} has no open attempt; nothing to recover" if run else "no run is stale; nothing to recover"]
    would = "would close" if dry_run else "closed"
    lines: list[Line] = []
    for item in closed:
        lines.append((f"{would} {item['run']} attempt {item['attempt']}: ", styled(item["outcome"])))
        lines.append(f"  {item['reason']}; failure class {item['failure'] or 'none'}")
    return lines if dry_run else [*lines, f"next: harness launch {closed[-1]['run']} --resume"]
