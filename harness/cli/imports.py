"""`harness import`: runs of other tools, read into the ledger with provenance `imported`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, mutation_document, narrate, table
from harness.cli.shared import DryRun, command, new_app
from harness.cli.state import program, refresh_thread
from harness.cli.views import styled

if TYPE_CHECKING:
    from harness.imports.plan import ImportPlan, Row

app = new_app()
APPS = {"import": app}


@command(
    app,
    "import",
    "harness import wandb-exports/ --infer-parents",
    "harness import mlruns/ --dry-run",
    "harness import logs/ --format tensorboard --reward eval/score",
    "harness import outputs/ --only second-try --parent second-try=run-001",
)
def import_runs(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file or folder that another tool wrote.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="wandb-csv, wandb-offline, tensorboard, mlflow, trl or verifiers; found when left out.",
        ),
    ] = "",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Take only this run; repeatable.")] = None,
    reward: Annotated[
        str, typer.Option(metavar="METRIC", help="The metric that is the training reward; known names are found.")
    ] = "",
    parents: Annotated[
        list[str] | None,
        typer.Option("--parent", metavar="CHILD=PARENT", help="A run's parent, by name or run id; repeatable."),
    ] = None,
    infer_parents: Annotated[
        bool, typer.Option("--infer-parents", help="Take the nearest earlier config as parent, recorded as a guess.")
    ] = False,
    dry_run: DryRun = False,
) -> Result:
    """Read runs of W&B, TensorBoard, MLflow, TRL or verifiers into the ledger.

    Every run gets a number and provenance `imported`, which no gate promotes. What was imported before, from
    the same bytes, is recognised and left alone. Pickles are never opened, links never followed.
    """
    from harness.imports.plan import Request, apply_import, plan_import

    here = program()
    request = Request(Path(source), format, tuple(only or ()), reward, tuple(parents or ()), infer_parents)
    plan = plan_import(here, request)
    for note in plan.not_read:
        narrate((Styled("not read:", "warn"), f" {note}"))
    added = len(plan.new)
    if not dry_run and added:
        apply_import(here, plan)
        added = len(plan.new)
        refresh_thread(here)
    detail = {
        "format": plan.format,
        "new": added,
        "known": len(plan.rows) - added,
        "runs": [_row(row) for row in plan.rows],
        "not_read": list(plan.not_read),
    }
    data = mutation_document(source, applied=bool(added) and not dry_run, dry_run=dry_run, detail=detail)
    return Result(data, lambda: _lines(plan, detail, dry_run))


def _row(row: Row) -> dict[str, Any]:
    data = row.prepared.data
    last = [result for result in row.prepared.evals if result["subject"] == "policy"][-1:]
    return {
        "run": row.run,
        "known": row.known,
        "name": data["name"],
        "status": data["outcome"],
        "reason": data["reason"],
        "parent": row.parent,
        "parent_by": row.parent_by,
        "earlier": row.earlier,
        "metrics": data["metrics"]["keys"],
        "steps": data["metrics"]["steps"],
        "last_step": data["metrics"]["last_step"],
        "curve": next((name for name in data["final"] if name.endswith("/reward/mean")), None),
        "evals": len(row.prepared.evals),
        "reward": last[0]["means"].get("reward", {}).get("mean") if last else None,
        "source_sha": data["source"]["sha"],
        "not_read": data["not_read"],
    }


def _lines(plan: ImportPlan, detail: dict[str, Any], dry_run: bool) -> list[Line]:
    rows = [
        (
            row["run"],
            "known" if row["known"] else "new",
            styled(row["status"]),
            row["last_step"],
            row["metrics"],
            row["reward"],
            row["parent"],
            row["name"],
        )
        for row in detail["runs"]
    ]
    header = ["run", "import", "status", "last-step", "metrics", "reward", "parent", "name"]
    lines = table(header, rows, right="last-step metrics reward")
    verb = "would be imported" if dry_run else "imported"
    lines.append("")
    lines.append(f"{detail['new']} run(s) {verb} as {plan.format}, {detail['known']} known from before")
    guessed = sum(row["parent_by"] == "inferred" for row in detail["runs"] if not row["known"])
    if guessed:
        lines.append(
            Styled(f"{guessed} parent(s) were guessed from the configs; --parent CHILD=PARENT says them", "dim")
        )
    for row in detail["runs"]:
        if row["earlier"]:
            lines.append(f"{row['run']} is a later state of {row['earlier']}; both stay")
        if row["not_read"] and not row["known"]:
            lines.append(Styled(f"{row['run']}: not read: {'; '.join(row['not_read'])}", "dim"))
    blind = [row["run"] for row in detail["runs"] if not row["known"] and row["metrics"] and not row["curve"]]
    if blind:
        text = f"no metric of {', '.join(blind[:5])}{' …' if len(blind) > 5 else ''} is known to be the training reward"
        lines.append(Styled(f"{text}; `--reward METRIC` names it", "dim"))
    if detail["new"] and not dry_run:
        first = next(row["run"] for row in detail["runs"] if not row["known"])
        lines += ["", ("next: ", Styled(f"harness report {first}", "strong"))]
    return lines
