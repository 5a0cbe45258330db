"""Learning curves of several runs in one table and one picture; pure, over rows that the caller read.

A run stands beside others here, so a curve is a mean of the last steps and never a verdict: training rewards are those
of the tasks a run happened to draw, and held-out means of different protocols are not drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.reports.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    new_figure,
    plot_style,
    plot_text,
    png,
    step_axis,
)

MOST_RUNS = 24
"""Lines that can be told apart: six colours in four dashes."""
_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_LEGEND_ROW_IN = 0.21
_LEGEND_COLUMNS = 2


class Point(NamedTuple):
    """One value of one run: a training metric, or a held-out mean."""

    run: str
    metric: str
    step: int
    value: float


def smoothed(points: Iterable[Point], window: int) -> pd.DataFrame:
    """Return the points by run, metric and step, each with the mean of the last `window` steps up to it.

    Args:
        points: in any order; of two for one step the later one stands, and what is not finite is left out.
        window: steps of the running mean, at least 1.

    Returns:
        A frame with the columns `run`, `metric`, `step`, `value` and `smooth`.
    """
    frame = pd.DataFrame(
        [point for point in points if math.isfinite(point.value)], columns=["run", "metric", "step", "value"]
    )
    frame = frame.drop_duplicates(["run", "metric", "step"], keep="last").sort_values(["run", "metric", "step"])
    grouped = frame.groupby(["run", "metric"], sort=False)["value"]
    frame["smooth"] = grouped.transform(lambda values: values.rolling(window, min_periods=1).mean())
    return frame.reset_index(drop=True)


def summarise(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return per run and metric where its curve begins, ends, and is highest and lowest, as running means.

    Args:
        frame: as `smoothed` returns it.
    """
    rows = []
    for (run, metric), part in frame.groupby(["run", "metric"], sort=True):
        top, low = part.loc[part["smooth"].idxmax()], part.loc[part["smooth"].idxmin()]
        rows.append(
            {
                "run": str(run),
                "metric": str(metric),
                "steps": len(part),
                "first_step": int(part["step"].iloc[0]),
                "last_step": int(part["step"].iloc[-1]),
                "first": float(part["smooth"].iloc[0]),
                "last": float(part["smooth"].iloc[-1]),
                "highest": float(top["smooth"]),
                "highest_step": int(top["step"]),
                "lowest": float(low["smooth"]),
                "lowest_step": int(low["step"]),
            }
        )
    return rows


def draw(frame: pd.DataFrame, held_out: Iterable[Point], labels: Mapping[str, str], window: int) -> bytes:
    """Return the picture as PNG bytes: a panel per training metric, then one per held-out environment.

    Args:
        frame: as `smoothed` returns it.
        held_out: means by step; `metric` is the environment.
        labels: what to call each run, in the order of the legend; at most `MOST_RUNS`.
        window: of the running mean, for the titles.
    """
    metrics = sorted(frame["metric"].unique())
    tested = smoothed(held_out, 1)
    environments = sorted(tested["metric"].unique())
    with plot_style():
        figure, axes = new_figure(max(1, len(metrics) + len(environments)), columns=2, height_in=3.4)
        for axis, metric in zip(axes, metrics, strict=False):
            _panel(axis, frame[frame["metric"] == metric], labels, "smooth")
            axis.set_ylabel("mean reward" if metric.endswith("reward/mean") else "value")
            axis.set_title(plot_text(_title(metric), 44))
            if window > 1:
                axis.set_xlabel(f"training step (mean of {window})")
        for axis, env in zip(axes[len(metrics) :], environments, strict=False):
            _panel(axis, tested[tested["metric"] == env], labels, "value", marker="o")
            axis.set_ylabel("mean reward")
            axis.set_title(plot_text(f"{env}: held-out reward", 44))
        _legend(figure, axes, labels)
        return png(figure)


def _title(metric: str) -> str:
    """Return a metric's name as a title: what it is of, then what it is, where it is a reward."""
    env = metric.removeprefix("train/").removesuffix("/reward/mean")
    return f"{env}: training reward" if metric == f"train/{env}/reward/mean" else metric


def line_style(index: int) -> dict[str, Any]:
    """Return colour and dash of the n-th run; no two of the first `MOST_RUNS` are equal."""
    return {"color": _COLOURS[index % len(_COLOURS)], "ls": _DASHES[index // len(_COLOURS) % len(_DASHES)]}


def _panel(axis: Axes, part: pd.DataFrame, labels: Mapping[str, str], column: str, marker: str | None = None) -> None:
    for index, run in enumerate(labels):
        line = part[part["run"] == run]
        if not line.empty:
            axis.plot(line["step"], line[column], lw=1.7, marker=marker, ms=4, **line_style(index))
    step_axis(axis, [int(step) for step in part["step"]])
    axis.margins(y=0.08)


def _legend(figure: Figure, axes: Sequence[Axes], labels: Mapping[str, str]) -> None:
    """Make room below the panels and name the lines there."""
    columns = min(_LEGEND_COLUMNS, max(1, len(labels)))
    room = 0.05 + _LEGEND_ROW_IN * math.ceil(len(labels) / columns)
    width, height = figure.get_size_inches()
    for axis in axes:
        box = axis.get_position()
        share = height / (height + room)
        axis.set_position((box.x0, (box.y0 * height + room) / (height + room), box.width, box.height * share))
    figure.set_size_inches(width, height + room)
    lines = [Line2D([], [], lw=2, **line_style(index)) for index in range(len(labels))]
    figure.legend(
        lines,
        [plot_text(label, 52) for label in labels.values()],
        loc="lower center",
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
        handlelength=3.2,
        borderaxespad=0.3,
    )
