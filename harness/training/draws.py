"""The batch of a step: which tasks, which seeds, and their scored groups with advantages.

Nothing here changes, so a thread may draw the batch of a later step while the trainer trains on an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from harness.config.schema import EnvSection, RunConfig
from harness.core.seeds import derive_seed
from harness.core.types import Rollout, Task
from harness.envs.base import Environment
from harness.inference.models import LoadedModel
from harness.inference.vllm_engine import PinnedEngine
from harness.rollouts.collect import Engine, Sampling, Timing, collect
from harness.training.batches import Group
from harness.training.grouping import Shaping, make_group, scale_groups
from harness.training.tasks import Curriculum, TaskStream, environment_places

Rates = Mapping[str, float]
"""Running pass rates by `environment/task`, by which a curriculum chooses."""


@dataclass(slots=True)
class TrainingEnv:
    """One training environment: its section of the config, tasks and prompt, and the tasks of the warm start."""

    section: EnvSection
    env: Environment
    stream: TaskStream
    components: Mapping[str, str] | None
    sampling: Sampling
    demonstrated: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """What was sampled for a step.

    Args:
        groups: with advantages, not yet scaled.
        timing: seconds and tokens that it took.
    """

    groups: list[Group]
    timing: Timing


@dataclass(frozen=True, slots=True)
class Draws:
    """Where the batches of a run come from.

    Args:
        config: the run's config.
        loaded: the base model; its tokenizer and end ids are used here.
        envs: by environment id.
        engine: yields what samples; a version of the policy that it is bound to is noted on every rollout.
    """

    config: RunConfig
    loaded: LoadedModel
    envs: Mapping[str, TrainingEnv]
    engine: Callable[[], AbstractContextManager[Engine]]

    def batch(self, step: int, rates: Rates) -> Batch:
        """Sample the groups of a step, those that replace groups without spread included."""
        timing = Timing()
        groups = self._collect(step, 0, self.config.train.tasks_per_step, timing, rates)
        return Batch(groups + self._resample(step, groups, timing, rates), timing)

    def _collect(
        self, step: int, first: int, count: int, timing: Timing, rates: Rates, before: Sequence[Group] = ()
    ) -> list[Group]:
        """Sample `count` groups for the task positions of a step, from `first` on, after the groups `before`."""
        train = self.config.train
        start = (step - 1) * (train.tasks_per_step + train.resample_groups) + first
        taken = {group.rollouts[0].task.id for group in before}
        return self.groups("rollout", step, self.tasks(start, count, rates, taken), first, timing)

    def _resample(self, step: int, groups: Sequence[Group], timing: Timing, rates: Rates) -> list[Group]:
        """Sample further groups, one by one, until as many have spread as a step wants or the cap is reached."""
        train = self.config.train
        extra: list[Group] = []
        while len(extra) < train.resample_groups:
            if sum(any(group.advantages) for group in (*groups, *extra)) >= train.tasks_per_step:
                break
            extra += self._collect(step, train.tasks_per_step + len(extra), 1, timing, rates, (*groups, *extra))
        return extra

    def tasks(self, start: int, count: int, rates: Rates, taken: Collection[str] = ()) -> dict[str, list[Task]]:
        """Return the tasks at `count` positions of the run from `start` on, by environment.

        Args:
            taken: ids of tasks that the step has already.
        """
        train = self.config.train
        weights = {name: item.section.weight for name, item in self.envs.items()}
        curriculum = Curriculum(train.curriculum_low, train.curriculum_high)
        own = {name: _of_env(rates, name) for name in self.envs}
        seen = set(taken)
        wanted: dict[str, list[Task]] = {}
        for name, index in environment_places(weights, start, count):
            stream = self.envs[name].stream
            if train.curriculum == "pass_rate":
                task = curriculum.choose(stream, index, own[name], seen)
            else:
                task = stream[index]
            seen.add(task.id)
            wanted.setdefault(name, []).append(task)
        return wanted

    def groups(
        self, purpose: str, step: int, wanted: Mapping[str, Sequence[Task]], first: int, timing: Timing
    ) -> list[Group]:
        """Sample one group of each task; `purpose`, step and place are the address of its random draws."""
        train, size = self.config.train, self.config.train.group_size
        groups = []
        for name, tasks in wanted.items():
            item = self.envs[name]
            seeds = [
                [derive_seed(train.seed, purpose, step, first + t, task.id, g) for g in range(size)]
                for t, task in enumerate(tasks)
            ]
            rollouts = self._rollouts(item, tasks, seeds, timing)
            parts = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
            shaping = self.shaping(item)
            groups += [
                make_group(part, train.advantage, train.mask_truncated, item.sampling.temperature, shaping)
                for part in parts
            ]
        return groups

    def _rollouts(
        self, item: TrainingEnv, tasks: Sequence[Task], seeds: Sequence[Sequence[int]], timing: Timing
    ) -> list[Rollout]:
        loaded, size = self.loaded, self.config.train.group_size
        with self.engine() as engine:
            rollouts = collect(
                engine, loaded.tokenizer, loaded.eos_ids, item.env, tasks, size, item.sampling, seeds,
                item.components, timing,
            )  # fmt: skip
        if isinstance(engine, PinnedEngine):
            return [replace(rollout, version=engine.version) for rollout in rollouts]
        return rollouts

    def scaled(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups of a step with their advantages divided by what the whole step has in common."""
        shaping = {name: self.shaping(item) for name, item in self.envs.items()}
        return scale_groups(groups, self.config.train.advantage, shaping)

    def shaping(self, item: TrainingEnv) -> Shaping:
        """Return what besides its score decides a rollout's advantage in an environment."""
        return Shaping.of(self.config.train, item.sampling.max_tokens)


def _of_env(rates: Rates, env: str) -> dict[str, float]:
    """Return the pass rates of one environment by task id."""
    prefix = f"{env}/"
    return {key.removeprefix(prefix): rate for key, rate in rates.items() if key.startswith(prefix)}
