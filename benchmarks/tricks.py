"""Measure what each trick of the trainer gives, alone and together.

    python benchmarks/tricks.py [--rounds 1] [--json FILE]

Training: one forward and backward pass over a group of 8 completions of 64 tokens behind a prompt of 600, LoRA r16
on all linear layers, float32. Sampling: 4 such prompts, 8 rows each, 32 new tokens. Every setting runs in a fresh
process, whose largest resident set is its peak memory; with several rounds the medians are shown. Prints a
Markdown table for `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from work import LORA, RESULT, peak_mib

TRAINING = {
    "none of the four": [],
    "attention part by part": ["parts"],
    "fused adapted layers": ["fused"],
    "vector-sized head": ["head"],
    "heap given back": ["trim"],
    "all four": ["parts", "fused", "head", "trim"],
    "all four, no shared prefix": ["parts", "fused", "head", "trim", "unshared"],
}
SAMPLING = {
    "model's modules, adapter beside the weights": ["modules", "unmerged"],
    "model's modules, adapter folded in": ["modules"],
    "few operations (default)": [],
    "few operations, no shared prefix": ["unshared"],
}
PROMPTS, GROUP, PROMPT, NEW = 4, 8, 600, 64


def put(module: str, name: str, value: Any) -> None:
    """Put another form in place of a function of a module."""
    setattr(importlib.import_module(module), name, value)


def build(names: list[str]) -> tuple[Any, Any]:
    """Return the engine and the parameters of the embedded model with a fresh adapter."""
    import torch

    from harness.config.schema import LoraSection, ModelSection
    from harness.inference.engine import TransformersEngine
    from harness.inference.lora import attach_lora, trainable
    from harness.inference.models import load_model
    from harness.training.fused import fuse_adapters

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded = load_model(ModelSection(dtype="float32", device="cpu"))
    model = attach_lora(loaded.model, LoraSection(rank=LORA["r"], alpha=LORA["lora_alpha"]), seed=0)
    if "fused" in names:
        fuse_adapters(model)
    if "modules" in names:
        put("harness.inference.engine", "supports", lambda causal_lm: False)
    if "unmerged" in names:
        put("harness.inference.engine", "merged_adapter", lambda model: contextlib.nullcontext())
    return TransformersEngine(loaded, model), list(trainable(model).values())


def without(names: list[str]) -> None:
    """Put the plain form in place of each trick of the training pass that is not named."""
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    def masked_square(query: Any, key: Any, value: Any, parts: Any, scaling: float) -> Any:
        seen = torch.zeros(query.shape[2], query.shape[2], dtype=torch.bool)
        for queries, keys, causal in parts:
            block = torch.ones(queries.stop - queries.start, keys.stop - keys.start, dtype=torch.bool)
            seen[queries, keys] = block.tril_() if causal else block
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)

    def chunk(hidden: Any, targets: Any, weight: Any) -> Any:
        return torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None])[:, 0]

    def twice(hidden: Any, targets: Any, weight: Any, temperatures: Any, with_entropy: bool) -> Any:
        ranges = [slice(start, start + 512) for start in range(0, len(targets), 512)]
        parts = [checkpoint(chunk, hidden[r], targets[r], weight, use_reentrant=False) for r in ranges]
        return torch.cat(parts), torch.zeros_like(temperatures)

    if "parts" not in names:
        put("harness.inference.tree", "parted_attention", masked_square)
    if "head" not in names:
        put("harness.training.policy", "token_statistics", twice)


def train(names: list[str]) -> float:
    """Return the seconds of the second of two passes."""
    import torch

    from harness.core.memory import give_back
    from harness.inference.tree import build_tree
    from harness.training.policy import tree_logprobs

    engine, _ = build(names)
    without(names)
    source = random.Random(0)  # noqa: S311 - filler tokens
    prompt = [source.randrange(10, 40000) for _ in range(PROMPT)]
    rows = [[source.randrange(10, 40000) for _ in range(NEW)] for _ in range(GROUP)]
    engine.causal_lm.train()
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for part in [[row] for row in rows] if "unshared" in names else [rows]:
            if "trim" in names:
                give_back()
            tree = build_tree([prompt], [part], torch.device("cpu"))
            logprobs, _ = tree_logprobs(engine.causal_lm, tree, torch.ones(len(part) * NEW), with_entropy=False)
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        seconds = time.perf_counter() - start
    return seconds


def sample(names: list[str]) -> float:
    """Return the seconds of the second of two calls."""
    import dataclasses

    engine, _ = build(names)
    engine.loaded = dataclasses.replace(engine.loaded, eos_ids=frozenset())
    source = random.Random(0)  # noqa: S311 - filler tokens
    prompts = [[source.randrange(10, 40000) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    seeds = [[p * GROUP + g for g in range(GROUP)] for p in range(PROMPTS)]
    count = GROUP
    if "unshared" in names:
        prompts, seeds, count = [p for p in prompts for _ in range(GROUP)], [[s] for row in seeds for s in row], 1
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        engine.generate(prompts, count, NEW // 2, 1.0, seeds)
        seconds = time.perf_counter() - start
    return seconds


def measure(kind: str, names: list[str]) -> dict[str, float]:
    """Run one setting in a fresh process."""
    argv = [sys.executable, __file__, "--child", kind, *names]
    out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(next(line for line in out.splitlines() if line.startswith(RESULT)).removeprefix(RESULT)))


def main() -> int:
    """Run every setting and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *names = options.child
        seconds = (train if kind == "train" else sample)(names)
        print(RESULT + json.dumps({"s": seconds, "mib": peak_mib()}))
        return 0
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind, settings in (("train", TRAINING), ("sample", SAMPLING)):
        title = "training pass" if kind == "train" else "sampling"
        print(f"\n| {title} | s | peak memory, GiB |\n|---|---:|---:|", flush=True)
        for title, names in settings.items():
            rounds = [measure(kind, names) for _ in range(options.rounds)]
            row = {key: statistics.median(r[key] for r in rounds) for key in ("s", "mib")}
            results.setdefault(kind, {})[title] = row
            print(f"| {title} | {row['s']:.1f} | {row['mib'] / 1024:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
