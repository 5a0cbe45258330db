"""What an `evaluated` event says follows from the items alone."""

from __future__ import annotations

import math

import pytest

from harness.core.canonical import canonical_json
from harness.core.errors import UsageError
from harness.core.types import FailureClass
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import mean_of, paired_difference
from harness.evaluation.summary import answer_shares, summarise


def item(task, reward, failure=None, answer=None, metrics=None, accuracy=0.0):
    diagnostics = {} if answer is None else {"answer": answer}
    return ItemRecord(task, task, 0, reward, {"accuracy": accuracy}, metrics or {}, failure, diagnostics=diagnostics)


BASE = [item(f"t{n}", 0.1, FailureClass.MODEL) for n in range(6)]
POLICY = [
    item("t0", 0.9, answer="A", accuracy=1.0),
    item("t1", 0.2, FailureClass.MODEL, answer="A"),
    item("t2", 0.1, FailureClass.MODEL, answer="B"),
    item("t3", 0.0, FailureClass.MODEL, answer=""),
    item("t4", 0.0, FailureClass.INFRA, answer="C"),
    item("t5", 0.8, answer="A", accuracy=1.0),
]


def test_counts_means_and_gains():
    result = summarise(POLICY, requested=6, base=BASE)
    assert (result["n"], result["requested"]) == (5, 6)
    assert result["failures"] == {"infra": 1, "model": 3}
    assert set(result["means"]) == {"reward", "accuracy"}
    expected = mean_of(POLICY, "accuracy")
    assert result["means"]["accuracy"] == {"mean": expected.mean, "low": expected.low, "high": expected.high}
    gain = paired_difference(POLICY, BASE, "reward")
    assert result["gain"]["reward"]["low"] == gain.low
    assert (result["gain"]["reward"]["wins"], result["gain"]["reward"]["missing"]) == (3, 1)
    assert "gain_shipped" not in result
    canonical_json(result)


def test_both_gains_are_kept_apart():
    result = summarise(POLICY, requested=6, base=BASE, base_shipped=POLICY)
    assert result["gain_shipped"]["reward"]["mean"] == 0.0 < result["gain"]["reward"]["mean"]


def test_answers_are_counted_over_counted_items_that_gave_one():
    assert summarise(POLICY, requested=6)["extra"] == {"answers": {"A": 3, "B": 1}, "top_answer_share": 0.75}
    assert answer_shares(BASE) == {}


def test_a_metric_some_items_lack_gets_no_mean_but_is_shown():
    items = [item("a", 1.0, metrics={"hops": 2.0}), item("b", 0.0, FailureClass.MODEL)]
    result = summarise(items, requested=2)
    assert "hops" not in result["means"]
    assert result["extra"]["partial_metrics"] == {"hops": 1}


def test_non_finite_numbers_are_typed():
    result = summarise([item("a", math.nan), item("b", 0.0)], requested=2)
    assert result["means"]["reward"]["mean"] == {"$non_finite": "nan"}
    canonical_json(result)


def test_an_eval_without_a_counted_item_is_typed_too():
    result = summarise([item("a", 0.0, FailureClass.INFRA)], requested=4)
    assert (result["n"], result["requested"], result["failures"]) == (0, 4, {"infra": 1})
    assert result["means"] == {"reward": {key: {"$non_finite": "nan"} for key in ("mean", "low", "high")}}


def test_more_items_than_requested_is_a_mistake():
    with pytest.raises(UsageError, match="only 1 were requested"):
        summarise(POLICY, requested=1)
