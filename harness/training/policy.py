"""One optimizer step: log probabilities on the tree, loss, backward, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from harness.config.schema import TrainSection
from harness.core.errors import ConfigError, DivergedError
from harness.core.memory import give_back
from harness.inference.streaming import computing_twice, is_streamed
from harness.inference.tree import ATTENTION, TreeBatch
from harness.training.batches import Group, MicroBatch, Plan, micro_batch, plan_passes
from harness.training.head import CHUNK, token_statistics
from harness.training.losses import LossInputs, LossOutput, Totals, policy_loss
from harness.training.ranks import ALONE, Ranks
from harness.training.room import Room, in_passes_that_fit


@dataclass(slots=True)
class StepStats:
    """Sums over the tokens of a step; `metrics` turns them into means.

    `kl_reference` and `corrected` stay None in a run that has no reference and no importance correction, and
    `microbatch_tokens`, the budget of a pass, until memory ran out.
    """

    tokens: int = 0
    loss: float = 0.0
    kl_reference: float | None = None
    corrected: float | None = None
    entropy: float = 0.0
    kl_sampler: float = 0.0
    gaps: list[Tensor] = field(default_factory=list)
    clipped: float = 0.0
    grad_norm: float = 0.0
    updates: int = 0
    computed_tokens: int = 0
    out_of_memory: int = 0
    microbatch_tokens: int | None = None

    def add(self, batch: MicroBatch, logprobs: Tensor, loss: float, entropy: float, out: LossOutput) -> None:
        """Add one pass.

        Args:
            logprobs: (M,) without gradient.
            loss: with the entropy bonus.
            entropy: sum over the tokens, in nats.
            out: what the policy loss counted.
        """
        gap = logprobs - batch.sampler_logprobs
        self.tokens += len(gap)
        self.loss += loss
        self.entropy += entropy
        self.kl_sampler += float((gap.exp() - 1 - gap).sum())
        self.gaps.append(gap)
        self.clipped += float(out.clipped)
        self.computed_tokens += batch.tree.tokens

    def plus(self, other: StepStats) -> StepStats:
        """Return the sums of two processes that computed parts of the same step; this one made the updates."""
        names = ("tokens", "loss", "entropy", "kl_sampler", "gaps", "clipped", "computed_tokens", "out_of_memory")
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        for name in ("kl_reference", "corrected"):
            parts = [part for stats in (self, other) if (part := getattr(stats, name)) is not None]
            sums[name] = sum(parts) if parts else None
        budgets = [stats.microbatch_tokens for stats in (self, other) if stats.microbatch_tokens]
        return replace(self, **sums, microbatch_tokens=min(budgets, default=None))

    def to_json(self) -> dict[str, Any]:
        """Return the sums as JSON values, exactly."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return plain | {"gaps": [value for gap in self.gaps for value in gap.tolist()]}

    @classmethod
    def of(cls, spelt: Mapping[str, Any]) -> StepStats:
        """Return the sums that `to_json` spelt."""
        gaps = [torch.tensor(spelt["gaps"], dtype=torch.float64)] if spelt["gaps"] else []
        return cls(**{**spelt, "gaps": gaps})

    def metrics(self) -> dict[str, float]:
        """Return per-token means and the last gradient norm, by metric key."""
        count = max(self.tokens, 1)
        gap = torch.cat([part.cpu() for part in self.gaps]) if self.gaps else torch.zeros(1)
        optional = {"train/kl_reference": self.kl_reference, "train/importance_cut_share": self.corrected}
        return {
            "train/loss": self.loss,
            "train/entropy": self.entropy / count,
            "train/kl_sampler": self.kl_sampler / count,
            "train/logprob_gap": float(gap.abs().mean()),
            "train/logprob_gap_p99": float(torch.quantile(gap.abs(), 0.99)),
            "train/logprob_gap_signed": float(gap.mean()),
            "train/clipped_share": self.clipped / count,
            "optim/grad_norm": self.grad_norm,
            "perf/tree_tokens": float(self.computed_tokens),
            **{key: value / count for key, value in optional.items() if value is not None},
            **({"perf/out_of_memory": float(self.out_of_memory)} if self.out_of_memory else {}),
            **({"perf/microbatch_tokens": float(self.microbatch_tokens)} if self.microbatch_tokens else {}),
        }


