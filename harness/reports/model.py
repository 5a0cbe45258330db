"""What a report says, as plain values: the view-model between the ledger and the writers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.core.canonical import decode_number
from harness.core.ids import NAME_PATTERN

if TYPE_CHECKING:
    from harness.reports.search_model import Search


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with the bounds of its interval, at the confidence CONTEXT.md froze."""

    mean: float
    low: float
    high: float

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Estimate:
        """Build from an event's `{mean, low, high}`; typed non-finite numbers are understood.

        An imported mean has no interval, since its items are not known: both bounds are NaN then.
        """
        return cls(*(decode_number(data[key]) if key in data else math.nan for key in ("mean", "low", "high")))

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return not (math.isnan(self.low) and math.isnan(self.high))


@dataclass(frozen=True, slots=True)
class Eval:
    """One held-out eval: who, when, under which prompt, and what came out."""

    subject: str
    step: int
    env: str
    prompt: str
    n: int | None
    """Scored items; None where an imported result does not say."""
    requested: int | None
    failures: Mapping[str, int]
    means: Mapping[str, Estimate]
    gain: Mapping[str, Estimate]
    gain_shipped: Mapping[str, Estimate]
    extra: Mapping[str, Any]
    file: str
    file_intact: bool | None
    """Whether the committed items match their hash in the ledger; None when there is no file to check."""

    @property
    def complete(self) -> bool:
        """Whether every item that was asked for was scored."""
        return self.n is None or self.requested is None or self.n >= self.requested


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """One entry of the change set to the parent."""

    key: str
    old: str
    new: str
    kind: str
    counts: bool


