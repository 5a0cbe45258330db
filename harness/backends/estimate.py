"""Time and memory of a run from shapes alone, before any weight is loaded.

The arithmetic is pure; `estimate_launch` gathers its inputs: the model's config.json, what `inference.memory` counts of
it, the prompts of the environments, and the speed of one matrix product on the device. Expect the right order of
magnitude (a factor of two), not minutes.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.config.schema import ModelSection, RunConfig
from harness.core.errors import ConfigError
from harness.envs.registry import load_environment
from harness.inference.memory import Footprint, footprint
from harness.inference.memory import Workload as Pass
from harness.inference.models import config_folder, pick_device, pick_dtype, set_threads
from harness.program import Context
from harness.training.parts import trainer

CHARACTERS_PER_TOKEN = 3.6
"""English prose with names, over the tokenizers of small open models."""
TRAIN_EFFICIENCY = 0.6
"""Share of the speed of a large matrix product that forward and backward reach."""
DECODE_EFFICIENCY = 0.35
"""The same while decoding a batch token by token."""
RUNTIME_BYTES = 700 * 2**20
"""Libraries, tokenizer and allocator."""
PROMPTS_SAMPLED = 24


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the arithmetic needs of a decoder-only transformer."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    gated: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a transformers config.json.

        Raises:
            ConfigError: when a size is missing.
        """
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            experts = int(config.get("num_experts") or 0)
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                intermediate=int(config["intermediate_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                gated=config.get("model_type") == "afmoe",
                experts=experts,
                experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
                shared_experts=int(config.get("num_shared_experts") or 0),
                expert_intermediate=int(config["moe_intermediate_size"]) if experts else 0,
                dense_layers=int(config.get("num_dense_layers") or 0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the model's config.json lacks a size: {error}", "estimate needs a decoder-only model"
            ) from error

    def linears(self) -> list[tuple[int, int, int, int]]:
        """Return of the linear layers of all blocks: inputs, outputs, how many there are, how many a token meets."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, query), (self.hidden, key), (self.hidden, key), (query, self.hidden)]
        attention += [(self.hidden, query)] if self.gated else []
        mixed = self.layers - self.dense_layers if self.experts else 0
        found = [(i, o, self.layers, self.layers) for i, o in attention]
        for size, there, met in (
            (self.intermediate, self.layers - mixed, self.layers - mixed),
            (self.expert_intermediate * self.shared_experts, mixed, mixed),
            (self.expert_intermediate, mixed * self.experts, mixed * self.experts_per_token),
        ):
            found += [(self.hidden, size, there, met)] * 2 + [(size, self.hidden, there, met)]
        return found

    @property
    def parameters(self) -> int:
        """Weights in all, norms and routers left out."""
        embedding = self.vocabulary * self.hidden
        return sum(i * o * there for i, o, there, _ in self.linears()) + embedding * (1 if self.tied else 2)

    @property
    def multiplied(self) -> int:
        """Weights every token is multiplied with: the blocks and the output layer."""
        return sum(i * o * met for i, o, _, met in self.linears()) + self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Weights of LoRA adapters of this rank on every linear layer of every block."""
        return sum(rank * (i + o) * there for i, o, there, _ in self.linears())


@dataclass(frozen=True, slots=True)
class Workload:
    """What is generated and trained on.

    Args:
        shared_tokens: tokens that all training prompts of an environment begin with; computed once per batch.
        prompt_tokens: further tokens of a training prompt, on average.
        completion_tokens: tokens of a completion, at most.
        eval_samples: completions of one held-out eval.
        eval_prompt_tokens: tokens of a held-out prompt after the shared ones, on average.
        eval_tokens: tokens of a held-out completion, at most.
        evals: held-out evals of the whole run.
        warmup_steps: supervised steps of a warm start.
        warmup_items: demonstrations a step, each at most as long as a completion.
    """

    steps: int
    tasks_per_step: int
    group_size: int
    shared_tokens: int
    prompt_tokens: int
    completion_tokens: int
    microbatch_tokens: int
    rank: int
    eval_samples: int
    eval_prompt_tokens: int
    eval_tokens: int
    evals: int
    warmup_steps: int = 0
    warmup_items: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds and bytes of a run; `memory_bytes` is the peak of the process or of the device."""

    parameters: int
    adapter_parameters: int
    step_s: float
    eval_s: float
    total_s: float
    memory_bytes: int
    disk_bytes: int


def estimate(shape: ModelShape, work: Workload, flops_per_s: float, memory: int, processes: int = 1) -> Estimate:
    """Return time and memory of a run; several processes share the work evenly.

    Forward costs 2 operations per weight and token; the backward pass to adapters only needs the
    gradient of the inputs, 2 more (Kaplan et al. 2020, arXiv 2001.08361, table 1, without weight gradients).

    Args:
        shape: the model.
        work: tokens and counts.
        flops_per_s: speed of a large matrix product on the device in the dtype used.
        memory: bytes at the peak.
        processes: of the run, each as fast.
    """
    weights = shape.multiplied
    group = work.prompt_tokens + work.group_size * work.completion_tokens
    sampled = work.tasks_per_step * work.group_size * work.completion_tokens
    passes = math.ceil(work.tasks_per_step * group / max(work.microbatch_tokens - work.shared_tokens, group))
    trained = passes * work.shared_tokens + work.tasks_per_step * group
    fast, slow = flops_per_s * TRAIN_EFFICIENCY, flops_per_s * DECODE_EFFICIENCY
    prefill = 2 * weights * (work.shared_tokens + work.tasks_per_step * work.prompt_tokens) / fast
    step = prefill + 2 * weights * sampled / slow + 4 * weights * trained / fast
    eval_once = 2 * weights * work.eval_samples * work.eval_tokens / slow
    eval_once += 2 * weights * (work.shared_tokens + work.eval_samples * work.eval_prompt_tokens) / fast
    shown = work.shared_tokens + work.warmup_items * (work.prompt_tokens + work.completion_tokens)
    warm = work.warmup_steps * 4 * weights * shown / fast
    adapters = shape.adapter_parameters(work.rank)
    return Estimate(
        parameters=shape.parameters,
        adapter_parameters=adapters,
        step_s=step / processes,
        eval_s=eval_once / processes,
        total_s=warm + (work.steps * step + work.evals * eval_once) / processes,
        memory_bytes=memory,
        disk_bytes=int(adapters * 4 * (3 * 2 + work.evals)),
    )


def memory_bytes(found: Footprint, work: Workload, device: str, processes: int = 1) -> int:
    """Return the bytes of a run at its peak: of each GPU, or of all processes of a processor together.

    Args:
        found: what one pass over one group needs (`one_group`).
        work: tokens of the run; a pass takes as many groups as its budget allows.
        device: kind of the device; on a processor blocks at rest are in the same memory.
        processes: of the run.
    """
    group = work.prompt_tokens + work.group_size * work.completion_tokens
    whole = work.shared_tokens + work.tasks_per_step * group
    share = max(work.shared_tokens + group, min(work.microbatch_tokens, whole)) / (work.shared_tokens + group)
    training = found.copy_bytes + (found.activation_bytes - found.copy_bytes) * share + found.logit_bytes
    sampling = found.cache_bytes * whole / (work.shared_tokens + group)
    once = found.weight_bytes + found.adapter_bytes + max(training, sampling) + RUNTIME_BYTES
    return int((once + found.host_bytes) * processes if device == "cpu" else once)


def one_group(work: Workload) -> Pass:
    """Return the pass over one group that memory is counted for."""
    return Pass(work.shared_tokens + work.prompt_tokens, work.completion_tokens, work.group_size)


def workload(config: RunConfig, context: Context) -> Workload:
    """Return the counts of a run from its config and the protocol; prompts are measured on the first tasks."""
    train = [(env.weight, *_prompt_tokens(env.id, env.args, "train")) for env in config.env]
    limits = [
        (env.sampling.max_tokens or config.sampling.max_tokens) * (env.sampling.max_turns or config.sampling.max_turns)
        for env in config.env
    ]
    total = sum(weight for weight, _, _ in train)
    evals = context.eval.env
    samples = sum(env.items * env.samples for env in evals)
    own = sum(env.items * env.samples * _prompt_tokens(env.id, env.args, env.split)[1] for env in evals)
    return Workload(
        steps=config.train.steps,
        tasks_per_step=config.train.tasks_per_step,
        group_size=config.train.group_size,
        shared_tokens=round(sum(weight * shared for weight, shared, _ in train) / total),
        prompt_tokens=round(sum(weight * tokens for weight, _, tokens in train) / total),
        completion_tokens=round(sum(row[0] * limit for row, limit in zip(train, limits, strict=True)) / total),
        microbatch_tokens=config.train.microbatch_tokens,
        rank=config.lora.rank,
        eval_samples=samples,
        eval_prompt_tokens=round(own / samples),
        eval_tokens=round(sum(env.items * env.samples * env.max_tokens * env.max_turns for env in evals) / samples),
        evals=evals_of(config.train.steps, context.eval.interval) + (config.warmup.steps > 0),
        warmup_steps=config.warmup.steps,
        warmup_items=config.warmup.items_per_step,
    )


def evals_of(steps: int, interval: int) -> int:
    """Return how many held-out evals of the policy and the base a run makes: before, at every interval, at the end."""
    return 1 + steps // interval + (1 if steps % interval else 0)


def _prompt_tokens(env: str, args: Mapping[str, Any], split: str) -> tuple[int, int]:
    """Return the tokens all prompts begin with, and the further tokens of one, on average."""
    loaded = load_environment(env, args)
    tasks = loaded.tasks(split)[:PROMPTS_SAMPLED]
    texts = ["".join(message.content for message in loaded.start(task).messages) for task in tasks]
    if not texts:
        return 0, 0
    shared = len(os.path.commonprefix(texts)) if len(texts) > 1 else 0  # noqa: RUF071 - characters are meant
    mean = statistics.fmean(len(text) for text in texts)
    return round(shared / CHARACTERS_PER_TOKEN), round((mean - shared) / CHARACTERS_PER_TOKEN)


def model_shape(section: ModelSection) -> ModelShape:
    """Return a model's shape; of a Hub id only config.json is fetched.

    Raises:
        NotFoundError, ConfigError, InfraError: as `inference.models.resolve_model`.
    """
    path = config_folder(section.name, section.revision) / "config.json"
    return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))


def measure_flops(device: Any, dtype: Any, size: int = 1024, seconds: float = 0.4) -> float:
    """Return the operations per second of a square matrix product on a device.

    Args:
        device: a torch device.
        dtype: a torch dtype.
        size: side of the matrices.
        seconds: how long to measure, after one warm-up product.
    """
    import torch

    left = torch.ones(size, size, device=device, dtype=dtype)

    def multiply() -> None:
        (left @ left)[0, 0].item()  # reading one number waits for the device

    multiply()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        multiply()
        fastest = min(fastest, time.perf_counter() - start)  # the mean would measure the other users too
    return 2 * size**3 / fastest


def estimate_launch(config: RunConfig, context: Context) -> dict[str, Any]:
    """Return the estimate of a run on this machine, with what it rests on, as a JSON object."""

    shape = model_shape(config.model)
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    set_threads(config.backend.threads)
    work = workload(config, context)
    folder = config_folder(config.model.name, config.model.revision)
    found = footprint(folder, config.lora, dtype, one_group(work), trainer(), config.model.load)
    processes = config.backend.processes
    memory = memory_bytes(found, work, device.type, processes)
    # threads of a processor are shared among processes, so they are no faster together
    speed = measure_flops(device, dtype)
    result = estimate(shape, work, speed, memory, 1 if device.type == "cpu" else processes)
    machine = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "gflops": speed / 1e9}
    return {"estimate": asdict(result), "model": asdict(shape), "workload": asdict(work), "machine": machine}
