"""The plots of a report: each takes the view-model and returns PNG bytes, or None without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from harness.reports.model import Estimate, Eval, LabelRow, ReportData, metric_order, reward_parts
from harness.reports.style import (
    BLUE,
    GRID,
    INK,
    PURPLE,
    SOFT,
    VERMILION,
    label_room,
    least_span,
    metric_colour,
    new_figure,
    plot_style,
    plot_text,
    png,
    running_mean,
    step_axis,
)
from harness.reports.warn import ZERO_SPREAD_SHARE

WINDOW = 5
SNAPSHOTS = 5
MAX_METRICS = 6
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
GAIN_KEY = "●  over the base under the run's prompt     ◇  over the base under the shipped prompt"


@dataclass(frozen=True, slots=True)
class Plot:
    """One rendered plot."""

    name: str
    data: bytes
    alt: str
    caption: str


def render_plots(data: ReportData) -> dict[str, Plot]:
    """Return every plot the data allows, by name, in the order of the report."""
    makers: list[tuple[str, Callable[[], Plot | None]]] = []
    for env in data.eval_environments():
        makers.append((f"gain-{env}", lambda env=env: _gain(data, env)))  # type: ignore[misc]
        makers.append((f"heldout-{env}", lambda env=env: _heldout(data, env)))  # type: ignore[misc]
        makers.append((f"labels-{env}", lambda env=env: _labels(data, env)))  # type: ignore[misc]
    makers.append(("learning", lambda: _learning(data)))
    makers += [(f"components-{e}", lambda e=e: _components(data, e)) for e in data.metrics.environments()]  # type: ignore[misc]
    makers.append(("logged", lambda: _logged(data)))
    makers += [("rollouts", lambda: _rollouts(data)), ("optimisation", lambda: _optimisation(data))]
    with plot_style():
        made = {name: make() for name, make in makers}
    return {name: plot for name, plot in made.items() if plot is not None}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _shown_metrics(data: ReportData, env: str, means: Mapping[str, Estimate]) -> list[str]:
    return [name for name in reward_parts(means, data, env) if math.isfinite(means[name].mean)][:MAX_METRICS]


def _heldout(data: ReportData, env: str) -> Plot | None:
    curve = data.curve(env)
    final = data.final(env)
    names = _shown_metrics(data, env, final.means) if final else []
    if len(curve) < 2 or not names:
        return None
    figure, axes = new_figure(len(names), columns=2 if len(names) in (2, 4) else 3)
    shipped = data.base(env, "shipped")
    for axis, name in zip(axes, names, strict=True):
        colour = metric_colour(name, names)
        points = [(point.step, point.means[name]) for point in curve if name in point.means]
        steps = [step for step, _ in points]
        axis.fill_between(
            steps,
            [_finite(e.low) for _, e in points],
            [_finite(e.high) for _, e in points],
            color=colour,
            alpha=0.18,
            lw=0,
        )
        axis.plot(steps, [e.mean for _, e in points], color=colour, lw=2, marker="o", ms=4.5)
        _reference(axis, points[0][1].mean, "base, run prompt")
        if shipped and name in shipped.means:
            _reference(axis, shipped.means[name].mean, "base, shipped prompt", dotted=True)
        axis.set_title(plot_text(name), color=colour)
        axis.set_ylabel("mean (0–1)" if name != "reward" else "mean reward")
        step_axis(axis, steps)
        axis.margins(y=0.16)
        least_span(axis, 0.25)
    last = final.means[names[0]] if final else None
    summary = f"; {names[0]} ends at {last.mean:.3f}" if last else ""
    band = f"the band is the {data.confidence:.0%} interval, " if any(e.bounded for e in _all_means(curve)) else ""
    begin = "step 0 is the base model" + (" and, above or below it, the warm start" if data.warm(env) else "")
    caption = f"Held-out mean by training step; {band}{begin}."
    return Plot(f"heldout-{env}", png(figure), f"Held-out curves of {env}{summary}", caption)


def _all_means(curve: Sequence[Eval]) -> list[Estimate]:
    return [estimate for point in curve for estimate in point.means.values()]


def _reference(axis: Axes, value: float, label: str, *, dotted: bool = False) -> None:
    """Draw a level with its name on it; two levels that coincide share the line."""
    if not math.isfinite(value):
        return
    axis.axhline(value, color=SOFT, lw=1, ls=(0, (1, 2)) if dotted else (0, (5, 3)), zorder=1)
    axis.annotate(
        label,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3 if dotted else 3),
        textcoords="offset points",
        ha="right",
        va="top" if dotted else "bottom",
        fontsize=8.5,
        color=SOFT,
    )


def _gain(data: ReportData, env: str) -> Plot | None:
    final = data.final(env)
    if final is None or not (final.gain or final.gain_shipped):
        return None
    names = _shown_metrics(data, env, final.gain or final.gain_shipped)
    room = label_room([plot_text(name) for name in names])
    figure, (axis,) = new_figure(1, columns=1, height_in=0.95 + 0.52 * len(names), left_in=room)
    one = final.gain == final.gain_shipped  # the run's prompt is the shipped one
    pairs = (
        [(final.gain, 0.0, "o", False)]
        if one
        else [(final.gain, -0.13, "o", False), (final.gain_shipped, 0.17, "D", True)]
    )
    for row, name in enumerate(names):
        colour = metric_colour(name, names)
        for gains, shift, marker, face in pairs:
            if name in gains:
                _whisker(axis, gains[name], row + shift, colour, marker, "white" if face else colour)
    axis.axvline(0, color=INK, lw=1)
    axis.set_yticks(range(len(names)), [plot_text(name) for name in names], color=INK, fontsize=10.5)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", visible=True)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.margins(x=0.12)
    axis.set_xlabel(f"paired gain on the same items, with {data.confidence:.0%} interval")
    axis.set_title(
        "" if one else GAIN_KEY,
        fontsize=9.5,
        color=SOFT,
        fontweight="normal",
    )
    caption = "Difference to the base on the same held-out items; an interval right of zero is a gain."
    return Plot(f"gain-{env}", png(figure), f"Paired gains in {env}", caption)


def _whisker(axis: Axes, gain: Estimate, y: float, colour: str, marker: str, face: str) -> None:
    low, high = _finite(gain.low), _finite(gain.high)
    axis.plot([low, high], [y, y], color=colour, lw=2.2 if marker == "o" else 1.4, zorder=2)
    axis.plot([gain.mean], [y], marker=marker, ms=7 if marker == "o" else 6, mfc=face, mec=colour, mew=1.5, zorder=3)
    edge = high if math.isfinite(high) else gain.mean
    axis.annotate(
        f"{gain.mean:+.3f}".replace("-", "−"),
        (edge, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=SOFT,
    )


def _learning(data: ReportData) -> Plot | None:
    environments = [env for env in data.metrics.environments() if data.metrics.series(f"train/{env}/reward/mean")[0]]
    if not environments:
        return None
    figure, axes = new_figure(len(environments), columns=2, height_in=3.1, right_in=0.55)
    for axis, env in zip(axes, environments, strict=True):
        steps, values = data.metrics.series(f"train/{env}/reward/mean")
        smooth = running_mean(values, WINDOW)
        axis.plot(steps, values, color=BLUE, alpha=0.4, lw=1, marker="o", ms=3, mew=0)
        axis.plot(steps, smooth, color=BLUE, lw=2.4)
        step_axis(axis, steps)
        _end_label(axis, steps[-1], smooth[-1], f"{smooth[-1]:.3f}", BLUE)
        axis.set_title(f"{plot_text(env, 24)}: training reward")
        axis.set_ylabel("mean reward")
        axis.margins(y=0.12)
    caption = (
        f"Thin: every step. Thick: mean of the last {WINDOW} steps. Training tasks, sampled; not the held-out set."
    )
    return Plot("learning", png(figure), "Learning curves", caption)


_TELLING = ("reward", "score", "acc", "loss")


def _logged(data: ReportData) -> Plot | None:
    """Draw what an imported run logged when none of it is known to be its reward."""
    if not data.provenance or data.metrics.environments():
        return None
    drawable = [key for key in data.metrics.columns if len(data.metrics.series(key)[0]) > 1]
    rank = {key: min((i for i, word in enumerate(_TELLING) if word in key.lower()), default=9) for key in drawable}
    chosen = sorted(drawable, key=lambda key: (rank[key], key))[:MAX_METRICS]
    if not chosen:
        return None
    figure, axes = new_figure(len(chosen), columns=2 if len(chosen) in (2, 4) else 3)
    for axis, key in zip(axes, chosen, strict=True):
        steps, values = data.metrics.series(key)
        axis.plot(steps, values, color=INK, alpha=0.35, lw=1)
        axis.plot(steps, running_mean(values, WINDOW), color=INK, lw=2)
        axis.set_title(plot_text(key, 28))
        step_axis(axis, steps)
    left = len(drawable) - len(chosen)
    more = f" {left} more are in data/metrics.csv." if left else ""
    caption = f"As logged, under the source's names. Thin: every step. Thick: mean of the last {WINDOW} steps.{more}"
    return Plot("logged", png(figure), "Logged metrics", caption)


def _end_label(axis: Axes, x: float, y: float, label: str, colour: str) -> None:
    axis.annotate(
        label,
        (x, y),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        color=colour,
        fontweight="bold",
        annotation_clip=False,
    )


def _snapshots(steps: list[int]) -> list[int]:
    """Return up to SNAPSHOTS indices, evenly spread, the last one included."""
    first = min(WINDOW, len(steps)) - 1
    count = min(SNAPSHOTS, len(steps) - first)
    if count == 1:
        return [len(steps) - 1]
    return sorted({first + round(i * (len(steps) - 1 - first) / (count - 1)) for i in range(count)})


def _components(data: ReportData, env: str) -> Plot | None:
    names = [
        n for n in metric_order(data.metrics.components(env)) if data.metrics.series(f"train/{env}/component/{n}")[0]
    ]
    if not names:
        return None
    figure, (axis,) = new_figure(1, columns=1, height_in=3.2, bottom_in=0.82)
    ticks: list[float] = []
    labels: list[str] = []
    for group, name in enumerate(names):
        steps, values = data.metrics.series(f"train/{env}/component/{name}")
        colour = metric_colour(name, names)
        bars = _bars(axis, group, steps, running_mean(values, WINDOW), colour)
        ticks += bars
        labels += bars.values()
        below: dict[str, Any] = {"xytext": (0, -22), "textcoords": "offset points", "ha": "center", "va": "top"}
        where = ("data", "axes fraction")
        axis.annotate(plot_text(name), (group, 0), xycoords=where, fontsize=10.5, weight="bold", color=colour, **below)
    axis.set_xticks(ticks, labels, fontsize=8.5)
    axis.tick_params(axis="x", length=0)
    axis.set_xlabel("training step", labelpad=30)
    axis.set_ylabel("component mean (0–1)")
    axis.set_yticks(QUARTERS)
    axis.set_ylim(0, 1.12)
    axis.margins(x=0.02)
    axis.set_title(f"{plot_text(env)}: reward components at snapshot steps")
    caption = f"Unweighted components of the training reward, mean of the {WINDOW} steps up to each snapshot."
    return Plot(f"components-{env}", png(figure), f"Reward components of {env}", caption)


def _bars(axis: Axes, group: int, steps: list[int], values: list[float], colour: str) -> dict[float, str]:
    """Draw one component's bars, lighter for earlier steps; return their places with the step below each."""
    chosen = _snapshots(steps)
    width = 0.8 / len(chosen)
    places = {}
    for place, index in enumerate(chosen):
        x = group + (place - (len(chosen) - 1) / 2) * width
        shade = 0.35 + 0.65 * (place + 1) / len(chosen)
        axis.bar(x, values[index], width * 0.88, color=colour, alpha=shade)
        above: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{values[index]:.2f}", (x, values[index]), fontsize=8.5, **above)
        places[x] = str(steps[index])
    return places


