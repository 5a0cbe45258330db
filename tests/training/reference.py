"""A naive trainer step: every sequence alone, in full, with plain transformers attention."""

from __future__ import annotations

import random

import torch

from harness.core.types import Completion, Episode, FinishReason, Message, Rollout, Score, Task
from harness.training.batches import Group


def random_group(name, prompt, lengths, advantages, vocabulary, seed, temperature=1.0):
    """Return a group with random completion ids; sampler logprobs are filled in by the caller if needed."""
    source = random.Random(seed)
    task = Task(name, "toy", "train", {}, "A", "A", name)
    rollouts = []
    for index, length in enumerate(lengths):
        ids = tuple(source.randrange(10, vocabulary) for _ in range(length))
        completion = Completion(ids, tuple(-1.0 for _ in ids), FinishReason.LENGTH)
        episode = Episode(name, (Message("user", "q"), Message("assistant", "a")), FinishReason.LENGTH)
        score = Score(advantages[index], {})
        rollouts.append(Rollout(task, name, index, tuple(prompt), (completion.segment,), episode, score))
    return Group(tuple(rollouts), tuple(advantages), temperature)


def naive_logprobs(causal_lm, prompt, completion, temperature=1.0):
    """Return the log probabilities of one completion from a forward pass over its own sequence."""
    causal_lm.set_attn_implementation("eager")
    ids = torch.tensor([[*prompt, *completion]])
    logits = causal_lm(input_ids=ids, use_cache=False).logits[0]
    kind = torch.promote_types(logits.dtype, torch.float32)
    log_all = torch.log_softmax(logits[len(prompt) - 1 : -1].to(kind) / temperature, dim=-1)
    return log_all.gather(1, ids[0, len(prompt) :, None])[:, 0]


def naive_gradient(causal_lm, parameters, groups):
    """Return the gradient of -sum(advantage * logprob) / tokens, one sequence at a time."""
    for parameter in parameters.values():
        parameter.grad = None
    active = sum(group.completion_tokens for group in groups)
    for group in groups:
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
            logprobs = naive_logprobs(causal_lm, group.prompt, rollout.completion.token_ids, group.temperature)
            (-(advantage * logprobs).sum() / active).backward()
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def relative_difference(left, right):
    """Return |left - right| / |right| over all parameters together."""
    top = sum(float((left[name] - right[name]).double().pow(2).sum()) for name in right)
    bottom = sum(float(right[name].double().pow(2).sum()) for name in right)
    return (top / bottom) ** 0.5
