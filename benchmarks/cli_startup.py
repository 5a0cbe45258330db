"""Median start-up times of the command line: `harness --help`, `harness list` and completion on 1,000 runs.

    python benchmarks/cli_startup.py [--runs 20] [--ledger 1000]

Bars on two cores: 150 ms, and 300 ms for the list. Prints the bare interpreter beside them, which is the floor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.core.ids import run_id  # noqa: E402 - the path above makes it importable without installation
from harness.ledger import Actor, Ledger, NewEvent  # noqa: E402


def events(count: int) -> list[NewEvent]:
    """Return five events for each of `count` finished runs."""
    actor = Actor("ci", "benchmark")
    mean = {"mean": 0.41, "low": 0.33, "high": 0.49}
    made = []
    for number in range(1, count + 1):
        run, parent = run_id(number), run_id(number - 1) if number > 1 else None
        change = {"key": "lora.alpha", "old": 32, "new": 64, "kind": "config", "counts": True}
        basis = {"config": {"train": {"steps": 30, "seed": number}}, "environments": {}, "prompts": {}, "code": {}}
        created = {
            "type": "training",
            "hypothesis": f"Setting {number} raises the held-out reward",
            "parent": parent,
            "changes": [change],
            "config": f"rl/{run}.toml",
            "config_sha": "0" * 64,
            "basis": basis,
        }
        evaluated = {"attempt": 1, "subject": "policy", "step": 30, "env": "drugprot", "prompt": "run", "n": 120}
        evaluated |= {"requested": 120, "means": {"reward": mean, "accuracy": mean}, "gain": {"reward": mean}}
        made += [
            NewEvent(run, "created", created, actor=actor),
            NewEvent(run, "started", {"attempt": 1, "host": "elsewhere", "pid": 1, "pid_start": "1"}, actor=actor),
            NewEvent(run, "evaluated", evaluated, actor=actor),
            NewEvent(run, "finished", {"attempt": 1, "outcome": "completed", "step": 30}, actor=actor),
            NewEvent(run, "decided", {"decision": "keep", "reason": "the gain holds"}, actor=actor),
        ]
    return made


def make_program(root: Path, count: int) -> None:
    """Write a program with a ledger of `count` runs."""
    for name in ("GOAL.md", "CONTEXT.md", "PLAN.md"):
        (root / name).write_text("not read by list\n")
    (root / "rl").mkdir()
    Ledger(root / "runs.jsonl").append_locked(lambda _: events(count))


COMPLETION = {"_HARNESS_COMPLETE": "complete_bash", "COMP_WORDS": "harness show run-00", "COMP_CWORD": "2"}
"""What the completion script of bash sets while `harness show run-00` is typed."""


def median_ms(argv: list[str], cwd: Path, runs: int, variables: Mapping[str, str]) -> float:
    """Return the median wall-clock milliseconds of a command that must succeed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | variables | {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(cwd / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    times = []
    for _ in range(runs + 1):  # the first one writes bytecode, warms the file cache, and is dropped
        start = time.perf_counter()
        subprocess.run(argv, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, check=True)
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[1:])


def main() -> int:
    """Print the medians; exit code 1 when one is above its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="repetitions of each command")
    parser.add_argument("--ledger", type=int, default=1000, help="runs in the ledger")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_program(root, options.ledger)
        harness = [sys.executable, "-m", "harness"]
        rows: list[tuple[str, list[str], float | None, dict[str, str]]] = [
            ("python -c pass", [sys.executable, "-c", "pass"], None, {}),
            ("harness --help", [*harness, "--help"], 150.0, {}),
            (f"harness list, {options.ledger} runs", [*harness, "list"], 300.0, {}),
            (f"completing a run, {options.ledger} runs", harness, 150.0, COMPLETION),
        ]
        over = False
        for name, argv, bar, variables in rows:
            median = median_ms(argv, root, options.runs, variables)
            over = over or (bar is not None and median > bar)
            print(f"{name:<32} {median:7.1f} ms" + (f"   bar {bar:.0f} ms" if bar else ""))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
