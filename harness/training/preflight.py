"""Before step 1: has any group of the base model a spread that training could learn from? Pure, and free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.errors import RefusedError


def informative_share(pass_rate: float, group_size: int) -> float:
    """Return the share of groups with both right and wrong answers: 1 - p^G - (1 - p)^G.

    A group of G independent answers, each right with probability p, is all right or all wrong otherwise, and then has
    no spread under a reward that only tells right from wrong. The function is concave in p, so at the mean pass rate
    of many tasks it is an upper bound of their mean share.

    Args:
        pass_rate: p, from 0 to 1.
        group_size: G, at least 1.
    """
    return 1.0 - pass_rate**group_size - (1.0 - pass_rate) ** group_size


@dataclass(frozen=True, slots=True)
class Preflight:
    """What the groups of the base model showed.

    Args:
        groups: groups that were sampled.
        informative: those of them with spread.
        group_size: rollouts per group.
        right: rollouts with a right answer, among `counted`.
        counted: rollouts that count; the others failed outside the model.
        tokens: sampled for it; no part of the run's tokens.
        seconds: what it took.
    """

    groups: int
    informative: int
    group_size: int
    right: int
    counted: int
    tokens: int
    seconds: float

    @property
    def share(self) -> float:
        """Measured share of groups with spread."""
        return self.informative / self.groups

    @property
    def pass_rate(self) -> float:
        """Share of right answers; 0 when nothing counts."""
        return self.right / self.counted if self.counted else 0.0

    def metrics(self) -> dict[str, float]:
        """Return what the first metrics row holds of it."""
        return {
            "preflight/informative_share": self.share,
            "preflight/informative_expected": informative_share(self.pass_rate, self.group_size),
            "preflight/pass_rate": self.pass_rate,
            "preflight/groups": float(self.groups),
            "preflight/tokens": float(self.tokens),
            "time/preflight": self.seconds,
        }

    def describe(self, who: str = "base model") -> str:
        """Return one sentence with the numbers; `who` played the groups."""
        expected = informative_share(self.pass_rate, self.group_size)
        text = (
            f"{self.informative} of {self.groups} groups of the {who} have spread; {self.pass_rate:.1%} of its "
            f"answers are right, which for a reward of right or wrong gives at most {expected:.1%}"
        )
        lost = self.groups * self.group_size - self.counted
        return text + (f"; {lost} rollouts failed outside the model" if lost else "")

    def check(self, run: str, who: str = "base model") -> None:
        """Refuse a run whose base model, or policy after a warm start, gave no group with spread.

        Args:
            run: run id, for the hint.
            who: played the groups.

        Raises:
            RefusedError: with what may help.
        """
        if self.informative:
            return
        raise RefusedError(
            f"{run} cannot learn: {self.describe(who)}",
            "another prompt, easier tasks, a higher sampling.temperature or a larger train.group_size give spread; "
            f"`harness launch {run} --anyway` trains all the same",
        )


def add(parts: Sequence[Preflight]) -> Preflight:
    """Return several probes of one run as one."""
    return Preflight(
        groups=sum(part.groups for part in parts),
        informative=sum(part.informative for part in parts),
        group_size=parts[0].group_size,
        right=sum(part.right for part in parts),
        counted=sum(part.counted for part in parts),
        tokens=sum(part.tokens for part in parts),
        seconds=sum(part.seconds for part in parts),
    )
