"""What needs no model: copied candidates, frequent terms, a table from domains to terms. Reports show them.

Frequencies and table come from the train proteins alone. A score without these beside it means nothing: a model
that repeats the candidates of its prompt has understood nothing of the protein.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from typing import TYPE_CHECKING

from harness.core.canonical import canonical_json
from harness.core.types import Score, Task
from harness.envs.bioreason_go.metrics import corpus_metrics
from harness.envs.bioreason_go.records import NOTHING, task_candidates, task_labels
from harness.envs.bioreason_go.terms import ASPECTS, Aspect

if TYPE_CHECKING:
    from harness.envs.bioreason_go.environment import BioReasonGo

Lists = Mapping[Aspect, Sequence[str]]
Answerer = Callable[[Task], Lists]
SHOWN = ("reward", "similarity", "f1", "exact_precision", "exact_recall", "ids")
MOST_FREQUENT = 5
_CARRIED = 0.5  # share of a domain's train proteins that a term needs


def reply(lists: Lists) -> str:
    """Return ids as an answer in the required form."""
    return canonical_json({"summary": "baseline", **{aspect: list(lists.get(aspect, ())) for aspect in ASPECTS}})


def frequent_terms(train: Sequence[Task], most: int = MOST_FREQUENT) -> dict[Aspect, list[str]]:
    """Return the most frequent labels of each aspect, the most frequent first, ties by id."""
    counts: dict[Aspect, Counter[str]] = {aspect: Counter() for aspect in ASPECTS}
    for task in train:
        for aspect, ids in task_labels(task).items():
            counts[aspect].update(ids)
    return {aspect: _most_common(counts[aspect], most) for aspect in ASPECTS}


def _most_common(counts: Counter[str], most: int) -> list[str]:
    return sorted(counts, key=lambda name: (-counts[name], name))[:most]


def domain_table(train: Sequence[Task]) -> dict[str, dict[Aspect, list[str]]]:
    """Return for each domain the labels that at least half of its train proteins carry."""
    carriers: Counter[str] = Counter()
    counts: dict[str, dict[Aspect, Counter[str]]] = {}
    for task in train:
        labels = task_labels(task)
        for domain in _domains(task):
            carriers[domain] += 1
            for aspect, ids in labels.items():
                counts.setdefault(domain, {a: Counter() for a in ASPECTS})[aspect].update(ids)
    return {
        domain: {
            aspect: sorted(name for name, count in of.items() if count >= _CARRIED * carriers[domain])
            for aspect, of in by_aspect.items()
        }
        for domain, by_aspect in counts.items()
    }


def _domains(task: Task) -> list[str]:
    text = task.fields.get("domains", NOTHING)
    return [] if text == NOTHING else text.split("\n")


def domain_lookup(table: Mapping[str, Lists], otherwise: Lists) -> Answerer:
    """Return what answers with the terms of all domains of a protein, per aspect, or else with others."""

    def answer(task: Task) -> Lists:
        found = {a: sorted({name for d in _domains(task) for name in table.get(d, {}).get(a, ())}) for a in ASPECTS}
        return {aspect: found[aspect] or otherwise[aspect] for aspect in ASPECTS}

    return answer


def answerers(train: Sequence[Task]) -> dict[str, Answerer]:
    """Return every baseline by its name."""
    frequent = frequent_terms(train)
    single = {aspect: ids[:1] for aspect, ids in frequent.items()}
    return {
        "copy all candidates": task_candidates,
        "most frequent term": lambda task: single,
        f"{MOST_FREQUENT} most frequent terms": lambda task: frequent,
        "domain lookup": domain_lookup(domain_table(train), single),
    }


def means(scores: Iterable[Score]) -> dict[str, float]:
    """Return the means that a report shows, and the measures over the whole set."""
    rows = [{"reward": score.reward, **score.components, **score.metrics} for score in scores]
    shown = {name: fsum(row[name] for row in rows) / len(rows) for name in SHOWN}
    return shown | corpus_metrics(rows)


def report_rows(env: BioReasonGo, tasks: Sequence[Task]) -> list[tuple[str, str, float]]:
    """Return (baseline, metric, value) of each baseline on these tasks.

    Args:
        env: the environment they were evaluated in; its train split is what the baselines know.
        tasks: at least one.
    """
    rows: list[tuple[str, str, float]] = []
    for name, answer in answerers(env.tasks("train")).items():
        found = means(env.scorer.score_reply(reply(answer(task)), env.gold(task)) for task in tasks)
        rows += [(name, metric, value) for metric, value in found.items()]
    return rows
