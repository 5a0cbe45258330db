"""Every supported type: what gets an adapter, tree and sampler against the plain pass, files that plain PEFT reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict  # noqa: E402

from harness.config.schema import LoraSection  # noqa: E402
from harness.core.errors import ConfigError  # noqa: E402
from harness.inference.engine import TransformersEngine, merged_adapter  # noqa: E402
from harness.inference.lora import (  # noqa: E402
    adapted_weights,
    attach_lora,
    left_out,
    load_adapter,
    save_adapter,
    trainable,
)
from harness.inference.tree import ATTENTION, build_tree  # noqa: E402
from harness.training.policy import tree_logprobs  # noqa: E402
from tests.torch_support import loaded, tiny_afmoe, tiny_llama, tiny_qwen, with_adapter  # noqa: E402
from tests.training.reference import (  # noqa: E402
    naive_gradient,
    naive_logprobs,
    random_group,
    relative_difference,
)
from tests.training.test_tree_gradient import some_groups, tree_gradient  # noqa: E402

FAMILIES: dict[str, Callable] = {
    "llama": tiny_llama,
    "qwen2": lambda **settings: tiny_qwen(2, **settings),
    "qwen3": tiny_qwen,
    "afmoe": tiny_afmoe,
}
ATTENTION_WEIGHTS = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
MLP = ["gate_proj", "up_proj", "down_proj"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 20 + i, *range(30, 31 + 2 * i)] for i in range(3)]


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def groups():
    """Prompts that share ten tokens, three completions each; long enough to leave a window of eight."""
    return [random_group(f"t{i}", p, [7, 1, 12], [0.5, -0.25, -0.25], 128, i) for i, p in enumerate(PROMPTS)]


def sequence_logprobs(model):
    """Return the log probabilities of one sequence with transformers' own attention."""
    model.eval()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        return naive_logprobs(base, PROMPTS[2], [9, 30, 77, 101, 4, 63])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_dense_models_have_an_adapter_on_every_linear_layer_but_the_head(name):
    wrapped = attach_lora(FAMILIES[name](layers=2), LoraSection(rank=4), 0)
    inside = [*ATTENTION_WEIGHTS, *(f"mlp.{part}.weight" for part in MLP)]
    expected = {f"model.layers.{layer}.{part}" for layer in range(2) for part in inside}
    assert {weight.name for weight in adapted_weights(wrapped)} == expected
    assert left_out(wrapped) == []


def test_afmoe_has_an_adapter_on_everything_but_router_and_head():
    wrapped = attach_lora(tiny_afmoe(experts=6), LoraSection(rank=4), 0)
    attention = [*ATTENTION_WEIGHTS, "self_attn.gate_proj.weight"]
    expected = {f"model.layers.{layer}.{name}" for layer in range(4) for name in attention}
    expected |= {f"model.layers.0.mlp.{name}.weight" for name in MLP}
    expected |= {f"model.layers.{i}.mlp.shared_experts.{name}.weight" for i in (1, 2, 3) for name in MLP}
    expected |= {f"model.layers.{i}.mlp.experts.{name}" for i in (1, 2, 3) for name in ("gate_up_proj", "down_proj")}
    adapted = {weight.name: weight for weight in adapted_weights(wrapped)}
    assert set(adapted) == expected
    assert left_out(wrapped) == []
    assert not any("router" in name or "lm_head" in name or "embed" in name for name in trainable(wrapped))
    gate_up = adapted["model.layers.1.mlp.experts.gate_up_proj"]
    assert (gate_up.shape, tuple(gate_up.a.shape), tuple(gate_up.b.shape)) == ((6, 80, 48), (24, 48), (80, 24))
    down = adapted["model.layers.1.mlp.experts.down_proj"]
    assert (down.shape, tuple(down.a.shape), tuple(down.b.shape)) == ((6, 48, 40), (24, 40), (48, 24))
    assert len(trainable(wrapped)) == 2 * len(expected)
    assert sum(w.parameters for w in adapted.values()) == sum(p.numel() for p in trainable(wrapped).values())


