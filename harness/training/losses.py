"""The policy loss: a pure function of log probabilities, advantages and a denominator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Loss of one micro-batch and the counts that its metrics average over.

    Args:
        loss: scalar, already divided by the batch's number of active tokens.
        clipped: number of tokens whose clipped branch was taken.
    """

    loss: Tensor
    clipped: Tensor


def dapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, active_tokens: int, clip_low: float, clip_high: float
) -> LossOutput:
    """Return the clipped policy loss averaged over all active tokens of the optimizer batch.

    Args:
        logprobs: (N,) log probabilities under the policy, with gradient.
        old_logprobs: (N,) under the policy that sampled, without gradient.
        advantages: (N,) each token's rollout advantage.
        active_tokens: tokens of the whole optimizer batch, over all micro-batches.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 8: token-level mean with decoupled
    clipping bounds.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(plain, bounded).sum() / max(active_tokens, 1)
    return LossOutput(loss, (bounded < plain).sum())
