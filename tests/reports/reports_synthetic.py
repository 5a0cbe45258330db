"""A synthetic program with one trained run, shaped like real ones; data are made here and nowhere else."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.canonical import sha256_file
from harness.core.types import FailureClass, Task
from harness.evaluation.records import ItemRecord, write_items
from harness.evaluation.summary import summarise
from harness.ledger import Actor, Ledger
from harness.program import Program

ENV = "bench"
RUN = "run-002"
STEPS = 30
LABELS = ("INHIBITOR", "AGONIST", "ANTAGONIST", "SUBSTRATE", "ACTIVATOR", "PRODUCT-OF", "PART-OF")
ACTOR = Actor("agent", "loop")

GOAL = """# Goal

```toml
[gate]
baseline = "base_run_prompt"
[[env]]
id = "bench"
metric = "reward"
threshold = 0.30
min_gain = 0.02
not_below = ["accuracy"]
```
"""
CONTEXT = """# Context

```toml
[model]
name = "smollm2-135m"
[eval]
interval = 10
[[eval.env]]
id = "bench"
items = 140
max_tokens = 64
```
"""
PLAN = "# Plan\n\n```toml\nnuisance = ['train.seed']\n[search_space]\n'lora.alpha' = [16, 32, 64]\n```\n"


@dataclass(frozen=True)
class Bench:
    """A small environment with labels, as the registry would load it."""

    redistributable: bool = True
    id: str = ENV
    version: str = "1"
    verifier_version: str = "1"

    def tasks(self, split: str) -> tuple[Task, ...]:
        return tuple(
            Task(
                f"{split}-{i:03d}",
                ENV,
                split,
                {"text": f"sentence {i}"},
                "E",
                LABELS[(i * i) % len(LABELS)],
                f"pair-{i // 2}",
            )
            for i in range(140)
        )


def load_bench(args: Mapping[str, Any]) -> Any:
    """Load the environment as the registry would; reports never start an episode, so it has none."""
    return Bench(**args)


def make_program(root: Path) -> Program:
    """Write the four pages of a program and return it."""
    for name, body in (("GOAL.md", GOAL), ("CONTEXT.md", CONTEXT), ("PLAN.md", PLAN)):
        (root / name).write_text(body)
    (root / "rl").mkdir()
    return Program.find(root, environ={})


def items(skill: float, form: float, seed: int) -> list[ItemRecord]:
    """Return 140 item records of a model with a given skill and form; some items fail for infrastructure."""
    rng = random.Random(seed)
    records = []
    for task in Bench().tasks("heldout"):
        hard = (sum(map(ord, task.label)) % 10) / 12
        valid = rng.random() < form
        right = valid and rng.random() < max(0.02, skill - 0.5 * hard + 0.2)
        parts = {"accuracy": float(right), "format": float(valid), "reasoning": round(rng.betavariate(2, 6), 3)}
        reward = 0.7 * parts["accuracy"] + 0.2 * parts["reasoning"] + 0.1 * parts["format"]
        lost = seed == 5 and task.id.endswith("077")
        failure = FailureClass.INFRA if lost else None if right else FailureClass.MODEL
        answer = rng.choice("EEEEEFABCKI") if valid else ""
        diagnostics = {"answer": answer} if answer else {}
        records.append(ItemRecord(task.id, task.cluster, 0, reward, parts, {}, failure, "p", "c", None, diagnostics))
    return records


class Recorder:
    """Appends the events of one run with a fixed clock, as a backend would."""

    def __init__(self, program: Program, run: str = RUN) -> None:
        self.program, self.run = program, run
        self.now = 1_800_000_000_000_000_000
        self.ledger = Ledger(program.ledger, clock=self._tick)

    def _tick(self) -> int:
        self.now += 60_000_000_000
        return self.now

    def add(self, kind: str, data: Mapping[str, Any]) -> None:
        self.ledger.append(self.run, kind, data, actor=ACTOR)

    def evaluated(self, records: list[ItemRecord], subject: str, step: int, prompt: str = "run", **bases: Any) -> None:
        suffix = ".shipped" if prompt == "shipped" else ""
        path = self.program.analysis_dir(self.run) / f"evals/step_{step}.{subject}.{ENV}{suffix}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_items(path, records, compact=True)
        file = {"file": str(path.relative_to(self.program.root)), "file_sha": sha256_file(path)}
        head = {"attempt": 1, "subject": subject, "step": step, "env": ENV, "prompt": prompt, "verifier": "1"}
        self.add("evaluated", {**head, **file, **summarise(records, requested=140, **bases)})


def created(**changes: Any) -> dict[str, Any]:
    """Return the data of a `created` event."""
    basis = {"config": {"env": [{"id": ENV, "args": {}}]}}
    data = {
        "type": "training",
        "hypothesis": "Alpha 64 learns faster than 32 without hurting held-out accuracy.",
        "parent": "run-001",
        "lever": None,
        "replicate_of": None,
        "changes": [
            {"key": "lora.alpha", "old": 32.0, "new": 64.0, "kind": "config", "counts": True},
            {"key": "train.seed", "old": 0, "new": 1, "kind": "config", "counts": False},
            {"key": "code.harness", "old": "3f9d1c2", "new": "a81e0b7", "kind": "code", "counts": False},
        ],
        "config": "rl/run-002.toml",
        "basis": basis,
        "outside_plan": [],
    }
    return {**data, **changes}


def make_run(program: Program, *, collapse: bool = False) -> None:
    """Write a whole run: events, item files, metrics, rollouts and the captured environment."""
    record = Recorder(program)
    record.add("created", created())
    capture = {"commit": "a81e0b7c2d91", "dirty_sha": None, "packages_sha": "5be0" * 16, "python": "3.11.7"}
    hardware = {"cpu": "Xeon 2 cores", "memory_gb": 16}
    started = {
        "attempt": 1,
        "host": "box",
        "pid": 42,
        "resumed_from": None,
        "environment": {**capture, "hardware": hardware},
    }
    record.add("started", started)
    base, shipped = items(0.35, 0.59, 1), items(0.30, 0.45, 2)
    record.evaluated(base, "base", 0)
    record.evaluated(shipped, "base", 0, "shipped")
    for step, skill, form in ((10, 0.45, 0.8), (20, 0.62, 0.95), (30, 0.7, 0.99)):
        record.evaluated(items(skill, form, 2 + step // 10), "policy", step, base=base, base_shipped=shipped)
    write_outputs(program.run_dir(RUN), collapse=collapse)
    record.add(
        "finished",
        {
            "attempt": 1,
            "outcome": "completed",
            "failure": None,
            "reason": "",
            "step": STEPS,
            "wall_s": 812.4,
            "tokens": 58211,
        },
    )
    record.add("gated", gated())
    record.add("decided", {"decision": "keep", "reason": "Reward and accuracy rise, no collapse.", "by_rule": False})


def gated() -> dict[str, Any]:
    """Return the data of a `gated` event with one gate of three checks and one gate not run."""
    common = {"env": ENV, "low": None, "high": None, "bound": None}
    checks = [
        {
            **common,
            "check": "evidence",
            "metric": "",
            "value": 139.0,
            "bound": 140,
            "verdict": "pass",
            "detail": "all on record",
        },
        {
            **common,
            "check": "threshold",
            "metric": "reward",
            "value": 0.47,
            "low": 0.41,
            "high": 0.52,
            "bound": 0.3,
            "verdict": "pass",
            "detail": "at least 0.3",
        },
        {
            **common,
            "check": "gain",
            "metric": "reward",
            "value": 0.2,
            "low": 0.13,
            "high": 0.28,
            "bound": 0.02,
            "verdict": "pass",
            "detail": "above 0.02",
        },
    ]
    gates = [
        {"name": "heldout", "verdict": "pass", "checks": checks},
        {"name": "looks", "verdict": "not_run", "checks": []},
    ]
    return {"verdict": "cannot_tell", "gates": gates, "step": 30}


def metric_rows(*, collapse: bool = False) -> list[dict[str, Any]]:
    """Return metric rows of a run that learns its format first and the answers later."""
    rng = random.Random(11)
    rows: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        grown = 1 / (1 + math.exp(-(step - 10) / 4))
        accuracy = 0.15 + 0.4 * grown + rng.gauss(0, 0.06)
        form = min(1.0, 0.55 + 0.42 * grown + rng.gauss(0, 0.03))
        reasoning = 0.2 + 0.1 * grown + rng.gauss(0, 0.015)
        spread = 0.95 if collapse and step > 24 else min(1, max(0, 0.25 * round(rng.random() * 2 + grown)))
        length = 52 - 20 * grown + rng.gauss(0, 2)
        rows.append(
            {
                "step": step,
                "time": 1_800_000_000.5 + 27 * step,
                "attempt": 1,
                f"train/{ENV}/reward/mean": 0.7 * accuracy + 0.2 * reasoning + 0.1 * form,
                f"train/{ENV}/reward/std": 0.3,
                f"train/{ENV}/component/accuracy": accuracy,
                f"train/{ENV}/component/format": form,
                f"train/{ENV}/component/reasoning": reasoning,
                "train/zero_spread_share": spread,
                "train/truncated_share": max(0.0, 0.3 * (1 - grown) + rng.gauss(0, 0.03)),
                "train/tokens/mean": length,
                "train/tokens/min": max(4, length - 22),
                "train/tokens/max": 64,
                "train/entropy": 1.4 - 0.8 * grown + rng.gauss(0, 0.05),
                "train/kl_sampler": abs(rng.gauss(0, 0.0006)),
                "train/loss": rng.gauss(0, 0.02),
                "train/failures/model": 20 - round(8 * grown),
                "optim/grad_norm": {"$non_finite": "nan"} if step == 7 else 0.5 + abs(rng.gauss(0, 0.2)),
                "optim/learning_rate": 1e-4,
                "time/generate": 12 + rng.random(),
                "time/train": 13 + rng.random(),
                "perf/tokens_per_s": 190 + 20 * rng.random(),
            }
        )
    return rows


def rollout(step: int, index: int, completion: str, reward: float, **more: Any) -> dict[str, Any]:
    """Return one stored rollout."""
    row = {
        "task": f"train-{index // 4:03d}",
        "group": f"{step}-{index // 4}",
        "index": index,
        "prompt": "Which relation holds?\nA. AGONIST … E. INHIBITOR\n\nAspirin blocks COX-1 in platelets.",
        "completion": completion,
        "finish": "stop",
        "reward": reward,
        "components": {"accuracy": float(reward > 0.6), "format": 1.0, "reasoning": 0.2},
        "metrics": {},
        "diagnostics": {"answer": "E"},
        "failure": None if reward > 0.6 else "model",
        "advantage": reward - 0.4,
        "tokens": 31,
    }
    return {**row, **more}


def write_outputs(folder: Path, *, collapse: bool = False) -> None:
    """Write the run directory a backend would leave behind."""
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", metric_rows(collapse=collapse))
    for step in (1, 15, STEPS):
        rows = [
            rollout(
                step,
                i,
                f"<think>Blocking COX-1 is inhibition, try {i}.</think>\n\\boxed{{E}}",
                [0.06, 0.1, 0.74, 0.78][i % 4],
            )
            for i in range(12)
        ]
        write_lines(folder / f"rollouts/step_{step}/{ENV}.jsonl", rows)
    capture = {
        "commit": "a81e0b7c2d91",
        "python": "3.11.7",
        "hardware": {"cpu": "Xeon 2 cores", "memory_gb": 16},
        "packages": {"torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.2", "numpy": "2.3.0", "zipp": "3.1"},
        "variables": {"HF_TOKEN": "hf_canary"},
    }
    (folder / "environment.json").write_text(json.dumps(capture))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
