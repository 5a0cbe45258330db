"""The GRPO loop: sample groups, score them, update the adapter, log, checkpoint, evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.schema import RunConfig
from harness.core.errors import DivergedError, StoppedError
from harness.inference.chat import render_chat
from harness.inference.engine import TransformersEngine
from harness.inference.lora import attach_lora, save_adapter, trainable
from harness.inference.models import LoadedModel
from harness.inference.vllm_engine import VllmEngine
from harness.ledger.superseded import current_rows, read_rows
from harness.rollouts.collect import Engine, Timing
from harness.rollouts.store import write_rollouts
from harness.training.ahead import Ahead, staleness, within_bound
from harness.training.batches import Group
from harness.training.checkpoints import Numerics, Progress, checkpoint_steps, load_checkpoint, save_checkpoint
from harness.training.crew import Crew, Site
from harness.training.draws import Draws, TrainingEnv
from harness.training.fused import fuse_adapters
from harness.training.metrics import append_row, peak_memory_mb, progress_row, rollout_metrics
from harness.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from harness.training.policy import StepStats
from harness.training.preflight import Preflight, add
from harness.training.ranks import ALONE, Ranks
from harness.training.room import Room
from harness.training.sampler import Sampler
from harness.training.tasks import updated_rate
from harness.training.warmup import ROWS, Batches, warm_up, write_summary
from harness.training.watchdogs import Finding, HeldOut, Watchdog, marks, replay

Report = Callable[[dict[str, Any]], None]
EvalHook = Callable[[Engine, int, str | None], None]
"""Called with the engine, the step and the adapter's hash when an eval is due."""
EMPTY_LIMIT = 20
"""Consecutive steps without any usable group after which a run cannot learn any more."""


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
        heldout: returns the held-out points on record, for the watchdog.
        anyway: train although no group of the base model has spread.
        spent_s: seconds that the run has cost before `run` is called, earlier attempts included.
        vllm: the engine to sample with; None samples with transformers from the weights that train.
        ranks: the processes of the run.
        sites: where the tasks come from that several processes share.
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
    heldout: Callable[[], Sequence[HeldOut]] = tuple
    anyway: bool = False
    spent_s: float = 0.0
    vllm: VllmEngine | None = None
    ranks: Ranks = ALONE
    sites: Mapping[str, Site] = field(default_factory=dict)
    progress: Progress = field(default_factory=lambda: Progress(0, 0))
    preflight: Preflight | None = None
    resumed: bool = False
    """Whether a checkpoint was restored; that of step 0 is the end of the warm start."""
    demonstrated_tokens: int = 0
    """Tokens of the replies that this attempt's warm start trained on; they are in `progress.tokens`."""

    def __post_init__(self) -> None:
        seed = self.config.train.seed
        self.model = attach_lora(self.loaded.model, self.config.lora, seed)
        fuse_adapters(self.model)
        self.parameters = trainable(self.model)
        self.optimizer = build_optimizer(self.parameters, self.config.optimizer, self.config.lora.rank)
        self.engine = self.vllm or TransformersEngine(self.loaded, self.model)
        self.sampler = self._sampler(self.vllm) if self.vllm else None
        self.draws = Draws(self.config, self.loaded, self.envs, self._held_engine)
        self.numerics = Numerics.here(self.loaded.device, self.loaded.dtype)
        self.watchdog = Watchdog(self.config.watchdog)
        self.room = Room(self.config.train.microbatch_tokens)
        weights = list(self.parameters.values())
        self.crew = Crew(self.ranks, self.config, self.loaded, self.model, weights, self.engine, self.sites, self.room)
        if self.ranks.size > 1:
            self.engine = self.crew

    model: Any = field(init=False)
    parameters: Any = field(init=False)
    optimizer: Any = field(init=False)
    engine: Engine = field(init=False)
    sampler: Sampler | None = field(init=False)
    draws: Draws = field(init=False)
    ahead: Ahead | None = field(init=False, default=None)
    numerics: Numerics = field(init=False)
    watchdog: Watchdog = field(init=False)
    began: float = field(init=False, default=0.0)
    room: Room = field(init=False)
    crew: Crew = field(init=False)

    def _sampler(self, engine: VllmEngine) -> Sampler:
        """Return what brings the policy to vLLM; it is probed with prompts of the first environment."""
        item = next(iter(self.envs.values()))

        def prompts(count: int) -> list[list[int]]:
            tasks = [item.stream[index] for index in range(count)]
            chats = [item.env.start(task, item.components).messages for task in tasks]
            return [render_chat(self.loaded.tokenizer, chat) for chat in chats]

        seed, temperature = self.config.train.seed, item.sampling.temperature
        return Sampler(engine, self.loaded, self.model, self.folder, self.attempt, seed, temperature, prompts)

    def _held_engine(self) -> AbstractContextManager[Engine]:
        """Return the engine, bound to one version of the policy where another may come while it samples."""
        return self.vllm.pinned() if self.vllm and self.config.train.max_staleness else nullcontext(self.engine)

    def resume(self) -> int:
        """Restore the newest checkpoint and return its step; 0 when there is none."""
        steps = checkpoint_steps(self.folder / "checkpoints")
        if not steps:
            return 0
        self.progress = load_checkpoint(
            self.folder / "checkpoints", steps[-1], self.parameters, self.optimizer, self.numerics, self.config_sha
        )
        self.resumed = True
        step = self.progress.step
        rows = [row for row in current_rows(read_rows(self.folder / "metrics.jsonl")) if row["step"] <= step]
        points = [point for point in self.heldout() if point.step <= step]
        self.watchdog = replay(rows, points, self.config.watchdog)
        return step

    def run(self) -> Progress:
        """Train from where the progress stands to the last step.

        Raises:
            StoppedError: a budget is spent.
            DivergedError: a watchdog stops the run, the gradient is not finite, or no group has had spread for
                `EMPTY_LIMIT` steps.
            RefusedError: no group of the base model has spread.
            InfraError: vLLM is lost, or does not sample from the policy that is trained.
        """
        self.began = time.monotonic()
        last = self.progress.step
        if self.sampler:
            self.sampler.bring(last)
            self.report({"phase": "sampler", "message": self.sampler.describe()})
            self.sampler.check()
        self._heed()  # what stopped an earlier attempt stops this one too, unless the run's file says otherwise
        if last == 0:
            self._begin()
        elif self.eval_due(last):
            self._evaluate(last)
        with self._sampling_ahead(last):
            for step in range(last + 1, self.config.train.steps + 1):
                self._check_budget(time.monotonic() - self.began)
                self._step(step)
                self._ask(step + 1 + self.config.train.max_staleness)
                due = self.eval_due(step)
                if due or step % self.config.checkpoint.interval == 0:
                    self._checkpoint()
                if due:
                    self._evaluate(step)
                self._heed()
        return self.progress

    @contextmanager
    def _sampling_ahead(self, last: int) -> Iterator[None]:
        """Let the engine sample coming batches meanwhile, where rollouts may be of an older policy."""
        if not (self.vllm and self.config.train.max_staleness):
            yield
            return
        with Ahead(self.draws.batch, self.vllm.close) as self.ahead:
            for step in range(last + 1, last + 2 + self.config.train.max_staleness):
                self._ask(step)
            yield

    def _ask(self, step: int) -> None:
        """Ask for the batch of a later step, now that the policy it may be sampled from is on the engine."""
        if self.ahead and step <= self.config.train.steps:
            self.ahead.ask(step, self.progress.pass_rates)

    def _begin(self) -> None:
        """Do what comes before step 1: eval of the base model, warm start and its eval, preflight."""
        if not self.resumed:
            self._evaluate(0, base=True)
        if self.config.warmup.steps:
            if not self.resumed:
                self._warm_up()
            self._evaluate(0)
        self._look_ahead()

    def _warm_up(self) -> None:
        """Train on the demonstrations; the policy is then the checkpoint of step 0, so no resume repeats it."""
        config, tokens = self.config, self.progress.tokens

        def record(step: int, row: dict[str, float]) -> None:
            self.demonstrated_tokens += int(row["warmup/tokens"])
            self.progress = Progress(0, tokens + self.demonstrated_tokens)
            append_row(self.folder / ROWS, self._head(step) | row)
            told = {"loss": row["warmup/loss"], "grad_norm": row["warmup/grad_norm"]}
            self.report({"phase": "warmup", "step": step, "steps": config.warmup.steps, **told})

        weights = {name: item.section.weight for name, item in self.envs.items()}
        batches = Batches(self.loaded, self.envs, weights, config.warmup.items_per_step, config.train.seed)
        model, budget = self.model.get_base_model(), lambda: self._check_budget(time.monotonic() - self.began)
        done = warm_up(model, self.parameters, batches, config, self.room, record, budget)
        write_summary(self.folder, done, {name: item.demonstrated for name, item in self.envs.items()})
        if self.sampler:
            self.sampler.bring(0)
            self.sampler.check()
        self._checkpoint()

    def _evaluate(self, step: int, base: bool = False) -> None:
        """Evaluate the policy of a step, or the base model, and show the result to the watchdog."""
        self.on_eval(self.engine, step, None if base else self._save_adapter(step))
        found = self.watchdog.observe_heldout(point for point in self.heldout() if point.step <= step)
        if found:
            append_row(self.folder / "metrics.jsonl", self._head(step) | marks(found))
        self._tell(found)

    def _tell(self, found: Sequence[Finding]) -> None:
        for finding in found:
            text = f"{finding.action}: {finding.rule}: {finding.reason}"
            self.report({"phase": "watchdog", "step": finding.step, "message": text})

    def _heed(self) -> None:
        """End the attempt when the watchdog has found a reason to."""
        if not self.watchdog.stops:
            return
        if self.progress.step and self.progress.step not in checkpoint_steps(self.folder / "checkpoints"):
            self._checkpoint()
        first, run = self.watchdog.stops[0], self.folder.name
        raise DivergedError(
            f"the watchdog {first.rule} stops the run after step {first.step}: {first.reason}",
            f'`harness decide {run} reject --reason …`; or watchdog.{first.rule} = "mark" in rl/{run}.toml and '
            f"`harness launch {run} --resume` to go on all the same",
        )

    def _head(self, step: int) -> dict[str, Any]:
        return {"step": step, "time": time.time(), "attempt": self.attempt}

    def _look_ahead(self) -> None:
        """Sample groups of the base model, a step's worth at a time, until one has spread.

        The draws have addresses of their own, so those of training stay what they are.

        Raises:
            RefusedError: when none has.
        """
        train = self.config.train
        parts: list[Preflight] = []
        while sum(part.groups for part in parts) < train.preflight_groups:
            first = sum(part.groups for part in parts)
            timing = Timing()
            began = time.monotonic()
            count = min(train.tasks_per_step, train.preflight_groups - first)
            wanted = self.draws.tasks(first, count, self.progress.pass_rates)
            groups = self.draws.groups("preflight", 0, wanted, first, timing)
            scores = [rollout.score for group in groups for rollout in group.rollouts if rollout.score.counts]
            parts.append(
                Preflight(
                    groups=len(groups),
                    informative=sum(any(group.advantages) for group in groups),
                    group_size=train.group_size,
                    right=sum(score.failure is None for score in scores),
                    counted=len(scores),
                    tokens=timing.tokens,
                    seconds=time.monotonic() - began,
                )
            )
            if parts[-1].informative:
                break
        if not parts:
            return
        self.preflight = add(parts)
        who = "warm policy" if self.config.warmup.steps else "base model"
        self.report({"phase": "preflight", "message": self.preflight.describe(who)})
        if not self.anyway:
            self.preflight.check(self.folder.name, who)

    def _check_budget(self, wall_s: float) -> None:
        budget = self.config.budget
        if budget.wall_clock_s is not None and wall_s > budget.wall_clock_s:
            self._stop(
                f"the wall-clock budget of {budget.wall_clock_s:g} s is spent",
                f"`harness launch {self.folder.name} --resume` goes on with a new one",
            )
        if budget.cost is not None and self._cost() > budget.cost:
            self._stop(
                f"the budget of {budget.cost:g} is spent at {budget.price_per_hour:g} an hour",
                f"raise budget.cost in the run's file, then `harness launch {self.folder.name} --resume`",
            )
        if budget.tokens is not None and self.progress.tokens > budget.tokens:
            self._stop(
                f"the budget of {budget.tokens} sampled tokens is spent",
                f"raise budget.tokens in the run's file, then `harness launch {self.folder.name} --resume`",
            )

    def _cost(self) -> float:
        """Return what the run has cost so far, all attempts together."""
        seconds = self.spent_s + time.monotonic() - self.began
        return (self.config.budget.price_per_hour or 0.0) * seconds / 3600

    def _stop(self, reason: str, hint: str) -> None:
        if self.progress.step:
            self._checkpoint()
        raise StoppedError(f"{reason} after step {self.progress.step}", hint)

    def _step(self, step: int) -> None:
        """Sample, score, update and record one step.

        Raises:
            DivergedError: the gradient is not finite, or no group has had spread for `EMPTY_LIMIT` steps.
        """
        began = time.monotonic()
        train = self.config.train
        batch = self.ahead.take(step) if self.ahead else self.draws.batch(step, self.progress.pass_rates)
        groups, timing, waited = batch.groups, batch.timing, time.monotonic() - began
        ages = self._ages(step, groups)
        fresh, old = within_bound(groups, ages, train.max_staleness)
        fresh = self.draws.scaled(fresh)
        groups, usable = fresh + old, [group for group in fresh if any(group.advantages)]
        rate = learning_rate(self.config.optimizer, step, train.steps)
        set_learning_rate(self.optimizer, rate)
        train_began = time.monotonic()
        stats = self._update(step, usable) if usable else None
        times = {"time/train": time.monotonic() - train_began}
        if self.ahead:
            self.ahead.check()
            times |= {"time/wait": waited} | staleness(ages, train.max_staleness)
        empty = 0 if usable else self.progress.empty_steps + 1
        self.progress = Progress(step, self.progress.tokens + timing.tokens, empty, self._updated_rates(groups))
        by_env = self._store(step, groups)
        if self.sampler:
            times |= self.sampler.bring(step)
        times["time/step"] = time.monotonic() - began
        row = rollout_metrics(by_env) | (stats.metrics() if stats else {}) | times
        row |= {
            "train/groups_used": float(len(usable)),
            "optim/learning_rate": rate,
            "optim/effective_step": rate * self.config.lora.alpha / self.config.lora.rank,
        }
        row |= _timings(timing) | self._extra(step, groups)
        self._record(step, row, list(by_env))
        if self.sampler:
            self.sampler.check()
        if empty >= EMPTY_LIMIT:
            raise DivergedError(
                f"no group had any spread in the last {empty} steps, so there is no gradient",
                "try a searched prompt, a higher sampling.temperature, or train.balance_labels = true",
            )

    def _ages(self, step: int, groups: Sequence[Group]) -> list[int]:
        """Return how many updates the policy that sampled each group is behind the one that the step trains."""
        if self.sampler is None or self.ahead is None:
            return [0] * len(groups)
        return [self.sampler.age(str(group.rollouts[0].version), step - 1) for group in groups]

    def _update(self, step: int, usable: Sequence[Group]) -> StepStats:
        """Run the optimizer on the groups of a step that have spread."""
        limit = max(item.sampling.max_tokens * item.sampling.max_turns for item in self.envs.values())
        return self.crew.update(step, usable, self.optimizer, limit)

    def _extra(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics that only some runs have."""
        train = self.config.train
        row: dict[str, float] = {}
        if train.resample_groups:
            row["train/groups_resampled"] = float(len(groups) - train.tasks_per_step)
        if self.config.budget.price_per_hour:
            row["perf/cost"] = self._cost()
        if self.preflight and step == 1:
            row |= self.preflight.metrics()
        return row

    def _record(self, step: int, row: dict[str, float], envs: Sequence[str]) -> None:
        """Show a step's metrics to the watchdog, append them and report them."""
        head = self._head(step)
        found = self.watchdog.observe(head | row)
        row |= marks(found)
        append_row(self.folder / "metrics.jsonl", head | dict(sorted(row.items())))
        self.report(progress_row(step, self.config.train.steps, row, envs))
        self._tell(found)

    def _updated_rates(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the running pass rates after a step; nothing is kept without a curriculum."""
        if self.config.train.curriculum == "none":
            return {}
        rates = dict(self.progress.pass_rates)
        for group in groups:
            task = group.rollouts[0].task
            scores = [rollout.score for rollout in group.rollouts if rollout.score.counts]
            if scores:
                key, right = f"{task.env}/{task.id}", sum(score.failure is None for score in scores) / len(scores)
                rates[key] = updated_rate(rates.get(key), right)
        return rates

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


def _timings(timing: Timing) -> dict[str, float]:
    return {
        "time/generate": timing.generate_s,
        "time/score": timing.score_s,
        "perf/tokens_per_s": timing.tokens / max(timing.generate_s, 1e-9),
        "perf/peak_memory_mb": peak_memory_mb(),
    }
