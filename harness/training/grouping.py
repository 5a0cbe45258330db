"""From the scored rollouts of one task to a group with advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.config.schema import TrainSection
from harness.core.types import Rollout
from harness.training.advantages import batch_scale, component_advantages, group_advantages, overlong_penalty
from harness.training.batches import Group


@dataclass(frozen=True, slots=True)
class Shaping:
    """What besides its score decides a rollout's advantage.

    Args:
        max_tokens: length limit of one reply in this environment.
        overlong_buffer: tokens before the limit over which the penalty grows; 0 turns it off.
        overlong_penalty: reward taken from a reply at the limit.
        component_weights: of the reward components under `train.advantage = "component"`; 1 where none is given.
    """

    max_tokens: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    component_weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, train: TrainSection, max_tokens: int) -> Shaping:
        """Return what a run's config says for an environment with this length limit."""
        return cls(max_tokens, train.overlong_buffer, train.overlong_penalty, train.component_weights)

    def penalty(self, rollout: Rollout) -> float:
        """Return what is added to a rollout's reward for the length of its longest reply; 0 or less."""
        longest = max((len(segment.token_ids) for segment in rollout.segments if segment.sampled), default=0)
        return self.overlong_penalty * overlong_penalty(longest, self.max_tokens, self.overlong_buffer)


PLAIN = Shaping()


def make_group(
    rollouts: Sequence[Rollout], advantage: str, mask_truncated: bool, temperature: float, shaping: Shaping = PLAIN
) -> Group:
    """Return a group with advantages.

    Failed rollouts, masked truncated ones and those without a sampled token stay outside baseline and loss.

    Args:
        rollouts: of one task, at least one.
        advantage: as `train.advantage`; `batch_std` and `component` are divided by `scale_groups` later.
        mask_truncated: leave rollouts that the length limit cut outside.
        temperature: of the sampler.
        shaping: penalty for length, weights of components.

    Raises:
        ValueError: when the rollouts are not of one group with one prompt, whose rewards alone share a baseline.
    """
    if any((rollout.group, rollout.prompt_ids) != (rollouts[0].group, rollouts[0].prompt_ids) for rollout in rollouts):
        raise ValueError("rollouts of different groups or prompts cannot share a baseline")

    def counts(rollout: Rollout) -> bool:
        cut = rollout.episode.finish_reason.truncated
        return rollout.score.counts and any(rollout.sampled) and not (mask_truncated and cut)

    outside = frozenset(index for index, rollout in enumerate(rollouts) if not counts(rollout))
    if advantage == "component":
        parts = [None if index in outside else _components(rollout, shaping) for index, rollout in enumerate(rollouts)]
        advantages = component_advantages(parts, shaping.component_weights)
    else:
        advantages = group_advantages(shaped_rewards(rollouts, outside, shaping), advantage)
    return Group(tuple(rollouts), tuple(advantages), temperature, outside)


def _components(rollout: Rollout, shaping: Shaping) -> Mapping[str, float]:
    """Return the parts of a rollout's reward; the penalty for length is one of them where it is on."""
    extra = {"overlong": shaping.penalty(rollout)} if shaping.overlong_buffer else {}
    return dict(rollout.score.components) | extra


def shaped_rewards(rollouts: Sequence[Rollout], outside: frozenset[int], shaping: Shaping) -> list[float | None]:
    """Return the rewards a baseline is made of; None for rollouts outside it."""
    return [
        None if index in outside else rollout.score.reward + shaping.penalty(rollout)
        for index, rollout in enumerate(rollouts)
    ]


def scale_groups(groups: Sequence[Group], advantage: str, shaping: Mapping[str, Shaping]) -> list[Group]:
    """Return the groups of one step with their advantages divided by what the whole step has in common.

    Args:
        groups: all of them, those without spread included.
        advantage: as `train.advantage`; only `batch_std` and `component` divide.
        shaping: by environment id.
    """
    rewards = [
        shaped_rewards(group.rollouts, group.outside, shaping[group.rollouts[0].task.env])
        if advantage == "batch_std"
        else group.rewards
        for group in groups
    ]
    scale = batch_scale(advantage, rewards, [group.advantages for group in groups])
    if scale == 1.0:
        return list(groups)
    return [replace(group, advantages=tuple(a / scale for a in group.advantages)) for group in groups]
