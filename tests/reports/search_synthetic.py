"""The record of a prompt search and the events around it, without any engine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from harness.core.canonical import canonical_json, sha256_hex
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import mean_of, paired_difference
from harness.evaluation.summary import interval_json
from harness.program import Program
from harness.reports.search_model import RECORD
from tests.reports.reports_synthetic import ENV, Recorder

SEARCH_RUN = "run-002"
SKILLS = (0.3, 0.35, 0.5, 0.45, 0.7, 0.55)
PARENTS: tuple[list[int], ...] = ([], [0], [0], [1], [2], [2])
TEXTS = (
    {"system": "Answer.", "demonstrations": "a\n\nb\n\nc"},
    {"system": "Answer well.", "demonstrations": "a\n\nb\n\nc"},
    {"system": "Answer.", "demonstrations": "a\n\nd\n\nc"},
    {"system": "Answer well.", "demonstrations": "b\n\na\n\nc"},
    {"system": "Answer with one letter.", "demonstrations": "a\n\nd\n\nc"},
    {"system": "Answer.", "demonstrations": "a\n\nd\n\ne"},
)


def _items(skill: float, count: int, kind: str) -> list[ItemRecord]:
    found = []
    for number in range(count):
        luck = random.Random(f"{kind}{number}").random()  # the same task is hard for every prompt
        found.append(ItemRecord(f"{kind}-{number:03d}", f"c{number // 2}", 0, float(luck < skill), {}, {}, None))
    return found


def _part(kind: str, count: int, skills: Mapping[str, float]) -> dict[str, Any]:
    items = {name: _items(skill, count, kind) for name, skill in skills.items()}
    means = {name: {"reward": interval_json(mean_of(found))} for name, found in items.items()}
    gain = {
        name: {"reward": interval_json(paired_difference(items["found"], other))}
        for name, other in items.items()
        if name != "found"
    }
    return {**means, "gain": gain, "items": count, "clusters": count // 2}


def search_record(**changes: Any) -> dict[str, Any]:
    """Return what a search of six candidates writes; candidate 4 is the best."""
    history = [
        {
            "index": index,
            "parents": PARENTS[index],
            "sha": f"{index}" * 64,
            "components": TEXTS[index],
            "mean": skill,
            "scores": {item.task: item.reward for item in _items(skill, 40, "validation")},
            "evaluations": 40 + 60 * index,
        }
        for index, skill in enumerate(SKILLS)
    ]
    record = {
        "chosen": 4,
        "candidates": len(history),
        "proposals": 9,
        "ended": "evaluations",
        "spent": {"evaluations": 400, "tokens": 12345, "money": 0.25, "seconds": 123.4},
        "limits": {"evaluations": 400, "tokens": None, "money": 2.0, "seconds": None},
        "sizes": {"validation": 40, "minibatch": 20},
        "seed_sha": "0" * 64,
        "prompt_sha": "4" * 64,
        "demonstrations": 2,
        "validation": _part("validation", 40, {"found": 0.7, "seed": 0.3}),
        "scoring": _part("scoring", 120, {"found": 0.6, "seed": 0.35, "random": 0.4}),
        "history": history,
        "steps": [
            *({"what": "accepted", "why": f"candidate {n}", "evaluations": 40 + 60 * n} for n in range(1, 6)),
            {"what": "rejected", "why": "first trial 0.300, its parent 0.350", "evaluations": 170},
            {"what": "refused", "why": "system lacks [[OPTIONS]]", "evaluations": 200, "components": {"system": "x"}},
        ],
        "examples": [
            {"task": "validation-001", "before": "B", "after": "<think>so</think>A", "reward": [0.0, 1.0]},
            {"task": "validation-004", "before": "A", "after": "C", "reward": [1.0, 0.0]},
        ],
        "shown": ["train-17", "train-42"],
        "clusters": {item.task: item.cluster for item in _items(0.5, 40, "validation")},
    }
    return record | changes


def write_search(program: Program, *, ended: bool = True, **changes: Any) -> None:
    """Write the record and the events of a search."""
    events = Recorder(program, SEARCH_RUN)
    asked = {"env": ENV, "number": 1}
    hypothesis = "A searched prompt earns more reward."
    events.add("created", {"type": "prompt_search", "hypothesis": hypothesis, "parent": None, "search": asked})
    events.add("started", {"attempt": 1, "host": "box", "pid": 1, "pid_start": 1, "resumed_from": None})
    if not ended:
        return
    data = (canonical_json(search_record(**changes), sort=False) + "\n").encode()
    path = program.analysis_dir(SEARCH_RUN) / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    files = [{"file": program.relative(path), "sha": sha256_hex(data)}]
    result = {"env": ENV, "prompt": "found-44444444", "model": "tiny", "reflection": "offline", "seed": 0, "number": 1}
    done = {"attempt": 1, "outcome": "completed", "failure": None, "reason": None, "step": 400, "wall_s": 130.0}
    events.add("finished", {**done, "tokens": 12345, "search": result, "files": files})
    events.add("decided", {"decision": "keep", "reason": "it holds", "by_rule": None})
