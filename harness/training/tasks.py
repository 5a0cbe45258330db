"""Which tasks a step trains on: a pure function of seed and position, so a resume needs no cursor."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.core.seeds import derive_seed
from harness.core.types import Task

Item = TypeVar("Item")
REVISIT = 0.1
"""Share of positions at which a curriculum takes the task as it comes, so that no task is given up for good."""
RECENT = 0.5
"""Weight of the newest group in a task's running pass rate."""


def environment_order(weights: Mapping[str, float], count: int) -> list[str]:
    """Return which environment each of the first `count` positions belongs to.

    Every prefix holds each environment as close to its share as whole tasks allow.
    """
    total = sum(weights.values())
    given = dict.fromkeys(weights, 0)
    order = []
    for position in range(1, count + 1):
        name = max(weights, key=lambda env: weights[env] / total * position - given[env])
        given[name] += 1
        order.append(name)
    return order


def environment_places(weights: Mapping[str, float], start: int, count: int) -> list[tuple[str, int]]:
    """Return environment and index within it of the `count` positions of a run from `start` on (0-based)."""
    order = environment_order(weights, start + count)
    return [(order[position], order[:position].count(order[position])) for position in range(start, start + count)]


class TaskStream:
    """An endless, addressable sequence of tasks of one environment.

    Args:
        tasks: the training split.
        balance: when true, labels come equally often: every cycle visits each label once.
        seed: the run's seed.
    """

    def __init__(self, tasks: Sequence[Task], balance: bool, seed: int) -> None:
        self.tasks = tuple(tasks)
        self._seed = seed
        self._by_label: dict[str, list[Task]] = {}
        for task in tasks:
            self._by_label.setdefault(task.label if balance else "", []).append(task)
        self._labels = sorted(self._by_label)

    def __getitem__(self, position: int) -> Task:
        """Return the task at `position` (0-based)."""
        cycle, offset = divmod(position, len(self._labels))
        label = self._shuffled(self._labels, "labels", cycle)[offset]
        tasks = self._by_label[label]
        epoch, index = divmod(cycle, len(tasks))
        order = self._shuffled(range(len(tasks)), f"tasks/{label}", epoch)
        return tasks[order[index]]

    def _shuffled(self, items: Sequence[Item], purpose: str, epoch: int) -> list[Item]:
        result = list(items)
        random.Random(derive_seed(self._seed, purpose, epoch)).shuffle(result)  # noqa: S311 - not cryptography
        return result

    def alternatives(self, position: int) -> list[Task]:
        """Return the tasks of the label at `position`, in an order that belongs to the position."""
        label = self[position].label if len(self._labels) > 1 else self._labels[0]
        return self._shuffled(self._by_label[label], "curriculum", position)

    def revisits(self, position: int) -> bool:
        """Say whether a curriculum leaves the task at `position` as it comes; so at a tenth of all positions."""
        seed = derive_seed(self._seed, "revisit", position)
        return random.Random(seed).random() < REVISIT  # noqa: S311 - not cryptography


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Prefer tasks that the policy gets right sometimes: those teach, the others rarely have spread.

    Args:
        low: lowest running pass rate of a preferred task.
        high: highest one.
    """

    low: float
    high: float

    def prefers(self, rate: float | None) -> bool:
        """Say whether a task with this running pass rate is worth its rollouts; None was never tried, so it is."""
        return rate is None or self.low <= rate <= self.high

    def choose(self, stream: TaskStream, position: int, rates: Mapping[str, float], taken: Collection[str]) -> Task:
        """Return the task for a position: the one that comes, or one of its label that is preferred.

        A function of its arguments alone, so a resume with the same rates takes the same tasks.

        Args:
            stream: of the environment.
            position: in the stream, 0-based.
            rates: running pass rates by task id.
            taken: ids of tasks that the step has already.
        """
        task = stream[position]
        if self.prefers(rates.get(task.id)) or stream.revisits(position):
            return task
        others = (other for other in stream.alternatives(position) if other.id not in taken)
        return next((other for other in others if self.prefers(rates.get(other.id))), task)


def updated_rate(old: float | None, now: float) -> float:
    """Return a task's running pass rate after a group with the share `now` of right answers."""
    return now if old is None else (1 - RECENT) * old + RECENT * now
