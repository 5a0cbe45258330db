"""One optimizer step: log probabilities on the tree, loss, backward, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.config.schema import TrainSection
from harness.core.errors import DivergedError
from harness.inference.tree import ATTENTION, TreeBatch, common_prefix
from harness.training.batches import Group, micro_batch, split_groups
from harness.training.losses import dapo_loss

LOGIT_CHUNK = 512
"""Completion tokens whose logits exist at the same time."""


@dataclass(slots=True)
class StepStats:
    """Sums over the tokens of a step; `metrics` turns them into means."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    kl_sampler: float = 0.0
    logprob_gap: float = 0.0
    clipped: float = 0.0
    grad_norm: float = 0.0
    updates: int = 0
    computed_tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """Return per-token means and the last gradient norm, by metric key."""
        count = max(self.tokens, 1)
        return {
            "train/loss": self.loss,
            "train/entropy": self.entropy / count,
            "train/kl_sampler": self.kl_sampler / count,
            "train/logprob_gap": self.logprob_gap / count,
            "train/clipped_share": self.clipped / count,
            "optim/grad_norm": self.grad_norm,
            "perf/tree_tokens": float(self.computed_tokens),
        }


def _chunk_logprobs(hidden: Tensor, targets: Tensor, head: Any, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(temperatures.dtype) / temperatures[:, None]
    log_all = torch.log_softmax(logits, dim=-1)
    entropy = -(log_all.exp() * log_all).sum(-1)
    return log_all.gather(1, targets[:, None])[:, 0], entropy


def tree_logprobs(causal_lm: Any, tree: TreeBatch, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return (M,) log probabilities and entropies (nats) of the completion tokens, in layout order.

    Args:
        causal_lm: a transformers model that uses the tree attention.
        tree: the flat layout.
        temperatures: (M,) the sampler's; log probabilities are those it sampled from, in this dtype.
    """
    output = causal_lm.get_decoder()(
        input_ids=tree.input_ids, position_ids=tree.position_ids, use_cache=False, tree=tree
    )
    hidden = output.last_hidden_state[0, tree.prediction_index()]
    targets = tree.target_ids()
    head = causal_lm.get_output_embeddings()
    pieces = []
    for start in range(0, len(targets), LOGIT_CHUNK):
        part = slice(start, start + LOGIT_CHUNK)
        # logits of a chunk are computed again in the backward pass: storing them all would take
        # tokens x vocabulary floats several times over
        pieces.append(
            checkpoint(_chunk_logprobs, hidden[part], targets[part], head, temperatures[part], use_reentrant=False)
        )
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def accumulate_gradient(causal_lm: Any, groups: Sequence[Group], section: TrainSection, stats: StepStats) -> None:
    """Add the gradient of the batch loss over `groups` to the parameters, micro-batch by micro-batch.

    The denominator is the token count of all groups, so the result does not depend on how they
    are split.

    Args:
        causal_lm: the model inside the adapter wrapper.
        groups: one optimizer batch.
        section: loss, clipping and token budget.
        stats: sums are added to it.
    """
    causal_lm.set_attn_implementation(ATTENTION)
    parameter = next(p for p in causal_lm.parameters() if p.requires_grad)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    prompts = [group.prompt for group in groups]
    root = common_prefix(prompts) if len(prompts) > 1 else 0
    active = sum(group.completion_tokens for group in groups)
    for part in split_groups(groups, root, section.microbatch_tokens):
        batch = micro_batch(part, root, parameter.device, dtype)
        logprobs, entropies = tree_logprobs(causal_lm, batch.tree, batch.temperatures)
        # one update per batch is on-policy by construction: the ratio is exactly 1
        old = logprobs.detach() if section.minibatches == 1 else batch.sampler_logprobs
        out = dapo_loss(logprobs, old, batch.advantages, active, section.clip_low, section.clip_high)
        loss = out.loss
        if section.entropy_beta:
            loss = loss - section.entropy_beta * entropies.sum() / max(active, 1)
        loss.backward()
        with torch.no_grad():
            gap = logprobs - batch.sampler_logprobs
            stats.tokens += len(gap)
            stats.loss += float(loss)
            stats.entropy += float(entropies.sum())
            stats.kl_sampler += float((gap.exp() - 1 - gap).sum())
            stats.logprob_gap += float(gap.abs().sum())
            stats.clipped += float(out.clipped)
            stats.computed_tokens += batch.tree.tokens


def update_policy(
    causal_lm: Any,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    section: TrainSection,
    max_grad_norm: float,
) -> StepStats:
    """Run the optimizer updates of one step on its groups.

    Args:
        parameters: the trainable ones, whose joint gradient norm is clipped to `max_grad_norm`.
        groups: with spread; none means no update.

    Raises:
        DivergedError: when the gradient is not finite; parameters keep their last good values.
    """
    stats = StepStats()
    causal_lm.train()  # the engine samples without dropout
    count = min(section.minibatches, len(groups))
    for index in range(count):
        optimizer.zero_grad(set_to_none=True)
        accumulate_gradient(causal_lm, groups[index::count], section, stats)
        stats.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        if not math.isfinite(stats.grad_norm):
            raise DivergedError("the gradient is not finite", "lower optimizer.learning_rate or lora.alpha")
        optimizer.step()
        stats.updates += 1
    optimizer.zero_grad(set_to_none=True)
    return stats
