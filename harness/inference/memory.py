"""What a model needs in memory, from its config.json alone, before any weight is loaded.

The model is built and one training pass is run on tensors that have shapes and no content (torch's
`FakeTensorMode`), through the trainer's own function. So the counts follow the code: parameters are
counted, not computed from a formula for each architecture, and the bytes kept for the backward pass are
those that autograd really keeps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft.tuners.lora import ParamWrapper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from harness.config.schema import LoraSection
from harness.core.errors import ConfigError
from harness.inference.lora import adapted_weights, attach_lora, trainable
from harness.inference.models import SUPPORTED_TYPES, check_four_bits
from harness.inference.parity import Trainer
from harness.inference.saved import saved_bytes
from harness.inference.tree import ATTENTION, build_tree

PARTS = {
    "embedding": ("embed_tokens",),
    "output": ("lm_head",),
    "router": (".router.", ".expert_bias"),
    "experts": (".mlp.experts.",),
    "shared experts": (".shared_experts.",),
    "attention": (".self_attn.",),
    "mlp": (".mlp.",),
    "norms": ("norm",),
}
"""Part -> what its parameters have in their names; the first part that fits counts."""
SHAPES = "harness_shapes"
MOMENTS = 2
"""Numbers that AdamW keeps for each parameter."""
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Of a weight: 4, an 8-bit scale for 64 of them, and a 32-bit one for 256 scales (Dettmers et al. 2023, section 3)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One pass of the trainer, and of the sampler: a group of completions of one prompt.

    Args:
        prompt: tokens of the prompt.
        completion: tokens of each completion.
        group: completions.
    """

    prompt: int = 600
    completion: int = 64
    group: int = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """Parameters by part, and bytes.

    Args:
        active: parameters that one token is multiplied with; of the experts only those it is routed to.
        weight_bytes: the base model, as far as it is on the device.
        host_bytes: blocks of it that rest in the processor's memory, or in files that are mapped into it.
        adapter_bytes: adapters, their gradient and the optimizer's moments, in float32.
        copy_bytes: of `activation_bytes`, weights with their adapter folded in that live until the backward
            pass: PEFT makes such a copy of each weight it adapts as a parameter.
        activation_bytes: what autograd keeps of one pass of the trainer.
        logit_bytes: of the logits that exist at the same time, float32.
        cache_bytes: keys and values of the sampler.
    """

    parts: dict[str, int]
    active: int
    adapter_parameters: int
    weight_bytes: int
    adapter_bytes: int
    copy_bytes: int
    activation_bytes: int
    logit_bytes: int
    cache_bytes: int
    host_bytes: int = 0

    @property
    def parameters(self) -> int:
        """Of the base model."""
        return sum(self.parts.values())

    @property
    def training_bytes(self) -> int:
        """Peak of a training pass, without the libraries and what the allocator wastes."""
        return self.weight_bytes + self.adapter_bytes + self.activation_bytes + self.logit_bytes

    @property
    def sampling_bytes(self) -> int:
        """Peak of sampling; in float32 the weights with the folded adapter stand beside the base's."""
        return self.weight_bytes + self.adapter_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True)
class Base:
    """Bytes of a frozen base.

    Args:
        outside: what does not belong to a block: embeddings, output head, last norm.
        blocks: of each block.
        matrices: of `blocks`, what stands in matrices of two dimensions.
        itemsize: bytes of a weight.
    """

    outside: int
    blocks: tuple[int, ...]
    matrices: int
    itemsize: int

    @classmethod
    def of(cls, model: Any) -> Base:
        """Count a model of any device."""
        layers = list(model.get_decoder().layers)
        weights = [parameter for layer in layers for parameter in layer.parameters()]
        blocks = tuple(sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers)
        outside = sum(parameter.nbytes for parameter in model.parameters()) - sum(blocks)
        matrices = sum(parameter.nbytes for parameter in weights if parameter.ndim == 2)
        return cls(outside, blocks, matrices, model.dtype.itemsize)

    def resting(self, load: str) -> tuple[int, int]:
        """Return the bytes on the device and those elsewhere for a value of `model.load`.

        Offloaded blocks visit the device one at a time, so the largest counts.
        """
        whole = sum(self.blocks)
        if load == "offload":
            return self.outside + max(self.blocks, default=0), whole
        if load == "nf4":
            return self.outside + whole - self.matrices + int(self.matrices / self.itemsize * NF4_BITS / 8), 0
        return self.outside + whole, 0


