"""Models for tests: a tiny random Llama, and the embedded model where it is installed."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.config.schema import LoraSection
from harness.inference.lora import attach_lora, trainable
from harness.inference.models import LoadedModel


def tiny_llama(dtype=torch.float32, vocabulary=128, layers=3, seed=0):
    """Return a randomly initialised Llama with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    return model.requires_grad_(False)


def loaded(model, tokenizer=None, eos=(2,)):
    """Wrap a model as the engine wants it."""
    parameter = next(model.parameters())
    return LoadedModel(model, tokenizer, frozenset(eos), parameter.dtype, parameter.device, Path())


def with_adapter(model, rank=4, scale=0.05, seed=1, dropout=0.0):
    """Attach adapters whose B is not zero."""
    wrapped = attach_lora(model, LoraSection(rank=rank, alpha=2.0 * rank, dropout=dropout), seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        for name, parameter in trainable(wrapped).items():
            if dtype == torch.float64:
                parameter.data = parameter.data.double()
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return wrapped
