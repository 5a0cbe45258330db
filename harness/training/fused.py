"""Adapted layers as single operations, for training: a linear layer, and a gated MLP of three of them.

PEFT computes `base(x) + scale * B(A(x))` with separate operations: the scaled product and the sum are
passes over a tensor of the layer's output, and so are their gradients. On a processor these passes cost
as much as the adapter's products. Here the products add into the layer's output in place. The MLP keeps
only the outputs of its first two layers and computes their activation and product again in the backward pass,
which halves what it stores.

Sources: Hu et al. 2021 (LoRA, arXiv 2106.09685), equation 3; Shazeer 2020 (arXiv 2002.05202), equation 6
(SwiGLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

ADAPTER = "default"


class _Layer(NamedTuple):
    """Tensors of one adapted linear layer without bias: weight (O, I), A (R, I), B (O, R), and the scale."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (N, O) and the low-rank input of B (N, R)."""
        low = rows @ self.a.T
        return (rows @ self.weight.T).addmm_(low, self.b.T, alpha=self.scale), low

    def backward(self, gradient: Tensor, rows: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the rows' low-rank part (N, R), of A and of B."""
        by_low = (gradient @ self.b).mul_(self.scale)
        return by_low, by_low.T @ rows, (gradient.T @ low).mul_(self.scale)

    def to_rows(self, gradient: Tensor, by_low: Tensor) -> Tensor:
        """Return the gradient of the input (N, I)."""
        return (gradient @ self.weight).addmm_(by_low, self.a)


def _layers(tensors: Sequence[Tensor], scales: Sequence[float]) -> list[_Layer]:
    return [_Layer(tensors[3 * i], tensors[3 * i + 1], tensors[3 * i + 2], scale) for i, scale in enumerate(scales)]


class _AdaptedMlp(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)), every layer adapted."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scales: tuple[float, float, float], *tensors: Any) -> Tensor:
        gate, up, down = _layers(tensors, scales)
        rows = inputs.reshape(-1, inputs.shape[-1])
        gated, low_gate = gate.forward(rows)
        upped, low_up = up.forward(rows)
        output, low_down = down.forward(F.silu(gated).mul_(upped))
        ctx.save_for_backward(rows, gated, upped, low_gate, low_up, low_down, *tensors)
        ctx.scales, ctx.shape = scales, inputs.shape
        return output.view(*inputs.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, gated, upped, low_gate, low_up, low_down, *tensors = ctx.saved_tensors
        gate, up, down = _layers(tensors, ctx.scales)
        gradient = gradients[0].reshape(-1, down.weight.shape[0])
        activated = F.silu(gated)
        by_down, to_down_a, to_down_b = down.backward(gradient, activated * upped, low_down)
        inner = down.to_rows(gradient, by_down)
        to_up = activated.mul_(inner)
        to_gate = torch.ops.aten.silu_backward(inner.mul_(upped), gated)
        by_gate, to_gate_a, to_gate_b = gate.backward(to_gate, rows, low_gate)
        by_up, to_up_a, to_up_b = up.backward(to_up, rows, low_up)
        to_inputs = None
        if ctx.needs_input_grad[0]:
            to_inputs = gate.to_rows(to_gate, by_gate).addmm_(to_up, up.weight).addmm_(by_up, up.a).view(ctx.shape)
        adapters = (None, to_gate_a, to_gate_b, None, to_up_a, to_up_b, None, to_down_a, to_down_b)
        return (to_inputs, None, *adapters)


class _AdaptedLinear(torch.autograd.Function):
    """A linear layer with its adapter; weight and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        output, low = _Layer(weight, a, b, scale).forward(rows)
        if bias is not None:
            output += bias
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scale, ctx.shape = scale, inputs.shape
        return output.view(*inputs.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        rows, low, weight, a, b = ctx.saved_tensors
        layer = _Layer(weight, a, b, ctx.scale)
        gradient = gradients[0].reshape(-1, layer.weight.shape[0])
        by_low, to_a, to_b = layer.backward(gradient, rows, low)
        to_inputs = layer.to_rows(gradient, by_low).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return to_inputs, None, None, to_a, to_b, None


def _is_plain(module: LoraLinear) -> bool:
    """Tell whether the layer is base plus one adapter, in one dtype, without dropout or variants."""
    base: Any = module.get_base_layer()
    dropout: Any = module.lora_dropout[ADAPTER]
    return (
        not module.disable_adapters
        and not module.merged
        and module.active_adapters == [ADAPTER]
        and not module.lora_variant
        and not module.lora_bias.get(ADAPTER)
        and not (module.training and getattr(dropout, "p", False))
        and base.weight.dtype == module.lora_A[ADAPTER].weight.dtype
        and not base.weight.requires_grad
    )


def _forward(self: LoraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs or not torch.is_grad_enabled() or not _is_plain(self):
        return LoraLinear.forward(self, x, *args, **kwargs)
    base: Any = self.get_base_layer()
    a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
    output: Tensor = _AdaptedLinear.apply(x, base.weight, base.bias, a, b, self.scaling[ADAPTER])
    return output


def _forward_mlp(self: Any, x: Tensor) -> Tensor:
    layers = (self.gate_proj, self.up_proj, self.down_proj)
    if not torch.is_grad_enabled() or not all(map(_is_plain, layers)):
        plain: Tensor = type(self).forward(self, x)
        return plain
    tensors: list[Tensor] = []
    for layer in layers:
        tensors += [layer.get_base_layer().weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
    scales = tuple(layer.scaling[ADAPTER] for layer in layers)
    output: Tensor = _AdaptedMlp.apply(x, scales, *tensors)
    return output


def _is_gated_mlp(module: Any) -> bool:
    """Tell whether a module is `down(silu(gate(x)) * up(x))` of three adapted layers without bias."""
    if type(module).__name__ not in ("LlamaMLP", "Qwen2MLP", "Qwen3MLP"):
        return False
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation") and all(
        type(layer) is LoraLinear and layer.get_base_layer().bias is None for layer in layers
    )


def fuse_adapters(model: Any) -> tuple[int, int]:
    """Let plain LoRA layers of a PEFT model, and gated MLPs made of them, train as one operation each.

    A layer goes on as PEFT computes it wherever that differs: dropout, a merged or disabled adapter,
    another dtype, several adapters. Calling it again changes nothing.

    Returns:
        How many linear layers and how many MLPs.
    """
    layers = [module for module in model.modules() if type(module) is LoraLinear]
    mlps = [module for module in model.modules() if _is_gated_mlp(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    for mlp in mlps:
        mlp.forward = MethodType(_forward_mlp, mlp)
    return len(layers), len(mlps)
