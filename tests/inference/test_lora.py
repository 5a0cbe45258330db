"""Adapters: merging and un-merging, and files that plain PEFT reads."""

from __future__ import annotations

import json
import random

import pytest

torch = pytest.importorskip("torch")

from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from harness.config.schema import LoraSection  # noqa: E402
from harness.core.canonical import sha256_file  # noqa: E402
from harness.core.errors import InfraError  # noqa: E402
from harness.inference.engine import TransformersEngine, merged_adapter  # noqa: E402
from harness.inference.lora import (  # noqa: E402
    SETTINGS,
    WEIGHTS,
    attach_lora,
    load_adapter,
    read_adapter,
    save_adapter,
    trainable,
)
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402

IDS = torch.tensor([[5, 9, 30, 77, 101, 4, 63]])


def logprobs(model):
    model.eval()
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=IDS, use_cache=False).logits.double(), -1)


def test_fresh_adapters_change_nothing_and_follow_the_seed():
    plain = logprobs(tiny_llama())
    first, second, third = (attach_lora(tiny_llama(), LoraSection(rank=4), seed) for seed in (1, 1, 2))
    assert torch.equal(logprobs(first), plain)
    a, b, c = (trainable(model) for model in (first, second, third))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_attaching_leaves_global_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    attach_lora(tiny_llama(seed=0), LoraSection(rank=4), 1)
    model = tiny_llama  # building the model seeds by itself, so only the attach may matter
    torch.manual_seed(5)
    wrapped = attach_lora(model(seed=5), LoraSection(rank=4), 1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)
    assert list(trainable(wrapped)) == sorted(trainable(wrapped))


def test_every_linear_layer_but_the_head_is_adapted():
    wrapped = attach_lora(tiny_llama(layers=2), LoraSection(rank=4), 0)
    modules = {name.split(".lora_")[0].split("layers.")[1] for name in trainable(wrapped)}
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert modules == {f"{layer}.{name}" for layer in range(2) for name in names}


def test_merging_restores_every_bit():
    wrapped = with_adapter(tiny_llama(), scale=0.5)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    pointers = {name: tensor.data_ptr() for name, tensor in wrapped.state_dict().items()}
    unmerged = logprobs(wrapped)
    with merged_adapter(wrapped):
        assert any(not torch.equal(before[n], t) for n, t in wrapped.state_dict().items())
        inside = logprobs(wrapped)
    after = wrapped.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == pointers
    assert torch.allclose(inside, unmerged, atol=1e-5)
    assert not torch.allclose(inside, logprobs(tiny_llama()), atol=1e-2)  # the adapter did act
    assert torch.equal(logprobs(wrapped), unmerged)


def test_an_error_while_merged_restores_too():
    wrapped = with_adapter(tiny_llama(), scale=0.5)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    unmerged = logprobs(wrapped)
    with pytest.raises(KeyboardInterrupt), merged_adapter(wrapped):
        raise KeyboardInterrupt
    assert all(torch.equal(before[name], tensor) for name, tensor in wrapped.state_dict().items())
    assert torch.equal(logprobs(wrapped), unmerged)


def test_the_engine_leaves_the_weights_as_they_were():
    wrapped = with_adapter(tiny_llama(), scale=0.5)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    source = random.Random(0)
    prompts = [[5, 6, 7, source.randrange(10, 99)] for _ in range(3)]
    TransformersEngine(loaded(wrapped.get_base_model()), wrapped).generate(prompts, 2, 4, 1.0, [[1, 2]] * 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in wrapped.state_dict().items())
    assert all(parameter.requires_grad for parameter in trainable(wrapped).values())


