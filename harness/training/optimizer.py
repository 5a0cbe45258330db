"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from harness.config.schema import OptimizerSection


def build_optimizer(parameters: Iterable[torch.nn.Parameter], section: OptimizerSection) -> torch.optim.AdamW:
    """Return AdamW over `parameters` (Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    return torch.optim.AdamW(
        parameters,
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
        foreach=False,
    )


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """Return the learning rate of a step.

    Args:
        step: 1-based step.
        steps: length of the run; decay ends at 0 after the last step.
    """
    if step <= section.warmup_steps:
        return section.learning_rate * step / section.warmup_steps
    if section.schedule == "constant":
        return section.learning_rate
    done = (step - 1 - section.warmup_steps) / max(steps - section.warmup_steps, 1)
    factor = 1 - done if section.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return section.learning_rate * factor
