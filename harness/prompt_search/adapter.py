"""Between GEPA and this project: evaluations through the project's own engine, cache, budget and verifiers.

Guards against what GEPA 0.1.4 does with an adapter:

- it asks for traces on whole validations too (gepa-ai/gepa issue 428): only first trials get them here;
- it keeps what it evaluated in a pickled folder, scores of failures included (issues 453, 456): it gets no folder, and
  the project's cache holds neither failures nor anything that runs;
- it goes on, silently and without end, when a proposer raises or is absent: the error is kept, and `stop` ends the
  search with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gepa.core.adapter import EvaluationBatch

from harness.core.canonical import content_sha
from harness.core.errors import ConfigError, InfraError
from harness.core.seeds import derive_seed
from harness.core.types import FailureClass, Rollout, Task
from harness.envs.base import Environment, feedback_of
from harness.evaluation.heldout import item_record
from harness.inference.chat import render_chat
from harness.program.prompts import prompt_sha
from harness.prompt_search.budget import Budget, BudgetSpentError
from harness.prompt_search.cache import Cache, Evaluation, Proposal, evaluation_key
from harness.prompt_search.overlap import TrainingText
from harness.prompt_search.proposer import Proposer
from harness.prompt_search.screening import screen
from harness.prompt_search.splits import Guard
from harness.rollouts.collect import Engine, Sampling, collect

CHUNK = 64
"""Tasks per call of the engine, so per flush of the cache; what a prompt begins with is computed once per call."""
TRIES = 3
"""Times an evaluation that machine or tool spoiled is made before the search gives up."""
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Player:
    """Plays tasks of one environment under a candidate.

    Args:
        engine: samples.
        model: what the engine samples from: name, revision and adapter hash.
        sampling: how.
        seed: of all samples; the same task meets the same random numbers under every candidate.
        batch: identifies this kind of sample in the seeds: `search` or `scoring`.
        window: tokens the model can read; None when not known.
    """

    engine: Engine
    tokenizer: Any
    eos_ids: frozenset[int]
    env: Environment
    model: str
    sampling: Sampling
    seed: int
    batch: str = "search"
    window: int | None = None

    def seed_of(self, task: Task) -> int:
        """Return the seed of a task's sample."""
        return derive_seed(self.seed, "prompt-search", self.batch, task.id)

    def settings_sha(self) -> str:
        """Return a hash of all that decides a score besides candidate, task, seed and model."""
        own, env = self.sampling, self.env
        settings = [own.max_tokens, own.temperature, own.context, own.max_turns]
        return content_sha([*settings, env.id, env.version, env.verifier_version])

    def play(self, candidate: Mapping[str, str], tasks: Sequence[Task]) -> list[Rollout]:
        """Return one scored rollout of each task, in order."""
        seeds = [[self.seed_of(task)] for task in tasks]
        own = (self.engine, self.tokenizer, self.eos_ids, self.env)
        return collect(*own, tasks, 1, self.sampling, seeds, candidate)

    def problem(self, candidate: Mapping[str, str], tasks: Sequence[Task]) -> str | None:
        """Return why a candidate cannot be played, from these tasks; None when it can."""
        try:
            for task in tasks:
                ids = render_chat(self.tokenizer, self.env.start(task, candidate).messages)
                if len(ids) + self.sampling.max_tokens > self.sampling.context:
                    return f"{len(ids)} prompt tokens leave no room for a reply"
        except ConfigError as error:
            return error.message
        return None


