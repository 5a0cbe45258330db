"""The bytes that autograd keeps, counted on a graph small enough to count by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from harness.inference.saved import saved_bytes  # noqa: E402

FLOAT = 4


def test_each_storage_counts_once_and_what_is_there_anyway_does_not():
    weight = torch.nn.Parameter(torch.randn(4, 8))
    inputs = torch.randn(3, 4, requires_grad=True)

    def run():
        # the product keeps its factors, the exponential its result; the second use keeps nothing new
        return (inputs @ weight).exp().sum() + (inputs.T.T @ weight).sum()

    with_weight = (inputs.numel() + weight.numel() + 3 * 8) * FLOAT
    assert saved_bytes(run, tuple) == with_weight
    assert saved_bytes(run, lambda: [weight]) == with_weight - weight.numel() * FLOAT
    assert saved_bytes(run, lambda: [weight, inputs]) == 3 * 8 * FLOAT


def test_what_stands_apart_is_asked_for_after_the_pass():
    made = []

    def run():
        made.append(torch.randn(5, requires_grad=True))
        return made[0] * torch.randn(5, requires_grad=True)

    assert saved_bytes(run, lambda: made) == 5 * FLOAT


def test_it_counts_where_gradients_are_off():
    inputs = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert saved_bytes(lambda: inputs.exp(), tuple) == 3 * FLOAT
