"""Commands that only look: status, list, show and diff."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import views
from harness.cli.output import Line, Result, fields, table
from harness.cli.shared import All, Limit, RunArg, command, new_app
from harness.cli.state import find_run, program, read_state
from harness.cli.views import change_lines, section, styled
from harness.core.numbers import number_or_none, spell_interval
from harness.ledger.superseded import is_superseded

if TYPE_CHECKING:
    from harness.ledger import RunState

_SHOWN = 40
"""Settings and metrics of an imported run that `show` lists."""
APPS = {name: new_app() for name in ("status", "list", "show", "diff")}


@command(
    APPS["list"],
    "list",
    "harness list",
    'harness list --where "status=completed" --where "gain.low>0" --sort -gain',
    "harness list --columns run,decision,reward,accuracy_gain,lora.alpha",
    "harness list --status completed --all --json",
)
def list_runs(
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="COLUMN OP VALUE, with = != > >= < <= or ~ (contains); all must hold."),
    ] = None,
    status: Annotated[str, typer.Option(help=f"Only runs with this status: {', '.join(views.STATUSES)}.")] = "",
    decision: Annotated[str, typer.Option(help="Only runs with this decision; `none` for undecided ones.")] = "",
    kind: Annotated[str, typer.Option(help="Only runs of this kind: training, prompt_search or import.")] = "",
    tag: Annotated[str, typer.Option(help="Only runs with this tag.")] = "",
    sort: Annotated[str, typer.Option(metavar="COLUMN", help="Order by a column; `-COLUMN` for descending.")] = "",
    columns: Annotated[str, typer.Option(metavar="A,B,C", help="Columns to show, separated by commas.")] = "",
    limit: Limit = 100,
    everything: All = False,
) -> Result:
    """List the runs of the program, newest first.

    A column is a fact of a run (status, decision, parent, step, …), a metric of its last held-out evals
    (reward, gain, accuracy, accuracy_gain; with .low and .high, and with .ENV where there are several
    environments), or a key of its config (lora.alpha). An unknown column is answered with the nearest one.
    """
    asked = [f"{name}={value}" for name, value in (("kind", kind), ("tags", tag)) if value]
    if not (where or asked or sort or columns):
        return views.list_runs(status, decision, limit, everything)
    from harness.cli import listing

    asked += [f"{name}={value}" for name, value in (("status", status), ("decision", decision)) if value]
    return listing.list_runs([*asked, *(where or [])], sort, columns, limit, everything)


@command(APPS["status"], "status", "harness status", "harness status --json")
def status() -> Result:
    """Show where the program stands and what is running."""
    return views.status()


@command(APPS["show"], "show", "harness show run-002", "harness show run-002 --config", "harness show run-002 --json")
def show(
    run: RunArg,
    config: Annotated[
        bool, typer.Option("--config", help="Every key of the config instead, with the run that set it.")
    ] = False,
) -> Result:
    """Show everything the ledger knows about a run.

    With --config: each key, its value and where that comes from, this run, an ancestor or the default. `--set` of
    `new-run` goes over the parent's config and that over the defaults; a key that CONTEXT.md freezes is marked.
    """
    here = program()
    state = read_state(here)
    found = find_run(state, run)
    if config:
        from harness.cli.configs import config_origins

        return config_origins(here, state, run)
    data = views.run_row(found, here) | {
        "champion": state.champion == run,
        "config": found.created.get("config"),
        "config_sha": found.config_sha,
        "lever": found.created.get("lever"),
        "replicate_of": found.created.get("replicate_of"),
        "changes": found.created.get("changes", []),
        "attempts": found.attempts,
        "evals": [data | {"superseded": is_superseded(data, found.attempts)} for data in found.evals],
        "decisions": found.decisions,
        "gated": found.gated,
        "promoted": found.promoted,
        "notes": found.notes,
        "protocol": found.created.get("protocol"),
        "imported": _imported(found),
        "report": _existing(here.analysis_dir(run) / "report.md", here.root),
        "outputs": _existing(here.run_dir(run), here.root),
    }
    return Result(data, lambda: _show_lines(found, data))


def _imported(run: RunState) -> dict[str, Any] | None:
    """Return where an imported run comes from and what it had; None for a run of this program."""
    keys = ("format", "name", "source", "settings", "final", "metrics", "reason", "parent_by", "not_read", "files")
    return {key: run.created.get(key) for key in keys} if run.created.get("provenance") == "imported" else None


def _provenance(imported: Mapping[str, Any] | None) -> str | None:
    if imported is None:
        return None
    told = f"as {imported['format']} from {(imported['source'] or {}).get('name')}"
    told += f"; {imported['reason']}" if imported["reason"] else ""
    return told + ("; the parent is a guess from the configs" if imported["parent_by"] == "inferred" else "")


def _imported_lines(imported: Mapping[str, Any] | None) -> list[Line]:
    """Lay out the settings and the last values of an imported run."""
    if imported is None:
        return []
    from harness.imports.settings import flatten

    settings = [(key, str(value)) for key, value in flatten(imported["settings"] or {}).items()]
    final = [(key, number_or_none(value)) for key, value in (imported["final"] or {}).items()]
    lines = section("Settings, as its tool names them", fields(settings[:_SHOWN]))
    lines += [f"{len(settings) - _SHOWN} more in --json"] if len(settings) > _SHOWN else []
    lines += section("Last value of each metric", fields(final[:_SHOWN]))
    return lines + ([f"{len(final) - _SHOWN} more in --json"] if len(final) > _SHOWN else [])


def _existing(path: Any, root: Any) -> str | None:
    return path.relative_to(root).as_posix() if path.exists() else None


def _show_lines(run: RunState, data: Mapping[str, Any]) -> list[Line]:
    lines = fields(
        [
            ("run", f"{run.run}{' (champion)' if data['champion'] else ''}"),
            ("hypothesis", run.hypothesis),
            ("status", views.status_cell(data)),
            ("because", data["stale_reason"]),
            ("tags", ", ".join(data["tags"]) or None),
            ("decision", styled(run.decision)),
            ("reason", run.reason),
            ("parent", run.parent or "none (first run)"),
            ("lever", data["lever"]),
            ("replicates", data["replicate_of"]),
            ("config", data["config"]),
            ("imported", _provenance(data["imported"])),
            ("report", data["report"]),
            ("outputs", data["outputs"]),
        ]
    )
    lines += section("Changes to the parent", change_lines(data["changes"]))
    attempts = [
        (str(a["attempt"]), styled(a["outcome"] or data["status"]), a["at"], a.get("step"), a.get("reason") or "")
        for a in run.attempts
    ]
    lines += section(
        "Attempts", table(["attempt", "outcome", "started", "step", "reason"], attempts) if attempts else []
    )
    lines += section("Held-out evals", _eval_lines(data["evals"]))
    lines += _imported_lines(data["imported"])
    gates = [
        (gate.get("at"), styled(gate.get("verdict")), ", ".join(f"{g['name']} {g['verdict']}" for g in gate["gates"]))
        for gate in run.gated
    ]
    lines += section("Gates", table(["at", "verdict", "gates"], gates) if gates else [])
    lines += section("Notes", [note.get("text", "") for note in run.notes])
    return lines


def _eval_lines(evals: list[dict[str, Any]]) -> list[Line]:
    if not evals:
        return []
    rows = []
    for data in evals:
        requested, counted = data.get("requested"), data.get("n")
        items = str(counted) if requested == counted else f"{counted} of {requested}"
        if counted is None:  # an imported result: what was asked for, as far as its config tells
            items = "-" if requested is None else f"? of {requested}"
        rows.append(
            (
                str(data.get("step")),
                data.get("subject"),
                data.get("env"),
                data.get("prompt"),
                items,
                spell_interval(data.get("means", {}).get("reward")),
                spell_interval((data.get("gain") or {}).get("reward")),
                "superseded" if data["superseded"] else "",
            )
        )
    header = ["step", "subject", "env", "prompt", "items", "reward", "gain", "note"]
    return table(header, rows, right="step items")


@command(APPS["diff"], "diff", "harness diff run-001 run-002", "harness diff run-001 run-002 --json")
def diff(old: RunArg, new: RunArg) -> Result:
    """Compare two runs: their change set, held-out results and decisions.

    The change set compares what they stood on: config, environments, task sets, verifiers, prompts and code.
    Only what counts could be a hypothesis. Held-out results are the means of each run and, where both were
    evaluated on the same items and these are committed, the difference paired item by item.
    """
    from harness.cli.compare import diff as compare

    return compare(old, new)
