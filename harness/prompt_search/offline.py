"""The proposer that needs no large model: it chooses and orders demonstrations by their measured effect.

It writes nothing of its own. A proposal is a set of search-train tasks shown as examples, their order and style, or an
instruction variant that the environment brings along. What it has learnt stands in the evaluations of the search:

- the residual of an evaluation is its reward less the mean reward of all candidates on the same task;
- the effect of a demonstration is the mean residual, over the candidates that show it, on tasks of its own label,
  shrunk towards the candidate's mean residual on all tasks.

Source: the effect is the influence of an in-context example (Nguyen & Wong 2023, arXiv 2302.11042, equation 1: mean
    score of the prompts with it less mean score of those without), taken by label because a demonstration mostly moves
    the answers that it shows, and shrunk because a label has few tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.core.seeds import derive_seed
from harness.core.types import Task
from harness.envs.base import Searchable
from harness.prompt_search.cache import Evaluation
from harness.prompt_search.proposer import ReflectiveDataset, Usage

SHRINK = 5
"""Evaluations at the candidate's own mean that an effect is shrunk with."""
TRIES = 8
"""Draws until a proposal is new."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Demonstrations of a candidate: tasks in order, and the style they are written in."""

    tasks: tuple[Task, ...]
    style: str


class OfflineProposer:
    """Proposes demonstrations and instruction variants; see the module.

    Args:
        env: says what may be tried.
        pool: tasks that may be demonstrations.
        played: the tasks of trials and validation, whose evaluations are the measurements.
        seen: by candidate hash and task id, the evaluations of the search so far; read, never written.
        texts: the candidates by hash.
        seed: of the search.
        count: demonstrations of a proposal; one for each label of the pool when None.
    """

    name = "offline"
    paid = False
    selector = "all"

    def __init__(
        self,
        env: Searchable,
        pool: Sequence[Task],
        played: Sequence[Task],
        seen: Mapping[str, Mapping[str, Evaluation]],
        texts: Mapping[str, Mapping[str, str]],
        seed: int,
        count: int | None = None,
    ) -> None:
        self._env, self._seen, self._texts = env, seen, texts
        self._pool: dict[str, list[Task]] = {}
        for task in pool:
            self._pool.setdefault(task.label, []).append(task)
        self._label = {task.id: task.label for task in played}
        self._random = random.Random(derive_seed(seed, "prompt-search", "proposals"))  # noqa: S311 - not cryptography
        self._count = count or len(self._pool)
        self._styles = list(env.demonstration_styles())
        self._variants = [(name, text) for name, texts_ in env.instruction_variants().items() for text in texts_]
        self._shown: dict[str, Shown] = {}
        self._proposed: set[tuple[tuple[str, str], ...]] = set()
        self._turn = 0

    def usage(self) -> Usage:
        """Return nothing: proposals are free."""
        return Usage()

    def shown(self, text: str) -> Shown | None:
        """Return the tasks a component was composed of; None when this proposer did not compose it."""
        return self._shown.get(text)

    def propose(
        self, candidate: Mapping[str, str], reflective_dataset: ReflectiveDataset, components: Sequence[str]
    ) -> dict[str, str]:
        """Return the next thing to try; empty when nothing new was found.

        First a fresh set in every style, then in turn: the demonstrations of highest effect together, an instruction
        variant, the weakest ones drawn anew, another order.
        """
        for _ in range(TRIES):
            texts = self._move(candidate)
            self._turn += 1
            texts = {name: text for name, text in texts.items() if candidate.get(name) != text}
            key = tuple(sorted({**candidate, **texts}.items()))
            if texts and key not in self._proposed:
                self._proposed.add(key)
                return texts
        return {}

    def _move(self, candidate: Mapping[str, str]) -> dict[str, str]:
        shown = next((found for text in candidate.values() if (found := self._shown.get(text))), None)
        if self._turn < len(self._styles) or shown is None:
            return self._compose(Shown(tuple(self.draw(self._random)), self._styles[self._turn % len(self._styles)]))
        moves: list[Callable[[Shown], dict[str, str]]] = [self._merge, self._variant, self._redraw, self._reorder]
        return moves[(self._turn - len(self._styles)) % len(moves)](shown)

    def draw(self, source: random.Random) -> list[Task]:
        """Return fresh demonstrations: labels in turn as far as `count` goes, in random order."""
        labels = sorted(self._pool)
        source.shuffle(labels)
        drawn: list[Task] = []
        for position in range(self._count):
            left = [task for task in self._pool[labels[position % len(labels)]] if task not in drawn]
            drawn += [source.choice(left)] if left else []
        source.shuffle(drawn)
        return drawn

    def _compose(self, shown: Shown) -> dict[str, str]:
        texts = self._env.demonstrations(shown.tasks, shown.style)
        for text in texts.values():
            self._shown[text] = shown
        return texts

    def _merge(self, shown: Shown) -> dict[str, str]:
        """Put in each place the demonstration of that label with the highest effect."""
        effects = self.effects()
        known = {task.id: task for found in self._shown.values() for task in found.tasks}
        ranked = sorted((task for task in known.values() if task.id in effects), key=lambda t: (-effects[t.id], t.id))
        taken: list[Task] = []
        for task in shown.tasks:
            best = next((other for other in ranked if other.label == task.label and other not in taken), task)
            taken.append(best)
        return self._compose(Shown(tuple(taken), shown.style))

    def _redraw(self, shown: Shown) -> dict[str, str]:
        """Draw the third of the demonstrations with the lowest effect anew."""
        effects = self.effects()
        weakest = sorted(shown.tasks, key=lambda task: (effects.get(task.id, 0.0), task.id))
        replaced = weakest[: max(1, len(weakest) // 3)]
        tasks = []
        for task in shown.tasks:
            left = [other for other in self._pool[task.label] if other not in shown.tasks and other not in tasks]
            tasks.append(self._random.choice(left) if task in replaced and left else task)
        return self._compose(Shown(tuple(tasks), shown.style))

    def _reorder(self, shown: Shown) -> dict[str, str]:
        """Put the demonstrations of lowest effect last, nearest to the question, where a small model looks most."""
        effects = self.effects()
        tasks = sorted(shown.tasks, key=lambda task: (-effects.get(task.id, 0.0), task.id))
        if tuple(tasks) == shown.tasks:
            self._random.shuffle(tasks)
        return self._compose(Shown(tuple(tasks), shown.style))

    def _variant(self, shown: Shown) -> dict[str, str]:
        """Take the next instruction variant, or the demonstrations in another style."""
        choices = [*self._variants, *(("", style) for style in self._styles if style != shown.style)]
        name, text = self._random.choice(choices) if choices else ("", shown.style)
        return {name: text} if name else self._compose(Shown(shown.tasks, text))

    def effects(self) -> dict[str, float]:
        """Return the measured effect of every demonstration that was shown, by task id."""
        rewards: dict[str, list[float]] = {}
        for found in self._seen.values():
            for task, evaluation in found.items():
                rewards.setdefault(task, []).append(evaluation.item.reward)
        usual = {task: fmean(values) for task, values in rewards.items()}
        told: dict[str, list[float]] = {}
        for sha, found in self._seen.items():
            shown = next((s for text in self._texts[sha].values() if (s := self._shown.get(text))), None)
            if shown is None or not found:
                continue
            residuals = {task: evaluation.item.reward - usual[task] for task, evaluation in found.items()}
            whole = fmean(residuals.values())
            for demonstration in shown.tasks:
                own = [value for task, value in residuals.items() if self._label[task] == demonstration.label]
                told.setdefault(demonstration.id, []).append((sum(own) + SHRINK * whole) / (len(own) + SHRINK))
        return {task: fmean(values) for task, values in told.items()}
