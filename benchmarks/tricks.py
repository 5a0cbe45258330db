"""Measure what each trick of the trainer gives, alone and together.

    python benchmarks/tricks.py [--rounds 1] [--shrink 1] [--only KIND] [--json FILE]

Training: one forward and backward pass over a group of 8 completions of 64 tokens behind a prompt of 600, LoRA r16
on all linear layers, float32. Sampling: 4 such prompts, 8 rows each, 32 new tokens. The two with prefixes: 4 tasks of
two environments, prompts of 600 tokens of which the first 500 are the environment's, 3 completions of 32 tokens each in
training, 8 rows of 16 in sampling. Every setting runs in a fresh process after a short warm-up, and its largest
resident set is its peak memory; with several rounds the medians are shown. Prints Markdown tables for
`docs/performance.md`.
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

EVERY = ["parts", "fused", "norms", "head", "trim"]
TRAINING = {
    "none of the five": [],
    "attention part by part": ["parts"],
    "fused adapted layers": ["fused"],
    "fused norms and rotations": ["norms"],
    "vector-sized head": ["head"],
    "heap given back": ["trim"],
    "all five": EVERY,
    "all five, no shared prefix": [*EVERY, "unshared"],
}
SAMPLING = {
    "model's modules, adapter beside the weights": ["modules", "unmerged"],
    "model's modules, adapter folded in": ["modules"],
    "few operations (default)": [],
    "few operations, no shared prefix": ["unshared"],
}
PREFIXES = {
    "shared between tasks (default)": EVERY,
    "only inside a group": [*EVERY, "grouped"],
    "nothing shared": [*EVERY, "unshared"],
}
KINDS = {
    "train": ("training pass", TRAINING),
    "sample": ("sampling", SAMPLING),
    "train-prefixes": ("training, tasks of two environments", PREFIXES),
    "sample-prefixes": ("sampling, tasks of two environments", PREFIXES),
}
PROMPTS, GROUP, PROMPT, NEW = 4, 8, 600, 64
ENVIRONMENTS, BEGINNING = 2, 500
PASS = 2048


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
    from harness.inference.prefixes import Kin, Prefix
    from harness.training.fused import fuse_adapters

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded = load_model(ModelSection(dtype="float32", device="cpu"))
    model = attach_lora(loaded.model, LoraSection(rank=LORA["r"], alpha=LORA["lora_alpha"]), seed=0)
    if "fused" not in names:
        put("harness.training.fused", "_is_plain", lambda layer: False)
    if "norms" not in names:
        put("harness.training.fused", "NORMS", ())
        put("harness.training.fused", "ATTENTIONS", ())
    fuse_adapters(model)
    if "modules" in names:
        put("harness.inference.engine", "supports", lambda causal_lm: False)
    if "unmerged" in names:
        put("harness.inference.engine", "merged_adapter", lambda model: contextlib.nullcontext())
    if "grouped" in names or "unshared" in names:
        put("harness.inference.tree", "shared_prefixes", lambda prompts: Prefix(0, 0, tuple(range(len(prompts)))))
        put("harness.inference.engine", "families", lambda prompts: [Kin(0, tuple(range(len(prompts))))])
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


def filler(source: random.Random, count: int) -> list[int]:
    """Return random token ids."""
    return [source.randrange(10, 40000) for _ in range(count)]


def work(kind: str, names: list[str], shrink: int) -> tuple[list[list[int]], int, int]:
    """Return the prompts, the rows of each, and the tokens of a row."""
    source = random.Random(0)  # noqa: S311 - filler tokens
    if kind in ("train", "sample"):
        prompts = [filler(source, PROMPT // shrink) for _ in range(1 if kind == "train" else PROMPTS)]
        rows, new = GROUP, (NEW if kind == "train" else NEW // 2) // shrink
    else:
        begins = [filler(source, BEGINNING // shrink) for _ in range(ENVIRONMENTS)]
        prompts = [begin + filler(source, (PROMPT - BEGINNING) // shrink) for begin in begins for _ in range(2)]
        rows, new = (3, NEW // 2 // shrink) if kind == "train-prefixes" else (GROUP, NEW // 4 // shrink)
    if "unshared" in names:
        prompts, rows = [prompt for prompt in prompts for _ in range(rows)], 1
    return prompts, rows, new


def train(kind: str, names: list[str], shrink: int) -> float:
    """Return the seconds of one forward and backward over the work, in passes of at most `PASS` tokens."""
    import torch

    from harness.core.memory import give_back
    from harness.inference.tree import build_tree
    from harness.training.policy import tree_logprobs

    engine, _ = build(names)
    without(names)
    engine.causal_lm.train()

    def run(prompts: list[list[int]], rows: int, new: int) -> None:
        source = random.Random(1)  # noqa: S311 - filler tokens
        size = max(PASS // (len(prompts[0]) + rows * new), 1)
        for start in range(0, len(prompts), size):
            part = prompts[start : start + size]
            if "trim" in names:
                give_back()
            tree = build_tree(part, [[filler(source, new) for _ in range(rows)] for _ in part], torch.device("cpu"))
            logprobs, _ = tree_logprobs(engine.causal_lm, tree, torch.ones(len(part) * rows * new), with_entropy=False)
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()

    run([[7] * 32], 2, 8)
    start = time.perf_counter()
    run(*work(kind, names, shrink))
    return time.perf_counter() - start


def sample(kind: str, names: list[str], shrink: int) -> float:
    """Return the seconds of one call."""
    import dataclasses

    engine, _ = build(names)
    engine.loaded = dataclasses.replace(engine.loaded, eos_ids=frozenset())

    def run(prompts: list[list[int]], rows: int, new: int) -> None:
        engine.generate(prompts, rows, new, 1.0, [[p * rows + g for g in range(rows)] for p in range(len(prompts))])

    run([[7] * 32] * 2, 2, 2)
    start = time.perf_counter()
    run(*work(kind, names, shrink))
    return time.perf_counter() - start


def measure(kind: str, names: list[str], shrink: int) -> dict[str, float]:
    """Run one setting in a fresh process."""
    argv = [sys.executable, __file__, "--shrink", str(shrink), "--child", kind, *names]
    out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(next(line for line in out.splitlines() if line.startswith(RESULT)).removeprefix(RESULT)))


def main() -> int:
    """Run every setting and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try whether everything runs")
    parser.add_argument("--only", choices=KINDS, action="append", help="one table; may be given several times")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *names = options.child
        seconds = (train if kind.startswith("train") else sample)(kind, names, options.shrink)
        print(RESULT + json.dumps({"s": seconds, "mib": peak_mib()}))
        return 0
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind in options.only or KINDS:
        heading, settings = KINDS[kind]
        print(f"\n| {heading} | s | peak memory, GiB |\n|---|---:|---:|", flush=True)
        for title, names in settings.items():
            rounds = [measure(kind, names, options.shrink) for _ in range(options.rounds)]
            row = {key: statistics.median(r[key] for r in rounds) for key in ("s", "mib")}
            results.setdefault(kind, {})[title] = row
            print(f"| {title} | {row['s']:.1f} | {row['mib'] / 1024:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