def tree_logprobs(
    causal_lm: Any, tree: TreeBatch, temperatures: Tensor, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (M,) log probabilities and entropies (nats) of the completion tokens, branch by branch.

    Args:
        causal_lm: a transformers model that uses the tree attention, with a frozen output head without bias.
        tree: the flat layout.
        temperatures: (M,) the sampler's; log probabilities are those it sampled from, in this dtype.
        with_entropy: whether the entropies carry a gradient.
    """
    output = causal_lm.get_decoder()(
        input_ids=tree.input_ids, position_ids=tree.position_ids, use_cache=False, tree=tree
    )
    hidden = output.last_hidden_state[0, tree.prediction_index()]
    weight = causal_lm.get_output_embeddings().weight
    return token_statistics(hidden, tree.target_ids(), weight, temperatures, with_entropy)


def accumulate_gradient(
    causal_lm: Any,
    groups: Sequence[Group],
    section: TrainSection,
    stats: StepStats,
    max_tokens: int | None = None,
    old_logprobs: Mapping[int, Tensor] | None = None,
    plan: Plan | None = None,
    room: Room | None = None,
) -> None:
    """Add the gradient of the batch loss over `groups` to the parameters, micro-batch by micro-batch.

    The denominators are counts of all groups, so the result does not depend on how they are split. A batch
    without a token in the loss adds nothing.

    Args:
        causal_lm: the model inside the adapter wrapper.
        groups: one optimizer batch.
        section: loss, clipping and token budget.
        stats: sums are added to it.
        max_tokens: length limit of a completion; the loss `dr_grpo` needs it.
        old_logprobs: by `id` of a rollout, what the ratio is taken against; None takes the current policy in a batch
            of one update, else what the sampler reported. So it does where the sampler may be an older policy and no
            importance correction accounts for it.
        plan: the passes; None makes them for the section's budget.
        room: checks that a pass fits before it is begun.

    Raises:
        NoRoomError: a pass would not fit.
    """
    causal_lm.set_attn_implementation(ATTENTION)
    totals = batch_totals(groups, max_tokens)
    for batch in passes(causal_lm, plan or _planner(groups, section)(section.microbatch_tokens)):
        if room is not None:
            check_room(room, causal_lm, batch, section)
        reference = None
        if section.kl_beta:
            with adapters_off(causal_lm):
                reference = _frozen_logprobs(causal_lm, batch)
        logprobs, entropies = tree_logprobs(causal_lm, batch.tree, batch.temperatures, bool(section.entropy_beta))
        # one update per batch is on-policy by construction: the ratio is exactly 1. An older policy's batch is not,
        # unless the importance weight leads from that one to this
        on_policy = section.minibatches == 1 and (not section.max_staleness or section.importance != "none")
        old = logprobs.detach() if on_policy else batch.sampler_logprobs
        if old_logprobs is not None:
            old = torch.cat([old_logprobs[id(rollout)] for rollout in batch.rollouts])
        inputs = LossInputs(logprobs, old, batch.advantages, batch.lengths, batch.sampler_logprobs, reference)
        out = policy_loss(inputs, totals, section)
        loss = out.loss
        if section.entropy_beta:
            loss = loss - section.entropy_beta * entropies.sum() / max(totals.tokens, 1)
        loss.backward()
        stats.add(batch, logprobs.detach(), float(loss.detach()), float(entropies.detach().sum()), out)
        if section.kl_beta:
            stats.kl_reference = (stats.kl_reference or 0.0) + float(out.kl)
        if section.importance != "none":
            stats.corrected = (stats.corrected or 0.0) + float(out.corrected)


def batch_totals(groups: Sequence[Group], max_tokens: int | None) -> Totals:
    """Return the denominators of an optimizer batch."""
    counts = [sum(rollout.sampled) for group in groups for rollout, _ in group.trained]
    return Totals(sum(counts), sum(count > 0 for count in counts), max_tokens)


def _planner(groups: Sequence[Group], section: TrainSection) -> Callable[[int], Plan]:
    """Return what makes the passes of a batch from their budget.

    Rollouts without advantage are left out where nothing else gives them a gradient.
    """
    skip_idle = not (section.entropy_beta or section.kl_beta)
    return partial(plan_passes, groups, skip_idle=skip_idle)


def passes(causal_lm: Any, plan: Plan) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a plan."""
    parameter = next(p for p in causal_lm.parameters() if p.requires_grad)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    for part in plan.parts:
        give_back()
        yield micro_batch(part, parameter.device, dtype)


def check_room(room: Room, causal_lm: Any, batch: MicroBatch, section: TrainSection) -> None:
    """Check that a pass fits into what is free.

    Raises:
        NoRoomError: it does not.
    """

    def forward(tree: TreeBatch) -> Tensor:
        return tree_logprobs(causal_lm, tree, batch.temperatures.new_ones(len(tree.target_ids())))[0]

    logits = min(len(batch.advantages), CHUNK)
    twice = section.activation_checkpointing or is_streamed(causal_lm)
    room.check(causal_lm, batch.tree, logits, forward, twice)


def _old_logprobs(causal_lm: Any, plan: Plan) -> dict[int, Tensor]:
    """Return the log probabilities of every rollout under the policy as it is, by `id` of the rollout."""
    found: dict[int, Tensor] = {}
    for batch in passes(causal_lm, plan):
        pieces = _frozen_logprobs(causal_lm, batch).split(list(batch.lengths))
        found |= {id(rollout): piece for rollout, piece in zip(batch.rollouts, pieces, strict=True)}
    return found


def _frozen_logprobs(causal_lm: Any, batch: MicroBatch) -> Tensor:
    """Return (M,) log probabilities without gradient and without dropout."""
    training = causal_lm.training
    causal_lm.eval()
    try:
        with torch.no_grad():
            return tree_logprobs(causal_lm, batch.tree, batch.temperatures)[0]
    finally:
        causal_lm.train(training)


@contextmanager
def adapters_off(causal_lm: Any) -> Iterator[None]:
    """Let a model answer without its adapters for the duration of a block: the reference of the KL term."""
    layers = [module for module in causal_lm.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def update_policy(
    causal_lm: Any,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    section: TrainSection,
    max_grad_norm: float,
    max_tokens: int | None = None,
    room: Room | None = None,
    ranks: Ranks = ALONE,
) -> StepStats:
    """Run the optimizer updates of one step on its groups.

    With several processes each adds the gradient of what its groups do not mark as computed elsewhere, the first one
    updates, and all have its weights before and after each update.

    Args:
        parameters: the trainable ones, whose joint gradient norm is clipped to `max_grad_norm`.
        groups: with spread; none means no update.
        max_tokens: length limit of a completion; the loss `dr_grpo` needs it.
        room: the budget of a pass, lowered when memory runs out; None begins with `train.microbatch_tokens`.
        ranks: the processes of the run; the sums returned are those of this one.

    Raises:
        DivergedError: when the gradient is not finite; parameters keep their last good values.
        MemoryError, RuntimeError: not even a pass of one rollout fits.
    """
    stats = StepStats()
    room = room or Room(section.microbatch_tokens)
    lowered = room.lowered
    causal_lm.train()  # the engine samples without dropout
    checkpoint_activations(causal_lm, section.activation_checkpointing)
    causal_lm.set_attn_implementation(ATTENTION)
    ranks.share(parameters)
    count = min(section.minibatches, len(groups))
    batches = [groups[index::count] for index in range(count)]
    old: list[dict[int, Tensor] | None] = [None] * count
    if section.importance != "none" and count > 1:
        # the weight corrects from the sampler to the policy before the first update, the ratio goes on from there
        action = partial(_old_logprobs, causal_lm)
        old = [in_passes_that_fit(room, _planner(part, section), action) for part in batches]
    for part, old_logprobs in zip(batches, old, strict=True):
        settings = (part, section, stats, max_tokens, old_logprobs)
        stats = in_passes_that_fit(
            room, _planner(part, section), partial(_fresh_gradient, causal_lm, optimizer, settings, room)
        )
        ranks.add_gradients(parameters)
        if ranks.is_main:
            stats.grad_norm = apply_gradient(parameters, optimizer, max_grad_norm)
        ranks.share(parameters)
        stats.updates += 1
    optimizer.zero_grad(set_to_none=True)
    stats.out_of_memory = room.lowered - lowered
    stats.microbatch_tokens = room.tokens if room.lowered else None
    return stats


def apply_gradient(
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    what: str = "the gradient",
    section: str = "optimizer",
) -> float:
    """Clip the gradient, update the parameters and return the global L2 norm before clipping.

    Args:
        what: is called not finite in the error.
        section: of the config with the learning rate to lower.

    Raises:
        DivergedError: the gradient is not finite; parameters keep their last good values.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if not math.isfinite(norm):
        raise DivergedError(f"{what} is not finite", f"lower {section}.learning_rate or lora.alpha")
    optimizer.step()
    return norm


def _fresh_gradient(
    causal_lm: Any, optimizer: torch.optim.Optimizer, settings: tuple[Any, ...], room: Room, plan: Plan
) -> StepStats:
    """Compute the gradient of a batch from nothing; return the sums before it with those of the batch added."""
    part, section, before, max_tokens, old_logprobs = settings
    optimizer.zero_grad(set_to_none=True)
    stats: StepStats = replace(before, gaps=list(before.gaps))  # a pass that is repeated counts once
    accumulate_gradient(causal_lm, part, section, stats, max_tokens, old_logprobs, plan, room)
    return stats


def checkpoint_activations(causal_lm: Any, on: bool) -> None:
    """Let the layers keep only their inputs and compute the rest again in the backward pass, or everything.

    Layers whose weights only visit the device are always computed twice.

    Raises:
        ConfigError: the model is not made of layers that transformers can compute twice.
    """
    layers: list[Any] = [m for m in causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)]
    on = on or is_streamed(causal_lm)
    if on and not layers:
        raise ConfigError(
            f"the layers of {type(causal_lm).__name__} cannot be computed twice",
            "set train.activation_checkpointing = false",
        )
    for layer in layers:
        layer.gradient_checkpointing = on
        layer._gradient_checkpointing_func = computing_twice(layer)
