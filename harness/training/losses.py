"""Policy losses: pure functions of log probabilities, advantages and counts of the whole optimizer batch.

Notation of a token t of completion i: ratio r = exp(logp - logp_old), advantage A, sampler's probability mu.
Every loss is a sum over tokens divided by a count of the *optimizer batch*, never of the micro-batch, so the
split into micro-batches changes nothing beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.schema import TrainSection

IMPORTANCE_CAPS = {"token": 2.0, "sequence_mask": 3.0, "geometric_mask": 1.01}
"""Caps in use elsewhere: C = 2 of truncated importance sampling in slime, 3 for sequences in TRL 1.16,
0.99 to 1.01 for the geometric mean in SkyRL."""
_PER_SEQUENCE = ("grpo", "gspo")


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The completion tokens of one micro-batch, completion after completion (N tokens in all).

    Args:
        logprobs: (N,) log probabilities (nats) under the policy, with gradient.
        old_logprobs: (N,) under the policy the ratio is taken against, without gradient.
        advantages: (N,) each token's rollout advantage.
        lengths: tokens of each completion, in layout order; they add up to N.
        sampler_logprobs: (N,) what the engine reported; needed by `dppo` and by an importance correction.
        reference_logprobs: (N,) under the reference policy; needed when `train.kl_beta` is above 0.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    lengths: Sequence[int]
    sampler_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimizer batch, all micro-batches together.

    Args:
        tokens: completion tokens in the loss.
        sequences: completions in the loss that have at least one token.
        max_tokens: the length limit of a completion; the loss `dr_grpo` needs it.
    """

    tokens: int
    sequences: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Loss of one micro-batch and the sums that its metrics average over.

    Args:
        loss: scalar, already divided by a count of the whole batch.
        clipped: tokens that are clipped or masked by the loss.
        kl: sum over tokens of the estimated KL to the reference (nats); 0 without one.
        corrected: tokens whose importance weight was cut to the cap or to zero.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    corrected: Tensor


def policy_loss(inputs: LossInputs, totals: Totals, section: TrainSection) -> LossOutput:
    """Return the loss `section.loss` of one micro-batch, with importance correction and KL where they are on.

    Raises:
        ValueError: when the section needs log probabilities that `inputs` lacks.
    """
    objective, clipped = token_objective(inputs, section)
    corrected = clipped.new_zeros(())
    if section.importance != "none":
        weights, cut = importance_weights(inputs, section.importance, section.importance_cap)
        objective, corrected = objective * weights, cut.sum()
    kl = objective.detach().new_zeros(())
    if section.kl_beta:
        estimate = reference_kl(inputs)
        objective = objective - section.kl_beta * estimate
        kl = estimate.detach().sum()
    return LossOutput(-aggregate(objective, inputs.lengths, section.loss, totals), clipped.sum(), kl, corrected)


def token_objective(inputs: LossInputs, section: TrainSection) -> tuple[Tensor, Tensor]:
    """Return (N,) what each token adds to the objective, before any mean, and (N,) whether it is clipped.

    - `grpo`, `bnpo`, `dr_grpo`, `dapo`: min(r A, clip(r, 1 - low, 1 + high) A). Shao et al. 2024 (arXiv 2402.03300),
      equation 3; with two bounds Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 10.
    - `gspo`: the same with r = exp(mean of logp - logp_old over the completion). Zheng et al. 2025
      (arXiv 2507.18071), equations 5 and 7.
    - `cispo`: sg(min(r, 1 + high)) A logp. MiniMax 2025 (arXiv 2506.13585), equations 4 and 5, without the lower bound.
    - `dppo`: r A, and 0 where the probability has moved from mu by more than the bound and A pushes it on. The
      binary total-variation mask of DPPO (arXiv 2602.04879).

    Raises:
        ValueError: `dppo` without the sampler's log probabilities.
    """
    advantages = inputs.advantages
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if section.loss == "gspo":
        log_ratio = per_sequence(log_ratio, inputs.lengths, mean=True)
    ratio = torch.exp(log_ratio)
    if section.loss == "cispo":
        cap = 1 + section.clip_high
        return ratio.detach().clamp(max=cap) * advantages * inputs.logprobs, ratio.detach() > cap
    if section.loss == "dppo":
        sampler = _needed(inputs.sampler_logprobs, "dppo", "the sampler's")
        moved = inputs.logprobs.detach().exp() - sampler.exp()
        masked = ((advantages > 0) & (moved > section.clip_high)) | ((advantages < 0) & (moved < -section.clip_low))
        return (ratio * advantages).masked_fill(masked, 0.0), masked
    plain = ratio * advantages
    bounded = ratio.clamp(1 - section.clip_low, 1 + section.clip_high) * advantages
    return torch.minimum(plain, bounded), bounded < plain


