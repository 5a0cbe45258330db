"""Compare one GRPO step of this trainer with TRL's GRPOTrainer on the same work.

    python benchmarks/grpo_step.py                              # 3 pairs, bfloat16, all cores
    python benchmarks/grpo_step.py --dtype float32              # where the processor has no native bfloat16
    python benchmarks/grpo_step.py --tune                       # first find TRL's fastest setting that fits in memory

The work: 4 prompts x 8 rollouts, prompts of 600 tokens, exactly 64 new tokens, a non-zero advantage in every group,
LoRA r16 on all linear layers, AdamW, no reference model, the same threads. The two alternate, each in a fresh process
whose largest resident set is its peak memory; the order within a pair alternates too. The time is the median of the
measured steps of a process, warm-up left out; the table shows medians over the pairs and the median of their ratios.

Exit code 0 when both bars are met (4 times faster, half the memory), 1 when not, 71 when a half failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from work import RESULT, Work

HERE = Path(__file__).resolve().parent
HALVES = {"harness": HERE / "grpo_step_harness.py", "trl": HERE / "grpo_step_trl.py"}
FASTER, SMALLER = 4.0, 0.5
NO, INFRA = 1, 71
GIB = 1024**3


class Limits(NamedTuple):
    """What a child may use: bytes of memory before it is ended, and seconds."""

    memory: float
    seconds: float


class ChildFailed(Exception):
    """A half did not give a result: it crashed, took too long, or needed more memory than there is."""


def run_child(half: str, python: str, work: Work, limits: Limits) -> dict[str, Any]:
    """Run one half in a fresh process and return its result.

    Raises:
        ChildFailed: with the reason and the last lines it wrote.
    """
    threads = {name: str(work.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    environment = os.environ | threads | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        argv = [python, str(HALVES[half]), *work.argv()]
        child = subprocess.Popen(argv, stdout=output, stderr=errors, env=environment, stdin=subprocess.DEVNULL)
        try:
            reason = watch(child, limits)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        lines = [line for line in output if line.startswith(RESULT)]
        if reason or child.returncode or not lines:
            errors.seek(0)
            tail = "".join(errors.readlines()[-8:])
            raise ChildFailed(f"{half}: {reason or f'exit code {child.returncode}'}\n{tail}")
        return dict(json.loads(lines[-1].removeprefix(RESULT)))


def watch(child: subprocess.Popen[bytes], limits: Limits) -> str:
    """Wait for a child; end it before it pushes the machine into its last memory. Returns why, or nothing."""
    process = psutil.Process(child.pid)
    deadline = time.monotonic() + limits.seconds
    while child.poll() is None:
        try:
            used = process.memory_info().rss
        except psutil.Error:
            used = 0
        if used > limits.memory:
            child.kill()
            child.wait()
            return f"needs more than the {limits.memory / GIB:.1f} GiB it may use"
        if time.monotonic() > deadline:
            child.kill()
            child.wait()
            return f"took longer than {limits.seconds:.0f} s"
        time.sleep(0.2)
    return ""


def tune(python: str, work: Work, limits: Limits) -> Work:
    """Return the work with TRL's fastest setting that fits: rows per pass, then continuous batching."""
    best, seconds = None, float("inf")
    tried = [work._replace(per_device=n) for n in (1, 2, 4, 8, 16, 32) if work.rows % n == 0]
    while tried:
        candidate = tried.pop(0)
        name = f"per_device={candidate.per_device} continuous={candidate.continuous}"
        try:
            result = run_child("trl", python, candidate, limits)
            print(f"  trl {name}: {result['step_s']:.1f} s, {result['peak_mib'] / 1024:.2f} GiB", flush=True)
            if result["step_s"] < seconds:
                best, seconds = candidate, result["step_s"]
        except ChildFailed as failure:
            print(f"  trl {name}: {str(failure).strip()}", flush=True)
        if not tried and best is not None and not candidate.continuous:
            tried.append(best._replace(continuous=True))
    if best is None:
        raise ChildFailed("no setting of TRL fits in memory")
    return best


