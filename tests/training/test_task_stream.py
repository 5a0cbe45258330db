"""Which tasks a step sees, the learning rate it takes, and what survives a crash between steps."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from harness.core.types import Task
from harness.training.tasks import TaskStream, environment_order


def tasks(counts):
    return [
        Task(f"{label}{number}", "toy", "train", {}, label, label, f"{label}{number}")
        for label, count in counts.items()
        for number in range(count)
    ]


UNEVEN = {"A": 50, "B": 7, "C": 1}


@pytest.mark.parametrize("seed", [0, 1, 99])
def test_every_cycle_visits_each_label_once(seed):
    stream = TaskStream(tasks(UNEVEN), balance=True, seed=seed)
    drawn = [stream[position] for position in range(300)]
    for start in range(0, 300, 3):
        assert sorted(task.label for task in drawn[start : start + 3]) == ["A", "B", "C"]
    # within a label every task comes once before any comes twice
    of_b = [task.id for task in drawn if task.label == "B"]
    for start in range(0, 98, 7):
        assert len(set(of_b[start : start + 7])) == 7


def test_without_balance_every_task_comes_once_an_epoch():
    everything = tasks(UNEVEN)
    stream = TaskStream(everything, balance=False, seed=4)
    for epoch in range(3):
        drawn = [stream[58 * epoch + position].id for position in range(58)]
        assert Counter(drawn) == Counter(task.id for task in everything)
    orders = [[stream[58 * epoch + position].id for position in range(58)] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("balance", [True, False])
def test_a_position_is_an_address(balance):
    """A resumed run asks for later positions only; it must get what the other run got."""
    first = TaskStream(tasks(UNEVEN), balance, 7)
    in_order = [first[position].id for position in range(200)]
    shuffled = list(range(200))
    random.Random(0).shuffle(shuffled)
    second = TaskStream(tasks(UNEVEN), balance, 7)
    assert {position: second[position].id for position in shuffled} == dict(enumerate(in_order))
    assert [TaskStream(tasks(UNEVEN), balance, 8)[p].id for p in range(200)] != in_order


def test_global_randomness_plays_no_part():
    random.seed(1)
    first = [TaskStream(tasks(UNEVEN), True, 0)[p].id for p in range(50)]
    random.seed(2)
    assert [TaskStream(tasks(UNEVEN), True, 0)[p].id for p in range(50)] == first


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 0.5, "b": 0.3, "c": 0.2}])
def test_every_prefix_holds_the_shares(weights):
    order = environment_order(weights, 200)
    total = sum(weights.values())
    for count in range(1, 201):
        seen = Counter(order[:count])
        for name, weight in weights.items():
            assert abs(seen[name] - count * weight / total) <= 1 + 1e-9
    assert environment_order(weights, 50) == order[:50]


def test_shares_by_hand():
    assert environment_order({"a": 3.0, "b": 1.0}, 8) == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert environment_order({"only": 0.1}, 3) == ["only"] * 3
    assert environment_order({"a": 1.0, "b": 1.0}, 0) == []
