"""The GRPO loop: sample groups, score them, update the adapter, log, checkpoint, evaluate."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import EnvSection, RunConfig
from harness.core.errors import DivergedError, StoppedError
from harness.core.seeds import derive_seed
from harness.core.types import FinishReason, Rollout, Task
from harness.envs.base import Environment
from harness.inference.engine import TransformersEngine
from harness.inference.lora import attach_lora, save_adapter, trainable
from harness.inference.models import LoadedModel
from harness.rollouts.collect import Sampling, Timing, collect
from harness.rollouts.store import write_rollouts
from harness.training.advantages import group_advantages
from harness.training.batches import Group
from harness.training.checkpoints import Numerics, Progress, checkpoint_steps, load_checkpoint, save_checkpoint
from harness.training.metrics import append_row, rollout_metrics
from harness.training.optimizer import build_optimizer, learning_rate
from harness.training.policy import update_policy
from harness.training.tasks import TaskStream, environment_order

Report = Callable[[dict[str, Any]], None]
EvalHook = Callable[[TransformersEngine, int, str | None], None]
"""Called with the engine, the step and the adapter's hash when an eval is due."""
EMPTY_LIMIT = 20
"""Consecutive steps without any usable group after which a run cannot learn any more."""


@dataclass(slots=True)
class TrainingEnv:
    """One training environment: its section of the config, tasks and prompt."""

    section: EnvSection
    env: Environment
    stream: TaskStream
    components: Mapping[str, str] | None
    sampling: Sampling


