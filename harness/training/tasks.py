"""Which tasks a step trains on: a pure function of seed and position, so a resume needs no cursor."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from harness.core.seeds import derive_seed
from harness.core.types import Task

Item = TypeVar("Item")


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


class TaskStream:
    """An endless, addressable sequence of tasks of one environment.

    Args:
        tasks: the training split.
        balance: when true, labels come equally often: every cycle visits each label once.
        seed: the run's seed.
    """

    def __init__(self, tasks: Sequence[Task], balance: bool, seed: int) -> None:
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
