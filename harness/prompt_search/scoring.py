"""The final scoring: found prompt, seed prompt and random demonstrations on items the selection never saw, once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.core.canonical import encode_non_finite
from harness.core.seeds import derive_seed
from harness.core.types import Task
from harness.envs.base import Searchable
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import mean_of, paired_difference
from harness.evaluation.summary import interval_json
from harness.prompt_search.adapter import Evaluator
from harness.prompt_search.budget import Budget, Limits
from harness.prompt_search.offline import Shown

DRAWS = 8
"""Random draws of demonstrations, each scored on its share of the items: one draw alone may be lucky."""


def score_prompts(
    evaluator: Evaluator, prompts: Mapping[str, Sequence[Mapping[str, str]]], tasks: Sequence[Task]
) -> dict[str, list[ItemRecord]]:
    """Return the records of each prompt on the same items with the same random numbers.

    Args:
        evaluator: of the search; its cache is used, its budget is not.
        prompts: by name one candidate, or several that take the items in turn.
        tasks: of the scoring part.
    """
    player = replace(evaluator.player, batch="scoring")
    apart = Budget(Limits(len(tasks) * len(prompts)))
    own = Evaluator(player, evaluator.cache, apart, evaluator.guard, evaluator.on_progress, phase="scoring")
    records: dict[str, list[ItemRecord]] = {}
    for name, candidates in prompts.items():
        records[name] = []
        for turn, candidate in enumerate(candidates):
            share = tasks[turn :: len(candidates)]
            records[name] += [evaluation.item for evaluation in own.evaluate(candidate, share)] if share else []
    return records


def random_demonstrations(
    env: Searchable, candidate: Mapping[str, str], shown: Shown, pool: Sequence[Task], seed: int
) -> list[dict[str, str]]:
    """Return a candidate with random demonstrations in place of its own, of equal count and style, one for each draw.

    Args:
        shown: the demonstrations of the candidate.
        pool: tasks to draw from, each as likely as any other.
        seed: of the search.
    """
    source = random.Random(derive_seed(seed, "prompt-search", "random"))  # noqa: S311 - not cryptography
    drawn = [source.sample(list(pool), len(shown.tasks)) for _ in range(DRAWS)]
    return [{**candidate, **env.demonstrations(tasks, shown.style)} for tasks in drawn]


def means(items: Sequence[ItemRecord], names: Sequence[str], confidence: float) -> dict[str, Any]:
    """Return mean and interval of each of these metrics, JSON-ready."""
    return dict(encode_non_finite({name: interval_json(mean_of(items, name, confidence)) for name in names}))


def gains(
    items: Sequence[ItemRecord], base: Sequence[ItemRecord], names: Sequence[str], confidence: float
) -> dict[str, Any]:
    """Return the paired difference to `base` of each of these metrics, with its interval, JSON-ready."""
    found = {name: interval_json(paired_difference(items, base, name, confidence)) for name in names}
    return dict(encode_non_finite(found))
