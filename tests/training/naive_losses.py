"""The losses once more, token by token in plain Python over lists of sequences."""

from __future__ import annotations

import math


def naive_policy_loss(kind, batch, low, high, max_tokens=None, importance="none", cap=2.0, kl_beta=0.0):
    """Return the loss of a batch of sequences.

    Each sequence is (logprobs, old, sampler, reference, advantage); lists of floats and a float.
    """
    tokens = sum(len(row[0]) for row in batch)
    sequences = sum(1 for row in batch if row[0])
    total = 0.0
    for new, old, sampler, reference, advantage in batch:
        if not new:
            continue
        own = 0.0
        gaps = [b - c for b, c in zip(old, sampler, strict=True)]
        for t in range(len(new)):
            value = token_value(kind, new, old, sampler, advantage, t, low, high)
            value *= weight(importance, gaps, t, cap)
            gap = reference[t] - new[t]
            value -= kl_beta * math.exp(new[t] - old[t]) * (math.exp(gap) - gap - 1)
            own += value
        if kind in ("grpo", "gspo"):
            own /= len(new) * sequences
        elif kind == "dr_grpo":
            own /= sequences * max_tokens
        else:
            own /= tokens
        total -= own
    return total


def token_value(kind, new, old, sampler, advantage, t, low, high):
    ratio = math.exp(new[t] - old[t])
    if kind == "gspo":
        ratio = math.exp(sum(a - b for a, b in zip(new, old, strict=True)) / len(new))
    if kind == "cispo":
        return min(ratio, 1 + high) * advantage * new[t]
    if kind == "dppo":
        moved = math.exp(new[t]) - math.exp(sampler[t])
        blocked = moved > high if advantage > 0 else moved < -low
        return 0.0 if blocked and advantage else ratio * advantage
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def weight(importance, gaps, t, cap):
    if importance == "token":
        return min(math.exp(gaps[t]), cap)
    if importance == "sequence_mask":
        whole = math.exp(sum(gaps))
        return 0.0 if whole > cap else whole
    if importance == "geometric_mask":
        return float(1 / cap <= math.exp(sum(gaps) / len(gaps)) <= cap)
    return 1.0
