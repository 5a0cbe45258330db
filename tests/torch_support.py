"""Models for tests: tiny random ones of every supported type, and a tokenizer that needs no file."""

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


def _tiny(kind, dtype, layers, seed, **settings):
    """Return a randomly initialised model of a transformers class."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=settings.pop("vocabulary", 128),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=2,
        **settings,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval().requires_grad_(False)


def tiny_qwen(version=3, dtype=torch.float32, layers=2, seed=0, **settings):
    """Return a random Qwen2 (biases) or Qwen3 (norms on queries and keys) whose last layer slides over 8 tokens."""
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": layers - 1}
    head = {"head_dim": 8} if version == 3 else {}
    return _tiny(f"Qwen{version}", dtype, layers, seed, tie_word_embeddings=True, **head, **window, **settings)


def tiny_afmoe(dtype=torch.float32, layers=4, experts=6, seed=0, **settings):
    """Return a random AFMoE: one dense layer, three of sliding attention with rope, the last full without."""
    model = _tiny(
        "Afmoe",
        dtype,
        layers,
        seed,
        head_dim=8,
        moe_intermediate_size=40,
        num_dense_layers=1,
        num_experts=experts,
        num_experts_per_tok=2,
        num_shared_experts=1,
        route_scale=1.5,
        global_attn_every_n_layers=4,
        sliding_window=8,
        mup_enabled=True,
        initializer_range=0.08,
        **settings,
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():  # a fresh router is zero: every choice of experts would be a tie
        if "router" in name or "expert_bias" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_tokenizer(template=CHAT_TEMPLATE):
    """Return a byte-level tokenizer of 260 tokens: one per byte, and four special ones; ends a turn with id 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "<|end|>", "<|start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    roles = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **roles)


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
