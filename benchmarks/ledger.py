"""How fast the ledger is: durable appends, `verify`, and `list` and `status` with and without an index.

    python benchmarks/ledger.py [--events 100000] [--runs 10000] [--repeats 9] [--json]

An append is compared with a bare write and fsync of the same bytes to a file beside it, the two taking
turns in one process, on an empty ledger and on one of `--events` events. Commands run in processes of
their own, start-up included; the first of each, which warms the file cache, is dropped. Every figure with a bar
says whether it holds; exit code 1 when one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.core.ids import new_ulid, run_id  # noqa: E402 - the path above makes it importable without installation
from harness.ledger import Actor, Ledger, NewEvent, cache  # noqa: E402
from harness.ledger.events import Event, format_time, make_event  # noqa: E402

START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
PER_RUN = 6
PAGE = "not read by these commands\n"
ACTOR = Actor("agent", "benchmark")
MEAN = {"mean": 0.4125, "low": 0.3347, "high": 0.4903}


class Figure(NamedTuple):
    """One measured number with its bar; None where it only stands for comparison."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the value is at most the bar; None without one."""
        return None if self.bar is None else self.value <= self.bar

    def __str__(self) -> str:
        verdict = (
            "" if self.bar is None else f"   bar {self.bar:7.3f} {self.unit:<2}   {'pass' if self.holds else 'FAIL'}"
        )
        return f"{self.name:<66} {self.value:9.3f} {self.unit:<2}{verdict}".rstrip()


