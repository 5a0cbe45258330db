"""Layers as single operations, for training: adapted linear layers, a gated MLP of three, norms and rotations.

PEFT computes `base(x) + scale * B(A(x))` with separate operations: the scaled product and the sum are
passes over a tensor of the layer's output, and so are their gradients. On a processor these passes cost
as much as the adapter's products. Here the products add into the layer's output in place. The MLP keeps
only the outputs of its first two layers and computes their activation and product again in the backward pass,
which halves what it stores. A norm and a rotation of queries and keys by their positions are two to four passes over
their tensors in each direction, and one new tensor, where separate operations take up to eight of both.

Sources: Hu et al. 2021 (LoRA, arXiv 2106.09685), equation 3; Shazeer 2020 (arXiv 2002.05202), equation 6
(SwiGLU); Zhang and Sennrich 2019 (RMSNorm, arXiv 1910.07467), equation 4; Su et al. 2021 (RoPE, arXiv 2104.09864),
equation 34.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from harness.inference.tree import TreeBatch, tree_attention

ADAPTER = "default"
NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
ATTENTIONS = ("LlamaAttention", "Qwen2Attention")
"""Those whose queries and keys are turned as they come out of their layers (Qwen3 has norms in between)."""


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


class _Norm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension; the weight is frozen.

    With s = (mean(x²) + ε)^(-1/2) and g the gradient times the weight: ∂x = s g - x s³ mean(g x).
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        scale = norm.square_().div_(inputs.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(inputs, weight, scale)
        return (inputs * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        inputs, weight, scale = ctx.saved_tensors
        gradient = gradients[0] * weight
        along = torch.linalg.vecdot(gradient, inputs)[..., None].mul_(scale**3).div_(-inputs.shape[-1])
        return gradient.mul_(scale).addcmul_(inputs, along), None, None


def _rotate(inputs: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    """Turn the halves of the last dimension (…, N, D) against each other; `sign` -1 turns them back."""
    half = inputs.shape[-1] // 2
    first, second = inputs[..., :half], inputs[..., half:]
    output = inputs * cosine
    output[..., :half].addcmul_(second, sine[..., :half], value=-sign)
    output[..., half:].addcmul_(first, sine[..., half:], value=sign)
    return output


class _Rotation(torch.autograd.Function):
    """Rotary position embedding; the sine is the same for both halves, so the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(inputs, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradients[0], cosine, sine, -1.0), None, None


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


def _forward_norm(self: Any, hidden_states: Tensor) -> Tensor:
    # transformers computes in float32 whatever the model is in
    if not hidden_states.requires_grad or hidden_states.dtype is not torch.float32 or self.weight.requires_grad:
        plain: Tensor = type(self).forward(self, hidden_states)
        return plain
    output: Tensor = _Norm.apply(hidden_states, self.weight, self.variance_epsilon)
    return output


def _forward_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    if not torch.is_grad_enabled() or not isinstance(settings.get("tree"), TreeBatch):
        inputs = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        plain: tuple[Tensor, Tensor | None] = type(self).forward(self, hidden_states, **inputs, **settings)
        return plain
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    layers = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
    turn = [part[:, None] for part in position_embeddings]
    query, key = _Rotation.apply(query, *turn), _Rotation.apply(key, *turn)
    output, _ = tree_attention(self, query, key, value, None, self.scaling, tree=settings["tree"])
    result: Tensor = self.o_proj(output.reshape(*shape[:-2], -1))
    return result, None


def _is_gated_mlp(module: Any) -> bool:
    """Tell whether a module is `down(silu(gate(x)) * up(x))` of three adapted layers without bias."""
    if type(module).__name__ not in ("LlamaMLP", "Qwen2MLP", "Qwen3MLP"):
        return False
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation") and all(
        type(layer) is LoraLinear and layer.get_base_layer().bias is None for layer in layers
    )


def fuse_adapters(model: Any) -> tuple[int, int]:
    """Let plain LoRA layers of a PEFT model, gated MLPs made of them, norms and rotations train as one operation each.

    A layer goes on as PEFT and transformers compute it wherever that differs: dropout, a merged or disabled adapter,
    another dtype, several adapters, attention without a tree. Calling it again changes nothing.

    Returns:
        How many linear layers and how many MLPs.
    """
    layers = [module for module in model.modules() if type(module) is LoraLinear]
    mlps = [module for module in model.modules() if _is_gated_mlp(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    for mlp in mlps:
        mlp.forward = MethodType(_forward_mlp, mlp)
    for module in model.modules():
        if type(module).__name__ in NORMS:
            module.forward = MethodType(_forward_norm, module)
        elif type(module).__name__ in ATTENTIONS:
            module.forward = MethodType(_forward_attention, module)
    return len(layers), len(mlps)
