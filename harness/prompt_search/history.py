"""What a search did, as GEPA tells it through callbacks: candidates, trials, rejections, budget by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.program.prompts import prompt_sha
from harness.prompt_search.budget import Budget


@dataclass(slots=True)
class Found:
    """A candidate that went through a whole validation.

    Args:
        index: GEPA's number; 0 is the seed.
        parents: of it.
        texts: all components.
        scores: reward by validation task.
        spent: evaluations of the search when it was validated.
    """

    index: int
    parents: tuple[int, ...]
    texts: dict[str, str]
    scores: dict[str, float]
    spent: int

    @property
    def mean(self) -> float:
        """Mean reward on search-validation."""
        return sum(self.scores.values()) / len(self.scores)

    @property
    def sha(self) -> str:
        """Hash of the texts."""
        return prompt_sha(self.texts)

    def to_json(self) -> dict[str, Any]:
        """Return the candidate for the record of the search."""
        return {
            "index": self.index,
            "parents": list(self.parents),
            "sha": self.sha,
            "components": self.texts,
            "mean": self.mean,
            "scores": self.scores,
            "evaluations": self.spent,
        }


@dataclass(slots=True)
class History:
    """Collects GEPA's events; also the callback object that GEPA calls.

    Args:
        budget: of the search.
        validation: ids of the validation tasks, in GEPA's order.
    """

    budget: Budget
    validation: list[str]
    found: list[Found] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    """What became of each proposal, in order: `accepted`, `rejected` or `refused`, why, and the budget by then."""
    idle: int = 0
    """Iterations in a row that spent nothing."""
    _spent: int = -1

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """Keep a candidate."""
        scores = {self.validation[key]: float(score) for key, score in event["scores_by_val_id"].items()}
        parents = tuple(int(parent) for parent in event["parent_ids"] if parent is not None)
        spent = self.budget.spent.evaluations
        self.found.append(Found(event["candidate_idx"], parents, dict(event["candidate"]), scores, spent))

    def on_candidate_accepted(self, event: Mapping[str, Any]) -> None:
        """Note that a proposal was worth a validation."""
        self._note("accepted", f"candidate {event['new_candidate_idx']}")

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        """Note that a proposal did not beat its parent, or too many others, on its first trial."""
        self._note("rejected", f"first trial {event['new_score']:.3f}, its parent {event['old_score']:.3f}")

    def refused(self, texts: Mapping[str, str], reason: str) -> None:
        """Note a proposal that was not tried."""
        self._note("refused", reason, texts)

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        """Count iterations that spent nothing, so that a search without proposals ends."""
        spent = self.budget.spent.evaluations
        self.idle = self.idle + 1 if spent == self._spent else 0
        self._spent = spent

    def _note(self, what: str, why: str, texts: Mapping[str, str] | None = None) -> None:
        step: dict[str, Any] = {"what": what, "why": why, "evaluations": self.budget.spent.evaluations}
        self.steps.append(step | ({"components": dict(texts)} if texts else {}))

    def best(self) -> Found:
        """Return the candidate with the highest mean reward on search-validation, of equal ones the first."""
        return max(self.found, key=lambda found: (found.mean, -found.index))
