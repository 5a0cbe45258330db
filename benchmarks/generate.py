"""Compare this engine's sampling with `model.generate` of transformers on the same work, alternating.

    python benchmarks/generate.py [--pairs 3] [--new-tokens 64] [--prompt-tokens 600]

4 prompts x 8 rows in one call, the same LoRA adapter, exactly the same number of new tokens, temperature 1, float32.
`model.generate` is given the adapter folded into the weights, which is its faster form. The time is that of the
second call of a fresh process. Exit code 0 when the engine makes at least twice the tokens per second, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time

from work import LORA, RESULT, peak_mib

PROMPTS, GROUP, FASTER = 4, 8, 2.0


def child(half: str, prompt_tokens: int, new_tokens: int) -> None:
    """Sample twice and print the seconds of the second call."""
    import random

    import torch

    from harness.config.schema import LoraSection, ModelSection
    from harness.inference.engine import TransformersEngine
    from harness.inference.lora import attach_lora, trainable
    from harness.inference.models import load_model

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    source = random.Random(0)  # noqa: S311 - filler tokens
    loaded = load_model(ModelSection(dtype="float32", device="cpu"))
    model = attach_lora(loaded.model, LoraSection(rank=LORA["r"], alpha=LORA["lora_alpha"]), seed=0)
    torch.manual_seed(0)
    for name, parameter in trainable(model).items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.01)
    prompts = [[source.randrange(10, 40000) for _ in range(prompt_tokens)] for _ in range(PROMPTS)]
    seeds = [[p * GROUP + g for g in range(GROUP)] for p in range(PROMPTS)]
    engine = TransformersEngine(dataclasses.replace(loaded, eos_ids=frozenset()), model)
    if half == "transformers":
        plain = model.merge_and_unload()
        plain.set_attn_implementation("sdpa")

    def generate() -> int:
        if half == "harness":
            rows = engine.generate(prompts, GROUP, new_tokens, 1.0, seeds)
            return sum(len(row.token_ids) for group in rows for row in group)
        with torch.inference_mode():
            ids = plain.generate(
                torch.tensor(prompts), attention_mask=torch.ones(PROMPTS, prompt_tokens, dtype=torch.long),
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=GROUP,
                min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=2,
            )  # fmt: skip
        return int(ids[:, prompt_tokens:].numel())

    generate()
    start = time.perf_counter()
    count = generate()
    seconds = time.perf_counter() - start
    print(RESULT + json.dumps({"s": seconds, "tokens_per_s": count / seconds, "mib": peak_mib(), "tokens": count}))


def main() -> int:
    """Run the pairs and print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--child", choices=("harness", "transformers"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.prompt_tokens, options.new_tokens)
        return 0
    sizes = ["--prompt-tokens", str(options.prompt_tokens), "--new-tokens", str(options.new_tokens)]
    rates: dict[str, list[float]] = {"harness": [], "transformers": []}
    for number in range(options.pairs):
        for half in sorted(rates, reverse=bool(number % 2)):
            argv = [sys.executable, __file__, "--child", half, *sizes]
            out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
            row = json.loads(next(line for line in out.splitlines() if line.startswith(RESULT)).removeprefix(RESULT))
            if row["tokens"] != PROMPTS * GROUP * options.new_tokens:
                raise ValueError(f"{half} made {row['tokens']} tokens")
            rates[half].append(row["tokens_per_s"])
            print(f"  pair {number + 1} {half}: {row['s']:.1f} s, {row['tokens_per_s']:.0f} tokens/s,"
                  f" {row['mib'] / 1024:.2f} GiB", flush=True)  # fmt: skip
    ratio = statistics.median(a / b for a, b in zip(rates["harness"], rates["transformers"], strict=True))
    print(f"{ratio:.2f} times the tokens per second (bar {FASTER:g})")
    return 0 if ratio >= FASTER else 1


if __name__ == "__main__":
    sys.exit(main())
