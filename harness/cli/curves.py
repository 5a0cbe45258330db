"""`harness curves`: learning curves of several runs, as a table and as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, rows_document, table
from harness.cli.shared import Force, command, complete_runs, new_app
from harness.cli.state import find_run, program, read_state
from harness.core.errors import NotFoundError, UsageError
from harness.core.names import did_you_mean

if TYPE_CHECKING:
    from harness.ledger import RunState, State
    from harness.program.model import Program
    from harness.reports.curves import Point

APPS = {"curves": new_app()}
_REWARD = re.compile(r"train/.+/reward/mean")


@command(
    APPS["curves"],
    "curves",
    "harness curves",
    "harness curves run-003 run-004 --png curves.png",
    'harness curves --metric "train/drugprot/component/accuracy" --window 1',
)
def curves(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run ids; the newest runs when left out.", autocompletion=complete_runs),
    ] = None,
    metric: Annotated[str, typer.Option(help="Training metric; the mean reward of each environment.")] = "",
    window: Annotated[int, typer.Option(min=1, help="Steps of the running mean.")] = 5,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the curves into this PNG file.")] = None,
    force: Force = False,
) -> Result:
    """Compare the learning curves of several runs, imported ones too.

    The table tells where the running mean of each run begins, ends, and is highest and lowest. The picture
    has a panel per training metric and one per environment with the held-out reward by step; of runs that
    were measured under different protocols only the newest one's is drawn there. Training rewards are those
    of the tasks that a run drew: `harness diff` compares results.
    """
    from harness.reports.curves import MOST_RUNS, draw, smoothed, summarise

    here = program()
    state = read_state(here)
    chosen = _chosen(here, state, runs or [], MOST_RUNS)
    points = list(_points(here, chosen, metric))
    if not points:
        raise NotFoundError(
            f"no run here has the training metric {metric!r}" if metric else "no run here has a training reward",
            '`harness curves --metric NAME`; `harness query "SELECT DISTINCT metric FROM metrics"` lists them',
        )
    drawn = [run for run in chosen if any(point.run == run.run for point in points)]
    frame = smoothed(points, window)
    held_out, apart = _held_out(drawn) if not metric else ([], [])
    rows = [{"name": _name(state.runs[row["run"]])} | row for row in summarise(frame)]
    counts = {"total": len(state.runs), "shown": len(drawn)}
    data: dict[str, Any] = rows_document(rows, counts, len(drawn) < len(state.runs) and not runs)
    data |= {"window": window, "not_comparable": apart, "png": None}
    after: list[Line] = []
    if apart:
        told = ", ".join(apart)
        after.append(Styled(f"held-out results under another protocol are not drawn: {told}", "dim"))
    if png is not None:
        from harness.cli.files import write_answer

        labels = {run.run: f"{run.run} {_name(run)}".strip() for run in drawn}
        data["png"] = write_answer(here, png, draw(frame, held_out, labels, window), force=force)
        after.append(f"{len(drawn)} runs drawn into {png}")
    return Result(data, lambda: [*_lines(rows), *after])


def _chosen(here: Program, state: State, names: Sequence[str], most: int) -> list[RunState]:
    """Return the runs named, in that order, or the newest ones that have metrics, oldest first."""
    from harness.cli.asked import metric_file

    if len(set(names)) > most:
        raise UsageError(f"{len(set(names))} runs are too many lines for one picture", f"name at most {most}")
    for name in names:
        find_run(state, name)
    if names:
        return [state.runs[name] for name in dict.fromkeys(names)]
    having = [run for run in state.runs.values() if metric_file(here, run.run) is not None]
    return having[-most:]


def _points(here: Program, runs: Sequence[RunState], metric: str) -> Iterator[Point]:
    """Yield the training values of runs that no later attempt superseded.

    Raises:
        UsageError: when some run has metrics, but none of this name, with the nearest one.
    """
    from harness.cli.asked import metric_file
    from harness.ledger.tables import metric_rows
    from harness.reports.curves import Point

    seen: set[str] = set()
    found = False
    for run in runs:
        path = metric_file(here, run.run)
        for row in metric_rows(run.run, path) if path is not None else ():
            seen.add(row["metric"])
            wanted = row["metric"] == metric if metric else _REWARD.fullmatch(row["metric"])
            if wanted and not row["superseded"]:
                found = True
                yield Point(run.run, row["metric"], row["step"], row["value"])
    if metric and seen and not found:
        raise UsageError(f"no training metric {metric[:80]!r}", did_you_mean(metric, sorted(seen)))


def _held_out(runs: Sequence[RunState]) -> tuple[list[Point], list[str]]:
    """Return the held-out rewards by step, and the runs whose results do not compare with those of the newest one.

    The base model's mean under the run's own prompt is its point at step 0, or the warm start's where a run has one.
    """
    from harness.core.numbers import number_or_none
    from harness.ledger.results import current_evals, last_policy_evals, protocol_of, reference_protocols
    from harness.reports.curves import Point

    reference = reference_protocols(sorted(runs, key=lambda run: (len(run.run), run.run)))
    points, apart = [], []
    for run in runs:
        last = last_policy_evals(run)
        other = {env for env, data in last.items() if protocol_of(run, data) != reference[env]}
        apart += [run.run] if other else []
        for data in current_evals(run):
            mean = number_or_none(((data.get("means") or {}).get("reward") or {}).get("mean"))
            env, step = str(data.get("env")), data.get("step")
            if mean is not None and isinstance(step, int) and data.get("prompt", "run") == "run" and env not in other:
                points.append(Point(run.run, env, step, mean))
    return points, apart


def _name(run: RunState) -> str:
    """Return what its authors call an imported run; empty for a run of this program."""
    return str(run.created.get("name") or "") if run.kind == "import" else ""


def _lines(rows: Sequence[dict[str, Any]]) -> list[Line]:
    named = any(row["name"] for row in rows)
    several = len({row["metric"] for row in rows}) > 1
    head = ["run", *(["name"] if named else []), *(["metric"] if several else [])]
    numbers = ["steps", "first", "last", "highest", "at", "lowest", "at"]
    cells = [
        [
            *(row[title] for title in head),
            f"{row['first_step']}–{row['last_step']}",
            f"{row['first']:.3f}",
            f"{row['last']:.3f}",
            f"{row['highest']:.3f}",
            str(row["highest_step"]),
            f"{row['lowest']:.3f}",
            str(row["lowest_step"]),
        ]
        for row in rows
    ]
    lines = table([*head, *numbers], cells, right="steps first last highest lowest at")
    return lines if several else [Styled(rows[0]["metric"], "dim"), *lines]
