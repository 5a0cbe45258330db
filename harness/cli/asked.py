"""The tables of the program at hand, filled from its ledger and its metric files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.views import live_status

if TYPE_CHECKING:
    from harness.ledger import State
    from harness.ledger.tables import Table
    from harness.program.model import Program


def gather(here: Program, state: State, names: Iterable[str]) -> list[Table]:
    """Return tables by name.

    Args:
        here: where the metric files are.
        state: of the ledger.
        names: of `ledger.tables.TABLES`.
    """
    from harness.ledger import tables

    makers = {
        "runs": lambda: tables.runs_table(state, live_status),
        "events": lambda: tables.events_table(state),
        "evals": lambda: tables.evals_table(state),
        "metrics": lambda: tables.metrics_table(metric_files(here, state)),
    }
    return [makers[name]() for name in names]


def metric_files(here: Program, state: State) -> Iterator[tuple[str, Path]]:
    """Yield each run that has training metrics with their file."""
    for run in state.runs:
        path = metric_file(here, run)
        if path is not None:
            yield run, path


def metric_file(here: Program, run: str) -> Path | None:
    """Return the file of a run's training metrics: in its run folder, else the committed one; None without any."""
    places = (here.run_dir(run) / "metrics.jsonl", here.analysis_dir(run) / "data" / "metrics.csv")
    return next((path for path in places if path.is_file()), None)
