"""From a search to what is kept of it: the chosen prompt, its scores with intervals, and how it was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.core.types import Task
from harness.envs.base import Searchable
from harness.evaluation.records import ItemRecord
from harness.prompt_search.adapter import Evaluator
from harness.prompt_search.budget import SCORING_ITEMS
from harness.prompt_search.history import Found, History
from harness.prompt_search.offline import OfflineProposer, Shown
from harness.prompt_search.proposer import Proposer
from harness.prompt_search.scoring import gains, means, random_demonstrations, score_prompts
from harness.prompt_search.search import Question, search
from harness.prompt_search.splits import sample_tasks

EXAMPLES = 5
"""Validation tasks shown with what the model wrote before and after."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a search found.

    Args:
        question: what was searched.
        history: candidates and what became of every proposal.
        ended: the limit that was reached, or `proposals` when there were no more.
        shown: the training tasks in the chosen prompt.
        validation: by `seed` and `found` the records that chose.
        scoring: by prompt the records of the final scoring.
        names: metrics that are told.
    """

    question: Question
    history: History
    ended: str
    shown: tuple[Task, ...]
    validation: Mapping[str, Sequence[ItemRecord]]
    scoring: Mapping[str, Sequence[ItemRecord]]
    names: tuple[str, ...]
    confidence: float

    @property
    def chosen(self) -> Found:
        """The candidate with the highest mean reward on search-validation."""
        return self.history.best()

    @property
    def prompt_id(self) -> str:
        """The id of its file: after the hash of its texts, so that one id never means two prompts."""
        return f"found-{self.chosen.sha[:8]}"

    def result(self) -> dict[str, Any]:
        """Return what the ledger and the prompt's file say of the search."""
        chosen, seed = self.chosen, self.history.found[0]
        return {
            "chosen": chosen.index,
            "candidates": len(self.history.found),
            "proposals": len(self.history.steps),
            "ended": self.ended,
            "spent": asdict(self.history.budget.spent),
            "limits": asdict(self.history.budget.limits),
            "sizes": self.question.sizes._asdict(),
            "seed_sha": seed.sha,
            "prompt_sha": chosen.sha,
            "demonstrations": len(self.shown),
            "validation": self._compared(self.validation),
            "scoring": self._compared(self.scoring),
        }

    def _compared(self, records: Mapping[str, Sequence[ItemRecord]]) -> dict[str, Any]:
        """Return means of each prompt, and what the found one gains over each other."""
        told: dict[str, Any] = {name: means(items, self.names, self.confidence) for name, items in records.items()}
        found = records["found"]
        others = {name: items for name, items in records.items() if name != "found"}
        told["gain"] = {name: gains(found, items, self.names, self.confidence) for name, items in others.items()}
        return told | {"items": len(found), "clusters": len({item.cluster for item in found})}

    def record(self) -> dict[str, Any]:
        """Return all that a report shows: candidates with their texts and scores, every proposal, examples."""
        return self.result() | {
            "history": [found.to_json() for found in self.history.found],
            "steps": self.history.steps,
            "examples": self._examples(),
            "shown": [task.id for task in self.shown],
            "clusters": {item.task: item.cluster for item in self.validation["seed"]},
        }

    def _examples(self) -> list[dict[str, Any]]:
        """Return the validation tasks whose reward moved most, with both replies."""
        before = {item.task: item for item in self.validation["seed"]}
        moved = sorted(
            self.validation["found"], key=lambda item: (-abs(item.reward - before[item.task].reward), item.task)
        )
        return [
            {
                "task": item.task,
                "before": before[item.task].completion,
                "after": item.completion,
                "reward": [before[item.task].reward, item.reward],
            }
            for item in moved[:EXAMPLES]
        ]


def find(
    question: Question, evaluator: Evaluator, proposer: Proposer, confidence: float, items: int = SCORING_ITEMS
) -> Finding:
    """Search, then score the found prompt, the seed and random demonstrations once on unseen items.

    Args:
        confidence: of every interval.
        items: of the final scoring at most; the first ones are the same for every seed.

    Raises:
        As `search.search`.
    """
    composed = proposer if isinstance(proposer, OfflineProposer) else None
    history, ended = search(question, evaluator, proposer, lambda text: bool(composed and composed.shown(text)))
    chosen, seed = history.best(), history.found[0]
    shown = next((s for text in chosen.texts.values() if composed and (s := composed.shown(text))), None)
    validation = {
        name: [evaluator.seen[found.sha][task.id].item for task in question.validation]
        for name, found in (("seed", seed), ("found", chosen))
    }
    tasks = sample_tasks(question.parts.scoring, items, 0)
    prompts = {"found": [chosen.texts], "seed": [seed.texts]} | _random(question, evaluator, chosen, shown)
    return Finding(
        question=question,
        history=history,
        ended=ended,
        shown=(shown.tasks if shown else ()) or question.shown_by(chosen.texts),
        validation=validation,
        scoring=score_prompts(evaluator, prompts, tasks),
        names=("reward", *evaluator.player.env.component_names()),
        confidence=confidence,
    )


def _random(
    question: Question, evaluator: Evaluator, chosen: Found, shown: Shown | None
) -> dict[str, list[dict[str, str]]]:
    """Return random demonstrations of equal count, in the found prompt and in the seed's; none if none were found."""
    env, pool = evaluator.player.env, question.parts.demonstrations
    if shown is None or not isinstance(env, Searchable):
        return {}
    plain = Shown(shown.tasks, env.demonstration_styles()[0])
    return {
        "random": random_demonstrations(env, chosen.texts, shown, pool, question.seed),
        "random_in_seed": random_demonstrations(env, question.seed_candidate, plain, pool, question.seed),
    }
