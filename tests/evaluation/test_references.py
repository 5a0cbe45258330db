"""References that read nothing, against naive computation, and against answers that are really drawn."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy import stats

from harness.core.errors import NotFoundError
from harness.core.types import FailureClass
from harness.evaluation.records import ItemRecord
from harness.evaluation.references import (
    against,
    constant_answer,
    drawn_answers,
    fixed_answers,
    references,
)

GOLDS = {f"t{n}": "EEEEKKKAB"[n % 9] for n in range(90)}


def policy(skill=0.6, seed=0, lost=()):
    """Return items of a policy that is right with a probability, two tasks a cluster, and its answers."""
    source = random.Random(seed)
    items, answers = [], {}
    for number, (task, gold) in enumerate(GOLDS.items()):
        answer = gold if source.random() < skill else source.choice("EKAB")
        answers[answer] = answers.get(answer, 0) + 1
        right = answer == gold
        failure = FailureClass.INFRA if task in lost else None if right else FailureClass.MODEL
        items.append(ItemRecord(task, f"c{number // 2}", 0, 0.7 * right, {"accuracy": float(right)}, {}, failure))
    return items, answers


def naive_interval(values, clusters):
    """The one-sample t interval over clusters of equal size: means of clusters are independent."""
    sizes = {name: clusters.count(name) for name in clusters}
    assert len(set(sizes.values())) == 1
    means = [np.mean([v for v, c in zip(values, clusters, strict=True) if c == name]) for name in sizes]
    half = stats.t.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / len(means) ** 0.5
    return np.mean(values) - half, np.mean(values) + half


def test_the_format_only_policy_gets_an_item_right_as_often_as_it_draws_its_answer():
    items, answers = policy()
    total = sum(answers.values())
    found = against("format only", items, drawn_answers(GOLDS, answers))
    expected = [
        sum(count / total * (letter == GOLDS[item.task]) for letter, count in answers.items()) for item in items
    ]
    assert found.accuracy == pytest.approx(np.mean(expected))
    differences = [item.components["accuracy"] - e for item, e in zip(items, expected, strict=True)]
    assert found.difference.mean == pytest.approx(np.mean(differences))
    low, high = naive_interval(differences, [item.cluster for item in items])
    assert (found.difference.low, found.difference.high) == pytest.approx((low, high))
    assert found.difference.clusters == 45

    letters, weights = list(answers), list(answers.values())
    source = random.Random(1)
    drawn = [np.mean([source.choices(letters, weights)[0] == gold for gold in GOLDS.values()]) for _ in range(400)]
    assert found.accuracy == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / 20)


def test_a_policy_that_draws_is_no_better_than_the_format_only_one_and_a_reader_is():
    drawer, answers = policy(skill=0.0, seed=3)
    found = against("format only", drawer, drawn_answers(GOLDS, answers))
    assert found.difference.low < 0 < found.difference.high
    reader, answers = policy(skill=0.8)
    assert against("format only", reader, drawn_answers(GOLDS, answers)).difference.low > 0


def test_the_constant_and_the_given_answers_are_right_where_they_are():
    best, expected = constant_answer(GOLDS)
    assert best == "E"
    assert expected == {task: float(gold == "E") for task, gold in GOLDS.items()}
    assert constant_answer({"a": "K", "b": "A"})[0] == "A"
    assert constant_answer({"a": "K", "b": "A"}, {"K": "one", "A": "two"}) == ("one", {"a": 1.0, "b": 0.0})
    assert fixed_answers({"a": "K", "b": "A"}, {"a": "K", "b": "B"}) == {"a": 1.0, "b": 0.0}


def test_all_references_stand_beside_a_policy_in_a_fixed_order():
    items, answers = policy()
    keyword = dict.fromkeys(GOLDS, "K")
    found = references(items, GOLDS, answers, keyword)
    assert [one.name for one in found] == [
        "always E",
        "cue words",
        "drawn from the held-out labels",
        "format only: drawn from the policy's own answers",
    ]
    shares = [4 / 9, 3 / 9, 1 / 9, 1 / 9]
    assert [one.accuracy for one in found[:3]] == pytest.approx([4 / 9, 3 / 9, sum(s * s for s in shares)])
    assert len(references(items, GOLDS, {})) == 2


def test_items_that_do_not_count_are_on_neither_side_and_an_accuracy_must_be_there():
    items, answers = policy(lost=("t0", "t1"))
    found = against("x", items, drawn_answers(GOLDS, answers))
    counted = [item for item in items if item.counts]
    assert found.difference.n == len(counted) == 88
    assert found.difference.missing == 0
    bare = [ItemRecord("t0", "c", 0, 1.0, {}, {}, None)]
    with pytest.raises(NotFoundError, match="accuracy"):
        against("x", bare, {"t0": 1.0})
