"""The share of groups that teach, by formula and by count."""

from __future__ import annotations

import itertools

import pytest

from harness.core.errors import ExitCode, RefusedError
from harness.training.preflight import Preflight, add, informative_share


def by_enumeration(rate, size):
    outcomes = itertools.product((0, 1), repeat=size)
    return sum(
        rate ** sum(answers) * (1 - rate) ** (size - sum(answers)) for answers in outcomes if 0 < sum(answers) < size
    )


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.18, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_formula_counts_groups_with_both_answers(rate, size):
    assert informative_share(rate, size) == pytest.approx(by_enumeration(rate, size), abs=1e-12)


def test_it_is_an_upper_bound_for_tasks_of_different_difficulty():
    rates = [0.0, 0.1, 0.4, 0.9]
    mean = sum(informative_share(rate, 8) for rate in rates) / 4
    assert mean < informative_share(sum(rates) / 4, 8)


def probe(groups, informative, right, counted):
    return Preflight(groups, informative, 4, right, counted, tokens=10, seconds=0.5)


def test_probes_add_up_and_say_what_they_saw():
    both = add([probe(2, 0, 0, 8), probe(2, 1, 2, 6)])
    assert (both.groups, both.informative, both.right, both.counted, both.tokens) == (4, 1, 2, 14, 20)
    assert both.metrics()["preflight/informative_share"] == 0.25
    assert both.metrics()["preflight/pass_rate"] == pytest.approx(2 / 14)
    assert "1 of 4 groups" in both.describe() and "2 rollouts failed outside the model" in both.describe()
    both.check("run-002")


def test_no_group_with_spread_is_refused_with_exit_code_2():
    with pytest.raises(RefusedError, match="run-002 cannot learn: 0 of 4 groups") as caught:
        probe(4, 0, 0, 16).check("run-002")
    assert caught.value.exit_code == ExitCode.USAGE
    assert "harness launch run-002 --anyway" in caught.value.hint
    assert probe(4, 0, 0, 0).pass_rate == 0.0