@dataclass(slots=True)
class Trainer:
    """State of one attempt.

    Args:
        config: the run's config.
        config_sha: hash of what decides the learned weights; a checkpoint of another one is refused.
        loaded: the base model.
        envs: by environment id.
        folder: the run directory.
        attempt: number of this attempt, written into every metrics row.
        eval_due: whether an eval follows a step.
        on_eval: runs it.
        report: progress callback.
    """

    config: RunConfig
    config_sha: str
    loaded: LoadedModel
    envs: dict[str, TrainingEnv]
    folder: Path
    attempt: int
    eval_due: Callable[[int], bool]
    on_eval: EvalHook
    report: Report
    progress: Progress = field(default_factory=lambda: Progress(0, 0))

    def __post_init__(self) -> None:
        seed = self.config.train.seed
        self.model = attach_lora(self.loaded.model, self.config.lora, seed)
        self.parameters = trainable(self.model)
        self.optimizer = build_optimizer(self.parameters.values(), self.config.optimizer)
        self.engine = TransformersEngine(self.loaded, self.model)
        self.numerics = Numerics.here(self.loaded.device, self.loaded.dtype)

    model: Any = field(init=False)
    parameters: Any = field(init=False)
    optimizer: Any = field(init=False)
    engine: TransformersEngine = field(init=False)
    numerics: Numerics = field(init=False)

    def resume(self) -> int:
        """Restore the newest checkpoint and return its step; 0 when there is none."""
        steps = checkpoint_steps(self.folder / "checkpoints")
        if not steps:
            return 0
        self.progress = load_checkpoint(
            self.folder / "checkpoints", steps[-1], self.parameters, self.optimizer, self.numerics, self.config_sha
        )
        return self.progress.step

    def run(self) -> Progress:
        """Train from where the progress stands to the last step.

        Raises:
            StoppedError: a budget is spent.
            DivergedError: the gradient is not finite, or no group has had spread for `EMPTY_LIMIT` steps.
        """
        started = time.monotonic()
        last = self.progress.step
        if last == 0 or self.eval_due(last):
            self.on_eval(self.engine, last, self._save_adapter(last) if last else None)
        for step in range(last + 1, self.config.train.steps + 1):
            self._check_budget(time.monotonic() - started)
            self._step(step)
            due = self.eval_due(step)
            if due or step % self.config.checkpoint.interval == 0:
                self._checkpoint()
            if due:
                self.on_eval(self.engine, step, self._save_adapter(step))
        return self.progress

    def _check_budget(self, wall_s: float) -> None:
        budget = self.config.budget
        if budget.wall_clock_s is not None and wall_s > budget.wall_clock_s:
            self._stop(
                f"the wall-clock budget of {budget.wall_clock_s:g} s is spent",
                f"`harness launch {self.folder.name} --resume` goes on with a new one",
            )
        if budget.tokens is not None and self.progress.tokens > budget.tokens:
            self._stop(
                f"the budget of {budget.tokens} sampled tokens is spent",
                f"raise budget.tokens in the run's file, then `harness launch {self.folder.name} --resume`",
            )

    def _stop(self, reason: str, hint: str) -> None:
        if self.progress.step:
            self._checkpoint()
        raise StoppedError(f"{reason} after step {self.progress.step}", hint)

    def _step(self, step: int) -> None:
        began = time.monotonic()
        train = self.config.train
        timing = Timing()
        groups = self._collect(step, 0, train.tasks_per_step, timing)
        for extra in range(train.resample_groups):
            if sum(any(group.advantages) for group in groups) >= train.tasks_per_step:
                break
            groups += self._collect(step, train.tasks_per_step + extra, 1, timing)
        usable = [group for group in groups if any(group.advantages)]
        rate = learning_rate(self.config.optimizer, step, train.steps)
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = rate
        train_began = time.monotonic()
        stats = None
        if usable:
            torch.manual_seed(derive_seed(train.seed, "dropout", step))  # so that a resumed run draws the same masks
            stats = update_policy(
                self.model.get_base_model(),
                list(self.parameters.values()),
                self.optimizer,
                usable,
                train,
                self.config.optimizer.max_grad_norm,
            )
        train_s = time.monotonic() - train_began
        empty = 0 if usable else self.progress.empty_steps + 1
        self.progress = Progress(step, self.progress.tokens + timing.tokens, empty)
        by_env = self._store(step, groups)
        row = rollout_metrics(by_env) | (stats.metrics() if stats else {})
        row |= {
            "train/groups_used": float(len(usable)),
            "optim/learning_rate": rate,
            "time/generate": timing.generate_s,
            "time/score": timing.score_s,
            "time/train": train_s,
            "time/step": time.monotonic() - began,
            "perf/tokens_per_s": timing.tokens / max(timing.generate_s, 1e-9),
            "perf/peak_memory_mb": peak_memory_mb(),
        }
        head = {"step": step, "time": time.time(), "attempt": self.attempt}
        append_row(self.folder / "metrics.jsonl", head | dict(sorted(row.items())))
        self.report(_progress_row(step, train.steps, row, list(by_env)))
        if empty >= EMPTY_LIMIT:
            raise DivergedError(
                f"no group had any spread in the last {empty} steps, so there is no gradient",
                "try a searched prompt, a higher sampling.temperature, or train.balance_labels = true",
            )

    def _collect(self, step: int, first: int, count: int, timing: Timing) -> list[Group]:
        """Sample `count` groups for the task positions of a step, from `first` on."""
        train = self.config.train
        per_step = train.tasks_per_step + train.resample_groups
        weights = {name: item.section.weight for name, item in self.envs.items()}
        start = (step - 1) * per_step + first
        order = environment_order(weights, start + count)
        wanted: dict[str, list[Task]] = {}
        for position in range(start, start + count):
            name = order[position]
            index = order[:position].count(name)
            wanted.setdefault(name, []).append(self.envs[name].stream[index])
        groups = []
        for name, tasks in wanted.items():
            item = self.envs[name]
            size = train.group_size
            seeds = [
                [derive_seed(train.seed, "rollout", step, first + t, task.id, g) for g in range(size)]
                for t, task in enumerate(tasks)
            ]
            loaded = self.loaded
            rollouts = collect(
                self.engine, loaded.tokenizer, loaded.eos_ids, item.env, tasks, size, item.sampling, seeds,
                item.components, timing,
            )  # fmt: skip
            parts = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
            groups += [
                make_group(part, train.advantage, train.mask_truncated, item.sampling.temperature) for part in parts
            ]
        return groups

    def _store(self, step: int, groups: Sequence[Group]) -> dict[str, list[Group]]:
        """Write the step's rollouts; return the groups by environment."""
        by_env: dict[str, list[Group]] = {}
        for group in groups:
            by_env.setdefault(group.rollouts[0].task.env, []).append(group)
        for name, parts in by_env.items():
            rollouts = [rollout for part in parts for rollout in part.rollouts]
            advantages = [advantage for part in parts for advantage in part.advantages]
            write_rollouts(self.folder / "rollouts" / f"step_{step}" / f"{name}.jsonl", rollouts, advantages)
        return by_env

    def _checkpoint(self) -> None:
        save_checkpoint(
            self.folder / "checkpoints",
            self.progress,
            self.parameters,
            self.optimizer,
            self.numerics,
            self.config_sha,
            self.config.checkpoint.keep,
        )

    def _save_adapter(self, step: int) -> str:
        return save_adapter(self.model, self.folder / "adapters" / f"step_{step}")


def make_group(rollouts: Sequence[Rollout], advantage: str, mask_truncated: bool, temperature: float) -> Group:
    """Return a group with advantages; failed rollouts, and masked truncated ones, stay outside baseline and loss."""

    def counts(rollout: Rollout) -> bool:
        cut = rollout.completion.finish_reason is FinishReason.LENGTH
        return rollout.score.counts and not (mask_truncated and cut)

    outside = frozenset(index for index, rollout in enumerate(rollouts) if not counts(rollout))
    rewards = [None if index in outside else rollout.score.reward for index, rollout in enumerate(rollouts)]
    return Group(tuple(rollouts), tuple(group_advantages(rewards, advantage)), temperature, outside)


def peak_memory_mb() -> float:
    """Return the largest resident set of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak / 2**20 if sys.platform == "darwin" else peak / 2**10)


def _progress_row(step: int, steps: int, row: Mapping[str, float], envs: Sequence[str]) -> dict[str, Any]:
    rewards = [row[key] for env in envs if (key := f"train/{env}/reward/mean") in row]
    return {
        "phase": "train",
        "step": step,
        "steps": steps,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "zero_spread": row["train/zero_spread_share"],
        "entropy": row.get("train/entropy"),
        "kl": row.get("train/kl_sampler"),
        "grad_norm": row.get("optim/grad_norm"),
        "tokens_per_s": row["perf/tokens_per_s"],
    }