def _rollouts(data: ReportData) -> Plot | None:
    metrics = data.metrics
    panels: list[Callable[[Axes], None]] = []
    if metrics.series("train/tokens/mean")[0]:
        panels.append(lambda axis: _lengths(axis, data))
    if metrics.series("train/zero_spread_share")[0]:
        panels.append(
            lambda axis: _share(axis, data, "train/zero_spread_share", "zero-spread groups", ZERO_SPREAD_SHARE)
        )
    if metrics.series("train/truncated_share")[0]:
        panels.append(lambda axis: _share(axis, data, "train/truncated_share", "truncated rollouts", None))
    if not panels:
        return None
    figure, axes = new_figure(len(panels), columns=3)
    for axis, draw in zip(axes, panels, strict=True):
        draw(axis)
    caption = (
        "Band of the length: shortest to longest rollout of the step. Groups without spread carry no gradient; "
        f"from {ZERO_SPREAD_SHARE:.0%} on, training has stalled."
    )
    return Plot("rollouts", png(figure), "Completion lengths, zero-spread groups and truncation", caption)


def _lengths(axis: Axes, data: ReportData) -> None:
    steps, mean = data.metrics.series("train/tokens/mean")
    low = dict(zip(*data.metrics.series("train/tokens/min"), strict=True))
    high = dict(zip(*data.metrics.series("train/tokens/max"), strict=True))
    axis.fill_between(
        steps,
        [low.get(s, math.nan) for s in steps],
        [high.get(s, math.nan) for s in steps],
        color=PURPLE,
        alpha=0.15,
        lw=0,
    )
    axis.plot(steps, mean, color=PURPLE, lw=2)
    axis.set_title("completion length")
    axis.set_ylabel("tokens")
    axis.set_ylim(bottom=0)
    step_axis(axis, steps)


