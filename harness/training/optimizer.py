"""Optimizers over LoRA factors, their learning-rate groups, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.config.schema import OptimizerSection

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""
NEWTON_SCHULZ_STEPS = 5
UPDATE_RMS = 0.2
"""Root mean square of an AdamW update as found in practice (Moonlight, arXiv 2502.16982, section 2.2)."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return (…, m, n) with every singular value of each matrix moved to about 1 (0.7 to 1.2), zeros left at zero.

    Newton-Schulz iteration towards U Vᵀ of the singular value decomposition. In float32 whatever the input is
    in: the products have a side of the adapter's rank, so nothing is gained by bfloat16, and on a processor
    without it the result would take longer and be rougher.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-30)  # the spectral norm is at most the Frobenius norm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrices.dtype)


def factors(name: str, tensor: Tensor, rank: int | None) -> Tensor:
    """Return a view of one adapter factor as (experts, m, n) matrices; one expert for an ordinary layer.

    PEFT stacks the adapters of fused experts in two dimensions: A as (experts · rank, in), expert by expert, and B
    as (out, rank · experts), with the experts fastest. Orthogonalising the stack would mix them.

    Args:
        name: of the parameter; tells A from B.
        tensor: the factor, or its gradient.
        rank: of the adapters; None takes every factor for that of one layer.
    """
    if rank is None:
        return tensor[None]
    if ".lora_B." in name:
        return tensor.view(tensor.shape[0], rank, -1).permute(2, 0, 1)
    return tensor.view(-1, rank, tensor.shape[1])


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, matrix by matrix (Jordan et al. 2024), for the factors A and B.

    `torch.optim.Muon` computes the same for one plain matrix, in bfloat16; it cannot tell experts apart.

    The update of an m x n matrix is scaled by 0.2 · sqrt(max(m, n)) (Moonlight, arXiv 2502.16982, equation 4),
    which gives it the root mean square 0.2 of an AdamW update, so learning rates mean the same for both.
    Weight decay is decoupled.

    Args:
        groups: parameter groups; each has `params` and, aligned with it, `views`: functions that show a factor as
            (experts, m, n).
        lr: learning rate.
        momentum: decay of the running mean of gradients; Nesterov's form is used.
        weight_decay: decoupled.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            ValueError: with a closure, which nothing here uses.
        """
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for parameter, view in zip(group["params"], group["views"], strict=True):
                if parameter.grad is not None:
                    self._update(parameter, view, group)

    def _update(self, parameter: Tensor, view: Callable[[Tensor], Tensor], group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient: Any = parameter.grad
        buffer, momentum = state["momentum_buffer"], group["momentum"]
        buffer.lerp_(gradient, 1 - momentum)
        matrices = view(torch.lerp(gradient, buffer, momentum))
        scale = UPDATE_RMS * math.sqrt(max(matrices.shape[-2:]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        view(parameter).add_(orthogonalise(matrices), alpha=-group["lr"] * scale)


def build_optimizer(
    parameters: Mapping[str, torch.nn.Parameter] | Iterable[torch.nn.Parameter],
    section: OptimizerSection,
    rank: int | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a run: AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), Muon or SGD.

    With `optimizer.b_scale` the factors B have a learning rate of their own (LoRA+, Hayou et al. 2024,
    arXiv 2402.12354): the group's `scale` times the rate that `set_learning_rate` sets.

    Args:
        parameters: adapter factors by name; without names B is not told from A.
        section: name, rates, momenta.
        rank: of the adapters; needed by Muon to tell stacked experts apart.
    """
    named = dict(parameters) if isinstance(parameters, Mapping) else {str(i): p for i, p in enumerate(parameters)}
    groups = [
        {
            "params": [named[name] for name in names],
            "scale": scale,
            "views": [_viewer(name, rank) for name in names],
            "lr": section.learning_rate * scale,
        }
        for scale, names in _rate_groups(named, section.b_scale).items()
    ]
    if section.name == "muon":
        return Muon(groups, section.learning_rate, section.momentum, section.weight_decay)
    for group in groups:
        del group["views"]
    if section.name == "sgd":
        return torch.optim.SGD(groups, momentum=section.momentum, weight_decay=section.weight_decay, foreach=False)
    return torch.optim.AdamW(
        groups,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
        foreach=False,
    )


def _rate_groups(named: Mapping[str, torch.nn.Parameter], b_scale: float) -> dict[float, list[str]]:
    """Return the names by the scale of their learning rate, in their order."""
    groups: dict[float, list[str]] = {}
    for name in named:
        groups.setdefault(b_scale if ".lora_B." in name else 1.0, []).append(name)
    return groups


def _viewer(name: str, rank: int | None) -> Callable[[Tensor], Tensor]:
    return lambda tensor: factors(name, tensor, rank)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate of a step, times the group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)


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
