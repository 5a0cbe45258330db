"""The two layouts of expert adapters: shapes, a round trip, and equal effects. Not run on an engine that reads them."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from peft import get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from harness.inference.experts import per_expert, per_expert_settings, stacked  # noqa: E402
from harness.inference.lora import SETTINGS, WEIGHTS, adapted_weights, save_adapter  # noqa: E402
from tests.torch_support import tiny_afmoe, with_adapter  # noqa: E402

RANK, EXPERTS = 3, 5
LAYER = "base_model.model.model.layers.2.mlp.experts"


@pytest.fixture
def wrapped():
    return with_adapter(tiny_afmoe(layers=4, experts=EXPERTS), rank=RANK, scale=0.3)


def test_shapes_and_names_of_experts_one_by_one(wrapped):
    state = get_peft_model_state_dict(wrapped)
    single = per_expert(state, RANK)
    others = {name for name in state if ".mlp.experts." not in name}
    assert {name for name in single if ".mlp.experts." not in name} == others
    assert any("shared_experts" in name for name in others)
    for expert in range(EXPERTS):
        shapes = {
            name: [tuple(single[f"{LAYER}.{expert}.{name}.lora_{factor}.weight"].shape) for factor in "AB"]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        assert shapes == {
            "gate_proj": [(RANK, 48), (40, RANK)],
            "up_proj": [(RANK, 48), (40, RANK)],
            "down_proj": [(RANK, 40), (48, RANK)],
        }
    assert sum(".mlp.experts." in name for name in single) == 3 * EXPERTS * 3 * 2


def test_the_effects_of_all_experts_are_those_of_the_stacked_weights(wrapped):
    single = per_expert(get_peft_model_state_dict(wrapped), RANK)
    weights = {weight.name: weight.layer for weight in adapted_weights(wrapped)}
    scale = weights["model.layers.2.mlp.experts.down_proj"].scaling["default"]

    def effect(expert, name):
        a, b = (single[f"{LAYER}.{expert}.{name}.lora_{factor}.weight"] for factor in "AB")
        return scale * b @ a

    down = torch.stack([effect(expert, "down_proj") for expert in range(EXPERTS)])
    gate_up = [torch.cat([effect(e, "gate_proj"), effect(e, "up_proj")]) for e in range(EXPERTS)]
    for name, found in (("down_proj", down), ("gate_up_proj", torch.stack(gate_up))):
        expected = weights[f"model.layers.2.mlp.experts.{name}"].get_delta_weight("default")
        assert expected.abs().max() > 0.01
        assert torch.allclose(found, expected, atol=1e-6)


def test_there_and_back(wrapped):
    state = get_peft_model_state_dict(wrapped)
    back = stacked(per_expert(state, RANK))
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_files_and_settings(wrapped, tmp_path):
    save_adapter(wrapped, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    single = per_expert(load_file(tmp_path / "adapter" / WEIGHTS), settings["r"])
    told = per_expert_settings(settings)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in single}
    assert set(told["target_modules"]) == names
    assert told["target_parameters"] is None
    assert (told["r"], told["lora_alpha"]) == (RANK, 2 * RANK)


def test_factors_that_do_not_fit_are_refused(wrapped):
    state = get_peft_model_state_dict(wrapped)
    with pytest.raises(ValueError, match="do not fit rank 4"):
        per_expert(state, 4)
    swapped = dict(state)  # as if PEFT wrapped the two weights the other way round
    for factor in "AB":
        inner, outer = f"{LAYER}.base_layer.lora_{factor}.weight", f"{LAYER}.lora_{factor}.weight"
        swapped[inner], swapped[outer] = state[outer], state[inner]
    with pytest.raises(ValueError, match="do not fit"):
        per_expert(swapped, RANK)
    with pytest.raises(ValueError, match="lacks the factor"):
        per_expert({name: tensor for name, tensor in state.items() if name != f"{LAYER}.lora_B.weight"}, RANK)


def test_an_a_of_its_own_for_gate_and_up_cannot_be_stacked(wrapped):
    single = per_expert(get_peft_model_state_dict(wrapped), RANK)
    single[f"{LAYER}.1.up_proj.lora_A.weight"] = single[f"{LAYER}.1.up_proj.lora_A.weight"] + 1
    with pytest.raises(ValueError, match="an A each"):
        stacked(single)
    del single[f"{LAYER}.1.up_proj.lora_A.weight"]
    with pytest.raises(ValueError, match="lacks the factor"):
        stacked(single)