def datas(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and data of the six events of a finished run, 700 bytes a line on average.

    They name no files, so that `verify` reads the ledger and nothing else.
    """
    parent = run_id(number - 1) if number > 1 else None
    config = {"train": {"steps": 30, "seed": number}, "lora": {"rank": 16, "alpha": 64.0, "targets": "all-linear"}}
    change = {"key": "lora.alpha", "old": 32.0, "new": 64.0, "kind": "config", "counts": True}
    created = {
        "type": "training",
        "hypothesis": f"Setting {number} raises the held-out reward without hurting validity",
        "parent": parent,
        "changes": [change],
        "config_sha": f"{number:064x}",
        "basis": {"config": config, "environments": {"drugprot": {"version": "1", "verifier": "v1"}}},
        "protocol": dict.fromkeys(("goal", "context", "plan"), sha256(PAGE.encode()).hexdigest()),
    }
    process = {"attempt": 1, "host": "elsewhere", "pid": 4000 + number % 1000, "pid_start": "a:b:c:1"}
    packed = {"commit": f"{number:040x}", "python": "3.11.7", "device": "cpu", "dtype": "bfloat16", "threads": 2}
    packed |= {"packages_sha": f"{number:064x}", "capability": "AVX512", "torch_version": "2.9.0", "hardware": "x86_64"}
    evaluated = {"attempt": 1, "env": "drugprot", "prompt": "run", "n": 120, "requested": 120, "failures": {}}
    evaluated |= {"items_sha": f"{number:064x}", "means": dict.fromkeys(("reward", "accuracy", "valid"), MEAN)}
    policy = evaluated | {"subject": "policy", "step": 30, "gain": {"reward": MEAN, "accuracy": MEAN}}
    reason = "the interval of the gain reaches below zero; " * 4
    return [
        ("created", created),
        ("started", process | {"resumed_from": None, "config_sha": f"{number:064x}", "environment": packed}),
        ("evaluated", evaluated | {"subject": "base", "step": 0}),
        ("evaluated", policy),
        ("finished", {"attempt": 1, "outcome": "completed", "failure": None, "step": 30, "wall_s": 1834.2}),
        (
            "decided",
            {"decision": "reject", "reason": reason, "by_rule": True},
        ),
    ]


def events(count: int) -> Iterator[Event]:
    """Make events of runs that follow one another, a second apart."""
    made = 0
    for number in range(1, count // PER_RUN + 2):
        prev: list[str] = []
        for kind, data in datas(number):
            if made == count:
                return
            at = START_MS + made * 1000
            new = NewEvent(run_id(number), kind, data, actor=ACTOR)
            event = make_event(new, id=new_ulid(at), at=format_time(at * 1_000_000), prev=prev)
            prev = [event.sha]
            made += 1
            yield event


def make_program(root: Path, count: int) -> Path:
    """Write a program whose ledger has `count` events; return the ledger."""
    root.mkdir()
    for name in ("GOAL.md", "CONTEXT.md", "PLAN.md"):
        (root / name).write_text(PAGE)
    (root / "rl").mkdir()
    path = root / "runs.jsonl"
    with path.open("wb") as file:
        for event in events(count):
            file.write(event.line + b"\n")
    return path


def appends(path: Path, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of a bare write with fsync and of an append, taking turns."""
    ledger = Ledger(path)
    ledger.append("run-001", "noted", {"text": "the first append reads the ledger"})
    bare = os.open(path.with_name("bare"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats):
        data = {"text": f"{number} " + "x" * 400}
        start = time.perf_counter()
        event = ledger.append("run-001", "noted", data)
        middle = time.perf_counter()
        os.write(bare, event.line + b"\n")
        os.fsync(bare)
        times[0].append(time.perf_counter() - middle)
        times[1].append(middle - start)
    os.close(bare)
    return statistics.median(times[0]) * 1000, statistics.median(times[1]) * 1000


def first_append(path: Path, repeats: int) -> float:
    """Return the median milliseconds of the first append of a new `Ledger`, as a short command makes it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        Ledger(path).append("run-001", "noted", {"text": "a command of its own"})
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def append_figures(folder: Path, count: int, repeats: int) -> list[Figure]:
    """Measure appends to an empty and to a large ledger."""
    small, large = folder / "small" / "runs.jsonl", folder / "large" / "runs.jsonl"
    small.parent.mkdir()
    Ledger(small).append("run-001", "created", {"hypothesis": "h"}, actor=ACTOR)
    rounds: list[tuple[float, ...]] = []
    for _ in range(5):  # disks drift, so the two ledgers take turns as well
        rounds.append((*appends(small, repeats * 20), *appends(large, repeats * 20)))
    bare, empty, bare_large, full = (statistics.median(column) for column in zip(*rounds, strict=True))
    over = [statistics.median(row[place + 1] - row[place] for row in rounds) for place in (0, 2)]
    grown = statistics.median(row[3] / row[1] for row in rounds)
    return [
        Figure("write and fsync, beside an empty ledger", bare, "ms"),
        Figure("append to an empty ledger", empty, "ms"),
        Figure("  above the write and fsync", over[0], "ms", 1.0),
        Figure(f"write and fsync, beside {count:,} events", bare_large, "ms"),
        Figure(f"append to {count:,} events", full, "ms"),
        Figure("  above the write and fsync", over[1], "ms", 1.0),
        Figure("  as a multiple of the append to an empty ledger", grown, "", 1.2),
        Figure(f"first append of a process to {count:,} events, with an index", first_append(large, repeats), "ms"),
    ]


def fold_figure(path: Path, count: int, repeats: int) -> Figure:
    """Measure reading, folding and the facts of a list, in processor seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        runs = Ledger(path).state().runs
        rows = [(r.run, r.kind, r.status, r.hypothesis, r.parent, r.decision) for r in runs.values()]
        times.append(time.process_time() - start)
        assert len(rows) == count // PER_RUN
    return Figure(f"load and fold {count:,} events, processor time", statistics.median(times), "s", 0.3 * count / 6000)


def verify_s(path: Path, repeats: int) -> float:
    """Return the median seconds of `verify`, each in a process of its own as a command has it."""
    code = "import sys, time, pathlib; from harness.ledger.verify import verify; start = time.perf_counter(); "
    code += "assert verify(pathlib.Path(sys.argv[1])) == []; print(time.perf_counter() - start)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", code, str(path)]
    runs = [subprocess.run(argv, env=environment, capture_output=True, text=True, check=True) for _ in range(repeats)]
    return statistics.median(float(run.stdout) for run in runs)


def command_s(argv: list[str], path: Path, repeats: int, *, warm: bool) -> float:
    """Return the median seconds of a command, with its index or with the index deleted before each."""
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": python_path, "PYTHONPYCACHEPREFIX": str(path.parent / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    times = []
    for _ in range(repeats + 1):
        if not warm:
            cache.location(path).unlink(missing_ok=True)
        start = time.perf_counter()
        subprocess.run(argv, cwd=path.parent, env=environment, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def reading_figures(path: Path, runs: int, repeats: int) -> list[Figure]:
    """Measure `list --json` and `status`, without an index and with one."""
    harness = [sys.executable, "-m", "harness"]
    figures = []
    for name in ("list --json", "status"):
        argv = [*harness, *name.split()]
        figures.append(Figure(f"{name}, {runs:,} runs, no index", command_s(argv, path, repeats, warm=False), "s", 1.5))
        figures.append(Figure(f"{name}, {runs:,} runs, index", command_s(argv, path, repeats, warm=True), "s", 0.3))
    return figures


def measure(folder: Path, options: argparse.Namespace) -> list[Figure]:
    """Make the ledgers and measure everything."""
    tenth = options.events // 10
    medium = make_program(folder / "medium", tenth)
    large = make_program(folder / "large", options.events)
    reading = make_program(folder / "reading", options.runs * PER_RUN)
    figures = [Figure("bytes a line", large.stat().st_size / options.events, "B")]
    command = [sys.executable, "-m", "harness", "ledger", "verify"]
    for path, count, bar in ((medium, tenth, 0.5 / 10_000), (large, options.events, 4 / 100_000)):
        figures.append(Figure(f"verify {count:,} events", verify_s(path, options.repeats), "s", bar * count))
        seconds = command_s(command, path, max(options.repeats // 3, 1), warm=True)
        figures.append(Figure("  the whole command, start-up and pages included", seconds, "s"))
    figures.append(fold_figure(make_program(folder / "folded", 6000), 6000, options.repeats))
    figures += reading_figures(reading, options.runs, options.repeats)
    return figures + append_figures(folder, options.events, options.repeats)


def main() -> int:
    """Print the figures; exit code 1 when one is above its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000, help="events of the large ledger")
    parser.add_argument("--runs", type=int, default=10_000, help="runs that list and status read")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each command")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), options)
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, nice {os.nice(0)}"
    if options.json:
        rows = [figure._asdict() | {"holds": figure.holds} for figure in figures]
        print(json.dumps({"figures": rows, "machine": load}, indent=2))
    else:
        print(*figures, load, sep="\n")
    return int(any(figure.holds is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
