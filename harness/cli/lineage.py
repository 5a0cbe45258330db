"""`harness lineage`: the parent tree of the runs, as text and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import views
from harness.cli.output import Line, Result, Styled, page, rows_document, table
from harness.cli.shared import All, Force, Limit, RunChoice, command, new_app
from harness.cli.state import find_run, program, read_state

if TYPE_CHECKING:
    from harness.ledger import State
    from harness.ledger.lineage import Node
    from harness.program.model import Program

APPS = {"lineage": new_app()}


@command(
    APPS["lineage"],
    "lineage",
    "harness lineage",
    "harness lineage run-007",
    "harness lineage --svg lineage.svg",
    "harness lineage --json",
)
def lineage(
    run: RunChoice = "",
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the tree into this SVG file.")] = None,
    limit: Limit = 100,
    everything: All = False,
    force: Force = False,
) -> Result:
    """Show the parent tree of the runs, with decisions and gains.

    A run stands below its parent; where a parent has several children, all but one branch off. `*` marks
    the champion. With a run only its ancestors and descendants are shown. The drawing holds all of them.
    """
    from harness.ledger.lineage import family, forest

    here = program()
    state = read_state(here)
    parents = {name: found.parent for name, found in state.runs.items()}
    if run:
        find_run(state, run)
        parents = family(parents, run)
    nodes = forest(parents)
    shown, truncated = page(nodes, limit, everything)
    rows = _rows(here, state, shown)
    counts = {"total": len(state.runs), "matching": len(nodes), "shown": len(rows)}
    data: dict[str, Any] = rows_document(rows, counts, truncated) | {"svg": None}
    after: list[Line] = []
    if svg is not None:
        from harness.cli.drawing import lineage_svg
        from harness.cli.files import write_answer

        drawn = rows if len(rows) == len(nodes) else _rows(here, state, nodes)
        data["svg"] = write_answer(here, svg, lineage_svg(drawn).encode(), force=force)
        after = [f"{len(drawn)} runs drawn into {svg}"]
    return Result(data, lambda: [*_lines(shown, rows, counts), *after])


def _rows(here: Program, state: State, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    kept = ("run", "status", "decision", "promoted", "kind", "reward", "gain", "hypothesis")
    rows = []
    for node in nodes:
        row = views.run_row(state.runs[node.run], here)
        place = {"parent": node.parent, "missing_parent": node.missing, "depth": node.depth}
        place |= {"lane": node.lane, "branch": node.branch, "champion": node.run == state.champion}
        rows.append({key: row[key] for key in kept} | place)
    return rows


def _lines(nodes: Sequence[Node], rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> list[Line]:
    if not rows:
        return views.list_lines([], counts)
    cells = []
    for node, row in zip(nodes, rows, strict=True):
        mark = "*" if row["champion"] else "o"
        name = f"{node.prefix}{mark} {node.run}"
        orphan = f"(from {node.missing}, which is not above it here) " if node.missing else ""
        cells.append(
            (
                Styled(name, "strong") if row["champion"] else name,
                views.styled(row["decision"] or row["status"]),
                views.brief(row["reward"]),
                views.brief(row["gain"], signed=True),
                orphan + (row["hypothesis"] or row["kind"]),
            )
        )
    laid = table(["run", "decision", "reward", "gain", "hypothesis"], cells, right="reward gain")
    lines: list[Line] = [laid[0]]
    for index, (node, line) in enumerate(zip(nodes, laid[1:], strict=True)):
        lines += [""] * (node.parent is None and index > 0) + [line]  # a new tree begins
    return [*lines, *views.more_lines(counts)]
