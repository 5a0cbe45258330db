"""`harness prune`: delete what decided runs no longer need from outputs/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, mutation_document, narrate, table
from harness.cli.shared import DryRun, command, complete_runs, new_app
from harness.cli.state import find_run, program, read_state

if TYPE_CHECKING:
    from harness.backends.prune import PrunePlan
    from harness.program.model import Program

app = new_app()
APPS = {"prune": app}
MIB = 2**20


@command(
    app,
    "prune",
    "harness prune --dry-run",
    "harness prune --keep-last 5 --older-than 14",
    "harness prune run-002 --keep-last 0 --json",
)
def prune(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run ids; all runs when left out.", autocompletion=complete_runs),
    ] = None,
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=0, help="So many of the youngest decided runs keep everything.")
    ] = 3,
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, help="Days since the decision; younger ones keep everything.")
    ] = 0.0,
    dry_run: DryRun = False,
) -> Result:
    """Delete checkpoints and rollouts of decided runs.

    Of the rollouts the first and the last step stay, with all adapters, evals, metrics and logs, so that reports,
    promotion and `harness eval` work as before. Runs that are open, undecided or to be rerun, and files that git
    tracks, are left alone. A pruned run cannot be resumed.
    """
    from harness.backends.prune import apply_prune, plan_prune

    here = program()
    state = read_state(here)
    for run in runs or ():
        find_run(state, run)
    plan = plan_prune(here, state, runs=tuple(runs or ()), keep_last=keep_last, older_than_days=older_than)
    if not dry_run:
        apply_prune(plan.items, lambda item: narrate(f"deleted {here.relative(item.path)}"))
    detail: dict[str, Any] = {
        "bytes": plan.size,
        "items": [
            {"run": item.run, "what": item.what, "path": here.relative(item.path), "bytes": item.size}
            for item in plan.items
        ],
        "kept": [{"run": kept.run, "reason": kept.reason} for kept in plan.kept],
    }
    applied = bool(plan.items) and not dry_run
    data = mutation_document(",".join(runs or ["outputs"]), applied=applied, dry_run=dry_run, detail=detail)
    return Result(data, lambda: _lines(here, plan, dry_run))


def _lines(here: Program, plan: PrunePlan, dry_run: bool) -> list[Line]:
    by_run: dict[tuple[str, str], list[int]] = {}
    for item in plan.items:
        by_run.setdefault((item.run, item.what), []).append(item.size)
    rows = [(run, what, str(len(sizes)), f"{sum(sizes) / MIB:.1f}") for (run, what), sizes in by_run.items()]
    lines: list[Line] = [*table(["run", "what", "folders", "MiB"], rows, right="folders MiB"), ""] if rows else []
    lines += [(Styled("kept", "dim"), f"  {kept.run}: {kept.reason}") for kept in plan.kept]
    said = "would free" if dry_run else "freed"
    return [*lines, f"{said} {plan.size / MIB:.1f} MiB in {len(plan.items)} folders of outputs/"]