def test_tensor_names_of_afmoe_adapters():
    """Files outlive versions of PEFT, whose way to wrap two parameters of one module decides these names."""
    wrapped = attach_lora(tiny_afmoe(), LoraSection(rank=4), 0)
    names = {name for name in get_peft_model_state_dict(wrapped) if ".layers.1." in name}
    modules = [f"self_attn.{part}_proj" for part in ("q", "k", "v", "o", "gate")]
    modules += [f"mlp.shared_experts.{part}" for part in MLP] + ["mlp.experts", "mlp.experts.base_layer"]
    expected = {f"base_model.model.model.layers.1.{m}.lora_{f}.weight" for m in modules for f in "AB"}
    assert names == expected


def test_a_weight_that_would_be_left_out_is_refused(monkeypatch):
    monkeypatch.setattr("harness.inference.lora.TARGETS", {})  # what PEFT does with all-linear by itself
    with pytest.raises(ConfigError, match="would get no adapter") as caught:
        attach_lora(tiny_afmoe(), LoraSection(rank=4), 0)
    assert "harness model check" in caught.value.hint


def test_dropout_on_weights_without_one_is_refused():
    with pytest.raises(ConfigError, match="have no dropout") as caught:
        attach_lora(tiny_afmoe(), LoraSection(rank=4, dropout=0.1), 0)
    assert "lora.dropout=0" in caught.value.hint


def test_item_23_tree_and_plain_pass_agree_in_every_family(family):
    """Base and adapter, all prompts packed into one tree, against each sequence alone."""
    for model in (family(), with_adapter(family())):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        rows = groups()
        expected = torch.cat(
            [naive_logprobs(base, g.prompt, r.completion.token_ids).detach() for g in rows for r in g.rollouts]
        )
        base.set_attn_implementation(ATTENTION)
        ids = [[r.completion.token_ids for r in g.rollouts] for g in rows]
        tree = build_tree(PROMPTS, ids, torch.device("cpu"))
        with torch.no_grad():
            found, _ = tree_logprobs(base, tree, torch.ones(len(expected)))
        assert (found - expected).abs().max() <= 1e-4
        assert expected.std() > 0.1  # a model that says the same of every token would prove nothing


def test_item_23_sampler_and_plain_pass_agree_in_every_family(family):
    wrapped = with_adapter(family())
    base = wrapped.get_base_model()
    results = TransformersEngine(loaded(base), wrapped).generate(PROMPTS, 2, 12, 1.0, [[1, 2]] * 3)
    for prompt, rows in zip(PROMPTS, results, strict=True):
        for row in rows:
            expected = naive_logprobs(base, prompt, row.token_ids).detach()
            assert (torch.tensor(row.logprobs) - expected).abs().max() <= 1e-4


def test_item_23_the_router_is_frozen_and_sees_the_same_in_both_passes():
    """The experts that a token is sent to must not depend on whether its prefix is shared."""
    model = tiny_afmoe()
    seen = []
    for layer in model.model.layers[1:]:
        layer.mlp.router.register_forward_hook(lambda _m, _i, output: seen.append(output[2].sort(-1).values))
    prompt, completion = PROMPTS[2], [9, 30, 77, 101]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False)
        alone, seen[:] = list(seen), []
        model.set_attn_implementation(ATTENTION)
        tree = build_tree([prompt], [[completion, [8, 8, 8]]], torch.device("cpu"))
        tree_logprobs(model, tree, torch.ones(7))
    length = len(prompt) + len(completion)
    assert len(alone) == len(seen) == 3
    assert all(torch.equal(a, b[:length]) for a, b in zip(alone, seen, strict=True))
    assert len({tuple(row) for row in torch.cat(alone).tolist()}) > 3  # the router does choose


