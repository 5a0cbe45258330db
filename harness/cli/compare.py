"""`harness diff`: two runs side by side, change set, held-out results, training and decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.cli.output import Cell, Line, Result, Styled, fields, rows_document, table
from harness.cli.state import find_run, program, read_state
from harness.cli.views import change_lines, live_status, section
from harness.core.errors import HarnessError, MissingExtraError
from harness.core.numbers import number_or_none, spell_interval

if TYPE_CHECKING:
    from harness.ledger import RunState
    from harness.program.model import Program

_TOLD = ("/reward/", "/component/")
"""Parts of the names of training metrics that the text shows; --json has all of them."""


def diff(old: str, new: str) -> Result:
    """Return what differs between two runs, and what became of each.

    Raises:
        NotFoundError: when one of them does not exist.
    """
    here = program()
    state = read_state(here)
    first, second = find_run(state, old), find_run(state, new)
    changes, compared = change_rows(here, first, second)
    counts = {"total": len(changes), "counting": sum(bool(change["counts"]) for change in changes)}
    data = rows_document(changes, counts, False) | {
        "old": old,
        "new": new,
        "compared": compared,
        "evals": _evals(here, first, second),
        "training": _training(here, first, second),
        "decisions": {run.run: _decision(run) for run in (first, second)},
    }
    return Result(data, lambda: _lines(data, counts))


def change_rows(here: Program, old: RunState, new: RunState) -> tuple[list[dict[str, Any]], str | None]:
    """Return the change set and what it compares: `basis` (all a run stands on), `config` alone, or None.

    Imported runs have a config of another tool at most, which is compared key by key.
    """
    from harness.backends.basis import stored_basis
    from harness.config.changes import change_set
    from harness.ledger.select import run_config
    from harness.program.documents import read_plan

    bases = stored_basis(old), stored_basis(new)
    if bases[0] is not None and bases[1] is not None:
        return change_set(bases[0], bases[1], read_plan(here).nuisance).to_json(), "basis"
    configs = [run_config(run) or _imported_config(here, run) for run in (old, new)]
    if not all(configs):
        return [], None
    from harness.imports.settings import changes

    return changes(configs[0], configs[1]), "config"


def _imported_config(here: Program, run: RunState) -> Mapping[str, Any]:
    """Return the committed config of an imported run that was too large for its event."""
    from harness.core.canonical import strict_loads

    try:
        found = strict_loads((here.analysis_dir(run.run) / "import" / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _evals(here: Program, old: RunState, new: RunState) -> list[dict[str, Any]]:
    try:
        from harness.evaluation.compare import compare_runs
    except ModuleNotFoundError as error:
        raise MissingExtraError("analysis", str(error.name)) from error
    return compare_runs(here.root, old, new, _confidence(here))


def _confidence(here: Program) -> float:
    from harness.program.documents import read_context

    try:
        return read_context(here).eval.confidence
    except HarnessError:  # a page that is being edited does not stop a look at two runs
        return 0.95


def _training(here: Program, old: RunState, new: RunState) -> list[dict[str, Any]]:
    """Return the last value of every training metric that either run has."""
    last = [final_values(here, run) for run in (old, new)]
    return [
        {"metric": name, "old": last[0].get(name), "new": last[1].get(name)} for name in sorted({*last[0], *last[1]})
    ]


def final_values(here: Program, run: RunState) -> dict[str, float]:
    """Return the last value of each training metric of a run."""
    from harness.cli.asked import metric_file
    from harness.ledger.tables import metric_rows

    path = metric_file(here, run.run)
    if path is not None:
        return {row["metric"]: row["value"] for row in metric_rows(run.run, path) if not row["superseded"]}
    recorded = run.created.get("final")
    values = {name: number_or_none(value) for name, value in recorded.items()} if isinstance(recorded, dict) else {}
    return {name: value for name, value in values.items() if value is not None}


def _decision(run: RunState) -> dict[str, Any]:
    return {
        "status": live_status(run),
        "decision": run.decision,
        "reason": run.reason,
        "promoted": run.promoted is not None,
    }


def _lines(data: Mapping[str, Any], counts: Mapping[str, int]) -> list[Line]:
    old, new = data["old"], data["new"]
    lines: list[Line] = []
    if data["compared"] is None:
        lines.append("no change set: a run has no config on record")
    elif not data["rows"]:
        lines.append(f"{old} and {new} do not differ")
    else:
        summary = f"{counts['counting']} of {counts['total']} differences count as changes"
        lines += [*change_lines(data["rows"]), Styled(summary, "dim")]
    lines += section("Held-out results", _eval_lines(old, new, data["evals"]))
    told = [row for row in data["training"] if any(part in row["metric"] for part in _TOLD)]
    cells = [(row["metric"], row["old"], row["new"], _minus(row["new"], row["old"])) for row in told]
    lines += section("Training, last value", table(["metric", old, new, "difference"], cells) if cells else [])
    decisions: list[tuple[str, Cell]] = []
    for run, found in data["decisions"].items():
        reason = f": {found['reason']}" if found["reason"] else ""
        decisions.append((run, f"{found['decision'] or found['status'] + ', undecided'}{reason}"))
    return [*lines, *section("Decisions", fields(decisions))]


def _minus(new: float | None, old: float | None) -> Cell:
    return None if new is None or old is None else f"{new - old:+.4g}"


def _eval_lines(old: str, new: str, rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    if not rows:
        return []
    cells = []
    for row in rows:
        difference = row["difference"]
        counts = "-" if difference is None else f"{difference['wins']}/{difference['losses']}/{difference['ties']}"
        cells.append(
            (
                row["env"],
                row["metric"],
                spell_interval(row["old"]),
                spell_interval(row["new"]),
                _spell_difference(difference),
                counts,
            )
        )
    steps = {
        f"{row['env']}: {old} at step {row['old_step']}, {new} at step {row['new_step']}"
        for row in rows
        if row["old"] and row["new"]
    }
    reasons = {f"{row['env']}: no difference, {row['why']}" for row in rows if row["why"] and row["metric"] == "reward"}
    header = ["env", "metric", old, new, f"{new} minus {old}", "wins/losses/ties"]
    return [*table(header, cells), *(Styled(text, "dim") for text in (*sorted(steps), *sorted(reasons)))]


def _spell_difference(difference: Mapping[str, Any] | None) -> Cell:
    if difference is None:
        return None
    text = spell_interval(difference)
    low, high = number_or_none(difference["low"]), number_or_none(difference["high"])
    style = "good" if low is not None and low > 0 else "bad" if high is not None and high < 0 else ""
    return Styled(text if text.startswith("-") else f"+{text}", style)
