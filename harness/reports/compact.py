"""The committed copy of what a report needs from `outputs/`: per-step table, chosen rollouts, summary.

A report is always made from these compact files, also on the machine that trained, so a reviewer
who has only the repository regenerates the same bytes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.core.canonical import canonical_json, decode_number, encode_non_finite, strict_loads
from harness.core.errors import ConfigError
from harness.core.numbers import number_or_none
from harness.ledger.superseded import current_rows
from harness.reports.model import Metrics, Sample

METRICS_BYTES = 1_200_000
SAMPLE_CHARS = 6000
_LEFT_OUT = frozenset({"step", "time"})
BEST, WORST, RANDOM = 2, 2, 3


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the JSON objects of a file and the numbers of the lines that could not be read, from 1.

    A killed process may leave a torn line, so a bad line is told, not fatal.
    """
    rows: list[dict[str, Any]] = []
    broken: list[int] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = strict_loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken.append(number)
    return rows, broken


def merge_metrics(rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """Merge metric rows by step, without those that a later attempt superseded.

    Of two values for one step and key the later one stands.
    """
    merged: dict[int, dict[str, float]] = {}
    numbered = [row for row in rows if isinstance(row.get("step"), int) and not isinstance(row.get("step"), bool)]
    for row in current_rows(numbered):
        step = row["step"]
        target = merged.setdefault(step, {})
        for key, value in row.items():
            if key not in _LEFT_OUT:
                try:
                    target[key] = decode_number(value)
                except ValueError:
                    continue  # a text member is no metric
    steps = tuple(sorted(merged))
    keys = sorted({key for values in merged.values() for key in values})
    return Metrics(steps, {key: tuple(merged[s].get(key, math.nan) for s in steps) for key in keys})


def metrics_csv(metrics: Metrics, limit: int = METRICS_BYTES) -> str:
    """Return the table as CSV of at most `limit` bytes; long runs keep every k-th step and the last."""
    stride = 1
    while True:
        text = _csv(metrics, stride)
        if len(text.encode()) <= limit or stride >= max(2, len(metrics.steps)):
            return text
        stride *= 2


def _csv(metrics: Metrics, stride: int) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["step", *metrics.columns])
    last = len(metrics.steps) - 1
    for index, step in enumerate(metrics.steps):
        if index % stride == 0 or index == last:
            writer.writerow([step, *(_number(values[index]) for values in metrics.columns.values())])
    return buffer.getvalue()


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def parse_metrics(text: str, where: str) -> Metrics:
    """Read the table back.

    Raises:
        ConfigError: when a row does not fit the header or a cell is no number.
    """
    rows = list(csv.reader(io.StringIO(text)))
    if not rows:
        return Metrics()
    keys = rows[0][1:]
    try:
        steps = tuple(int(row[0]) for row in rows[1:])
        cells = [[float(cell) if cell else math.nan for cell in row[1:]] for row in rows[1:]]
        columns = {key: tuple(row[i] for row in cells) for i, key in enumerate(keys)}
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"{where} is damaged: {error}", "take it back from git, or run `harness report` again"
        ) from error
    return Metrics(steps, columns)


def choose_samples(run: str, env: str, rollouts: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Choose rollouts to show: one from the first stored step, then best, worst and random of the last.

    Args:
        run: seeds the choice, so it is the same at every regeneration.
        env: environment id.
        rollouts: stored rollouts by step.
    """
    steps = sorted(step for step in rollouts if rollouts[step])
    if not steps:
        return []
    last = steps[-1]
    shuffled = sorted(rollouts[last], key=_order(run, env, last))
    counted = [row for row in shuffled if row.get("failure") in (None, "model")]
    ranked = sorted(counted, key=_reward)  # stable: ties keep the seeded order
    picks: list[tuple[str, int, Mapping[str, Any]]] = []
    if len(steps) > 1:
        first = min(rollouts[steps[0]], key=_order(run, env, steps[0]))
        picks.append(("first step", steps[0], first))
    picks += [("best", last, row) for row in reversed(ranked[-BEST:])]
    picks += [("worst", last, row) for row in ranked[: min(WORST, max(0, len(ranked) - BEST))]]
    taken = {id(row) for _, _, row in picks}
    picks += [("random", last, row) for row in [r for r in shuffled if id(r) not in taken][:RANDOM]]
    return [{**row, "env": env, "step": step, "pick": pick} for pick, step, row in picks]


def _order(run: str, env: str, step: int) -> Callable[[Mapping[str, Any]], bytes]:
    def key(row: Mapping[str, Any]) -> bytes:
        name = f"{run}\0{env}\0{step}\0{row.get('task')}\0{row.get('group')}\0{row.get('index')}"
        return hashlib.sha256(name.encode(errors="replace")).digest()

    return key


def _reward(row: Mapping[str, Any]) -> float:
    value = number_or_none(row.get("reward"))
    return value if value is not None and math.isfinite(value) else -math.inf


def sample_line(row: Mapping[str, Any], *, redistributable: bool) -> str:
    """Return a chosen rollout as one JSON line; the prompt stays out where it may not be shared."""
    kept = {
        "env": row["env"],
        "step": row["step"],
        "pick": row["pick"],
        "task": _text(row.get("task")),
        "prompt": cut(_text(row.get("prompt"))) if redistributable else None,
        "completion": cut(_text(row.get("completion"))),
        "finish": _text(row.get("finish")),
        "reward": row.get("reward"),
        "components": row.get("components") or {},
        "diagnostics": {k: cut(_text(v), 500) for k, v in (row.get("diagnostics") or {}).items()},
        "failure": row.get("failure"),
        "advantage": row.get("advantage"),
        "tokens": row.get("tokens"),
    }
    return canonical_json(encode_non_finite(kept))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text.encode(errors="replace").decode()  # a lone surrogate cannot be written


def cut(text: str, limit: int = SAMPLE_CHARS) -> str:
    """Return a text without its middle when it is longer than `limit` characters, and say how much is left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters omitted …\n{text[-half:]}"


def parse_samples(text: str, where: str) -> tuple[Sample, ...]:
    """Read chosen rollouts back.

    Raises:
        ConfigError: on a damaged line, naming it.
    """
    samples = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        try:
            samples.append(_sample(strict_loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "take it back from git, or run `harness report` again"
            raise ConfigError(f"{where}:{number} is damaged: {error}", hint) from error
    return tuple(samples)


def _sample(row: Mapping[str, Any]) -> Sample:
    tokens, reward = number_or_none(row["tokens"]), number_or_none(row["reward"])
    components = {str(k): number_or_none(v) for k, v in row["components"].items()}
    return Sample(
        env=str(row["env"]),
        step=int(row["step"]),
        pick=str(row["pick"]),
        task=str(row["task"]),
        prompt=None if row["prompt"] is None else str(row["prompt"]),
        completion=str(row["completion"]),
        finish=str(row["finish"]),
        reward=math.nan if reward is None else reward,
        components={k: v for k, v in sorted(components.items()) if v is not None},
        diagnostics={str(k): str(v) for k, v in sorted(row["diagnostics"].items())},
        failure="" if row["failure"] is None else str(row["failure"]),
        advantage=number_or_none(row["advantage"]),
        tokens=None if tokens is None else int(tokens),
    )