def test_the_tree_has_the_naive_gradient_in_every_family(family):
    wrapped = with_adapter(family())
    rows = some_groups()
    shared = tree_gradient(wrapped, rows)
    assert relative_difference(shared, naive_gradient(wrapped.get_base_model(), trainable(wrapped), rows)) < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_item_24_every_adapter_tensor_gets_a_gradient(family, checkpointing):
    """B on the first step, where it is zero and A cannot have one; both from the second step on."""
    for wrapped, first in ((attach_lora(family(), LoraSection(rank=4), 0), True), (with_adapter(family()), False)):
        if checkpointing:
            base: Any = wrapped.get_base_model()
            base.gradient_checkpointing_enable({"use_reentrant": False})
            wrapped.train()
        found = tree_gradient(wrapped, some_groups())
        assert all(torch.isfinite(gradient).all() for gradient in found.values())
        silent = {name for name, gradient in found.items() if not gradient.abs().max() > 0}
        assert silent == ({name for name in found if "lora_A" in name} if first else set())


def test_every_kind_of_adapter_changes_the_output_alone():
    """The experts' among them: an engine that drops them answers like the base model (vllm#41384)."""
    base = sequence_logprobs(tiny_afmoe())
    wrapped = with_adapter(tiny_afmoe())
    written = {name: parameter for name, parameter in trainable(wrapped).items() if "lora_B" in name}
    kept = {name: parameter.detach().clone() for name, parameter in written.items()}
    kinds = {re.sub(r"layers\.\d+", "layers.*", name) for name in written}
    assert sum("mlp.experts" in kind for kind in kinds) == 2
    for kind in sorted(kinds):
        with torch.no_grad():
            for name, parameter in written.items():
                parameter.copy_(kept[name] if re.sub(r"layers\.\d+", "layers.*", name) == kind else 0 * kept[name])
        assert (sequence_logprobs(wrapped) - base).abs().max() > 1e-3, kind


def test_merging_adapters_on_parameters_restores_every_bit():
    wrapped = with_adapter(tiny_afmoe(), scale=0.3)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    unmerged = sequence_logprobs(wrapped)
    with merged_adapter(wrapped):
        inside = sequence_logprobs(wrapped)
    assert all(torch.equal(before[name], tensor) for name, tensor in wrapped.state_dict().items())
    assert torch.allclose(inside, unmerged, atol=1e-4)
    assert (inside - sequence_logprobs(tiny_afmoe())).abs().max() > 1e-2
    assert torch.equal(sequence_logprobs(wrapped), unmerged)


def test_an_adapter_that_cannot_be_merged_is_not_left_out_in_silence():
    wrapped = get_peft_model(tiny_llama(), LoraConfig(target_modules=["embed_tokens"], task_type="CAUSAL_LM"))
    with pytest.raises(TypeError, match="cannot be merged"), merged_adapter(wrapped):
        pass


def test_item_21_a_reloaded_adapter_gives_the_same_numbers_in_plain_peft(family, tmp_path):
    wrapped = with_adapter(family(), scale=0.2)
    expected = sequence_logprobs(wrapped)
    sha = save_adapter(wrapped, tmp_path / "adapter")
    assert torch.equal(sequence_logprobs(PeftModel.from_pretrained(family(), str(tmp_path / "adapter"))), expected)
    assert torch.equal(sequence_logprobs(load_adapter(family(), tmp_path / "adapter")), expected)
    assert (sequence_logprobs(family()) - expected).abs().max() > 1e-2
    assert save_adapter(wrapped, tmp_path / "same") == sha
    with torch.no_grad():  # the hash changes when, and only when, a weight does
        trainable(wrapped)[sorted(trainable(wrapped))[-1]].mul_(1.5)
    assert save_adapter(wrapped, tmp_path / "other") != sha
    assert not torch.equal(sequence_logprobs(wrapped), expected)


def test_llama_adapters_are_what_they_were():
    """Files of earlier versions name these tensors and settings; both must stay."""
    section = LoraSection(rank=4, dropout=0.1)
    wrapped = attach_lora(tiny_llama(layers=1), section, 0)
    plain = LoraConfig(
        r=4, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear", bias="none", task_type="CAUSAL_LM"
    )
    expected = get_peft_model(tiny_llama(layers=1), plain).peft_config["default"].to_dict()
    assert wrapped.peft_config["default"].to_dict() == expected
    modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    modules += [f"mlp.{name}" for name in MLP]
    names = {f"base_model.model.model.layers.0.{m}.lora_{f}.weight" for m in modules for f in "AB"}
    assert set(get_peft_model_state_dict(wrapped)) == names
