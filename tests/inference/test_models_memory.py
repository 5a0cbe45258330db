"""The memory of a model from its config alone, against the real numbers of small models."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from harness.config.schema import LoraSection  # noqa: E402
from harness.core.errors import ConfigError  # noqa: E402
from harness.inference.lora import attach_lora, trainable  # noqa: E402
from harness.inference.memory import Workload, footprint, one_pass  # noqa: E402
from harness.inference.saved import saved_bytes  # noqa: E402
from harness.training.parts import trainer  # noqa: E402
from tests.torch_support import tiny_afmoe, tiny_llama, tiny_qwen  # noqa: E402

WORK = Workload(prompt=40, completion=9, group=3)
TRINITY_MINI = {
    "model_type": "afmoe",
    "architectures": ["AfmoeForCausalLM"],
    "vocab_size": 200192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "global_attn_every_n_layers": 4,
    "sliding_window": 2048,
    "mup_enabled": True,
    "tie_word_embeddings": False,
}
"""The shape of a 26B mixture with 3B active parameters."""


def described(model, folder):
    folder.mkdir()
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen, tiny_afmoe])
def test_a_small_model_needs_what_was_told(build, dtype, tmp_path):
    build().save_pretrained(tmp_path / "model")
    told = footprint(tmp_path / "model", LoraSection(rank=4), dtype, WORK, trainer())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).eval().requires_grad_(False)
    assert told.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert told.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    wrapped = attach_lora(model, LoraSection(rank=4), 0)
    trainer().prepare(wrapped)
    adapters = list(trainable(wrapped).values())
    assert told.adapter_parameters == sum(parameter.numel() for parameter in adapters)
    assert {parameter.dtype for parameter in adapters} == {torch.float32}
    real = saved_bytes(lambda: one_pass(wrapped.get_base_model(), WORK, trainer()), wrapped.parameters)
    assert told.activation_bytes == pytest.approx(real, rel=0.02)


def test_parts_and_active_parameters_of_a_mixture(tmp_path):
    model = tiny_afmoe(experts=6)
    told = footprint(described(model, tmp_path / "m"), LoraSection(rank=4), torch.float32, WORK, trainer())
    assert told.parts["experts"] == 3 * 6 * 3 * 48 * 40
    assert told.parts["shared experts"] == 3 * 3 * 48 * 40
    assert told.parts["mlp"] == 3 * 48 * 96
    assert told.parts["router"] == 3 * (6 * 48 + 6)
    assert told.parts["embedding"] == told.parts["output"] == 128 * 48
    assert told.active == told.parameters - 128 * 48 - told.parts["experts"] * 4 // 6
    stacked = 4 * told.parts["experts"]
    assert stacked < told.copy_bytes < told.activation_bytes  # PEFT folds the adapter into a copy of each layer


def test_a_dense_model_has_no_copies_and_a_tied_head_counts_once(tmp_path):
    told = footprint(described(tiny_llama(), tmp_path / "m"), LoraSection(rank=4), torch.float32, WORK, trainer())
    assert told.copy_bytes == 0
    assert "output" not in told.parts
    assert told.active == told.parameters
    longer = Workload(prompt=400, completion=9, group=3)
    more = footprint(tmp_path / "m", LoraSection(rank=4), torch.float32, longer, trainer())
    assert more.activation_bytes > 2 * told.activation_bytes
    assert more.weight_bytes == told.weight_bytes


def test_a_model_of_26b_parameters_is_told_without_loading_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TRINITY_MINI))
    told = footprint(tmp_path, LoraSection(rank=16), torch.bfloat16, Workload(), trainer())
    assert 25.5e9 < told.parameters < 26.5e9
    assert 2.5e9 < told.active < 3.5e9
    assert told.weight_bytes == pytest.approx(2 * told.parameters, rel=0.01)
    assert told.copy_bytes > 48e9  # twice the weights: what makes training of experts through PEFT so large
    assert told.adapter_bytes == 16 * told.adapter_parameters


def test_26b_parameters_that_only_visit_the_device(tmp_path):
    """Of Trinity Mini's shape: 47 GiB rest elsewhere, and one of 32 blocks, embedding and head are on the device."""
    (tmp_path / "config.json").write_text(json.dumps(TRINITY_MINI))
    told = footprint(tmp_path, LoraSection(rank=16), torch.bfloat16, Workload(), trainer(), "offload")
    mixed = 128 * 3 * 1024 * 2048 + 3 * 1024 * 2048 + 128 * 2048  # experts, the shared one, the router
    attention = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    small = 4 * 2048 + 2 * 128 + 2 * 128  # norms of the block, of queries and keys, and the bias in float32
    outside = 2 * 200192 * 2048 + 2048
    assert told.weight_bytes == 2 * (mixed + attention + small + outside)
    assert told.host_bytes == pytest.approx(2 * (told.parameters - outside), rel=1e-6)
    inputs = 32 * (600 + 8 * 64) * 2048 * 2
    assert inputs < told.activation_bytes < inputs + 3e9  # and those of one block, with the copies of its experts
    assert told.training_bytes < 13 * 2**30
    with pytest.raises(ConfigError, match="experts of afmoe"):
        footprint(tmp_path, LoraSection(), torch.bfloat16, WORK, trainer(), "nf4")


def test_a_dense_base_in_4_bits(tmp_path):
    folder = described(tiny_llama(), tmp_path / "m")
    full, told = (
        footprint(folder, LoraSection(rank=4), torch.bfloat16, WORK, trainer(), load) for load in ("full", "nf4")
    )
    matrices = 3 * (48 * (48 + 48 + 16 + 16) + 3 * 48 * 96)
    assert full.weight_bytes - told.weight_bytes == pytest.approx(matrices * (2 - 4.127 / 8), abs=2)
    assert told.activation_bytes == full.activation_bytes and told.host_bytes == 0


@pytest.mark.parametrize(
    ("change", "message"), [({"model_type": "gpt2"}, "'gpt2'"), ({"auto_map": {"AutoConfig": "x.Y"}}, "not supported")]
)
def test_what_is_not_supported_is_refused(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TRINITY_MINI | change))
    with pytest.raises(ConfigError, match=message):
        footprint(tmp_path, LoraSection(), torch.bfloat16, WORK, trainer())


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "afmoe", "hidden_size": "many"}'])
def test_a_config_that_is_none(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="no model config"):
        footprint(tmp_path, LoraSection(), torch.bfloat16, WORK, trainer())
