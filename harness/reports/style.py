"""How plots look, and how the same values always give the same PNG bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.core.text import one_line

INK, SOFT, GRID = "#1b1f24", "#59636e", "#e4e8ec"
# Okabe & Ito 2008, "Color Universal Design": distinguishable with every common colour blindness.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#AA4C8F", "#B87A00", "#3A9BD1"
_FIXED = {"reward": BLUE, "accuracy": VERMILION, "format": GREEN, "reasoning": PURPLE}
_OTHERS = (ORANGE, SKY, SOFT)
WIDTH_IN = 9.0
DPI = 160
PANEL_IN = 2.55
TITLE_IN = 0.36

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelsize": 10,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": "#8c959f",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a label with $ is a label
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "svg.hashsalt": "harness",
}


@contextmanager
def plot_style() -> Iterator[None]:
    """Apply the house style over matplotlib's defaults, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(
    panels: int,
    *,
    columns: int = 3,
    height_in: float = PANEL_IN,
    left_in: float = 0.74,
    right_in: float = 0.14,
    bottom_in: float = 0.54,
) -> tuple[Figure, list[Axes]]:
    """Return a figure 9 inches wide with `panels` axes in a grid; unused places stay empty.

    Margins are fixed in inches: the fonts are, and an automatic layout draws every plot twice.

    Args:
        panels: number of axes.
        columns: most axes side by side.
        height_in: height of a row with its title and labels.
        left_in: room for the y label and tick labels of each axis.
        right_in: room for a label at the end of a line.
        bottom_in: room for the x label and tick labels.
    """
    columns = max(1, min(columns, panels))
    rows = math.ceil(panels / columns)
    width, height = WIDTH_IN / columns, rows * height_in
    figure = Figure(figsize=(WIDTH_IN, height))
    FigureCanvasAgg(figure)
    axes = []
    for index in range(panels):
        row, column = divmod(index, columns)
        left = (column * width + left_in) / WIDTH_IN
        bottom = (height - (row + 1) * height_in + bottom_in) / height
        size = ((width - left_in - right_in) / WIDTH_IN, (height_in - bottom_in - TITLE_IN) / height)
        axes.append(figure.add_axes((left, bottom, *size)))
    return figure, axes


def label_room(labels: Sequence[str]) -> float:
    """Return the inches that the longest of some y tick labels takes."""
    return 0.25 + 0.083 * max((len(label) for label in labels), default=0)


def png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes without the library's version or a date in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def metric_colour(name: str, names: Sequence[str]) -> str:
    """Return the colour of a metric: the same in every plot of every report."""
    if name in _FIXED:
        return _FIXED[name]
    others = [other for other in names if other not in _FIXED]
    return _OTHERS[others.index(name) % len(_OTHERS)]


def step_axis(axes: Axes, steps: Sequence[int], *, label: bool = True) -> None:
    """Give an axis whole steps, few ticks, and room at both ends."""
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=2, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if steps:
        low, high = min(steps), max(steps)
        pad = max(0.5, 0.03 * (high - low))
        axes.set_xlim(low - pad, high + pad)
    if label:
        axes.set_xlabel("training step")


def least_span(axes: Axes, span: float) -> None:
    """Widen the y axis to at least `span`, so that noise does not fill the panel."""
    low, high = axes.get_ylim()
    if high - low < span:
        middle = (low + high) / 2
        axes.set_ylim(middle - span / 2, middle + span / 2)


def plot_text(text: str, limit: int = 40) -> str:
    """Return a name as it may stand in a plot: one line, cut."""
    flat = one_line(text)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    """Return the mean of each value and up to `window - 1` before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]
