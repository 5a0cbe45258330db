"""The program around the current folder and the state of its ledger, as the commands see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.output import Styled, narrate
from harness.core.errors import NotFoundError
from harness.core.ids import run_number
from harness.core.names import did_you_mean

if TYPE_CHECKING:
    from harness.ledger import RunState, State
    from harness.program.model import Program


def program() -> Program:
    """Return the program around the current folder, or the one HARNESS_PROGRAM names."""
    from harness.program.model import Program

    return Program.find()


def read_state(here: Program) -> State:
    """Return the state of a program's ledger; warnings about its file go to standard error."""
    from harness.core.memory import exempt_from_collection, no_collection
    from harness.ledger import index

    with no_collection():
        state, warnings = index.read_state(here.ledger)
        exempt_from_collection(len(state.runs))
    for warning in warnings:
        narrate((Styled("warning:", "warn"), " ", warning))
    for number in state.collisions:
        text = (
            f" two branches created {number}; the older run is shown, and `harness ledger renumber {number}` solves it"
        )
        narrate((Styled("warning:", "warn"), text))
    return state


def refresh_thread(here: Program) -> None:
    """Rewrite the generated block of THREAD.md; what was recorded stands even when that fails."""
    from harness.core.errors import HarnessError
    from harness.program.thread import render_thread

    try:
        render_thread(here, read_state(here))
    except HarnessError as error:
        narrate((Styled("warning:", "warn"), f" THREAD.md was not refreshed: {error.message}"))


def find_run(state: State, run: str) -> RunState:
    """Return the state of a run.

    Raises:
        UsageError: when `run` is not spelt as a run id.
        NotFoundError: when the ledger has no such run, with the nearest one.
    """
    if run in state.runs:
        return state.runs[run]
    run_number(run)
    if not state.runs:
        raise NotFoundError(f"{run} does not exist; the ledger has no runs", "`harness new-run` plans the first one")
    raise NotFoundError(f"{run} does not exist", did_you_mean(run, state.runs, "`harness list` shows the runs"))
