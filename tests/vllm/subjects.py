"""Tiny random models in folders, adapters for them, and what plain transformers says of their tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import VllmSection
from harness.core.seeds import derive_seed
from harness.inference.experts import rewrite_per_expert
from harness.inference.lora import save_adapter, trainable
from harness.inference.models import LoadedModel
from harness.inference.vllm_engine import ColocatedEngine
from harness.inference.vllm_server import ServedEngine
from harness.inference.vllm_settings import EngineSettings
from tests.torch_support import tiny_tokenizer, with_adapter

EOS = frozenset({2, 7})
PROMPTS = ([1, 5, 9, 33, 40, 41, 77, 12, 13, 90, 91], [1, 5, 9, 33, 40, 41, 77, 55], [1, 60])
DEVICE = os.environ.get("HARNESS_VLLM_DEVICE", "cpu")
SMALL = VllmSection(kv_cache_gib=0.25, gpu_share=0.1)
_SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "afmoe": (
        "Afmoe",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "route_scale": 1.5,
            "global_attn_every_n_layers": 4,
            "sliding_window": 8,
            "mup_enabled": True,
        },
    ),
}


class Subject:
    """A random model in a folder, as the harness loads it, with an adapter whose B is not zero."""

    def __init__(self, kind, folder, dtype=torch.float32, adapter=True):
        import transformers

        name, settings = KINDS[kind]
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**(_SHAPE | settings))
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for key, parameter in model.named_parameters():
            if "router" in key or "expert_bias" in key or key.endswith("bias"):  # zero at birth: ties, or no test
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        for key, buffer in model.named_buffers():
            if "expert_bias" in key:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        self.folder = folder / kind
        model.to(dtype).save_pretrained(self.folder)
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.save_pretrained(self.folder)
        model.to(DEVICE)
        self.loaded = LoadedModel(model, self.tokenizer, EOS, dtype, torch.device(DEVICE), self.folder)
        self.model: Any = with_adapter(model, rank=4, scale=0.1) if adapter else None
        self.settings = EngineSettings(
            self.folder, str(dtype).removeprefix("torch."), DEVICE, 4 if adapter else 0, 1, 256, SMALL, kind
        )

    def save(self, name):
        """Save the adapter as it is."""
        path = self.folder / name
        save_adapter(self.model, path)
        if self.settings.kind == "afmoe":
            rewrite_per_expert(path)
        return path

    def scale(self, factor):
        """Change the adapter."""
        with torch.no_grad():
            for name, parameter in trainable(self.model).items():
                if "lora_B" in name:
                    parameter.mul_(factor)

    @torch.no_grad()
    def plain(self, prompts, drawn, temperature, adapter=True):
        """Return the log probabilities of drawn tokens under transformers' own attention, one row at a time."""
        causal_lm = self.model.get_base_model() if self.model is not None else self.loaded.model
        causal_lm.eval()
        causal_lm.set_attn_implementation("eager")
        if self.model is not None:
            (self.model.enable_adapter_layers if adapter else self.model.disable_adapter_layers)()
        pieces = []
        for prompt, rows in zip(prompts, drawn, strict=True):
            for row in rows:
                ids = torch.tensor([[*prompt, *row.token_ids]], device=DEVICE)
                logits = causal_lm(input_ids=ids, use_cache=False).logits[0].double() / temperature
                chosen = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
                pieces.append(chosen.gather(1, ids[0, len(prompt) :, None])[:, 0])
        if self.model is not None:
            self.model.enable_adapter_layers()
        return torch.cat(pieces).cpu()


def start(subject, mode="colocated", eos=EOS):
    """Start an engine for a subject."""
    kind = ServedEngine if mode == "server" else ColocatedEngine
    return kind(subject.settings, frozenset(eos), Path(subject.folder) / f"{mode}.log")


def seeds(n, prompts=PROMPTS, name="t"):
    return [[derive_seed(name, p, s) for s in range(n)] for p in range(len(prompts))]


def reported(drawn):
    return torch.tensor([value for rows in drawn for row in rows for value in row.logprobs], dtype=torch.float64)


def tokens(drawn):
    return [[row.token_ids for row in rows] for rows in drawn]