def aggregate(values: Tensor, lengths: Sequence[int], loss: str, totals: Totals) -> Tensor:
    """Return this micro-batch's share of the batch mean of (N,) token values.

    - `grpo`, `gspo`: the completion's length, then the number of completions (arXiv 2402.03300, equation 3).
    - `dr_grpo`: completions x length limit, a constant (Liu et al. 2025, arXiv 2503.20783, section 3.2).
    - `dapo`, `bnpo`, `cispo`, `dppo`: all tokens of the batch (arXiv 2503.14476, equation 8).

    `bnpo` divides by the tokens of its batch. Where others take the micro-batch for it, and so get another
    gradient for another split, it is the optimizer batch here, which makes it the same as `dapo`.

    Raises:
        ValueError: `dr_grpo` without a length limit.
    """
    if loss in _PER_SEQUENCE:
        own = torch.tensor(lengths, dtype=values.dtype, device=values.device)
        counts = torch.repeat_interleave(own, torch.tensor(lengths, device=values.device))
        return (values / counts).sum() / max(totals.sequences, 1)
    if loss == "dr_grpo":
        if totals.max_tokens is None:
            raise ValueError("dr_grpo needs the length limit of a completion")
        return values.sum() / max(totals.sequences * totals.max_tokens, 1)
    return values.sum() / max(totals.tokens, 1)


def importance_weights(inputs: LossInputs, kind: str, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Return (N,) weights that correct for a sampler that is not the old policy, and (N,) whether each was cut.

    With d = logp_old - logp_sampler, all without gradient:

    - `token`: min(exp(d), cap) (truncated importance sampling, Ionides 2008; Yao et al. 2025);
    - `sequence_mask`: exp(sum of d over the completion), or 0 where that exceeds the cap;
    - `geometric_mask`: 1, or 0 where exp(mean of d) lies outside [1 / cap, cap].

    A sum over thousands of tokens explodes, so `sequence_mask` drops most long completions; the dropped share is
    logged, and the other two do not depend on the length.

    Args:
        inputs: needs the sampler's log probabilities.
        kind: `token`, `sequence_mask` or `geometric_mask`.
        cap: above 1; `IMPORTANCE_CAPS` when None.

    Raises:
        ValueError: without the sampler's log probabilities, or for an unknown kind.
    """
    sampler = _needed(inputs.sampler_logprobs, f"importance {kind!r}", "the sampler's")
    if kind not in IMPORTANCE_CAPS:
        raise ValueError(f"unknown importance correction {kind!r}")
    limit = cap or IMPORTANCE_CAPS[kind]
    gap = inputs.old_logprobs.detach() - sampler
    if kind == "token":
        ratio = gap.exp()
        return ratio.clamp(max=limit), ratio > limit
    ratio = per_sequence(gap, inputs.lengths, mean=kind == "geometric_mask").exp()
    if kind == "sequence_mask":
        cut = ratio > limit
        return ratio.masked_fill(cut, 0.0), cut
    cut = (ratio > limit) | (ratio < 1 / limit)
    return (~cut).to(ratio.dtype), cut


def reference_kl(inputs: LossInputs) -> Tensor:
    """Return (N,) the estimate of KL(policy || reference) of each token, in nats, with gradient.

    k3 = exp(d) - d - 1 with d = logp_reference - logp (Schulman 2020; arXiv 2402.03300, equation 4), times the
    ratio to the policy that sampled. The ratio is 1 on policy; its gradient is what makes the gradient that of
    the KL (DeepSeek-V3.2, arXiv 2512.02556, "unbiased KL estimate"): k3 alone pulls along KL(reference || policy).

    Raises:
        ValueError: without the reference's log probabilities.
    """
    reference = _needed(inputs.reference_logprobs, "kl_beta", "the reference's")
    gap = reference - inputs.logprobs
    return torch.exp(inputs.logprobs - inputs.old_logprobs) * (gap.exp() - gap - 1)


def per_sequence(values: Tensor, lengths: Sequence[int], *, mean: bool) -> Tensor:
    """Return (N,) every token's completion sum, or mean, of (N,) token values; differentiable."""
    parts = [part for part in values.split(list(lengths)) if len(part)]
    if not parts:
        return values
    return torch.cat([(part.mean() if mean else part.sum()).expand(len(part)) for part in parts])


def _needed(logprobs: Tensor | None, what: str, whose: str) -> Tensor:
    if logprobs is None:
        raise ValueError(f"{what} needs {whose} log probabilities")
    return logprobs