def _share(axis: Axes, data: ReportData, key: str, title: str, limit: float | None) -> None:
    steps, values = data.metrics.series(key)
    axis.plot(steps, values, color=VERMILION, alpha=0.4, lw=1, marker="o", ms=3, mew=0)
    axis.plot(steps, running_mean(values, WINDOW), color=VERMILION, lw=2.2)
    if limit is not None:
        axis.axhline(limit, color=SOFT, lw=1, ls=(0, (5, 3)))
        axis.annotate(
            "limit",
            (0.01, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=SOFT,
        )
    axis.set_title(title)
    axis.set_ylabel("share")
    axis.set_ylim(-0.03, 1.03)
    step_axis(axis, steps)
    axis.set_yticks(QUARTERS)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


_OPTIMISATION = (
    ("train/entropy", "entropy", "nats per token"),
    ("train/kl_sampler", "KL to the sampler", "nats per token"),
    ("optim/grad_norm", "gradient norm", "L2 norm before clipping"),
)


def _optimisation(data: ReportData) -> Plot | None:
    shown = [entry for entry in _OPTIMISATION if data.metrics.series(entry[0])[0]]
    if not shown:
        return None
    figure, axes = new_figure(len(shown), columns=3)
    for axis, (key, title, unit) in zip(axes, shown, strict=True):
        steps, values = data.metrics.series(key)
        axis.plot(steps, values, color=INK, alpha=0.35, lw=1)
        axis.plot(steps, running_mean(values, WINDOW), color=INK, lw=2)
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # an exponent above the axis would hit the title
        step_axis(axis, steps)
    caption = f"Thin: every step. Thick: mean of the last {WINDOW} steps."
    return Plot("optimisation", png(figure), "Entropy, KL and gradient norm", caption)


def _labels(data: ReportData, env: str) -> Plot | None:
    rows = [row for row in data.labels if row.env == env and row.policy is not None]
    if not rows:
        return None
    rows.sort(key=lambda row: (-(row.policy or 0), -row.n, row.label))
    ticks = [f"{plot_text(row.label, 30)}  (n={row.n})" for row in rows]
    figure, (axis,) = new_figure(1, columns=1, height_in=1.0 + 0.27 * len(rows), left_in=label_room(ticks))
    for y, row in enumerate(rows):
        _dumbbell(axis, row, y)
    axis.set_yticks(range(len(rows)), ticks, color=INK, fontsize=9.5)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(-0.03, 1.03)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=True, color=GRID)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("held-out accuracy")
    axis.set_title(
        "○  base under the run's prompt     ●  trained policy", fontsize=9.5, color=SOFT, fontweight="normal"
    )
    return Plot(
        f"labels-{env}", png(figure), f"Held-out accuracy by label in {env}", "Held-out accuracy by label, last eval."
    )


def _dumbbell(axis: Axes, row: LabelRow, y: int) -> None:
    policy = row.policy if row.policy is not None else math.nan
    if row.base is not None:
        axis.plot([row.base, policy], [y, y], color=VERMILION, alpha=0.45, lw=2.2, zorder=2)
        axis.plot([row.base], [y], marker="o", ms=7, mfc="white", mec=VERMILION, mew=1.5, zorder=3)
    axis.plot([policy], [y], marker="o", ms=7, color=VERMILION, zorder=4)
