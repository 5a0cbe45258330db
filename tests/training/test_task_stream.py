"""Which tasks a step sees, the learning rate it takes, and what survives a crash between steps."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from harness.core.types import Task
from harness.training.tasks import Curriculum, TaskStream, environment_order, updated_rate


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


BAND = Curriculum(0.1, 0.9)


def test_a_curriculum_without_rates_takes_the_tasks_as_they_come():
    stream = TaskStream(tasks(UNEVEN), True, 3)
    assert [BAND.choose(stream, p, {}, ()).id for p in range(60)] == [stream[p].id for p in range(60)]


@pytest.mark.parametrize("balance", [True, False])
def test_tasks_outside_the_band_give_way_to_others_of_their_label(balance):
    stream = TaskStream(tasks({"A": 20, "B": 20}), balance, 3)
    rates = {f"{label}{n}": (0.0 if n < 10 else 0.5) for label in "AB" for n in range(20)}
    drawn = [(BAND.choose(stream, p, rates, ()), stream[p]) for p in range(400)]
    assert not balance or all(task.label == comes.label for task, comes in drawn)
    preferred = sum(BAND.prefers(rates[task.id]) for task, _ in drawn) / 400
    assert 0.9 < preferred < 1.0  # half of a tenth of the positions keep a task that teaches nothing now
    kept = {task.id for task, _ in drawn if rates[task.id] == 0.0}
    assert len(kept) > 5  # none of them is given up for good
    assert all(task is comes for task, comes in drawn if BAND.prefers(rates[comes.id]))


def test_a_curriculum_is_a_function_of_its_arguments_and_spares_what_the_step_has():
    stream = TaskStream(tasks({"A": 6}), True, 1)
    position = next(p for p in range(50) if not stream.revisits(p))
    rates = {f"A{n}": 0.5 for n in range(6)} | {stream[position].id: 1.0}
    first = BAND.choose(stream, position, rates, ())
    random.seed(9)
    assert BAND.choose(TaskStream(tasks({"A": 6}), True, 1), position, rates, ()) == first
    second = BAND.choose(stream, position, rates, {first.id})
    assert second.id not in (first.id, stream[position].id)
    everything = {task.id for task in tasks({"A": 6})}
    assert BAND.choose(stream, position, rates, everything) == stream[position]
    assert BAND.choose(stream, position, dict.fromkeys(everything, 0.0), ()) == stream[position]


def test_a_running_rate_forgets():
    assert updated_rate(None, 0.25) == 0.25
    assert updated_rate(1.0, 0.0) == 0.5
    assert updated_rate(0.5, 0.0) == 0.25
