"""Answers that read nothing, or only cue words, as what a trained policy is compared with, item by item; pure.

A reference that draws its answers has an expected accuracy on each item instead of a sampled one: the noise of its
draws would only widen the interval. Differences are paired and clustered as everywhere (`statistics.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import PairedInterval, paired_difference

ACCURACY = "accuracy"


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference beside a policy.

    Args:
        name: what it does.
        accuracy: expected share of right answers over the items both sides count.
        difference: the policy's accuracy minus the reference's.
    """

    name: str
    accuracy: float
    difference: PairedInterval


def constant_answer(golds: Mapping[str, str], labels: Mapping[str, str] | None = None) -> tuple[str, dict[str, float]]:
    """Return the best answer to give always, chosen on the items themselves, and its accuracy on each task.

    Args:
        golds: by task, the right answer; at least one.
        labels: what an answer stands for; without one the answer names itself. The first name wins a tie.
    """
    named, counts = labels or {}, Counter(golds.values())
    best = max(sorted(counts, key=lambda answer: named.get(answer, answer)), key=lambda answer: counts[answer])
    return named.get(best, best), fixed_answers(golds, dict.fromkeys(golds, best))


def fixed_answers(golds: Mapping[str, str], given: Mapping[str, str]) -> dict[str, float]:
    """Return on each task whether a given answer is right, as 0 or 1."""
    return {task: float(given[task] == gold) for task, gold in golds.items()}


def drawn_answers(golds: Mapping[str, str], counts: Mapping[str, float]) -> dict[str, float]:
    """Return the expected accuracy on each task of answers drawn with the frequencies of `counts`: p(gold answer).

    With a policy's own answers as counts this is the policy that knows the form and reads nothing. It always
    answers, so where the policy itself gives invalid replies the bar is the higher.

    Args:
        golds: by task, the right answer.
        counts: how often each answer is given; their sum is above 0.
    """
    total = sum(counts.values())
    return {task: counts.get(gold, 0) / total for task, gold in golds.items()}


def against(
    name: str, items: Sequence[ItemRecord], expected: Mapping[str, float], confidence: float = 0.95
) -> Reference:
    """Return a reference's accuracy on a policy's items and the paired difference to it.

    Args:
        items: of the policy; of every task that counts in `expected`.
        expected: by task, the reference's accuracy in [0, 1].
        confidence: two-sided coverage.

    Raises:
        NotFoundError: when an item that counts has no accuracy.
    """
    counted = [item for item in items if item.counts]
    other = [
        ItemRecord(item.task, item.cluster, item.sample, 0.0, {ACCURACY: expected[item.task]}, {}, None)
        for item in counted
    ]
    mean = sum(expected[item.task] for item in counted) / len(counted)
    return Reference(name, mean, paired_difference(counted, other, ACCURACY, confidence))


def references(
    items: Sequence[ItemRecord],
    golds: Mapping[str, str],
    answers: Mapping[str, float],
    keyword: Mapping[str, str] | None = None,
    confidence: float = 0.95,
    labels: Mapping[str, str] | None = None,
) -> list[Reference]:
    """Return every reference beside a policy.

    Args:
        items: of the policy's eval; at least one that counts.
        golds: by task, the right answer.
        answers: how often the policy gave each answer; empty leaves the format-only policy out.
        keyword: by task, what the environment's fixed list of cue words answers.
        confidence: two-sided coverage.
        labels: what an answer stands for; without one the answer names itself.
    """
    best, constant = constant_answer(golds, labels)
    expected = {f"always {best}": constant}
    if keyword is not None:
        expected["cue words"] = fixed_answers(golds, keyword)
    expected["drawn from the held-out labels"] = drawn_answers(golds, Counter(golds.values()))
    if answers:
        expected["format only: drawn from the policy's own answers"] = drawn_answers(golds, answers)
    return [against(name, items, by_task, confidence) for name, by_task in expected.items()]
