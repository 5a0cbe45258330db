"""What a search may spend, what it has spent, and the floor below which it would find nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from harness.core.errors import UsageError

SCORING_ITEMS = 240
"""Items of the final scoring, outside the budget: a gain of a fifth of the spread of rewards shows."""
PROPOSALS_AT_LEAST = 3
"""Accepted proposals that the smallest budget must have room for."""


class BudgetSpentError(Exception):
    """The next batch would go over the budget; ends the search, and what was found so far stands."""


class Sizes(NamedTuple):
    """Tasks per validation and per first trial of a proposal."""

    validation: int
    minibatch: int

    @property
    def floor(self) -> int:
        """Evaluations of the seed and of three accepted proposals.

        Source: the cost of an accepted proposal is a minibatch and a validation (GEPA 0.1.4,
            `GEPAEngine.run`); issue 375 of gepa-ai/gepa is what happens below it.
        """
        return self.minibatch + self.validation + PROPOSALS_AT_LEAST * (self.minibatch + self.validation)


def sizes_for(evaluations: int, validation: int | None = None, minibatch: int | None = None) -> Sizes:
    """Return sizes that a budget can afford: a tenth of it for a validation, a third of that for a first trial.

    Args:
        evaluations: the budget in task evaluations.
        validation: asked for; None for the usual size.
        minibatch: asked for; None for the usual size.
    """
    chosen = validation or min(100, max(16, evaluations // 10))
    return Sizes(chosen, minibatch or max(8, chosen // 3))


@dataclass(frozen=True, slots=True)
class Limits:
    """The budget of a search; None has no limit.

    Args:
        evaluations: episodes of the search, the final scoring not among them.
        tokens: sampled ones of the task model, and all of the reflection model.
        money: in the currency of the prices given for the reflection model.
        seconds: spent on evaluations and proposals, over all attempts.
    """

    evaluations: int
    tokens: int | None = None
    money: float | None = None
    seconds: float | None = None

    def check(self, sizes: Sizes) -> None:
        """Check that the search could accept anything.

        Raises:
            UsageError: when the budget is below the floor, or a limit is not positive.
        """
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise UsageError(
                    f"a budget of {value} {name} allows nothing", "give a positive number, or leave it out"
                )
        if self.evaluations < sizes.floor:
            raise UsageError(
                f"{self.evaluations} evaluations are too few: the seed and {PROPOSALS_AT_LEAST} accepted proposals take"
                f" {sizes.floor} with {sizes.validation} validation tasks and first trials of {sizes.minibatch}",
                f"--budget {sizes.floor}, or fewer tasks per candidate with --validation and --minibatch",
            )


@dataclass(slots=True)
class Spent:
    """What a search has used so far."""

    evaluations: int = 0
    tokens: int = 0
    money: float = 0.0
    seconds: float = 0.0

    def add(self, evaluations: int = 0, tokens: int = 0, money: float = 0.0, seconds: float = 0.0) -> None:
        """Add what one evaluation or proposal took."""
        self.evaluations += evaluations
        self.tokens += tokens
        self.money += money
        self.seconds += seconds


@dataclass(slots=True)
class Budget:
    """Limits and what was spent of them."""

    limits: Limits
    spent: Spent = field(default_factory=Spent)

    def exceeded(self) -> str | None:
        """Return the name of a limit that is reached; None while there is room."""
        for name, used in asdict(self.spent).items():
            limit = getattr(self.limits, name)
            if limit is not None and used >= limit:
                return name
        return None

    def room(self) -> int:
        """Return the evaluations that are left; 0 when another limit is reached."""
        return 0 if self.exceeded() else self.limits.evaluations - self.spent.evaluations

    def reserve(self, evaluations: int) -> None:
        """Check that a batch fits.

        Raises:
            BudgetSpentError: when it does not, or a limit was reached before.
        """
        name = self.exceeded() or ("evaluations" if evaluations > self.room() else None)
        if name:
            raise BudgetSpentError(name)
