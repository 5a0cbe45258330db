"""`harness list` with conditions, an order and columns of one's own choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.cli import views
from harness.cli.output import Cell, Line, Result, Styled, page, rows_document, table
from harness.cli.state import program, read_state
from harness.core.numbers import number_or_none
from harness.ledger.results import last_policy_evals
from harness.ledger.select import Column, Columns, Getter

if TYPE_CHECKING:
    from harness.ledger import RunState, State

DECISIONS = ("keep", "reject", "rerun", "retune", "inconclusive", "none")
KINDS = ("training", "prompt_search", "import")
_LABELS = {"status", "decision"}


def columns_of(state: State) -> Columns:
    """Return every column that the runs of a program have."""
    kinds = tuple(dict.fromkeys([*KINDS, *(run.kind for run in state.runs.values())]))
    words = {"status": views.STATUSES, "decision": DECISIONS, "kind": kinds}
    return Columns(state.runs.values(), fixed_columns(state), words)


def fixed_columns(state: State) -> dict[str, Getter]:
    """Return the facts that every run has, by their column name."""
    return {
        "run": lambda run: run.run,
        "status": views.live_status,
        "decision": lambda run: run.decision,
        "reason": lambda run: run.reason,
        "hypothesis": lambda run: run.hypothesis,
        "parent": lambda run: run.parent,
        "kind": lambda run: run.kind,
        "champion": lambda run: run.run == state.champion,
        "promoted": lambda run: run.promoted is not None,
        "attempts": lambda run: len(run.attempts),
        "created_at": lambda run: run.created_at,
        "finished_at": lambda run: _last_attempt(run).get("finished_at"),
        "failure": lambda run: _last_attempt(run).get("failure"),
        "step": lambda run: _last_attempt(run).get("step"),
        "wall_s": lambda run: _last_attempt(run).get("wall_s"),
        "tokens": lambda run: _last_attempt(run).get("tokens"),
        "items": lambda run: _items(run),
        "lever": lambda run: run.created.get("lever"),
        "replicate_of": lambda run: run.created.get("replicate_of"),
        "config_sha": lambda run: run.config_sha,
        "tags": lambda run: list(run.tags),
    }


def _last_attempt(run: RunState) -> Mapping[str, Any]:
    return run.attempts[-1] if run.attempts else {}


def _items(run: RunState) -> int | None:
    counted = [data.get("n") for data in last_policy_evals(run).values()]
    return sum(n for n in counted if isinstance(n, int)) if counted else None


def select(state: State, columns: Columns, where: Sequence[str], sort: str) -> list[RunState]:
    """Return the runs that fulfil every condition, newest first unless sorted.

    Args:
        state: of the ledger.
        columns: those of its runs.
        where: conditions such as `reward>0.2`; all must hold.
        sort: columns separated by commas, `-` before one for descending.

    Raises:
        UsageError: for an unknown column, value or condition.
    """
    conditions = [columns.condition(text) for text in where]
    wanted = [run for run in reversed(state.runs.values()) if all(c.matches(run) for c in conditions)]
    return columns.ordered(wanted, sort) if sort else wanted


def list_runs(where: Sequence[str], sort: str, columns: str, limit: int, everything: bool) -> Result:
    """Return the runs that fulfil every condition, in the order and with the columns asked for.

    Args:
        where: conditions such as `reward>0.2`; all must hold.
        sort: columns separated by commas, `-` before one for descending.
        columns: names separated by commas; the usual ones when empty.
        limit: runs shown at most.
        everything: show all of them.
    """
    here = program()
    state = read_state(here)
    known = columns_of(state)
    chosen = [known.find(name.strip()) for name in columns.split(",") if name.strip()]
    wanted = select(state, known, where, sort)
    shown, truncated = page(wanted, limit, everything)
    counts = {"total": len(state.runs), "matching": len(wanted), "shown": len(shown)}
    apart = known.incomparable(shown, sort)
    more = {"not_comparable": apart} if sort else {}
    if not chosen:
        rows = [views.run_row(run, here) | {"champion": run.run == state.champion} for run in shown]
        data = rows_document(rows, counts, truncated) | more
        return Result(data, lambda: [*views.list_lines(rows, counts), *_apart_lines(state, apart)])
    # Every row carries its run, so that it can be handed to the next command.
    rows = [{"run": run.run} | {column.name: column.show(run) for column in chosen} for run in shown]
    data = rows_document(rows, counts, truncated) | {"columns": [column.name for column in chosen]} | more
    return Result(data, lambda: [*_lines(chosen, rows, counts), *_apart_lines(state, apart)])


def _apart_lines(state: State, runs: Sequence[str]) -> list[Line]:
    """Return the lines that say which numbers do not compare with those above them."""
    imported = [run for run in runs if state.runs[run].kind == "import"]
    own = [run for run in runs if run not in imported]
    told = [(own, "measured under another protocol"), (imported, "imported")]
    return [
        Styled(f"{_several(names)} {why}: not comparable with the runs above", "dim") for names, why in told if names
    ]


def _several(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more:" if len(names) > 5 else f"{shown}:"


def _lines(chosen: Sequence[Column], rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> list[Line]:
    if not rows:
        return views.list_lines([], counts)
    cells = [[_cell(column, row[column.name]) for column in chosen] for row in rows]
    numeric = [
        column.name
        for index, column in enumerate(chosen)
        if all(row[index] in (None, "-") or _is_number(row[index]) for row in cells)
    ]
    lines = table([column.name for column in chosen], cells, right=" ".join(numeric))
    return [*lines, *views.more_lines(counts)]


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _cell(column: Column, value: Any) -> Cell:
    if column.name in _LABELS:
        return views.styled(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        if "mean" not in value:
            return views.brief(value, signed=column.is_gain)
        mean = number_or_none(value["mean"])
        return None if mean is None else f"{mean:+.3f}" if column.is_gain else f"{mean:.3f}"
    if isinstance(value, float):
        return f"{value:+.3f}" if column.is_gain else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    return None if value is None or value == "" else str(value)