@dataclass
class Evaluator:
    """Evaluates candidates, paying only for what the cache does not hold.

    What the cache holds is charged to the budget all the same when this process meets it first, so a resumed search
    comes to its end where the uninterrupted one does.

    Args:
        player: plays what is new.
        guard: refuses tasks that a search must not see.
        on_progress: told after every batch.
        phase: what it is told: `search` or `scoring`.
    """

    player: Player
    cache: Cache
    budget: Budget
    guard: Guard
    on_progress: Progress
    phase: str = "search"
    seen: dict[str, dict[str, Evaluation]] = field(default_factory=dict)
    """By hash of a candidate and task id, everything this search has evaluated, in that order."""
    texts: dict[str, dict[str, str]] = field(default_factory=dict)
    """The candidates by hash."""

    def evaluate(self, candidate: Mapping[str, str], tasks: Sequence[Task]) -> list[Evaluation]:
        """Return the evaluation of each task under a candidate.

        Raises:
            BudgetSpentError: when those that are new to this search do not fit the budget; none was then made.
            InfraError: when machine, tool or verifier failed again and again.
            RefusedError: when one of the tasks is held out.
        """
        self.guard.check(tasks)
        sha = prompt_sha(candidate)
        self.texts.setdefault(sha, dict(candidate))
        known = self.seen.setdefault(sha, {})
        new = [task for task in {task.id: task for task in tasks}.values() if task.id not in known]
        if new:
            self.budget.reserve(len(new))
            self._meet(sha, candidate, new, known)
            spent = self.budget.spent
            mean = sum(known[task.id].item.reward for task in tasks) / len(tasks)
            done = {"step": spent.evaluations, "steps": self.budget.limits.evaluations}
            self.on_progress({"phase": self.phase, "env": self.player.env.id, **done, "reward": mean})
        return [known[task.id] for task in tasks]

    def _meet(
        self, sha: str, candidate: Mapping[str, str], tasks: Sequence[Task], known: dict[str, Evaluation]
    ) -> None:
        keys = {task.id: self._key(sha, task) for task in tasks}
        unpaid = [task for task in tasks if keys[task.id] not in self.cache.evaluations]
        for start in range(0, len(unpaid), CHUNK):
            self._pay(candidate, unpaid[start : start + CHUNK], keys)
        for task in tasks:
            evaluation = known[task.id] = self.cache.evaluations[keys[task.id]]
            self.budget.spent.add(1, evaluation.tokens, 0.0, evaluation.seconds)

    def _key(self, sha: str, task: Task) -> str:
        own = self.player
        return evaluation_key(sha, f"{task.id}/{task.sha}", own.seed_of(task), own.model, own.settings_sha())

    def _pay(self, candidate: Mapping[str, str], tasks: Sequence[Task], keys: Mapping[str, str]) -> None:
        """Play tasks until each has a score of its own; what was scored is stored at once."""
        left = list(tasks)
        for _ in range(TRIES):
            began = time.monotonic()
            rollouts = self.player.play(candidate, left)
            seconds = (time.monotonic() - began) / len(left)
            good = [rollout for rollout in rollouts if rollout.score.counts]
            self.cache.add_evaluations((keys[rollout.task.id], self._evaluation(rollout, seconds)) for rollout in good)
            bad = [rollout for rollout in rollouts if not rollout.score.counts]
            for rollout in bad:
                tokens = len(rollout.completion.token_ids)
                why = rollout.score.diagnostics.get("error", "")
                self.cache.note_failure(rollout.task.id, rollout.score.failure or FailureClass.VERIFIER, why, tokens)
                self.budget.spent.add(tokens=tokens)
            left = [rollout.task for rollout in bad]
            if not left:
                return
        failure, why = bad[0].score.failure, bad[0].score.diagnostics.get("error", "")
        raise InfraError(
            f"task {left[0].id} failed {TRIES} times as {failure}: {why}",
            "mend that and run the same command again: nothing that was evaluated is lost, and no failure got a score",
        )

    def _evaluation(self, rollout: Rollout, seconds: float) -> Evaluation:
        feedback = feedback_of(self.player.env, rollout.task, rollout.episode, rollout.score)
        return Evaluation(item_record(rollout), feedback, len(rollout.completion.token_ids), seconds)


