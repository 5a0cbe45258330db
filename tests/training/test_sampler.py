"""Bringing the policy to an engine with weights of its own, and the probe; a second model stands in for vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from harness.core.errors import InfraError  # noqa: E402
from harness.inference.agreement import TOLERANCE  # noqa: E402
from harness.inference.experts import rewrite_per_expert, stacked  # noqa: E402
from harness.inference.lora import SETTINGS, WEIGHTS, save_adapter, trainable  # noqa: E402
from harness.training.sampler import FOLDER, Sampler  # noqa: E402
from tests.torch_support import loaded, tiny_afmoe, tiny_llama, with_adapter  # noqa: E402
from tests.training.second_model import SecondModel  # noqa: E402

pytestmark = pytest.mark.torch
PROMPTS = [[1, 4, 5, 6, 7 + index] for index in range(4)]


@pytest.fixture
def engine(tmp_path):
    return SecondModel(tmp_path)


@pytest.fixture
def policy():
    base = loaded(tiny_llama())
    return base, with_adapter(base.model, seed=3)


@pytest.fixture
def sampler(engine, policy, tmp_path):
    base, model = policy
    return Sampler(engine, base, model, tmp_path, 2, 0, 0.8, lambda count: PROMPTS[:count])


def move(model, factor=1.5):
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            if "lora_B" in name:
                parameter.mul_(factor)


def test_the_engine_gets_every_version_under_a_name_of_its_own_and_the_probe_agrees(sampler, engine, policy, tmp_path):
    names = []
    for step in range(3):
        metrics = sampler.bring(step)
        assert set(metrics) == {"probe/max", "probe/mean", "probe/p99", "probe/signed", "time/sync"}
        assert 0 <= metrics["probe/mean"] <= metrics["probe/p99"] <= metrics["probe/max"] <= TOLERANCE
        sampler.check()
        assert engine.versions == [engine.version]
        assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [f"step_{step}"]
        names.append(engine.version)
        move(policy[1])
    assert [name.rsplit("-", 1)[0] for name in names] == ["policy-2-0", "policy-2-1", "policy-2-2"]
    assert len({name.rsplit("-", 1)[1] for name in names}) == 3
    assert names[-1] in sampler.describe() and sampler.agreement.tokens > 64


def test_weights_that_did_not_change_are_not_sent_again(sampler, engine, tmp_path):
    sampler.bring(0)
    assert sampler.bring(1) == {}
    assert engine.version.startswith("policy-2-0-")
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step_0"]


def test_an_engine_that_goes_on_with_an_old_adapter_stops_the_run(sampler, engine, policy):
    sampler.bring(0)
    sampler.check()
    engine.stale = True
    move(policy[1])
    metrics = sampler.bring(1)
    assert metrics["probe/max"] > TOLERANCE
    with pytest.raises(InfraError, match="does not sample from the policy that is trained"):
        sampler.check()


def test_an_engine_that_does_not_list_a_version_stops_the_run(sampler, engine):
    engine.silent = True
    with pytest.raises(InfraError, match="does not list it"):
        sampler.bring(0)


def test_what_a_killed_attempt_left_is_gone_at_the_start(engine, policy, tmp_path):
    (tmp_path / FOLDER / "step_9").mkdir(parents=True)
    base, model = policy
    Sampler(engine, base, model, tmp_path, 3, 0, 1.0, lambda count: PROMPTS[:count])
    assert not (tmp_path / FOLDER).exists()


def test_the_probe_leaves_the_model_in_the_mode_it_was_in(sampler, policy):
    policy[1].train()
    sampler.bring(0)
    assert policy[1].get_base_model().training


def test_greedy_rows_and_groups_keep_their_order(engine):
    drawn = engine.generate(PROMPTS, 3, 5, 1.0, [[10 * p + s for s in range(3)] for p in range(4)])
    again = engine.generate([PROMPTS[2]], 1, 5, 1.0, [[21]])
    assert [len(rows) for rows in drawn] == [3, 3, 3, 3]
    assert again[0][0].token_ids == drawn[2][1].token_ids
    assert engine.generate([], 3, 5, 1.0, []) == []


def test_leaving_the_block_ends_the_engine(engine):
    with engine as same:
        assert same is engine and not engine.closed
    assert engine.closed


def test_adapters_on_experts_are_rewritten_one_by_one(tmp_path):
    import json

    folder = Path(tmp_path) / "adapter"
    save_adapter(with_adapter(tiny_afmoe(experts=5), rank=3), folder)
    before = load_file(folder / WEIGHTS)
    rewrite_per_expert(folder)
    after = load_file(folder / WEIGHTS)
    assert any(".experts.4.up_proj.lora_B.weight" in name for name in after)
    back = stacked(after)
    assert back.keys() == before.keys() and all(torch.equal(back[name], before[name]) for name in before)
    settings = json.loads((folder / SETTINGS).read_text())
    assert settings["target_parameters"] is None and {"gate_proj", "up_proj"} <= set(settings["target_modules"])