def test_plain_peft_reads_what_was_saved(tmp_path):
    wrapped = with_adapter(tiny_llama(), scale=0.2)
    expected = logprobs(wrapped)
    sha = save_adapter(wrapped, tmp_path / "adapter")
    assert sha == sha256_file(tmp_path / "adapter" / WEIGHTS)
    peft_model = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "adapter"))
    assert torch.equal(logprobs(peft_model), expected)
    ours = load_adapter(tiny_llama(), tmp_path / "adapter")
    assert torch.equal(logprobs(ours), expected)
    assert not torch.allclose(expected, logprobs(tiny_llama()), atol=1e-2)


def test_equal_adapters_give_equal_files_without_paths_of_this_machine(tmp_path):
    for name in ("a", "b"):
        save_adapter(with_adapter(tiny_llama()), tmp_path / name)
    for file in (WEIGHTS, SETTINGS):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    settings = json.loads((tmp_path / "a" / SETTINGS).read_text())
    assert settings["base_model_name_or_path"] is None
    assert settings["inference_mode"] is True
    assert str(tmp_path) not in (tmp_path / "a" / SETTINGS).read_text()


def test_saving_replaces_what_stood_there(tmp_path):
    save_adapter(with_adapter(tiny_llama(), seed=1), tmp_path / "adapter")
    (tmp_path / ".adapter.partial").mkdir()
    second = save_adapter(with_adapter(tiny_llama(), seed=2), tmp_path / "adapter")
    assert sha256_file(tmp_path / "adapter" / WEIGHTS) == second
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_section_survives(tmp_path):
    save_adapter(attach_lora(tiny_llama(), LoraSection(rank=8, alpha=12.5, dropout=0.1), 0), tmp_path / "adapter")
    section, state = read_adapter(tmp_path / "adapter")
    assert section == LoraSection(rank=8, alpha=12.5, dropout=0.1)
    assert len(state) == 2 * 7 * 3


def test_an_adapter_of_another_model_does_not_fit(tmp_path):
    save_adapter(with_adapter(tiny_llama(layers=2)), tmp_path / "adapter")
    with pytest.raises(InfraError, match="does not fit the model"):
        load_adapter(tiny_llama(layers=3), tmp_path / "adapter")


def test_an_adapter_that_lost_a_tensor_does_not_fit(tmp_path):
    save_adapter(with_adapter(tiny_llama()), tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / WEIGHTS)
    lost = sorted(state)[-1]
    save_file({name: tensor for name, tensor in state.items() if name != lost}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(InfraError, match=lost):
        load_adapter(tiny_llama(), tmp_path / "adapter")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"r": 0, "lora_alpha": 1, "lora_dropout": 0}', "null"])
def test_settings_that_make_no_sense(tmp_path, text):
    save_adapter(with_adapter(tiny_llama()), tmp_path / "adapter")
    (tmp_path / "adapter" / SETTINGS).write_text(text)
    with pytest.raises(InfraError, match="missing or corrupt"):
        read_adapter(tmp_path / "adapter")


def test_nothing_there(tmp_path):
    with pytest.raises(InfraError, match="missing or corrupt") as caught:
        read_adapter(tmp_path)
    assert "outputs/<run>/adapters/" in caught.value.hint


def test_a_rank_that_the_weights_do_not_have_asks_for_no_memory(tmp_path):
    save_adapter(with_adapter(tiny_llama()), tmp_path / "a")
    settings = json.loads((tmp_path / "a" / SETTINGS).read_text())
    (tmp_path / "a" / SETTINGS).write_text(json.dumps(settings | {"r": 2**70}))
    with pytest.raises(InfraError, match="does not fit the model or its settings"):
        load_adapter(tiny_llama(), tmp_path / "a")


def test_whole_numbers_are_no_weights(tmp_path):
    save_adapter(with_adapter(tiny_llama()), tmp_path / "a")
    state = {name: tensor.to(torch.int64) for name, tensor in load_file(tmp_path / "a" / WEIGHTS).items()}
    save_file(state, tmp_path / "a" / WEIGHTS)
    with pytest.raises(InfraError, match="whole ones"):
        read_adapter(tmp_path / "a")
