"""Write the table of how the scores of bioreason-go can be gamed into its documentation page.

    python scripts/go_gaming_table.py           # rewrites the block between the go-gaming marks
    python scripts/go_gaming_table.py --check   # exits 1 when the block differs, and changes nothing

Each row is an answer that needs no understanding, or an honest but imperfect one, scored by the default reward on
1,000 shipped proteins; random choices are seeded by the protein.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.core.seeds import derive_seed  # noqa: E402 - the path above makes it importable without installation
from harness.core.types import Task  # noqa: E402
from harness.envs.bioreason_go.baselines import answerers, frequent_terms, reply  # noqa: E402
from harness.envs.bioreason_go.environment import BioReasonGo  # noqa: E402
from harness.envs.bioreason_go.ontology import Ontology  # noqa: E402
from harness.envs.bioreason_go.records import task_candidates, task_labels  # noqa: E402
from harness.envs.bioreason_go.terms import ASPECTS, Aspect  # noqa: E402

PAGE = ROOT / "docs" / "environments" / "bioreason-go.md"
BEGIN, END = "<!-- go-gaming:begin -->\n", "<!-- go-gaming:end -->"
PROTEINS = 1000
HONEST = ("half of the labels", "half of the labels, as many wrong candidates")
COLUMNS = {
    "exact precision": "exact_precision",
    "exact recall": "exact_recall",
    "closure F1": "f1",
    "similarity": "similarity",
    "cardinality": "cardinality",
    "**reward**": "reward",
}
Lists = Mapping[Aspect, Sequence[str]]
Row = tuple[str, Callable[[Task], Lists]]


def _each(choose: Callable[[Aspect, Sequence[str], random.Random], Sequence[str]]) -> Callable[[Task], Lists]:
    """Return what answers aspect by aspect from the labels, with random numbers of the protein."""

    def answer(task: Task) -> Lists:
        rng = random.Random(derive_seed(0, "go-gaming", task.id))  # noqa: S311 - no secret depends on it
        return {aspect: choose(aspect, ids, rng) if ids else [] for aspect, ids in task_labels(task).items()}

    return answer


def _half(ids: Sequence[str], rng: random.Random) -> list[str]:
    return rng.sample(list(ids), (len(ids) + 1) // 2)


def _half_of_all(wrong: bool) -> Callable[[Task], Lists]:
    """Return what answers with half of a protein's labels, whatever their aspects, and perhaps as many wrong ids."""

    def answer(task: Task) -> Lists:
        rng = random.Random(derive_seed(0, "go-gaming", task.id))  # noqa: S311 - no secret depends on it
        labels, candidates = task_labels(task), task_candidates(task)
        pairs = [(aspect, go_id) for aspect in ASPECTS for go_id in labels[aspect]]
        chosen = rng.sample(pairs, (len(pairs) + 1) // 2)
        bad = [(a, go_id) for a in ASPECTS for go_id in candidates[a] if go_id not in labels[a]]
        chosen += rng.sample(bad, min(len(bad), len(chosen))) if wrong else []
        return {aspect: [go_id for of, go_id in chosen if of == aspect] for aspect in ASPECTS}

    return answer


def rows(env: BioReasonGo) -> list[Row]:
    """Return the answers of the table by their names, spam first."""
    ontology, train = env.ontology, env.tasks("train")
    every = {a: [ontology.id(i) for i in range(len(ontology)) if ontology.aspect(i) == a] for a in ASPECTS}
    often = frequent_terms(train, 20)
    known = answerers(train)
    common: Lists = {"mf": ["GO:0005515"], "bp": ["GO:0009987"], "cc": ["GO:0005737"]}
    return [
        ("an empty object", lambda task: {}),
        ("root only", lambda task: {aspect: [ontology.id(root)] for aspect, root in ontology.roots.items()}),
        *(
            (f"{n} most frequent term{'s' * (n > 1)}", lambda t, n=n: {a: often[a][:n] for a in ASPECTS})
            for n in (1, 5, 20)
        ),
        ("protein binding / cellular process / cytoplasm", lambda task: common),
        ("labels and 3 times as many random ids", _each(lambda a, ids, r: [*ids, *r.sample(every[a], 3 * len(ids))])),
        ("labels and 200 random ids", _each(lambda a, ids, r: [*ids, *r.sample(every[a], 200)])),
        ("copy all candidates", known["copy all candidates"]),
        ("domain lookup", known["domain lookup"]),
        ("one parent of every label", _each(lambda a, ids, r: [_parent(ontology, go_id) for go_id in ids])),
        (HONEST[1], _half_of_all(wrong=True)),
        (HONEST[0], _half_of_all(wrong=False)),
        ("half of each aspect's labels, rounded up", _each(lambda a, ids, r: _half(ids, r))),
        ("the labels", task_labels),
    ]


def _parent(ontology: Ontology, go_id: str) -> str:
    index = ontology.index_of(go_id)
    assert index is not None
    return ontology.id(ontology.parents[index][0])


def measure(env: BioReasonGo, proteins: int = PROTEINS) -> dict[str, dict[str, float]]:
    """Return by row and metric the mean over the first proteins of the held-out and train splits."""
    tasks = [*env.tasks("heldout"), *env.tasks("train")][:proteins]
    found = {}
    for name, answer in rows(env):
        scores = [env.scorer.score_reply(reply(answer(task)), env.gold(task)) for task in tasks]
        values = [{"reward": score.reward, **score.components, **score.metrics} for score in scores]
        found[name] = {metric: sum(value[metric] for value in values) / len(values) for metric in COLUMNS.values()}
    return found


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table as Markdown."""
    head = [f"| answer | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
    body = [
        f"| {name} | {' | '.join(f'{values[metric]:.3f}' for metric in COLUMNS.values())} |"
        for name, values in found.items()
    ]
    return "\n".join([*head, *body]) + "\n"


def main() -> int:
    """Rewrite the block, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when the block is stale")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    new = f"{before}{BEGIN}{table(measure(BioReasonGo()))}{END}{after}"
    if options.check:
        print(f"{PAGE.name}: the table is " + ("current" if new == text else "stale; run this without --check"))
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