@dataclass(frozen=True, slots=True)
class GateRow:
    """One check of one gate: what was measured, the bound, and what that means."""

    gate: str
    env: str
    check: str
    metric: str
    value: str
    bound: str
    verdict: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Gates:
    """The gate table: recorded by `promote`, or only the bar of GOAL.md when nobody asked yet."""

    verdict: str
    rows: tuple[GateRow, ...]
    recorded: bool
    promoted: bool = False
    step: int | None = None
    post_hoc: bool = False
    """Whether GOAL.md or CONTEXT.md was amended after the run started."""


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One execution of the run."""

    attempt: int
    outcome: str
    failure: str
    reason: str
    host: str
    resumed_from: str
    wall_s: float | None
    tokens: int | None
    step: int | None
    marks: tuple[str, ...] = ()
    """What the watchdogs marked without stopping the attempt."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The per-step table: one value per step and key, NaN where a step has none."""

    steps: tuple[int, ...] = ()
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a key, steps without a value left out."""
        values = self.columns.get(key, ())
        pairs = [(step, value) for step, value in zip(self.steps, values, strict=False) if math.isfinite(value)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def last(self, key: str, count: int) -> list[float]:
        """Return the last `count` finite values of a key."""
        return self.series(key)[1][-count:]

    def environments(self) -> list[str]:
        """Return the environments that were trained on, by name; names that are unsafe in a path are none."""
        names = {key.split("/")[1] for key in self.columns if key.startswith("train/") and "/reward/" in key}
        return sorted(name for name in names if NAME_PATTERN.fullmatch(name))

    def components(self, env: str) -> list[str]:
        """Return the reward components logged for an environment, by name."""
        prefix = f"train/{env}/component/"
        return sorted(key.removeprefix(prefix) for key in self.columns if key.startswith(prefix))


@dataclass(frozen=True, slots=True)
class Sample:
    """One stored rollout and why it was picked."""

    env: str
    step: int
    pick: str
    task: str
    prompt: str | None
    """None where the source text may not be redistributed."""
    completion: str
    finish: str
    reward: float
    components: Mapping[str, float]
    diagnostics: Mapping[str, str]
    failure: str
    advantage: float | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class LabelRow:
    """Held-out accuracy of one label, base against policy, in percent of `n` answers."""

    env: str
    label: str
    n: int
    base: float | None
    policy: float | None


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """What an answer without a model reaches on the held-out items."""

    env: str
    name: str
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """An answer that reads nothing, or only cue words, and the policy's accuracy minus its, on the same items."""

    name: str
    accuracy: float
    difference: Estimate


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """How often an answer is right among the held-out items, and how often it was given."""

    answer: str
    label: str
    gold: int
    warm: int
    final: int


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The policy's last eval in an environment against that of its own warm start, and references beside it.

    Args:
        step: of the last eval.
        gain: last eval minus warm start, paired, by metric.
        references: empty where the right answers are not known.
        answers: likewise.
    """

    env: str
    step: int
    gain: Mapping[str, Estimate]
    references: tuple[ReferenceRow, ...]
    answers: tuple[AnswerRow, ...]


@dataclass(frozen=True, slots=True)
class PartRow:
    """A metric that has no mean over all items of an eval: of a part of them, or of the set as a whole.

    Args:
        n: items it was computed from.
        base, policy: None where that eval lacks it.
    """

    env: str
    metric: str
    n: int
    base: float | None
    policy: float | None


@dataclass(frozen=True, slots=True)
class PromptEffect:
    """What `eval --prompt-effect` found in one environment, with the other run it was measured against.

    Args:
        cells: by (model, prompt) the means by metric; `evaluation.effect` names models and prompts.
        effects: by metric and name, paired on the items that count in all six evals.
        verdicts: by metric.
        items: that the paired numbers are about, and clusters.
        differs: config keys in which the two runs differ beside the prompt.
    """

    env: str
    seed_run: str
    chosen_run: str
    confidence: float
    cells: Mapping[tuple[str, str], Mapping[str, Estimate]]
    effects: Mapping[str, Mapping[str, Estimate]]
    verdicts: Mapping[str, str]
    items: tuple[int, int]
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything a report shows."""

    run: str
    kind: str
    hypothesis: str
    parent: str
    lever: str
    replicate_of: str
    outside_plan: str
    config: str
    provenance: str
    """Where an imported run comes from; empty for a run of this program."""
    status: str
    decision: str
    reason: str
    decided_by: str
    confidence: float
    gate_baseline: str
    changes: tuple[ChangeRow, ...]
    evals: tuple[Eval, ...]
    gates: Gates
    attempts: tuple[AttemptRow, ...]
    metrics: Metrics
    samples: tuple[Sample, ...]
    labels: tuple[LabelRow, ...]
    baselines: tuple[BaselineRow, ...]
    parts: tuple[PartRow, ...]
    capture: Mapping[str, str]
    packages: Mapping[str, str]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    warm_starts: tuple[WarmStart, ...] = ()
    warm_start_told: str = ""
    """What the warm start was, in one sentence; empty for a run without one."""
    effects: tuple[PromptEffect, ...] = ()
    search: Search | None = None
    """Of a prompt search that has ended."""

    def curve(self, env: str, prompt: str = "run") -> list[Eval]:
        """Return the held-out evals of an environment by step; the base comes first, then a warm start at step 0."""
        chosen = [e for e in self.evals if e.env == env and e.prompt == prompt]
        return sorted(chosen, key=lambda e: (e.subject == "policy", e.step))

    def base(self, env: str, prompt: str = "run") -> Eval | None:
        """Return the base model's eval under the run's or the shipped prompt."""
        found = [e for e in self.evals if e.env == env and e.subject == "base" and e.prompt == prompt]
        return found[-1] if found else None

    def final(self, env: str) -> Eval | None:
        """Return the policy's last eval under the run's prompt."""
        found = [e for e in self.curve(env) if e.subject == "policy"]
        return found[-1] if found else None

    def warm(self, env: str) -> Eval | None:
        """Return the eval of the policy after its warm start, before step 1."""
        return next((e for e in self.curve(env) if e.subject == "policy" and e.step == 0), None)

    def warm_start(self, env: str) -> WarmStart | None:
        """Return what the loop added to the warm start in an environment."""
        return next((warm for warm in self.warm_starts if warm.env == env), None)

    def eval_environments(self) -> list[str]:
        """Return the environments with held-out evals, by name."""
        return sorted({e.env for e in self.evals})


def reward_parts(names: Iterable[str], data: ReportData, env: str) -> list[str]:
    """Return the reward and its components, in order: what shares the scale from 0 to 1.

    Counts and lengths are in the table. Without training metrics (an import) every name is kept.
    """
    parts = {"reward", *data.metrics.components(env)}
    return [name for name in metric_order(list(names)) if name in parts or len(parts) == 1]


def metric_order(names: Mapping[str, Any] | Sequence[str] | set[str]) -> list[str]:
    """Return metric names with the reward first, then accuracy, then by name."""
    rank = {"reward": 0, "accuracy": 1}
    return sorted(names, key=lambda name: (rank.get(name, 2), name))