def run_pairs(pairs: int, pythons: dict[str, str], work: Work, limits: Limits) -> list[dict[str, dict[str, Any]]]:
    """Run both halves `pairs` times, in alternating order."""
    results = []
    for number in range(pairs):
        order = ("harness", "trl") if number % 2 == 0 else ("trl", "harness")
        pair = {}
        for half in order:
            pair[half] = run_child(half, pythons[half], work, limits)
            row = pair[half]
            print(f"  pair {number + 1} {half}: {row['step_s']:.1f} s, {row['peak_mib'] / 1024:.2f} GiB", flush=True)
        results.append(pair)
    return results


def summarise(results: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return measure -> medians of both halves, and the median over the pairs of harness / TRL."""
    summary = {}
    for key in ("step_s", "generate_s", "peak_mib"):
        values = {half: [pair[half][key] for pair in results] for half in HALVES}
        ratios = [ours / theirs for ours, theirs in zip(values["harness"], values["trl"], strict=True)]
        summary[key] = {half: statistics.median(column) for half, column in values.items()}
        summary[key]["ratio"] = statistics.median(ratios)
    return summary


def print_summary(summary: dict[str, dict[str, float]], pairs: int, trl: str) -> bool:
    """Print the table; return whether both bars are met."""
    print(f"\nmedian of {pairs} pairs")
    print(f"{'':<20}{'harness':>10}{'TRL ' + trl:>14}{'harness / TRL':>16}")
    names = {"step_s": ("step, s", 1), "generate_s": ("  of it sampling, s", 1), "peak_mib": ("peak memory, GiB", 1024)}
    for key, (name, unit) in names.items():
        row = summary[key]
        print(f"{name:<20}{row['harness'] / unit:>10.2f}{row['trl'] / unit:>14.2f}{row['ratio']:>16.3f}")
    speed, memory = 1 / summary["step_s"]["ratio"], summary["peak_mib"]["ratio"]
    print(f"{speed:.2f} times faster per step (bar {FASTER:g}); {memory:.2f} of the peak memory (bar {SMALLER:g})")
    return speed >= FASTER and memory <= SMALLER


def machine(threads: int) -> dict[str, Any]:
    """Return what the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    levels = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    memory = round(psutil.virtual_memory().total / GIB, 1)
    return {"processor": model, "levels": levels, "threads": threads, "memory_gib": memory, "load": os.getloadavg()[0]}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m", help="as model.name in a run's configuration")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--per-device", type=int, default=4, help="TRL: rows per pass, 4 was the fastest")
    parser.add_argument("--microbatch-tokens", type=int, default=2048, help="harness: tokens of one pass")
    parser.add_argument("--checkpointing", action="store_true", help="TRL: gradient checkpointing, slower and smaller")
    parser.add_argument("--continuous", action="store_true", help="TRL: sample by continuous batching")
    parser.add_argument(
        "--tune", action="store_true", help="TRL: try the settings above and take the fastest that fits"
    )
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter with benchmarks/requirements.txt")
    parser.add_argument("--only", choices=tuple(HALVES), help="run one half once, without a comparison")
    parser.add_argument(
        "--memory-share", type=float, default=0.9, help="of the memory available now; a child over it ends"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds one child may take")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    return parser.parse_args()


def main() -> int:
    """Run the comparison; return the exit code."""
    options = arguments()
    from harness.inference.models import resolve_model

    names = set(Work._fields) - {"model"}
    work = Work(resolve_model(options.model), **{name: getattr(options, name) for name in names})
    pythons = {"harness": sys.executable, "trl": options.trl_python}
    limits = Limits(psutil.virtual_memory().available * options.memory_share, options.timeout)
    print(f"work: {json.dumps(work._asdict(), default=str)}\nmachine: {json.dumps(machine(work.threads))}", flush=True)
    try:
        if options.only:
            print(json.dumps(run_child(options.only, pythons[options.only], work, limits), indent=1))
            return 0
        work = tune(pythons["trl"], work, limits) if options.tune else work
        results = run_pairs(options.pairs, pythons, work, limits)
    except ChildFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return INFRA
    summary = summarise(results)
    versions = results[0]["trl"]["versions"]
    met = print_summary(summary, options.pairs, versions["trl"])
    if options.json:
        facts = {"work": work._asdict(), "machine": machine(work.threads), "versions": versions}
        text = json.dumps(facts | {"pairs": results, "summary": summary, "met": met}, indent=1, default=str)
        options.json.write_text(text + "\n")
    return 0 if met else NO


if __name__ == "__main__":
    sys.exit(main())
