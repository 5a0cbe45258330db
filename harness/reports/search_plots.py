"""The plots of a prompt search: score by candidate, score by budget, and which tasks each candidate wins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from harness.reports.model import Estimate
from harness.reports.plots import Plot
from harness.reports.search_model import Candidate, Search
from harness.reports.style import (
    BLUE,
    GRID,
    INK,
    ORANGE,
    SOFT,
    VERMILION,
    label_room,
    least_span,
    new_figure,
    plot_style,
    plot_text,
    png,
)

MOST_CANDIDATES = 24
"""Candidates in a plot: the seed, the chosen one and the best of the others; the table has all."""
_SHADES = LinearSegmentedColormap.from_list("reward", ["#f4f6f8", "#9cc7e4", BLUE, "#003a5c"])


def search_plots(search: Search, confidence: float) -> dict[str, Plot]:
    """Return the plots by name, in the order of the report."""
    makers: dict[str, Callable[[], Plot]] = {
        "candidates": lambda: _candidates(search, confidence),
        "budget": lambda: _budget(search),
        "wins": lambda: _wins(search),
    }
    with plot_style():
        return {name: make() for name, make in makers.items()}


def drawn(search: Search) -> list[Candidate]:
    """Return the candidates that have room in a plot, in order of their index."""
    own = {0, search.chosen}
    ranked = sorted(search.candidates, key=lambda c: (c.index not in own, -c.mean.mean, c.index))
    kept = {candidate.index for candidate in ranked[:MOST_CANDIDATES]}
    return [candidate for candidate in search.candidates if candidate.index in kept]


def _label(candidate: Candidate, search: Search) -> str:
    if candidate.index == 0:
        return "seed"
    changed = plot_text(", ".join(candidate.changed) or "as its parent", 26)
    return f"{candidate.index}  {changed}{'  ◀ chosen' if candidate.index == search.chosen else ''}"


def _colour(candidate: Candidate, search: Search) -> str:
    return VERMILION if candidate.index == search.chosen else SOFT if candidate.index == 0 else BLUE


def _candidates(search: Search, confidence: float) -> Plot:
    shown = drawn(search)
    labels = [_label(candidate, search) for candidate in shown]
    figure, (axis,) = new_figure(1, columns=1, height_in=1.15 + 0.3 * len(shown), left_in=label_room(labels))
    for row, candidate in enumerate(shown):
        _whisker(axis, candidate.mean, row, _colour(candidate, search))
    axis.axvline(search.seed.mean.mean, color=SOFT, lw=1, ls=(0, (5, 3)), zorder=1)
    axis.set_yticks(range(len(shown)), labels, color=INK)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", visible=True)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.margins(x=0.12)
    axis.set_xlabel(f"mean reward on search-validation, with {confidence:.0%} interval")
    axis.set_title("Score by candidate")
    left = len(search.candidates) - len(shown)
    more = f" {left} more candidates are in the table." if left else ""
    caption = (
        f"Each prompt that was validated, named by the components it changed; the dashed line is the seed's.{more}"
    )
    found = search.found
    return Plot("candidates", png(figure), f"Score by candidate; the chosen one has {found.mean.mean:.3f}", caption)


def _whisker(axis: Axes, value: Estimate, y: float, colour: str) -> None:
    low, high = (bound if math.isfinite(bound) else value.mean for bound in (value.low, value.high))
    axis.plot([low, high], [y, y], color=colour, lw=2.2, zorder=2)
    axis.plot([value.mean], [y], marker="o", ms=6.5, color=colour, zorder=3)
    offset: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    axis.annotate(f"{value.mean:.3f}", (high, y), fontsize=9, color=SOFT, **offset)


def _budget(search: Search) -> Plot:
    figure, (axis,) = new_figure(1, columns=1, height_in=3.3, right_in=0.6)
    order = sorted(search.candidates, key=lambda candidate: (candidate.evaluations, candidate.index))
    best, steps, values = -math.inf, [], []
    for candidate in order:
        best = max(best, candidate.mean.mean)
        steps.append(candidate.evaluations)
        values.append(best)
    end = max([*steps, *(step.evaluations for step in search.steps)])
    axis.step([*steps, end], [*values, values[-1]], where="post", color=INK, lw=2, zorder=2)
    for candidate in order:
        colour = _colour(candidate, search)
        axis.plot([candidate.evaluations], [candidate.mean.mean], marker="o", ms=6.5, color=colour, zorder=3)
    for what, colour, marker in (("rejected", SOFT, "|"), ("refused", ORANGE, "x")):
        at = [step.evaluations for step in search.steps if step.what == what]
        if at:
            foot = axis.get_xaxis_transform()
            axis.plot(at, [0.03] * len(at), marker, color=colour, ms=7, mew=1.5, transform=foot, label=what)
    if any(step.what in ("rejected", "refused") for step in search.steps):
        axis.legend(loc="upper left", frameon=False, fontsize=9, ncols=2, handletextpad=0.2)
    axis.annotate(
        f"{values[-1]:.3f}", (end, values[-1]), xytext=(6, 0), textcoords="offset points", va="center", color=INK
    )
    axis.set_xlabel("task evaluations spent")
    axis.set_ylabel("mean reward on search-validation")
    axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.margins(x=0.03, y=0.2)
    least_span(axis, 0.1)
    axis.set_title("Score by budget")
    caption = (
        "Line: the best validated prompt so far. Dots: candidates, in the colours of the plot above. Marks below: "
        "proposals that were rejected on their first trial, or refused before it. The best of several noisy means is "
        "too high; the final scoring is on other items."
    )
    return Plot("budget", png(figure), "Best score by evaluations spent", caption)


def _wins(search: Search) -> Plot:
    shown = drawn(search)
    seed, found = search.seed.scores, search.found.scores
    tasks = sorted(seed, key=lambda task: (found.get(task, 0.0) - seed[task], seed[task], task))
    grid = [[candidate.scores.get(task, math.nan) for task in tasks] for candidate in shown]
    labels = [_label(candidate, search) for candidate in shown]
    height, room = 0.9 + 0.26 * len(shown), label_room(labels)
    figure, (axis,) = new_figure(1, columns=1, height_in=height, left_in=room, right_in=0.6, bottom_in=0.4)
    low, high = min(0.0, *(v for row in grid for v in row)), max(1.0, *(v for row in grid for v in row))
    axis.imshow(grid, aspect="auto", interpolation="nearest", cmap=_SHADES, vmin=low, vmax=high)
    axis.set_yticks(range(len(shown)), labels, color=INK)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.tick_params(axis="y", length=0)
    for edge in range(1, len(shown)):
        axis.axhline(edge - 0.5, color=GRID, lw=1)
    for spine in axis.spines.values():
        spine.set_visible(False)
    for row, candidate in enumerate(shown):
        place: dict[str, Any] = {
            "xytext": (6, 0),
            "textcoords": "offset points",
            "va": "center",
            "annotation_clip": False,
        }
        axis.annotate(str(candidate.best), (len(tasks) - 0.5, row), fontsize=9, color=SOFT, **place)
    axis.set_xlabel(f"{len(tasks)} validation tasks, from lost to won by the chosen prompt over the seed")
    axis.set_title("Reward by candidate and task")
    caption = (
        "Darker is more reward. The number at the right counts the tasks on which candidates differ and none has more."
    )
    return Plot("wins", png(figure), "Which tasks each candidate wins", caption)