class SearchAdapter:
    """What `gepa.optimize` calls.

    Args:
        evaluator: of the search.
        proposer: of new texts.
        traced: ids of the tasks whose traces a proposer may read; validation tasks are not among them.
        admit: returns why a candidate may not be tried, None when it may.
        on_reject: told of each proposal that was not admitted, with the reason.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        proposer: Proposer,
        traced: Sequence[Task],
        admit: Callable[[Mapping[str, str], Mapping[str, str]], str | None],
        on_reject: Callable[[Mapping[str, str], str], None],
    ) -> None:
        self._evaluator, self._proposer = evaluator, proposer
        self._traced = {task.id for task in traced}
        self._admit, self._on_reject = admit, on_reject
        self.selector = proposer.selector
        self._asked = 0
        self.failed: BaseException | None = None
        """What a proposer raised; GEPA swallows it, so the search must look here."""

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Evaluation, str]:
        """Return scores and outputs of a batch, with traces for tasks of the first trials only."""
        if self.failed is not None:
            raise self.failed
        found = self._evaluator.evaluate(candidate, batch)
        traces = found if capture_traces and all(task.id in self._traced for task in batch) else None
        return EvaluationBatch(
            outputs=[evaluation.item.completion or "" for evaluation in found],
            scores=[evaluation.item.reward for evaluation in found],
            trajectories=traces,
            objective_scores=[dict(evaluation.item.components) for evaluation in found],
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch[Evaluation, str], components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return what a proposer reads: for each component the same records, worst first."""
        rows = sorted(eval_batch.trajectories or [], key=lambda evaluation: evaluation.item.reward)
        records = [
            {
                "Inputs": evaluation.item.prompt or "",
                "Generated Outputs": evaluation.item.completion or "",
                "Feedback": evaluation.feedback,
                "Score": {"reward": evaluation.item.reward, **evaluation.item.components},
            }
            for evaluation in rows
        ]
        return dict.fromkeys(components_to_update, records)

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return new texts that may be tried; empty when the proposer has none, or what it has is not admitted."""
        if self.failed is not None:
            raise self.failed
        try:
            texts = self._propose(candidate, reflective_dataset, components_to_update)
            reason = self._admit(candidate, texts) if texts else None
        except BaseException as error:
            self.failed = error
            raise
        if reason is not None:
            self._on_reject(texts, reason)
            return {}
        return texts

    def _propose(
        self,
        candidate: Mapping[str, str],
        dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components: Sequence[str],
    ) -> dict[str, str]:
        """Ask the proposer, or the cache when its answer was paid for before."""
        own, cache, spent = self._proposer, self._evaluator.cache, self._evaluator.budget.spent
        if not own.paid:
            return own.propose(candidate, dataset, components)
        if self._evaluator.budget.exceeded():
            raise BudgetSpentError("proposals")
        records = {name: [dict(row) for row in rows] for name, rows in dataset.items()}
        self._asked += 1  # in the key, so that a proposer asked twice about the same may answer anew
        key = content_sha(["proposal", own.name, prompt_sha(candidate), records, list(components), self._asked])
        if key not in cache.proposals:
            try:
                texts = own.propose(candidate, dataset, components)
            except BaseException:
                cache.note_lost(own.usage())
                raise
            usage = own.usage()
            cache.add_proposal(key, Proposal(texts, usage.tokens, usage.money, usage.seconds))
        stored = cache.proposals[key]
        spent.add(0, stored.tokens, stored.money, stored.seconds)
        return dict(stored.texts)


def admission(
    player: Player, known: Mapping[str, str], training: TrainingText, written: Callable[[str], bool], probe: list[Task]
) -> Callable[[Mapping[str, str], Mapping[str, str]], str | None]:
    """Return the rule that says why proposed texts may not be tried.

    Args:
        known: the seed's texts; unchanged components are not looked at.
        training: the text no instruction may quote.
        written: whether a text was composed of demonstrations whose tasks are on record.
        probe: tasks every candidate must be playable on.
    """

    def admit(candidate: Mapping[str, str], texts: Mapping[str, str]) -> str | None:
        for name, text in texts.items():
            if name not in known:
                return f"there is no component {name[:80]!r}"
            if not written(text) and (problem := screen(name, known[name], text)) is not None:
                return problem
            copy = None if written(text) else training.copied(text)
            if copy is not None:
                return f"{name} copies training text of task {copy[1]}: {copy[0]!r}"
        return player.problem({**candidate, **texts}, probe)

    return admit
