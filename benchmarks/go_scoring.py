"""How many completions a second the verifier of bioreason-go scores on one core, beside go3.

    python benchmarks/go_scoring.py [--completions 3000] [--repeats 7] [--json]

Every completion is a JSON text of 5 to 20 ids an aspect, some of them labels of the protein, the rest drawn from the
whole ontology, and no two are the same. Scoring is all of it: parsing, resolving ids, closures, every component and
metric. The figure is the median over repeats of processor time, after one pass that loads what is loaded lazily;
nothing of a completion is kept between passes.

With go3 installed (`pip install go3==2.0.0`) its simGIC of the same lists, parsed beforehand, three calls a completion,
stands beside it: one number of those a score has, from a compiled library. Exit code 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.envs.bioreason_go.answer import Lists, read_answer  # noqa: E402 - the path above makes it importable
from harness.envs.bioreason_go.environment import BioReasonGo  # noqa: E402
from harness.envs.bioreason_go.records import task_labels  # noqa: E402
from harness.envs.bioreason_go.terms import ASPECTS  # noqa: E402
from harness.envs.bioreason_go.verifier import Gold  # noqa: E402

BAR = 5000.0
FEWEST, MOST = 5, 20


def completions(env: BioReasonGo, count: int) -> list[tuple[str, Gold]]:
    """Return different texts and the labels each is scored against."""
    rng = random.Random(0)  # noqa: S311 - seeded data
    every = {a: [i for i, of in zip(env.ontology.terms, env.ontology.aspects, strict=True) if of == a] for a in ASPECTS}
    tasks = env.tasks("train")
    made = []
    for number in range(count):
        task = tasks[number % len(tasks)]
        lists = {}
        for aspect, ids in task_labels(task).items():
            size = rng.randint(FEWEST, MOST)
            right = rng.sample(ids, min(len(ids), rng.randint(0, size)))
            lists[aspect] = [*right, *rng.sample(every[aspect], size - len(right))]
        made.append((json.dumps({"summary": f"protein {number}", **lists}), env.gold(task)))
    return made


def rate(work: Callable[[], None], count: int, repeats: int) -> float:
    """Return the median of completions a second of processor time."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return count / statistics.median(seconds)


def go3_rate(env: BioReasonGo, lists: list[tuple[Lists, Gold]], repeats: int) -> float:
    """Return go3's rate for simGIC of the same lists, its own loading left out."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import go3
    import go3_reference

    ontology = env.ontology
    go3.set_num_threads(1)
    counter = go3_reference.load(
        ontology, [[i for ids in task_labels(t).values() for i in ids] for t in env.tasks("train")]
    )
    pairs = [
        (lists[aspect], [ontology.id(term) for term in sorted(part.terms)])
        for lists, gold in lists
        for aspect, part in gold.aspects.items()
    ]

    def work() -> None:
        for given, labels in pairs:
            go3.termset_similarity(given, labels, "lin", "simgic", counter)

    return rate(work, len(lists), repeats)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--completions", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    env = BioReasonGo()
    made = completions(env, options.completions)

    def work() -> None:
        for text, gold in made:
            env.scorer.score_reply(text, gold)

    found: dict[str, Any] = {"completions_per_s": round(rate(work, len(made), options.repeats)), "bar": BAR}
    if importlib.util.find_spec("go3"):
        parsed = [(lists, gold) for text, gold in made if (lists := read_answer(text).lists) is not None]
        found["go3_simgic_completions_per_s"] = round(go3_rate(env, parsed, options.repeats))
    holds = found["completions_per_s"] >= BAR
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"scored completions     {found['completions_per_s']:8} /s   bar {BAR:.0f}   {'pass' if holds else 'FAIL'}"
        )
        if "go3_simgic_completions_per_s" in found:
            print(f"simGIC alone in go3    {found['go3_simgic_completions_per_s']:8} /s")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
