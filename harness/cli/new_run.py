"""`harness new-run`: from a hypothesis to a numbered config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, fields, mutation_document, narrate
from harness.cli.shared import DryRun, command, complete_runs, new_app
from harness.cli.state import find_run, program, read_state, refresh_thread
from harness.cli.views import change_lines, section

if TYPE_CHECKING:
    from harness.backends.planning import RunPlan
    from harness.program.model import Program

app = new_app()
APPS = {"new-run": app}


@command(
    app,
    "new-run",
    'harness new-run --hypothesis "The defaults train at all"',
    'harness new-run --from run-001 --set lora.alpha=64 --hypothesis "Alpha 64 learns faster than 32"',
    'harness new-run --from run-002 --replicate --hypothesis "The gain of run-002 is not its seed"',
    "harness new-run --next --from run-001 --set lora.alpha=64",
)
def new_run(
    hypothesis: Annotated[str, typer.Option(help="One sentence that a result can refute.")] = "",
    take_next: Annotated[bool, typer.Option("--next", help="Take up the idea that `harness next` left last.")] = False,
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="RUN", help="Parent; the champion, else the last kept run.", autocompletion=complete_runs
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A change, as lora.alpha=64; repeatable.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Name that declares several changes one lever.")] = None,
    replicate: Annotated[bool, typer.Option("--replicate", help="Repeat the parent with another seed.")] = False,
    outside_plan: Annotated[str | None, typer.Option(help="Why the run leaves the search space of PLAN.md.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key; the same key gives the same run again.")] = None,
    dry_run: DryRun = False,
) -> Result:
    """Plan a run: one hypothesis, one change to its parent.

    Writes rl/run-NNN.toml and the `created` event. Refuses a run without a hypothesis, with more than one
    change that counts (unless --group declares them one lever), with a frozen key, outside the search space,
    or a duplicate of an earlier run.
    """
    from harness.backends.planning import create_run, plan_run

    here = program()
    if from_run is not None:
        find_run(read_state(here), from_run)
    if take_next:
        hypothesis = _next_hypothesis(here, hypothesis)
    plan = plan_run(
        here,
        hypothesis=hypothesis,
        from_run=from_run,
        sets=tuple(sets or ()),
        group=group,
        replicate=replicate,
        outside_plan=outside_plan,
        key=key,
    )
    for warning in plan.warnings:
        narrate((Styled("warning:", "warn"), " ", warning))
    run = plan.run if dry_run else create_run(here, plan)
    if not dry_run and not plan.existing:
        refresh_thread(here)
    detail = plan_detail(here, plan, run)
    data = mutation_document(run, applied=not dry_run and not plan.existing, dry_run=dry_run, detail=detail)
    return Result(data, lambda: _lines(plan, detail, run, dry_run), multiline=True)


def _next_hypothesis(here: Program, hypothesis: str) -> str:
    from harness.core.errors import UsageError
    from harness.ledger.ideas import next_idea

    if hypothesis:
        raise UsageError("--next takes the hypothesis from the idea that was left", "leave out --hypothesis or --next")
    return str(next_idea(read_state(here))["hypothesis"])


def plan_detail(here: Program, plan: RunPlan, run: str) -> dict[str, Any]:
    """Return the plan as JSON: the same object for a dry run and for the real one."""
    config = plan.config
    return {
        "run": run,
        "existing": plan.existing,
        "config": here.relative(here.config_path(run)),
        "toml": plan.text,
        "hypothesis": config.hypothesis,
        "parent": config.parent,
        "lever": config.lever,
        "replicate_of": config.replicate_of,
        "idea": plan.idea,
        "changes": plan.changes.to_json(),
        "protocol": plan.protocol,
        "warnings": list(plan.warnings),
    }


def _lines(plan: RunPlan, detail: dict[str, Any], run: str, dry_run: bool) -> list[Line]:
    head = "would create" if dry_run else "exists already" if plan.existing else "created"
    lines = fields(
        [
            (head, f"{run}  {detail['config']}"),
            ("hypothesis", detail["hypothesis"]),
            ("parent", detail["parent"] or "none (first run)"),
            ("lever", detail["lever"]),
            ("replicates", detail["replicate_of"]),
        ]
    )
    lines += section("Changes to the parent", change_lines(detail["changes"]))
    if dry_run:
        return [*lines, *section(detail["config"], plan.text.rstrip().split("\n"))]
    return [*lines, "", ("next: ", Styled(f"harness launch {run}", "strong"))]
