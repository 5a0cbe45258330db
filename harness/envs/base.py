"""What an environment is: tasks, a session per episode, and a pure score.

An environment knows nothing of models, tokens or training. Prompt search may change the texts
that `components` returns, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from harness.core.canonical import content_sha
from harness.core.errors import ConfigError, NotFoundError, RefusedError
from harness.core.names import did_you_mean
from harness.core.types import Episode, Message, Score, Task


class Session(Protocol):
    """One episode in progress: what the model sees first, and what each reply leads to."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The opening messages, system message first."""
        ...

    def step(self, reply: str) -> tuple[Message, ...] | None:
        """Return the messages that follow the model's reply, or None when the episode is over."""
        ...


class Environment(Protocol):
    """Tasks, prompt and verifier under one id and version.

    `version` moves when tasks or prompts change meaning, `verifier_version` when scores do.
    """

    @property
    def id(self) -> str:
        """The name used in configs and file names."""
        ...

    @property
    def version(self) -> str:
        """Version of tasks, prompt and answer format together."""
        ...

    @property
    def verifier_version(self) -> str:
        """Version of the scoring rules, the reward variant included."""
        ...

    @property
    def redistributable(self) -> bool:
        """Whether prompts, which hold the source text, may stand in a committed report."""
        ...

    def components(self) -> dict[str, str]:
        """Return the shipped texts that prompt search may replace, by name."""
        ...

    def component_names(self) -> tuple[str, ...]:
        """Return the names of the reward components a score may hold."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split in a fixed order.

        Raises:
            NotFoundError: when there is no such split.
        """
        ...

    def start(self, task: Task, components: Mapping[str, str] | None = None) -> Session:
        """Open an episode on `task`; `components` replace shipped texts of the same name.

        Raises:
            ConfigError: when a component has an unknown name or cannot be rendered.
        """
        ...

    def score(self, task: Task, episode: Episode) -> Score:
        """Score an episode. Pure, and total: any text gets a score."""
        ...


@runtime_checkable
class Explains(Protocol):
    """An environment whose verifier says in words what was wrong."""

    def feedback(self, task: Task, episode: Episode, score: Score) -> str:
        """Return what a writer of prompts should know about an episode. Pure and total, as `score` is."""
        ...


@runtime_checkable
class Searchable(Protocol):
    """An environment that says what prompt search may try without a large model."""

    def instruction_variants(self) -> Mapping[str, Sequence[str]]:
        """Return by component texts that may stand in place of the shipped one."""
        ...

    def demonstration_styles(self) -> Sequence[str]:
        """Return the ways in which a task can be shown as an example; the first is the usual one."""
        ...

    def demonstrations(self, tasks: Sequence[Task], style: str) -> dict[str, str]:
        """Return the component, by its name, that shows these tasks as examples in this order.

        Raises:
            ConfigError: for an unknown style.
        """
        ...


def feedback_of(env: Environment, task: Task, episode: Episode, score: Score) -> str:
    """Return what the environment says about an episode; of one that says nothing, the diagnostics and components."""
    if isinstance(env, Explains):
        return env.feedback(task, episode, score)
    told = [f"{name}: {text}" for name, text in score.diagnostics.items()]
    return "; ".join([*told, *(f"{name} {value:g}" for name, value in score.components.items())])


@dataclass(frozen=True, slots=True)
class SingleTurnSession:
    """A session that ends with the first reply."""

    messages: tuple[Message, ...]

    def step(self, reply: str) -> tuple[Message, ...] | None:
        """Return None: one reply is the whole episode."""
        return None


def tasks_sha(env: Environment, split: str) -> str:
    """Return one hash over the content of a split's tasks, in order.

    Raises:
        NotFoundError: when there is no such split.
    """
    return content_sha([task.sha for task in env.tasks(split)])


def merge_components(shipped: Mapping[str, str], replaced: Mapping[str, str] | None) -> dict[str, str]:
    """Return the shipped texts with some of them replaced.

    Raises:
        ConfigError: when `replaced` names a text the environment does not have.
    """
    for name in replaced or {}:
        if name not in shipped:
            raise ConfigError(f"unknown prompt component {name[:80]!r}", did_you_mean(name, shipped))
    return {**shipped, **(replaced or {})}


def unknown_split(env: str, split: str, known: Sequence[str]) -> NotFoundError:
    """Return the error for a split that does not exist."""
    return NotFoundError(f"environment {env} has no split {split[:80]!r}", did_you_mean(split, known))


def without_shown(tasks: Sequence[Task], shown: Collection[str]) -> tuple[Task, ...]:
    """Return the tasks that a prompt does not give away: not those it shows, nor others of their clusters.

    Args:
        tasks: the training split.
        shown: ids of tasks that stand in the prompt as demonstrations.
    """
    clusters = {task.cluster for task in tasks if task.id in shown}
    return tuple(task for task in tasks if task.cluster not in clusters)


def check_disjoint(env: Environment, train: str = "train", heldout: str = "heldout") -> None:
    """Check that no task, content or cluster is in both splits; see `check_tasks_disjoint`."""
    check_tasks_disjoint(env.id, env.tasks(train), env.tasks(heldout))


def check_tasks_disjoint(env: str, trained: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Check that no held-out task is trained on: neither its id, nor its content, nor its cluster.

    Raises:
        RefusedError: naming the first overlap; training on it would leak held-out items.
    """
    ids, contents = {task.id for task in trained}, {task.sha for task in trained}
    clusters = {task.cluster for task in trained}
    for task in heldout:
        if task.id in ids or task.sha in contents or task.cluster in clusters:
            raise RefusedError(
                f"held-out task {task.id} of {env} (or its cluster {task.cluster}) is trained on too",
                "training and evaluation must use disjoint splits; compare [[env]] args with CONTEXT.md",
            )
