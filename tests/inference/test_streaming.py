"""Bases whose blocks only visit the device, or that are in 4 bits, beside the same bases as plain weights."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import LoraSection, ModelSection, TrainSection  # noqa: E402
from harness.core.errors import ConfigError  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from harness.inference.lora import attach_lora, trainable  # noqa: E402
from harness.inference.models import load_model  # noqa: E402
from harness.inference.streaming import is_streamed  # noqa: E402
from harness.training.fused import fuse_adapters  # noqa: E402
from harness.training.policy import StepStats, accumulate_gradient, checkpoint_activations  # noqa: E402
from tests.torch_support import tiny_afmoe, tiny_llama, tiny_qwen, tiny_tokenizer  # noqa: E402
from tests.training.reference import random_group  # noqa: E402

PROMPT = [5, 6, 7, 8, 9]
SECTION = TrainSection(entropy_beta=0.0)


def saved(build, folder, dtype):
    build(dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def subject(folder, load, dtype="float32", like=None):
    """Return a loaded model with adapters of some effect, equal to those of another model where it is given."""
    loaded = load_model(ModelSection(name=str(folder), dtype=dtype, device="cpu", load=load))
    wrapped = attach_lora(loaded.model, LoraSection(rank=4, alpha=8.0), seed=3)
    fuse_adapters(wrapped)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in trainable(wrapped).items():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            if like is not None:
                parameter.copy_(trainable(like)[name])
    return loaded, wrapped


def drawn(loaded, wrapped):
    (rows,) = TransformersEngine(loaded, wrapped).generate([PROMPT], 4, 6, 1.0, [[11, 12, 13, 14]])
    return [row.token_ids for row in rows], torch.tensor([value for row in rows for value in row.logprobs])


def gradients(wrapped):
    """Return every gradient of a policy step, and the log probabilities that went into it."""
    causal_lm, stats = wrapped.get_base_model(), StepStats()
    causal_lm.train()
    checkpoint_activations(causal_lm, False)
    group = random_group("g", PROMPT, [4, 3], [1.0, -1.0], 100, seed=2)
    accumulate_gradient(causal_lm, [group], SECTION, stats)
    causal_lm.eval()
    return {name: parameter.grad for name, parameter in trainable(wrapped).items()}, torch.cat(stats.gaps)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen, tiny_afmoe])
def test_blocks_that_rest_elsewhere_sample_and_train_as_blocks_that_stay(build, stored, tmp_path):
    """The files' dtype is another one than that of the computation, too: then a visit converts."""
    folder = saved(build, tmp_path / "m", stored)
    loaded, wrapped = subject(folder, "full")
    streamed, other = subject(folder, "offload", like=wrapped)
    assert loaded.resident and not streamed.resident
    assert is_streamed(other.get_base_model()) and not is_streamed(wrapped.get_base_model())
    block = other.get_base_model().get_decoder().layers[0]
    at_rest = {parameter.dtype for name, parameter in block.named_parameters() if "lora_" not in name}
    assert stored in at_rest
    tokens, logprobs = drawn(loaded, wrapped)
    again, theirs = drawn(streamed, other)
    assert again == tokens
    assert (theirs - logprobs).abs().max() < 1e-5  # the adapter stands beside the weights, and is folded in the others
    expected, gaps = gradients(wrapped)
    found, their_gaps = gradients(other)
    assert torch.equal(their_gaps, gaps)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-7), name
    assert {p.dtype for n, p in block.named_parameters() if "lora_" not in n} == at_rest  # nothing stays behind


def test_a_visit_ends_when_the_block_fails(tmp_path):
    _, wrapped = subject(saved(tiny_llama, tmp_path / "m", torch.bfloat16), "offload")
    block = wrapped.get_base_model().get_decoder().layers[0]
    with pytest.raises(Exception, match=r".*"):
        block("no tensor")
    assert block.mlp.down_proj.get_base_layer().weight.dtype is torch.bfloat16


def test_what_cannot_be_in_4_bits_is_refused(tmp_path):
    folder = saved(tiny_afmoe, tmp_path / "m", torch.float32)
    with pytest.raises(ConfigError, match="experts of afmoe"):
        load_model(ModelSection(name=str(folder), device="cpu", load="nf4"))
    dense = saved(tiny_llama, tmp_path / "d", torch.float32)
    with pytest.raises(ConfigError, match="float64"):
        load_model(ModelSection(name=str(dense), device="cpu", dtype="float64", load="nf4"))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_base_in_4_bits_is_the_base_of_its_rounded_weights(tmp_path):
    """Sampler, trainer and gradients equal those of a full model that is given the weights 4 bits can tell."""
    from bitsandbytes.functional import dequantize_4bit

    folder = saved(tiny_llama, tmp_path / "m", torch.float32)
    loaded, wrapped = subject(folder, "nf4")
    full, plain = subject(folder, "full", like=wrapped)
    rounded = {
        name: dequantize_4bit(parameter.data, parameter.quant_state)
        for name, parameter in wrapped.get_base_model().named_parameters()
        if type(parameter).__name__ == "Params4bit"
    }
    assert len(rounded) == 3 * 7
    moved = 0.0
    for name, parameter in plain.get_base_model().named_parameters():
        if name in rounded:
            moved = max(moved, float((parameter - rounded[name]).abs().max()))
            parameter.data = rounded[name].to(parameter.dtype)
    assert moved > 1e-4
    tokens, logprobs = drawn(full, plain)
    again, theirs = drawn(loaded, wrapped)
    assert again == tokens and (theirs - logprobs).abs().max() < 1e-4
    expected, gaps = gradients(plain)
    found, their_gaps = gradients(wrapped)
    assert (their_gaps - gaps).abs().max() < 1e-4
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5), name
