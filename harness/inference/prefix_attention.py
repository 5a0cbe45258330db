"""Exact attention over a tree of shared prefixes, part by part, on the processor.

A masked square over [prefix | completion 1 | completion 2 | …] computes every pair of tokens and throws
most away: completions do not see each other, and nothing sees what comes later. Here each block of
queries meets each block of keys that it sees, either all of it or causally, and the parts are merged by
their log-sum-exps. In the backward pass each part is given the merged output and log-sum-exp, which
makes its weights those of the whole softmax, so the parts' gradients add up.

Source: merging of softmax parts, Juravsky et al. 2024 (Hydragen, arXiv 2402.05099), section 3.1; the
backward of a part from the whole's log-sum-exp, Dao 2023 (FlashAttention-2, arXiv 2307.08691), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """A block of queries and a block of keys it sees, whole or causally; both are ranges of the flat layout."""

    query: slice
    key: slice
    causal: bool


def tree_parts(spans: Sequence[tuple[int, int, int]]) -> list[Part]:
    """Return what sees what in a flat tree.

    Args:
        spans: in layout order, runs of tokens that follow each other on a path: start, stop, and the place after the
            last token that sees the run. What sees a run stands directly behind it.
    """
    parts = []
    for start, stop, end in spans:
        own = slice(start, stop)
        if stop > start:
            parts.append(Part(own, own, True))
            if end > stop:
                parts.append(Part(slice(stop, end), own, False))
    return parts


class _PartedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scaling: float) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        merged = torch.empty_like(query, dtype=exact)
        total = query.new_empty(query.shape[:3], dtype=exact)
        reached = 0
        for part in parts:
            piece, lse = _forward(
                query[:, :, part.query], key[:, :, part.key], value[:, :, part.key], 0.0, part.causal, scale=scaling
            )
            if part.query.start >= reached:  # nothing to merge with yet
                merged[:, :, part.query], total[:, :, part.query] = piece, lse
                reached = part.query.stop
                continue
            before = total[:, :, part.query]
            after = torch.logaddexp(before, lse)
            so_far = merged[:, :, part.query]
            so_far.mul_((before - after).exp_()[..., None]).add_(piece * (lse - after).exp_()[..., None])
            total[:, :, part.query] = after
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.parts, ctx.scaling = parts, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        found = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
        for part in ctx.parts:
            mine, theirs = part.query, part.key
            pieces = _backward(
                gradient[:, :, mine], query[:, :, mine], key[:, :, theirs], value[:, :, theirs],
                output[:, :, mine], total[:, :, mine], 0.0, part.causal, scale=ctx.scaling,
            )  # fmt: skip
            for whole, piece, where in zip(found, pieces, (mine, theirs, theirs), strict=True):
                whole[:, :, where] += piece
        return (*found, None, None)


def parted_attention(query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scaling: float) -> Tensor:
    """Attend part by part; query, key and value (1, H, N, D) on the processor → (1, H, N, D).

    Args:
        parts: cover every query at least once, and no pair of query and key twice; the first to hold a query holds
            none that an earlier part held.
        scaling: factor of the scores.
    """
    result: Tensor = _PartedAttention.apply(query, key, value, parts, scaling)
    return result
