"""How many completions a second the verifier of bioreason-go scores on one core, beside go3.

    python benchmarks/go_scoring.py [--completions 3000] [--passes 240] [--json]

Every completion is a JSON text of 5 to 20 ids an aspect, some of them labels of the protein, the rest drawn from the
whole ontology, and no two are the same. Scoring is all of it: parsing, resolving ids, closures, every component and
metric. The figure is that of the fastest of many short passes, the one that other work on the machine disturbed least,
in processor time; the median stands beside it. Nothing of a completion is kept between passes.

With go3 installed (`pip install go3==2.0.0`) its simGIC of the same lists, parsed beforehand, three calls a completion,
stands beside it: one number of those a score has, from a compiled library. Exit code 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.envs.bioreason_go.answer import Lists, read_answer  # noqa: E402 - the path above makes it importable
from harness.envs.bioreason_go.environment import BioReasonGo  # noqa: E402
from harness.envs.bioreason_go.records import task_labels  # noqa: E402
from harness.envs.bioreason_go.terms import ASPECTS  # noqa: E402
from harness.envs.bioreason_go.verifier import Gold  # noqa: E402

BAR = 5000.0
CHUNK = 50
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


class Rate(NamedTuple):
    """Completions a second of processor time."""

    best: float
    median: float


def rate(score: Callable[[int], None], count: int, passes: int) -> Rate:
    """Return how fast `score` takes completions, by number, in passes of `CHUNK` that go round all of them."""
    numbers = itertools.cycle(range(count))
    rates = []
    for _ in range(passes):
        chosen = list(itertools.islice(numbers, CHUNK))
        start = time.process_time()
        for number in chosen:
            score(number)
        rates.append(CHUNK / (time.process_time() - start))
    return Rate(max(rates), statistics.median(rates))


def go3_rate(env: BioReasonGo, answers: list[tuple[Lists, Gold]], passes: int) -> Rate:
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
        [(lists[a], [ontology.id(term) for term in sorted(part.terms)]) for a, part in gold.aspects.items()]
        for lists, gold in answers
    ]

    def score(number: int) -> None:
        for given, labels in pairs[number]:
            go3.termset_similarity(given, labels, "lin", "simgic", counter)

    return rate(score, len(pairs), passes)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--completions", type=int, default=3000)
    parser.add_argument("--passes", type=int, default=240)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    env = BioReasonGo()
    made = completions(env, options.completions)

    def score(number: int) -> None:
        env.scorer.score_reply(*made[number])

    rates = {"scored completions": rate(score, len(made), options.passes)}
    if importlib.util.find_spec("go3"):
        parsed = [(lists, gold) for text, gold in made if (lists := read_answer(text).lists) is not None]
        rates["simGIC alone in go3"] = go3_rate(env, parsed, options.passes)
    holds = rates["scored completions"].best >= BAR
    if options.json:
        print(json.dumps({"bar": BAR, "holds": holds, **{name: found._asdict() for name, found in rates.items()}}))
    else:
        for name, found in rates.items():
            print(f"{name:<22} {found.best:8.0f} /s   median {found.median:8.0f} /s")
        print(f"bar {BAR:.0f} /s: {'pass' if holds else 'FAIL'}")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
