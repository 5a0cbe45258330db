"""The lineage as SVG: no scripts, no fonts or links from elsewhere, equal bytes for equal runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.cli.views import brief
from harness.core.text import one_line

ROW, LANE, LEFT, TOP, RADIUS = 30, 22, 24, 58, 7
"""Pixels: between rows, between lanes, margins, and the size of a run."""
WIDTH_OF_CHAR = 7.3
"""Pixels of a character of the text font at its size, rounded up: how far a label reaches."""
MAX_TEXT = 90
"""Characters of a hypothesis in its row; the whole one is the row's tooltip."""
COLORS = {
    "keep": "#1a7f37",
    "reject": "#cf222e",
    "retune": "#9a6700",
    "rerun": "#8250df",
    "inconclusive": "#6e7781",
    "undecided": "#ffffff",
}
"""Fill of a run by its decision; dark enough to tell apart without colour by the words beside it."""
_INK, _DIM, _EDGE, _PAPER = "#1f2328", "#59636e", "#afb8c1", "#ffffff"


def lineage_svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw runs that `ledger.lineage.forest` laid out.

    Args:
        rows: as `harness lineage --json` gives them, all of them; a parent before its children.
    """
    place: dict[str, tuple[int, int]] = {}
    bottom = TOP - ROW
    for row in rows:
        bottom += ROW + (ROW // 2 if place and not row["parent"] else 0)  # a new tree begins
        place[row["run"]] = (LEFT + LANE * row["lane"], bottom)
    start = LEFT + LANE * (max((row["lane"] for row in rows), default=0) + 1)
    labels = [_label(row) for row in rows]
    columns = [max((len(label[part]) for label in labels), default=0) * WIDTH_OF_CHAR + 18 for part in range(3)]
    longest = max((len(label[3]) for label in labels), default=20)
    width = round(start + sum(columns) + longest * WIDTH_OF_CHAR + LEFT)
    height = max(bottom, TOP) + ROW
    body = [edge for row in rows if (edge := _edge(row, place))]
    for row, label in zip(rows, labels, strict=True):
        body += _run(row, label, place[row["run"]], start, columns)
    return "\n".join(
        [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="ui-monospace, Menlo, Consolas, monospace" '
            'font-size="12">',
            "<title>Lineage of the runs</title>",
            f'<rect width="{width}" height="{height}" fill="{_PAPER}"/>',
            *_legend(),
            *body,
            "</svg>",
            "",
        ]
    )


def xml_text(text: str) -> str:
    """Return text as XML character data and attribute value: escaped, on one line, without what XML forbids."""
    kept = "".join(
        char for char in one_line(text) if ord(char) & 0xFFFE != 0xFFFE and not 0xFDD0 <= ord(char) <= 0xFDEF
    )
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        kept = kept.replace(char, entity)
    return kept


def _label(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    words = one_line(str(row["hypothesis"] or row["kind"]))
    words = words if len(words) <= MAX_TEXT else words[: MAX_TEXT - 1] + "…"
    missing = f"(from {one_line(str(row['missing_parent']), 40)}) " if row["missing_parent"] else ""
    # The gain is what lines are compared by; an imported run has only its reward.
    shown = next((text for text in (brief(row["gain"], signed=True), brief(row["reward"])) if text != "-"), "")
    return (str(row["run"]), str(row["decision"] or row["status"]), shown, missing + words)


def _edge(row: Mapping[str, Any], place: Mapping[str, tuple[int, int]]) -> str:
    if row["parent"] not in place:
        return ""
    (x, y), (to_x, to_y) = place[row["parent"]], place[row["run"]]
    bend = f"V{to_y - LANE} Q{x} {to_y} {to_x} {to_y}" if to_x != x else f"V{to_y}"
    return f'<path d="M{x} {y}{bend}" fill="none" stroke="{_EDGE}" stroke-width="2"/>'


def _run(
    row: Mapping[str, Any], label: Sequence[str], at: tuple[int, int], start: int, columns: Sequence[float]
) -> list[str]:
    x, y = at
    decision = row["decision"] or "undecided"
    fill = COLORS.get(decision, COLORS["inconclusive"])
    stroke = _DIM if decision == "undecided" else fill
    whole = ": ".join(filter(None, [" ".join(filter(None, label[:3])), row["hypothesis"]]))
    parts = [f"<g><title>{xml_text(whole)}</title>"]
    if row["champion"]:
        parts.append(f'<circle cx="{x}" cy="{y}" r="{RADIUS + 4}" fill="{_PAPER}" stroke="{fill}" stroke-width="2"/>')
    parts.append(f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="{fill}" stroke="{stroke}" stroke-width="2"/>')
    left = float(start)
    weight = ' font-weight="bold"' if row["champion"] else ""
    for index, (text, reach) in enumerate(zip(label, [*columns, 0.0], strict=True)):
        ink = _INK if index in (0, 3) else _DIM if index == 2 or decision == "undecided" else fill
        if text:
            parts.append(
                f'<text x="{left:.1f}" y="{y + 4}" fill="{ink}"{weight if index == 0 else ""}>{xml_text(text)}</text>'
            )
        left += reach
    return [*parts, "</g>"]


def _legend() -> list[str]:
    parts, x = [], float(LEFT)
    for name, fill in COLORS.items():
        stroke = _DIM if name == "undecided" else fill
        parts.append(f'<circle cx="{x:.1f}" cy="20" r="5" fill="{fill}" stroke="{stroke}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 11:.1f}" y="24" fill="{_DIM}">{name}</text>')
        x += 11 + len(name) * WIDTH_OF_CHAR + 16
    parts.append(f'<circle cx="{x:.1f}" cy="20" r="7" fill="none" stroke="{_DIM}" stroke-width="2"/>')
    parts.append(f'<text x="{x + 13:.1f}" y="24" fill="{_DIM}">champion</text>')
    return parts
