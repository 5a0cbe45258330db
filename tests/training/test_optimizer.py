"""Learning-rate schedules against numbers worked out by hand, and AdamW against its definition."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import OptimizerSection  # noqa: E402
from harness.training.optimizer import build_optimizer, learning_rate  # noqa: E402


def rates(steps, **settings):
    section = OptimizerSection(learning_rate=0.8, **settings)
    return [learning_rate(section, step, steps) for step in range(1, steps + 1)]


def test_constant():
    assert rates(4) == [0.8] * 4


def test_warm_up_reaches_the_peak_at_its_last_step():
    assert rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_linear_decay():
    assert rates(4, schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay():
    expected = [0.8 * 0.5 * (1 + math.cos(math.pi * done)) for done in (0, 0.25, 0.5, 0.75)]
    assert rates(4, schedule="cosine") == pytest.approx(expected)
    assert rates(4, schedule="cosine")[2] == pytest.approx(0.4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_step_learns(schedule):
    for warmup in (0, 1, 5, 9, 20):
        assert all(rate > 0 for rate in rates(10, schedule=schedule, warmup_steps=warmup))


def test_adamw_by_hand():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    section = OptimizerSection(learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.05)
    optimizer = build_optimizer([parameter], section)
    value, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate([[0.5, -1.0], [0.1, 2.0], [-0.3, 0.0]], 1):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(gradient):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.99 * v[i] + 0.01 * g * g
            update = (m[i] / (1 - 0.9**step)) / (math.sqrt(v[i] / (1 - 0.99**step)) + 1e-8)
            value[i] = value[i] - 0.1 * 0.05 * value[i] - 0.1 * update
    assert parameter.tolist() == pytest.approx(value, abs=1e-12)
