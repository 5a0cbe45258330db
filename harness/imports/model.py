"""One run of another tool as plain values: what every reader returns and the writer records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.evaluation.records import ItemRecord
from harness.imports.source import MAX_KEYS, MAX_POINTS, SourceError

Series = dict[str, dict[int, float]]
"""Metric -> step -> value."""


@dataclass(frozen=True, slots=True)
class ImportedEval:
    """One held-out result as the source states it.

    Args:
        env: plain name of the environment.
        step: training step; 0 for the untrained model.
        subject: `base` or `policy`.
        means: metric -> mean.
        metric: name of the series in the source.
        source_step: the step the source gives.
        requested: scored samples the source's config asked for; None when it does not say.
        samples: samples per task; None when it does not say.
        items: per-item results, where the source has them; intervals are computed from these only.
    """

    env: str
    step: int
    subject: str
    means: Mapping[str, float]
    metric: str = ""
    source_step: int | None = None
    requested: int | None = None
    samples: int | None = None
    items: Sequence[ItemRecord] = ()


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run of another tool.

    Args:
        name: as its authors call it.
        source_id: what identifies it in the source, such as a run id; the name when there is nothing else.
        source_sha: hash of the bytes it was read from; the same again is not imported twice.
        metrics: every logged number by step, under the source's own names.
        config: its settings, as nested JSON; secrets are taken out by the writer.
        env: plain name of the training environment.
        outcome: completed, failed, interrupted or stopped, as far as the source tells.
        reason: why that outcome.
        started_at: when it began, RFC 3339; empty when unknown.
        evals: held-out results.
        rollouts: sampled completions by step, in the shape of a rollout store's rows.
        tags: labels its authors gave it.
        not_read: what the source has that was not imported, one phrase each.
    """

    name: str
    source_id: str
    source_sha: str
    metrics: Series
    config: Mapping[str, Any] = field(default_factory=dict)
    env: str = "imported"
    outcome: str = "completed"
    reason: str = ""
    started_at: str = ""
    evals: tuple[ImportedEval, ...] = ()
    rollouts: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()

    @property
    def last_step(self) -> int | None:
        """Last step with a value; None without metrics."""
        return max((max(points) for points in self.metrics.values() if points), default=None)


class Collector:
    """Gathers metric values under limits; of two values for one key and step the later one stands."""

    def __init__(self, where: str) -> None:
        self.series: Series = {}
        self._where = where
        self._points = 0

    def add(self, key: str, step: int, value: float) -> None:
        """Take one value.

        Raises:
            SourceError: on more than `MAX_POINTS` values or `MAX_KEYS` metrics.
        """
        self._points += 1
        if self._points > MAX_POINTS:
            raise SourceError(f"{self._where} has more than {MAX_POINTS} metric values")
        if key not in self.series and len(self.series) >= MAX_KEYS:
            raise SourceError(f"{self._where} has more than {MAX_KEYS} metrics")
        self.series.setdefault(key, {})[step] = value
