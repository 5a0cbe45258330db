"""What one imported run becomes: its committed files and its events; pure, no file is touched here."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from typing import Any

from harness.core.canonical import canonical_json, encode_non_finite, sha256_hex
from harness.core.text import one_line
from harness.evaluation.records import dump_items
from harness.imports.model import ImportedEval, ImportedRun, Series
from harness.imports.names import house_names
from harness.imports.settings import clean_config

METRICS, ROLLOUTS = "data/metrics.csv", "data/rollouts.jsonl"
CONFIG = "import/config.json"
METRICS_BYTES = 1_200_000
"""About the largest per-step table; reports have the same limit."""
INLINE_BYTES = 64 << 10
"""Largest config that stands in the event itself; a larger one is only a file."""
MAX_FINAL = 200
"""Last values that stand in the event."""
FEW = 200
"""A metric with at most this many values keeps all of them when a long table is thinned."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run ready to be recorded: everything but its number and its parent.

    Args:
        run: as it was read.
        config: cleaned.
        files: bytes by path below `analysis/<run>/`.
        data: members of the `imported` event that need no run id.
        evals: data of the `evaluated` events, with the item file relative to `analysis/<run>/`.
    """

    run: ImportedRun
    config: dict[str, Any]
    files: dict[str, bytes]
    data: dict[str, Any]
    evals: tuple[dict[str, Any], ...] = field(default=())


def prepare(run: ImportedRun, kind: str, source_name: str, *, reward: str = "", confidence: float = 0.95) -> Prepared:
    """Return a run's files and event data.

    Args:
        run: as a reader returned it.
        kind: name of the format.
        source_name: last part of the source's path.
        reward: the source's name of the training reward; found when empty.
        confidence: of intervals that are computed from items.

    Raises:
        SourceError: when its config is too large.
        NotFoundError: when it has no metric `reward`.
    """
    metrics, renamed = house_names(run.metrics, run.env, reward)
    config, secrets = clean_config(run.config)
    table, kept = metrics_table(metrics)
    files = {
        CONFIG: (canonical_json(encode_non_finite(config)) + "\n").encode(),
        METRICS: table.encode(),
    }
    if run.rollouts:
        files[ROLLOUTS] = _rollouts(run).encode()
    evals = []
    for result in run.evals:
        data, items = _evaluated(result, confidence)
        if items is not None:
            name = f"evals/step_{result.step}.{result.subject}.{result.env}.jsonl"
            files[name] = items
            data |= {"file": name, "file_sha": sha256_hex(items)}
        evals.append(data)
    steps = sorted({step for points in metrics.values() for step in points})
    not_read = list(run.not_read)
    if secrets:
        not_read.append(f"{secrets} secret value(s) of the config")
    if kept < len(steps):
        not_read.append(f"{len(steps) - kept} of {len(steps)} steps of the long metrics; the table is thinned")
    data = {
        "type": "import",
        "provenance": "imported",
        "format": kind,
        "name": one_line(run.name, 200),
        "hypothesis": f"imported: {one_line(run.name, 200)}",
        "source": {"name": one_line(source_name, 200), "id": one_line(run.source_id, 300), "sha": run.source_sha},
        "env": run.env,
        "outcome": run.outcome,
        "reason": one_line(run.reason, 500),
        "started_at": run.started_at or None,
        "metrics": {"keys": len(metrics), "steps": len(steps), "last_step": run.last_step},
        "final": _final(metrics),
        "renamed": dict(sorted(renamed.items())[:MAX_FINAL]),
        "tags": {one_line(k, 100): one_line(v, 500) for k, v in sorted(run.tags.items())[:100]},
        "not_read": [one_line(text, 300) for text in not_read],
    }
    if len(files[CONFIG]) <= INLINE_BYTES:
        data["settings"] = config
    return Prepared(run, config, files, data, tuple(evals))


def _final(metrics: Series) -> dict[str, float]:
    """Return the last value of each metric, of the first `MAX_FINAL` by name."""
    return {name: metrics[name][max(metrics[name])] for name in sorted(metrics)[:MAX_FINAL] if metrics[name]}


def metrics_table(metrics: Series, limit: int = METRICS_BYTES) -> tuple[str, int]:
    """Return the per-step table as CSV of at most about `limit` bytes, and how many steps it has.

    A long run keeps every k-th step, the last one, and every step at which a rarely logged metric has a value.
    """
    names = sorted(metrics)
    steps = sorted({step for points in metrics.values() for step in points})
    rare = {step for points in metrics.values() if len(points) <= FEW for step in points}
    stride = 1
    while True:
        kept = [
            step
            for index, step in enumerate(steps)
            if index % stride == 0 or index == len(steps) - 1 or (step in rare and len(rare) <= 20 * FEW)
        ]
        text = _csv(metrics, names, kept)
        if len(text.encode()) <= limit or stride >= max(2, len(steps)):
            return text, len(kept)
        stride *= 2


def _csv(metrics: Series, names: list[str], steps: list[int]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["step", *names])
    for step in steps:
        writer.writerow([step, *(_cell(metrics[name].get(step)) for name in names)])
    return buffer.getvalue()


def _cell(value: float | None) -> str:
    """Spell a value exactly; NaN is spelt, so that it differs from a value that was never logged."""
    if value is None:
        return ""
    return repr(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else repr(value)


def _rollouts(run: ImportedRun) -> str:
    """Return the rollouts to show. Their prompts stay out: nobody knows here whether they may be passed on."""
    from harness.reports.compact import choose_samples, sample_line  # brings matplotlib, and most imports have none

    picks = choose_samples(run.name, run.env, run.rollouts)
    return "".join(sample_line(row, redistributable=False) + "\n" for row in picks)


def _evaluated(result: ImportedEval, confidence: float) -> tuple[dict[str, Any], bytes | None]:
    """Return the data of an `evaluated` event and the bytes of its items; no items, no interval."""
    data: dict[str, Any] = {
        "provenance": "imported",
        "attempt": None,
        "subject": result.subject,
        "step": result.step,
        "source_step": result.source_step,
        "metric": result.metric,
        "env": result.env,
        "prompt": "run",
        "protocol": {"samples": result.samples},
        "n": None,
        "requested": result.requested,
        "failures": {},
        "means": {name: {"mean": value} for name, value in result.means.items()},
    }
    if not result.items:
        return data, None
    from harness.evaluation.summary import summarise  # brings scipy, and most imports have no items

    data |= summarise(result.items, requested=result.requested or len(result.items), confidence=confidence)
    return data, dump_items(result.items)


def files_of(prepared: Prepared, folder: str) -> list[dict[str, str]]:
    """Return path and hash of each file, paths in the program; `folder` is `analysis/<run>`."""
    return [{"file": f"{folder}/{name}", "sha": sha256_hex(data)} for name, data in sorted(prepared.files.items())]
