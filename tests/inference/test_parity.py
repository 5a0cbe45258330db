"""The checks of `harness model check` pass on sound models, and each fails when what it looks for is broken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from peft.tuners.lora import ParamWrapper  # noqa: E402

from harness.config.schema import LoraSection  # noqa: E402
from harness.inference import parity  # noqa: E402
from harness.inference.lora import attach_lora  # noqa: E402
from harness.inference.parity import check_model, small_window  # noqa: E402
from harness.inference.tree import TreeBatch  # noqa: E402
from harness.training.parts import trainer  # noqa: E402
from harness.training.policy import tree_logprobs  # noqa: E402
from tests.torch_support import (  # noqa: E402
    CHAT_TEMPLATE,
    loaded,
    tiny_afmoe,
    tiny_llama,
    tiny_qwen,
    tiny_tokenizer,
)

NAMES = ["weights", "chat_template", "end_of_turn", "adapters", "gradient", "sampler", "tree", "packed", "padded"]
NAMES += ["sliding_window", "effect", "merged", "round_trip"]
FAMILIES: dict[str, Callable] = {
    "llama": tiny_llama,
    "qwen2": lambda **settings: tiny_qwen(2, **settings),
    "qwen3": tiny_qwen,
}


def run(model, template=CHAT_TEMPLATE, eos=(2,), logprobs=tree_logprobs):
    subject = loaded(model, tiny_tokenizer(template), eos)
    return {
        found.name: found
        for found in check_model(subject, LoraSection(rank=4, alpha=8), replace(trainer(), tree_logprobs=logprobs))
    }


def failed(found):
    return [name for name, check in found.items() if not check.passed]


@pytest.fixture(scope="module")
def afmoe():
    """The checks of a sound mixture, with its tensors before and after."""
    model = tiny_afmoe(vocabulary=260)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return run(model), model, before


def passes(found):
    assert list(found) == NAMES
    assert failed(found) == [], [found[name].detail for name in failed(found)]
    for name in ("sampler", "tree", "packed", "padded"):
        assert found[name].numbers["max"] <= 1e-4
        assert found[name].numbers["tokens"] >= 60
    assert found["round_trip"].numbers["peft_max"] == found["round_trip"].numbers["harness_max"] == 0
    assert found["gradient"].numbers["without"] == found["gradient"].numbers["a_at_start"] == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_sound_dense_models_pass_every_check(name):
    passes(run(FAMILIES[name](vocabulary=260)))


def test_a_sound_mixture_passes_every_check_in_its_parts(afmoe):
    found = afmoe[0]
    passes(found)
    assert found["sliding_window"].numbers["layers"] == 3
    assert found["sliding_window"].numbers["moved"] > 1e-3
    adapters = found["adapters"].numbers
    assert adapters["mlp.experts.gate_up_proj.count"] == adapters["mlp.shared_experts.up_proj.weight.count"] == 3
    assert set(found["effect"].numbers) == {key[: -len(".count")] for key in adapters if key.endswith(".count")}
    assert found["effect"].numbers["mlp.experts.down_proj"] > 1e-4
    assert 0 < found["gradient"].numbers["experts_touched"] <= found["gradient"].numbers["experts"] == 36


def test_the_model_is_left_as_it_came(afmoe):
    _, model, before = afmoe
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [8, 8, 8, None]
    assert not any("forward" in vars(module) for module in model.modules())


def test_bfloat16_has_bounds_of_its_own():
    found = run(tiny_llama(torch.bfloat16, vocabulary=260))
    assert failed(found) == [], [found[name].detail for name in failed(found)]
    assert "99th percentile" in found["tree"].detail
    assert "not merged" in found["merged"].detail


def test_weights_that_are_not_finite():
    model = tiny_llama(vocabulary=260)
    model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    check = next(check_model(loaded(model, tiny_tokenizer()), LoraSection(), trainer()))
    assert not check.passed
    assert "model.layers.1.mlp.up_proj.weight" in check.detail


def test_a_template_that_rewrites_earlier_turns():
    forgetful = CHAT_TEMPLATE.replace("message['content']", "(message['content'] if loop.last else '…')")
    found = run(tiny_llama(vocabulary=260), forgetful)
    assert failed(found) == ["chat_template", "end_of_turn"]
    assert "episodes of one turn only" in found["chat_template"].detail


def test_no_template_is_said_and_the_rest_is_checked_on_random_ids():
    found = run(tiny_llama(vocabulary=260), None)
    assert failed(found) == ["chat_template"]
    assert found["tree"].numbers["tokens"] >= 60


def test_a_template_whose_end_of_turn_is_not_an_end():
    found = run(tiny_llama(vocabulary=260), eos=(1,))
    assert "end_of_turn" in failed(found)
    assert "'<|end|>' (id 2), which is NOT among" in found["end_of_turn"].detail


def test_a_trainer_that_is_off():
    def skewed(*arguments):
        logprobs, entropies = tree_logprobs(*arguments)
        return logprobs + 0.001, entropies

    assert failed(run(tiny_qwen(vocabulary=260), logprobs=skewed)) == ["tree", "packed", "sliding_window"]


def test_a_trainer_that_forgets_the_window(monkeypatch):
    whole = TreeBatch.bias
    monkeypatch.setattr(TreeBatch, "bias", lambda self, place, window, dtype: whole(self, place, None, dtype))
    assert {"tree", "packed", "sliding_window"} <= set(failed(run(tiny_qwen(vocabulary=260))))


def test_an_adapter_without_a_gradient(monkeypatch):
    def silenced(model, section, seed):
        wrapped = attach_lora(model, section, seed)
        model.model.layers[2].mlp.up_proj.lora_B["default"].weight.register_hook(torch.zeros_like)
        return wrapped

    monkeypatch.setattr(parity, "attach_lora", silenced)
    found = run(tiny_llama(vocabulary=260))
    assert failed(found) == ["gradient"]
    assert "model.layers.2.mlp.up_proj.weight (B)" in found["gradient"].detail


def test_experts_whose_adapters_are_dropped_in_silence(monkeypatch):
    def without(self, x, *args, **kwargs):
        return self.base_layer(x, *args, **kwargs)

    monkeypatch.setattr(ParamWrapper, "forward", without)
    found = run(tiny_afmoe(vocabulary=260))
    assert "effect" in failed(found)
    assert "mlp.experts.gate_up_proj" in found["effect"].detail


def test_a_merge_that_leaves_the_adapter_out(monkeypatch):
    @contextlib.contextmanager
    def nothing(model):
        with model.disable_adapter():
            yield

    monkeypatch.setattr(parity, "merged_adapter", nothing)
    assert failed(run(tiny_llama(vocabulary=260))) == ["merged"]


def test_a_file_that_does_not_bring_the_adapter_back(monkeypatch):
    monkeypatch.setattr(parity, "load_adapter", lambda base, folder: attach_lora(base, LoraSection(rank=4), 0))
    found = run(tiny_llama(vocabulary=260))
    assert failed(found) == ["round_trip"]
    assert found["round_trip"].numbers["peft_max"] == 0 < found["round_trip"].numbers["harness_max"]


def test_weights_that_would_be_left_out_end_the_checks(monkeypatch):
    monkeypatch.setattr("harness.inference.lora.TARGETS", {})
    found = run(tiny_afmoe(vocabulary=260))
    assert list(found) == NAMES[:4]
    assert failed(found) == ["adapters"]


def test_a_narrowed_window_comes_back_after_an_error():
    model = tiny_qwen()
    with pytest.raises(KeyboardInterrupt), small_window(model, 3) as layers:
        assert (layers, model.config.sliding_window, model.model.layers[1].self_attn.sliding_window) == (1, 3, 3)
        raise KeyboardInterrupt
    assert (model.config.sliding_window, model.model.layers[1].self_attn.sliding_window) == (8, 8)
