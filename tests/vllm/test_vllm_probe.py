"""The probe with the real vLLM: it passes for the policy, and fails for an adapter that is too old."""

from __future__ import annotations

import pytest

from harness.core.errors import InfraError
from harness.inference.agreement import TOLERANCE
from harness.training.sampler import Sampler
from tests.vllm.subjects import PROMPTS


@pytest.fixture(params=["colocated", "served"])
def engine(request):
    return request.getfixturevalue(request.param)


def test_the_probe_passes_for_the_policy_and_fails_for_a_stale_adapter(llama, engine, tmp_path, monkeypatch):
    prompts = [*PROMPTS, [1, 8, 9]]
    attempt = 1 if engine.settings.section.mode == "server" else 2
    sampler = Sampler(engine, llama.loaded, llama.model, tmp_path, attempt, 0, 0.8, lambda n: prompts[:n])
    assert sampler.bring(0)["probe/max"] <= TOLERANCE
    sampler.check()
    llama.scale(1.5)
    assert sampler.bring(1)["probe/max"] <= TOLERANCE
    sampler.check()
    llama.scale(1.01)  # an update of a hundredth
    monkeypatch.setattr(engine, "sync", lambda version, folder: None)
    assert sampler.bring(2)["probe/max"] > TOLERANCE
    with pytest.raises(InfraError, match="does not sample from the policy that is trained"):
        sampler.check()
    llama.scale(1 / 1.01 / 1.5)