def footprint(
    folder: Path, section: LoraSection, dtype: torch.dtype, work: Workload, trainer: Trainer, load: str = "full"
) -> Footprint:
    """Return what the model of a folder's config.json needs.

    Args:
        folder: with config.json; weights are not looked at.
        section: the adapters.
        dtype: of the base model.
        work: tokens of a pass.
        trainer: the trainer's own parts.
        load: as `model.load`.

    Raises:
        ConfigError: a model type that is not supported, no config of one, or experts in 4 bits.
    """
    config = _config(folder)
    if load == "nf4":
        check_four_bits(config.model_type)
    with torch.device("meta"):  # PEFT can attach there, but the CPU's attention cannot run there
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        parts = _parts(model)
        weights, host = Base.of(model).resting(load)
        wrapped = attach_lora(model, section, 0)
    adapters = sum(parameter.numel() for parameter in trainable(wrapped).values())
    copies = sum(weight.base.nbytes for weight in adapted_weights(wrapped) if isinstance(weight.layer, ParamWrapper))
    with FakeTensorMode():
        _without_content(wrapped)
        trainer.prepare(wrapped)
        if "experts" in parts:  # torch's grouped product knows its shapes only in bfloat16
            model.set_experts_implementation(SHAPES)
        kept = saved_bytes(lambda: one_pass(wrapped.get_base_model(), work, trainer), wrapped.parameters)
    if load == "offload":  # the inputs of all blocks, and everything of the one that is computed again
        layers, tokens = config.num_hidden_layers, work.prompt + work.group * work.completion
        kept = kept // layers + layers * tokens * config.hidden_size * dtype.itemsize
        copies //= layers
    return Footprint(
        parts=parts,
        active=_active(parts, config),
        adapter_parameters=adapters,
        weight_bytes=weights,
        adapter_bytes=adapters * 4 * (2 + MOMENTS),
        copy_bytes=copies,
        activation_bytes=kept,
        logit_bytes=trainer.logit_rows * config.vocab_size * 4,
        cache_bytes=_cache(config, work, dtype),
        host_bytes=host,
    )


def _config(folder: Path) -> Any:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if settings.get("model_type") not in SUPPORTED_TYPES or "auto_map" in settings:
            raise ConfigError(
                f"model type {settings.get('model_type')!r} in {folder / 'config.json'} is not supported",
                f"supported types: {', '.join(SUPPORTED_TYPES)}, without code of their own",
            )
        return AutoConfig.from_pretrained(folder)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        what = " ".join(str(error).split())[:300]
        raise ConfigError(f"{folder / 'config.json'} is no model config: {what}", "download the model again") from error


def _without_content(model: torch.nn.Module) -> None:
    """Replace the tensors of a model by ones of the mode that is on; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    parameter = isinstance(old, torch.nn.Parameter)
                    made[id(old)] = torch.nn.Parameter(new, old.requires_grad) if parameter else new
                tensors[name] = made[id(old)]  # type: ignore[assignment]


def _experts_by_shape(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute what the experts of a layer would, by the weights of the first one: the shapes are the same.

    Args:
        self: the experts of a layer.
        hidden: (N, H).
        chosen: (N, k) experts of each token.
        weights: (N, k) of their outputs.
    """
    order = torch.sort(chosen.reshape(-1)).indices
    inner = self._apply_gate(functional.linear(hidden[order // chosen.shape[1]], self.gate_up_proj[0]))
    outer = functional.linear(inner, self.down_proj[0]) * weights.reshape(-1)[order].unsqueeze(-1)
    return outer[torch.empty_like(order)].view(*chosen.shape, -1).sum(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(SHAPES, _experts_by_shape)


def _parts(model: torch.nn.Module) -> dict[str, int]:
    found = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        part = next((part for part, marks in PARTS.items() if any(mark in name for mark in marks)), "norms")
        found[part] += parameter.numel()
    return {part: count for part, count in found.items() if count}


def _active(parts: dict[str, int], config: Any) -> int:
    """Return the parameters a token meets: an embedding is looked up, and of the experts only some are used."""
    share = (getattr(config, "num_experts_per_tok", 0) or 0) / (getattr(config, "num_experts", 0) or 1)
    tied = parts.get("embedding", 0) if "output" not in parts else 0
    dense = sum(count for part, count in parts.items() if part not in ("embedding", "experts"))
    return dense + tied + round(parts.get("experts", 0) * share)


def _cache(config: Any, work: Workload, dtype: torch.dtype) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = work.prompt + work.group * work.completion
    return int(2 * config.num_hidden_layers * heads * size * tokens * dtype.itemsize)


def one_pass(causal_lm: Any, work: Workload, trainer: Trainer) -> Tensor:
    """Return the summed log probabilities of one group, with the graph that a backward pass would need."""
    causal_lm.set_attn_implementation(ATTENTION)
    device = next(causal_lm.parameters()).device
    tree = build_tree([[0] * work.prompt], [[[0] * work.completion] * work.group], device)
    logprobs, _ = trainer.tree_logprobs(causal_lm, tree, torch.ones(work.group * work.completion, device=device))
    return logprobs.sum()
