"""Sample the batches of coming steps beside the training, from policies that are at most a few updates behind.

The batch of step b may be asked for once the policy of step b - 1 - S is on the engine, with S = `train.max_staleness`.
What it is sampled from is then at most S updates behind the policy that trains on it, and the loss is told which
probabilities it was sampled with. One thread samples one batch after the other, and every call to the engine holds the
newest version there is when the call begins (`VllmEngine.pinned`): all turns of an episode, and all rollouts of a
group, are one policy's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType

from harness.training.batches import Group
from harness.training.draws import Batch, Rates

LOOK_S = 0.5
"""Seconds that a wait for a batch goes on at once: a signal that another thread received is heeded in between."""
PATIENCE_S = 10.0
"""Seconds that the thread has to end once its engine is gone; a tool that an episode waits for may take longer."""


class Ahead:
    """A thread that samples, in the order in which the steps are asked for.

    Args:
        draw: samples the batch of a step, given the pass rates by which its tasks are chosen.
        end: ends what a call of `draw` waits for; called when the block is left before all batches were taken.
    """

    def __init__(self, draw: Callable[[int, Rates], Batch], end: Callable[[], None]) -> None:
        self._draw, self._end = draw, end
        self._jobs: queue.SimpleQueue[tuple[int, Rates, Future[Batch]] | None] = queue.SimpleQueue()
        self._batches: dict[int, Future[Batch]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampling-ahead", daemon=True)

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._jobs.put(None)
        if self._batches:
            self._end()
        self._thread.join(PATIENCE_S)

    def ask(self, step: int, rates: Rates) -> None:
        """Ask for the batch of a step, to be sampled after those asked for before."""
        self._batches[step] = Future()
        self._jobs.put((step, rates, self._batches[step]))

    def check(self) -> None:
        """Raise what ended the sampling, if anything did."""
        for batch in self._batches.values():
            if batch.done():
                batch.result()

    def take(self, step: int) -> Batch:
        """Return the batch of a step, waiting for it where need be; batches are taken in the order they were asked for.

        Raises:
            HarnessError: what ended the sampling, an engine that is lost for instance.
        """
        batch = self._batches[step]
        while not batch.done():
            wait([batch], LOOK_S)
        found = batch.result()
        del self._batches[step]
        return found

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stop.is_set():
            step, rates, batch = job
            try:
                batch.set_result(self._draw(step, rates))
            except BaseException as error:  # it is raised in the thread that trains
                batch.set_exception(error)
                return


def within_bound(groups: Sequence[Group], ages: Sequence[int], bound: int) -> tuple[list[Group], list[Group]]:
    """Return the groups that may be trained on, and those that are too old, which get no advantage.

    Args:
        groups: of one step.
        ages: updates that each group's policy is behind the one to be trained.
        bound: the highest age to train on.
    """
    pairs = list(zip(groups, ages, strict=True))
    old = [replace(group, advantages=(0.0,) * len(group.advantages)) for group, age in pairs if age > bound]
    return [group for group, age in pairs if age <= bound], old


def staleness(ages: Sequence[int], bound: int) -> dict[str, float]:
    """Return what a step's row says of the age of its groups: mean and largest within the bound, and the others."""
    young = [age for age in ages if age <= bound]
    row = {"train/groups_stale": float(len(ages) - len(young))}
    if young:
        row |= {"train/staleness_mean": sum(young) / len(young), "train/staleness_max": float(max(young))}
    return row
