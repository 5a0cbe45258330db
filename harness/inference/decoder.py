"""One decoding step of a Llama-like model with few operations.

Between two tokens a step of many rows is small: on a processor, calling the layers' modules and copying
between their views takes longer than the matrix products. Here query, key and value are one product, gate
and up another, and products take the weight as their left factor, which the processor's matrix kernels
multiply up to half as fast again when there are few rows.

The arithmetic is that of transformers' `llama`, `qwen2` and `qwen3`; `tests/inference/test_decoder.py` holds
it to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.inference.decode_state import DecodeState, decode_attention

TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one decoder layer, those that share an input joined."""

    before_attention: tuple[Tensor, float]
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor, float] | None
    out: Tensor
    out_bias: Tensor | None
    before_mlp: tuple[Tensor, float]
    gate_up: Tensor
    down: Tensor


class Decoder:
    """The decoder of a causal LM with its weights as they are now, for steps of one token per row.

    Args:
        causal_lm: of a type in `TYPES`, adapters folded into its weights or absent.
    """

    def __init__(self, causal_lm: Any) -> None:
        config = causal_lm.config
        self._model = causal_lm.get_decoder()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = [_join(layer) for layer in self._model.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, state: DecodeState) -> Tensor:
        """Return (B, D) last hidden states of one new token per row and store its keys and values in the state.

        Args:
            tokens: (B,) ids.
            positions: (B,) places on the rows' paths.
            state: its `length` is left to the caller.
        """
        rows, heads, kv_heads, size = len(tokens), self._heads, self._kv_heads, self._size
        hidden = self._model.embed_tokens(tokens)
        cosine, sine = (part[0, :, None] for part in self._model.rotary_emb(hidden[None], positions[None]))
        for index, layer in enumerate(self._layers):
            joint = layer.qkv @ _norm(hidden, *layer.before_attention).T
            mixed = joint.T.reshape(rows, heads + 2 * kv_heads, size)
            if layer.qkv_bias is not None:
                mixed += layer.qkv_bias.view(1, -1, size)
            value = mixed[:, heads + kv_heads :]
            query, key = _rotate(layer, mixed[:, : heads + kv_heads], heads, cosine, sine)
            seen = decode_attention(query, key, value, state, index, size**-0.5)
            hidden = hidden + (layer.out @ seen.reshape(rows, -1).T).T
            if layer.out_bias is not None:
                hidden += layer.out_bias
            gate, up = (layer.gate_up @ _norm(hidden, *layer.before_mlp).T).chunk(2)
            hidden = hidden + (layer.down @ F.silu(gate, inplace=True).mul_(up)).T
        norm = self._model.norm
        return _norm(hidden, norm.weight, norm.variance_epsilon)


def supports(causal_lm: Any) -> bool:
    """Tell whether `Decoder` computes what the model does: on the processor, by type, nothing unusual in it."""
    config = causal_lm.config
    return (
        config.model_type in TYPES
        and causal_lm.device.type == "cpu"
        and causal_lm.dtype in (torch.float32, torch.float64)
        and config.hidden_act == "silu"
        and not any(getattr(layer.self_attn, "sliding_window", None) for layer in causal_lm.get_decoder().layers)
        and not getattr(config, "mlp_bias", False)
    )


def _join(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = [_base(attention.q_proj), _base(attention.k_proj), _base(attention.v_proj)]
    out, norms = _base(attention.o_proj), None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    return _Layer(
        (first.weight, first.variance_epsilon),
        torch.cat([part.weight for part in parts]),
        None if parts[0].bias is None else torch.cat([part.bias for part in parts]),
        norms,
        out.weight,
        out.bias,
        (second.weight, second.variance_epsilon),
        torch.cat([_base(mlp.gate_proj).weight, _base(mlp.up_proj).weight]),
        _base(mlp.down_proj).weight,
    )


def _base(module: Any) -> Any:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    # transformers' modules compute the norm in float32 whatever the model is in
    exact = hidden.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return weight * (exact * scale).to(hidden.dtype)


def _rotate(layer: _Layer, both: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated queries (B, H, D) and keys (B, K, D), normalised before where the model does that."""
    if layer.qk_norm is not None:
        query, key, epsilon = layer.qk_norm
        both = torch.cat([_norm(both[:, :heads], query, epsilon), _norm(both[:, heads:], key, epsilon)], dim=1)
    first, second = both.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    turned = (both * cosine).addcmul_(turned, sine)
    return turned[:, :heads], turned[:, heads:]
