"""Log probabilities and entropies of chosen tokens, without keeping anything as large as the vocabulary.

Per chunk of tokens the logits are computed once. What the backward pass needs of them are two vectors of
the hidden size per token, the gradients of its log probability and of its entropy, so these are computed
while the chunk's distribution is there, and the distribution is dropped.

With logits z = W h / T, p = softmax(z) and H = -Σ p log p:

    ∂ log p_t / ∂h = (W_t - pᵀ W) / T        ∂H / ∂h = -(p · (log p + H))ᵀ W / T
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 256
"""Tokens whose logits exist at the same time."""
COPIES = 3
"""Arrays of the size of a chunk's logits at the peak: the logits or probabilities, their logarithms, one in between."""


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, temperatures: Tensor, gradients: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty_like(temperatures)
        entropies = torch.empty_like(temperatures)
        by_logprob = torch.empty_like(hidden) if gradients else None
        by_entropy = torch.empty_like(hidden) if gradients > 1 else None
        rows = min(len(targets), CHUNK)
        # made once: the page faults of new memory for every chunk would cost as much as the work on it
        buffers = torch.empty(2, rows, len(weight), dtype=temperatures.dtype, device=hidden.device)
        for start in range(0, len(targets), CHUNK):
            part = slice(start, start + CHUNK)
            inverse = 1 / temperatures[part, None]
            logits, logs = buffers[:, : len(inverse)]
            if hidden.dtype == logits.dtype:
                torch.mm(hidden[part], weight.T, out=logits)
            else:
                logits.copy_(hidden[part] @ weight.T)
            torch.log_softmax(logits.mul_(inverse), dim=-1, out=logs)
            probabilities = torch.exp(logs, out=logits)
            logprobs[part] = logs.gather(1, targets[part, None])[:, 0]
            if by_logprob is not None:
                by_logprob[part] = (weight[targets[part]] - probabilities.to(weight.dtype) @ weight) * inverse
            weighted = logs.mul_(probabilities)
            entropies[part] = -weighted.sum(-1)
            if by_entropy is not None:
                surprise = weighted.add_(probabilities.mul_(entropies[part, None]))
                by_entropy[part] = (surprise.to(weight.dtype) @ weight).mul_(-inverse)
        ctx.save_for_backward(by_logprob, by_entropy)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        by_logprob, by_entropy = ctx.saved_tensors
        result = by_logprob * gradients[0][:, None]
        if by_entropy is not None:
            result = result + by_entropy * gradients[1][:, None]
        return result.to(by_logprob.dtype), None, None, None, None


def token_statistics(
    hidden: Tensor, targets: Tensor, weight: Tensor, temperatures: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return (M,) log probabilities of `targets` and (M,) entropies in nats, of the tempered distributions.

    Args:
        hidden: (M, D) last hidden states, with gradient.
        targets: (M,) token ids.
        weight: (V, D) output head, frozen and without bias.
        temperatures: (M,) positive; results have its dtype.
        with_entropy: whether the entropies carry a gradient.
    """
    gradients = 1 + with_entropy if torch.is_grad_enabled() and hidden.requires_grad else 0
    logprobs, entropies = _TokenStatistics.apply(hidden, targets, weight, temperatures, gradients)
    return logprobs, entropies if with_entropy else entropies.detach()
