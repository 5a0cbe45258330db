"""How often noise alone sets a watchdog off, and how soon a real collapse does: synthetic runs, counted.

`python benchmarks/watchdog_alarms.py --runs 400` prints one row per kind of run. A row of a healthy kind counts the
runs that were stopped or marked, each a false alarm; a row of a failing kind counts those that were stopped, and how
many steps after the fall began. With `--published FOLDER` the twelve published runs are replayed as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.training.watchdogs import HeldOut, Watchdog, replay, replicated

Row = dict[str, Any]
ENV = "synthetic"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a synthetic run behaves.

    Args:
        steps: its length.
        tasks: groups per step.
        group: rollouts per group.
        start: share of right answers of the first step.
        end: of the last step, when nothing falls.
        difficulty: concentration of the tasks' own rates around the step's (Beta); small: tasks are all or nothing.
        wobble: standard deviation of the slow noise of the rate, on the logit scale.
        memory: correlation of that noise from step to step.
        scale: what a right answer is worth.
        fall: step at which the rate begins to fall; 0: never.
        over: steps that the fall takes.
        floor: share of the rate that is left after the fall.
        evals: held-out evaluations of a policy that is as good as the base model.
    """

    steps: int = 100
    tasks: int = 4
    group: int = 8
    start: float = 0.3
    end: float = 0.7
    difficulty: float = 2.0
    wobble: float = 0.3
    memory: float = 0.8
    scale: float = 1.0
    fall: int = 0
    over: int = 3
    floor: float = 0.0
    evals: int = 4


HEALTHY = {
    "learns (4 x 8 rollouts)": Kind(),
    "learns (16 x 16 rollouts)": Kind(tasks=16, group=16),
    "learns, reward of 100": Kind(scale=100.0),
    "flat at 0.1 (4 x 8)": Kind(start=0.1, end=0.1),
    "flat at 0.02 (4 x 8)": Kind(start=0.02, end=0.02),
    "all-or-nothing tasks (4 x 4)": Kind(tasks=4, group=4, difficulty=0.3, start=0.4, end=0.5),
    "slow swings": Kind(wobble=1.0, memory=0.97, start=0.4, end=0.4),
    "falls to 40 % and stays": Kind(start=0.6, end=0.6, fall=60, over=10, floor=0.4),
    "learns, 1000 steps": Kind(steps=1000, evals=20),
    "flat at 0.1, 1000 steps": Kind(steps=1000, start=0.1, end=0.1, evals=20),
    "short, 25 steps": Kind(steps=25, evals=2),
}
FAILING = {
    "collapse (4 x 8)": Kind(fall=60),
    "collapse (16 x 16)": Kind(tasks=16, group=16, fall=60),
    "collapse over 20 steps (4 x 8)": Kind(fall=50, over=20),
    "collapse to 3 % (16 x 16)": Kind(tasks=16, group=16, fall=60, floor=0.03),
    "collapse at step 15": Kind(fall=15),
    "collapse of a hard task (0.1)": Kind(start=0.1, end=0.1, fall=60, steps=120),
}


def rates(kind: Kind, random: np.random.Generator) -> np.ndarray:
    """Return the share of right answers behind each step: a trend, slow noise, and the fall.

    Returns:
        (steps,) in [0, 1].
    """
    trend = np.linspace(_logit(kind.start), _logit(kind.end), kind.steps)
    noise = np.zeros(kind.steps)
    for step in range(1, kind.steps):
        fresh = random.normal(0.0, kind.wobble * np.sqrt(1 - kind.memory**2))
        noise[step] = kind.memory * noise[step - 1] + fresh
    rate = 1 / (1 + np.exp(-(trend + noise)))
    if kind.fall:
        done = np.clip((np.arange(kind.steps) - kind.fall + 1) / kind.over, 0.0, 1.0)
        rate = rate * (1 - done * (1 - kind.floor))
    return np.asarray(rate)


def _logit(share: float) -> float:
    return float(np.log(share / (1 - share)))


