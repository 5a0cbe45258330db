"""Do two ways to the same log probabilities agree? The bounds, for the checks of a model and for the probe of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference of log probabilities in float32 and float64, nats."""
BF16_MEAN, BF16_P99 = 0.06, 0.25
"""In bfloat16: mean absolute difference and its 99th percentile, nats."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences of log probabilities of the same tokens, in nats.

    Args:
        tokens: how many were compared; at least 1.
        largest: largest absolute difference; NaN when one is not a number.
        mean: mean absolute difference.
        p99: 99th percentile of the absolute difference.
        signed: mean difference, first minus second.
    """

    tokens: int
    largest: float
    mean: float
    p99: float
    signed: float

    def holds(self, dtype: torch.dtype) -> bool:
        """Return whether they agree as two programs for a model in `dtype` must; a NaN never does."""
        if dtype is torch.bfloat16:
            return self.mean <= BF16_MEAN and self.p99 <= BF16_P99
        return self.largest <= TOLERANCE

    def describe(self, dtype: torch.dtype) -> str:
        """Return the numbers that decide, with their bounds."""
        if dtype is torch.bfloat16:
            bound = f"mean {self.mean:.2g} (at most {BF16_MEAN:g}), 99th percentile {self.p99:.2g} "
            bound += f"(at most {BF16_P99:g})"
        else:
            bound = f"largest difference {self.largest:.2g} nats (at most {TOLERANCE:g})"
        return f"{bound} over {self.tokens} tokens"


def compare(first: Tensor, second: Tensor) -> Agreement:
    """Return how far two tensors of log probabilities are apart.

    Args:
        first: (N,) nats, N at least 1.
        second: (N,) nats of the same tokens.

    Raises:
        ValueError: the shapes differ, or there is nothing to compare.
    """
    if first.shape != second.shape or first.numel() == 0:
        raise ValueError(f"cannot compare log probabilities of shapes {tuple(first.shape)} and {tuple(second.shape)}")
    gap = first.double() - second.double()
    size = gap.abs()
    return Agreement(
        len(gap), float(size.max()), float(size.mean()), float(torch.quantile(size, 0.99)), float(gap.mean())
    )
