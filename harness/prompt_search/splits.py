"""Parts of the training split for a prompt search, and the guard that keeps held-out items out of it.

Four parts that share no cluster: tasks that may become demonstrations, tasks a proposal is tried on first
(both are search-train), search-validation, and items for the final scoring. Which clusters score is decided
by their names alone, so a second search never selects on items that an earlier one was scored with; the
other three parts are drawn with the seed of the search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError, RefusedError
from harness.core.types import Task

SCORING_SHARE = 0.3
"""Share of the clusters of each label that only the final scoring sees."""
VALIDATION_SHARE = 0.4
FEEDBACK_SHARE = 0.25
"""Shares of the other clusters; what is left may become demonstrations."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The tasks of a search.

    Args:
        demonstrations: may be shown as examples.
        feedback: a proposal meets a few of these before it may cost a whole validation.
        validation: decides which candidate is chosen.
        scoring: unused in the selection, scored once at the end.
    """

    demonstrations: tuple[Task, ...]
    feedback: tuple[Task, ...]
    validation: tuple[Task, ...]
    scoring: tuple[Task, ...]

    @property
    def searched(self) -> tuple[Task, ...]:
        """Every task the selection may look at."""
        return (*self.demonstrations, *self.feedback, *self.validation)


def split_tasks(tasks: Sequence[Task], seed: int) -> Parts:
    """Divide the training split by cluster, each label by itself.

    Args:
        tasks: the training split.
        seed: of the search; does not move the scoring part.

    Raises:
        ConfigError: when a part would be empty.
    """
    by_label: dict[str, set[str]] = {}
    for task in tasks:
        by_label.setdefault(task.label, set()).add(task.cluster)
    part: dict[str, str] = {}
    for label in sorted(by_label):
        ranked = _ranked(by_label[label], "prompt-search/scoring")
        cut = round(SCORING_SHARE * len(ranked))
        rest = _ranked(ranked[cut:], f"prompt-search/{seed}")
        validation = round(VALIDATION_SHARE * len(rest))
        feedback = validation + round(FEEDBACK_SHARE * len(rest))
        names = ("scoring", "validation", "feedback", "demonstrations")
        groups = (ranked[:cut], rest[:validation], rest[validation:feedback], rest[feedback:])
        for name, clusters in zip(names, groups, strict=True):
            for cluster in clusters:
                part.setdefault(cluster, name)
    found = {name: tuple(task for task in tasks if part[task.cluster] == name) for name in set(part.values())}
    parts = Parts(**{name: found.get(name, ()) for name in Parts.__slots__})
    if empty := [name for name in Parts.__slots__ if not getattr(parts, name)]:
        raise ConfigError(
            f"{len(part)} clusters of training tasks are too few for a prompt search: no tasks for {', '.join(empty)}",
            "use an environment with more training tasks, or write the prompt by hand into rl/prompts/",
        )
    return parts


def _ranked(clusters: Iterable[str], salt: str) -> list[str]:
    return sorted(clusters, key=lambda cluster: sha256_hex(f"{salt}/{cluster}"))


def sample_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """Return `count` tasks: labels in turn, every cluster once before any a second time.

    Args:
        tasks: of one part.
        count: how many at most.
        seed: decides which of a label's tasks come first.
    """
    by_label: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: sha256_hex(f"{seed}/{task.id}")):
        by_label.setdefault(task.label, []).append(task)
    ranked = []
    for label, members in sorted(by_label.items()):
        seen: dict[str, int] = {}
        turns = []
        for position, task in enumerate(members):
            turn = seen[task.cluster] = seen.get(task.cluster, -1) + 1
            turns.append((turn, position, task))
        ranked += [(rank, label, task) for rank, (_, _, task) in enumerate(sorted(turns, key=lambda row: row[:2]))]
    return [task for _, _, task in sorted(ranked, key=lambda row: row[:2])][:count]


class Guard:
    """Refuses every task that is not of the training split, or that a held-out task is a sibling of.

    Args:
        train: the training split.
        heldout: every other split.
    """

    def __init__(self, train: Iterable[Task], heldout: Iterable[Task]) -> None:
        self._train = {task.id for task in train}
        held = list(heldout)
        self._keys = {task.id for task in held} | {task.sha for task in held}
        self._clusters = {task.cluster for task in held}

    def check(self, tasks: Iterable[Task]) -> None:
        """Check that a search may look at these tasks.

        Raises:
            RefusedError: naming the first one that it must never see.
        """
        for task in tasks:
            held = task.id in self._keys or task.sha in self._keys or task.cluster in self._clusters
            if held or task.id not in self._train:
                raise RefusedError(
                    f"task {task.id} of {task.env} is {'held out' if held else 'not in the training split'}, and a"
                    " prompt search must not see it",
                    "training and held-out tasks must be disjoint: `harness env show` lists the splits",
                )