def metrics(kind: Kind, random: np.random.Generator) -> list[Row]:
    """Return the metrics rows of one synthetic run: reward, accuracy, format, zero-spread share, entropy."""
    rows = []
    for step, rate in enumerate(rates(kind, random), 1):
        mean = np.clip(rate, 1e-9, 1 - 1e-9)
        own = random.beta(mean * kind.difficulty, (1 - mean) * kind.difficulty, kind.tasks)
        right = random.binomial(kind.group, own)
        shaped = np.minimum(right + random.binomial(kind.group - right, 0.6 * min(1.0, rate / 0.05)), kind.group)
        accuracy, form = float(right.mean()) / kind.group, float(shaped.mean()) / kind.group
        rows.append(
            {
                "step": step,
                f"train/{ENV}/reward/mean": kind.scale * (0.9 * accuracy + 0.1 * form),
                f"train/{ENV}/component/accuracy": accuracy,
                f"train/{ENV}/component/format": form,
                "train/zero_spread_share": float(np.mean((right == 0) | (right == kind.group))),
                "train/entropy": float(np.exp(-1.5 * step / kind.steps + random.normal(0, 0.1))),
                "train/kl_sampler": float(abs(random.normal(0, 1e-4))),
                "train/loss": float(random.normal(0, 0.1)),
            }
        )
    return rows


def evaluations(kind: Kind, random: np.random.Generator, degrees: int = 11) -> list[HeldOut]:
    """Return evaluations of a policy that equals the base model, measured against repeated evaluations of that."""
    base = random.normal(0.5, 0.02, degrees + 1)
    steps = np.linspace(kind.steps / kind.evals, kind.steps, kind.evals).astype(int)
    return replicated(list(base), {int(step): float(random.normal(0.5, 0.02)) for step in steps}, ENV)


def watch(kind: Kind, seed: int) -> Watchdog:
    """Return what the default rules say of one synthetic run."""
    random = np.random.default_rng(seed)
    return replay(metrics(kind, random), evaluations(kind, random))


def healthy_row(name: str, kind: Kind, runs: int) -> str:
    """Count the healthy runs that are stopped or marked."""
    found = [watch(kind, seed).findings for seed in range(runs)]
    stopped = sum(any(f.action == "stop" for f in findings) for findings in found)
    marked = sum(any(f.action == "mark" for f in findings) for findings in found)
    rules = sorted({f.rule for findings in found for f in findings if f.action == "stop"})
    return f"| {name} | {runs} | {stopped / runs:.2%} {' '.join(rules)} | {marked / runs:.1%} |"


def failing_row(name: str, kind: Kind, runs: int) -> str:
    """Count the collapsing runs that are stopped as such, and how long after the fall began."""
    delays, early = [], 0
    for seed in range(runs):
        steps = [f.step for f in watch(kind, seed).stops if f.rule == "collapse"]
        if steps:
            early += min(steps) < kind.fall
            delays.append(min(steps) - kind.fall)
    late = f"{np.median(delays):.0f}, {np.percentile(delays, 95):.0f}" if delays else "-"
    return f"| {name} | {runs} | {len(delays) / runs:.1%} | {late} | {early} |"


def published(folder: Path) -> list[str]:
    """Replay the twelve published runs; their held-out noise is that of the twelve evaluations of the base model."""
    from harness.imports import wandb_csv
    from harness.imports.names import house_names
    from harness.imports.source import Source

    runs = wandb_csv.read(Source(folder))
    base = [run.evals[0].means["reward"] for run in runs]
    lines = ["", "| run | held-out, in standard errors from the base model | first stop |", "|---|---|---|"]
    for run in runs:
        series, _ = house_names(run.metrics, run.env)
        steps = sorted({step for points in series.values() for step in points})
        rows = [{"step": step} | {k: points[step] for k, points in series.items() if step in points} for step in steps]
        points = replicated(base, {e.source_step or 0: e.means["reward"] for e in run.evals[1:]}, run.env)
        told = ", ".join(f"{point.step}: {point.difference / point.error:+.1f}" for point in points)
        watchdogs = (replay(rows), replay(rows, points))
        stops = [f"{w.stops[0].rule} at {w.stops[0].step}" for w in watchdogs if w.stops]
        lines.append(f"| {run.name} | {told} | {'; '.join(stops) or 'none'} |")
    return lines


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=400, help="synthetic runs per row; a tenth of it for 1000 steps")
    parser.add_argument("--published", type=Path, help="folder with the CSV exports of the published runs")
    asked = parser.parse_args(arguments)
    write("| healthy run | runs | stopped | marked |\n|---|---|---|---|")
    for name, kind in HEALTHY.items():
        write(healthy_row(name, kind, max(asked.runs // (10 if kind.steps > 500 else 1), 1)))
    write("\n| failing run | runs | stopped | steps after it began: median, 95 % | stopped before |")
    write("|---|---|---|---|---|")
    for name, kind in FAILING.items():
        write(failing_row(name, replace(kind), asked.runs))
    for line in published(asked.published) if asked.published else ():
        write(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
