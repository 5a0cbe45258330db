"""Run one prompt search: GEPA over the texts of an environment, with this project's evaluations, budget and proposers.

Source: Agrawal et al. 2025, "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning", algorithm 1, as
    in the library gepa 0.1.4. Two things differ from its defaults: first trials use one fixed set of tasks, so that a
    parent is paid for once, and they are a race (`Racing`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gepa.api import optimize

from harness.core.errors import ConfigError, InfraError
from harness.core.types import Task
from harness.prompt_search.adapter import Evaluator, SearchAdapter, admission
from harness.prompt_search.budget import Budget, BudgetSpentError, Sizes
from harness.prompt_search.history import History
from harness.prompt_search.overlap import TrainingText
from harness.prompt_search.proposer import Proposer
from harness.prompt_search.splits import Parts, sample_tasks

BEST_SHARE = 3
"""One in so many first trials leads to a whole validation."""
IDLE_AT_MOST = 20
"""Iterations in a row without an evaluation after which a search has run dry."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched.

    Args:
        seed_candidate: the texts to begin with, all components.
        parts: the tasks.
        sizes: tasks per validation and per first trial.
        seed: of the search.
        seed_shown: training tasks that the seed's demonstrations show.
    """

    seed_candidate: Mapping[str, str]
    parts: Parts
    sizes: Sizes
    seed: int
    seed_shown: tuple[Task, ...] = ()

    def shown_by(self, texts: Mapping[str, str]) -> tuple[Task, ...]:
        """Return the tasks of the seed's demonstrations that these texts still show."""
        changed = all(texts[name] != text for name, text in self.seed_candidate.items())
        return () if changed else self.seed_shown

    @property
    def validation(self) -> list[Task]:
        """The tasks that choose."""
        return sample_tasks(self.parts.validation, self.sizes.validation, self.seed)

    @property
    def trial(self) -> list[Task]:
        """The tasks of first trials."""
        return sample_tasks(self.parts.feedback, self.sizes.minibatch, self.seed)


class _FixedBatch:
    """GEPA's batch sampler: always the same tasks, so that a parent's first trial is in the cache."""

    def next_minibatch_ids(self, loader: Any, state: Any) -> list[Any]:
        return list(loader.all_ids())


class Racing:
    """GEPA's acceptance: a proposal that beats its parent and is in the best third of all first trials so far.

    Beating the parent alone is too little here: from a poor seed nearly everything does, and whole validations of that
    would eat the budget before the search has begun.

    Source: the promotion rule of asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel
        Hyperparameter Tuning", MLSys, algorithm 2) with a reduction factor of 3 and two rungs.
    """

    def __init__(self) -> None:
        self._trials: list[float] = []

    def should_accept(self, proposal: Any, state: Any) -> bool:
        """Say whether a proposal is worth a whole validation."""
        before, after = sum(proposal.subsample_scores_before), sum(proposal.subsample_scores_after)
        self._trials.append(after)
        better = sum(trial > after for trial in self._trials)
        return after > before and better < math.ceil(len(self._trials) / BEST_SHARE)


class _Quiet:
    """GEPA's logger: what it has to say stands in the history."""

    def log(self, message: str) -> None:
        return None


def search(
    question: Question, evaluator: Evaluator, proposer: Proposer, written: Callable[[str], bool] = lambda text: False
) -> tuple[History, str]:
    """Search until the budget is spent or there is nothing left to propose.

    Args:
        written: whether a text was composed of demonstrations whose tasks are on record.

    Returns:
        What was found, and why the search ended: the name of a limit, or `proposals`.

    Raises:
        InfraError: when machine, tool or verifier failed; the same search goes on from its cache.
        HarnessError: what the proposer raised.
    """
    budget, validation, trial = evaluator.budget, question.validation, question.trial
    history = History(budget, [task.id for task in validation])
    known = dict(question.seed_candidate)
    text = TrainingText((*question.parts.searched, *question.parts.scoring), known)
    admit = admission(evaluator.player, known, text, written, [*trial, *validation])
    lost = evaluator.cache.lost
    budget.spent.add(0, lost.tokens, lost.money, lost.seconds)
    adapter = SearchAdapter(evaluator, proposer, trial, admit, history.refused)
    if (problem := evaluator.player.problem(known, [*trial, *validation])) is not None:
        raise ConfigError(f"the seed prompt cannot be played: {problem}", "search from another one with --seed-prompt")
    with contextlib.suppress(BudgetSpentError):
        _optimize(question, adapter, history, budget, trial, validation)
    if isinstance(adapter.failed, BudgetSpentError):
        return history, str(adapter.failed)
    if adapter.failed is not None:
        raise adapter.failed
    room = budget.room() < len(trial) + len(validation)
    return history, budget.exceeded() or ("evaluations" if room else "proposals")


def _optimize(
    question: Question,
    adapter: SearchAdapter,
    history: History,
    budget: Budget,
    trial: Sequence[Task],
    validation: Sequence[Task],
) -> None:
    def stop(state: Any) -> bool:
        over = adapter.failed is not None or history.idle > IDLE_AT_MOST
        return over or budget.room() < len(trial) + len(validation)  # nothing could be accepted any more

    run: Any = optimize  # it takes its collaborators by their methods, which its annotations do not say
    result = run(
        seed_candidate=dict(question.seed_candidate),
        trainset=list(trial),
        valset=list(validation),
        adapter=adapter,
        candidate_selection_strategy="pareto",
        skip_perfect_score=False,
        batch_sampler=_FixedBatch(),
        module_selector=adapter.selector,
        acceptance_criterion=Racing(),
        stop_callbacks=stop,
        callbacks=[history],
        logger=_Quiet(),
        run_dir=None,
        cache_evaluation=False,
        track_best_outputs=False,
        seed=question.seed,
        raise_on_exception=True,
    )
    if len(result.candidates) != len(history.found):  # GEPA only logs what a callback raises
        raise InfraError(f"{len(result.candidates)} candidates were validated and {len(history.found)} recorded")
