"""Two runs side by side: a difference only where both were evaluated on the same, unchanged items."""

from dataclasses import replace

import pytest

from harness.core.types import FailureClass
from harness.evaluation.compare import compare_runs
from harness.evaluation.records import ItemRecord, write_items
from harness.evaluation.statistics import mean_of, paired_difference
from harness.evaluation.summary import interval_json, summarise
from harness.ledger import Ledger


def items(right, metric=None):
    return [
        ItemRecord(
            task=f"t{number}",
            cluster=f"c{number // 2}",
            sample=0,
            reward=float(number in right),
            components={"accuracy": float(number in right)} | ({metric: 0.5} if metric else {}),
            metrics={},
            failure=None if number in right else FailureClass.MODEL,
        )
        for number in range(40)
    ]


OLD, NEW = items(range(10)), items(range(25), "extra")


@pytest.fixture
def program(tmp_path):
    """A ledger whose run-001 and run-002 have committed items; returns a function that gives the comparison."""

    def build(old=None, new=None, broken=None):
        ledger = Ledger(tmp_path / "runs.jsonl")
        for run, found, changes in (("run-001", OLD, old), ("run-002", NEW, new)):
            name = f"analysis/{run}/evals/step_10.policy.drugprot.jsonl"
            data = {"attempt": 1, "subject": "policy", "step": 10, "env": "drugprot", "prompt": "run"}
            data |= {"items_sha": "i", "verifier": "1", "protocol": {"samples": 1}, "file": name}
            data["file_sha"] = write_items(tmp_path / name, found)
            data |= summarise(found, requested=40) | (changes or {})
            ledger.append(run, "created", {"type": "training"})
            ledger.append(run, "evaluated", {key: value for key, value in data.items() if value is not None})
        if broken is not None:
            broken(tmp_path / "analysis/run-002/evals/step_10.policy.drugprot.jsonl")
        state = ledger.state()
        return compare_runs(tmp_path, state.runs["run-001"], state.runs["run-002"])

    return build


def test_means_and_the_paired_difference_are_those_of_the_statistics(program):
    rows = {row["metric"]: row for row in program()}
    assert list(rows) == ["reward", "accuracy", "extra"]
    expected = interval_json(paired_difference(NEW, OLD, "reward"))
    assert rows["reward"]["difference"] == expected
    assert (expected["wins"], expected["losses"], expected["ties"]) == (15, 0, 25)
    assert rows["reward"]["old"] == interval_json(mean_of(OLD, "reward"))
    assert rows["reward"]["why"] is None
    assert (rows["extra"]["old"], rows["extra"]["difference"]) == (None, None)
    assert "every item" in rows["extra"]["why"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"items_sha": "other"}, "other items"),
        ({"verifier": "2"}, "different verifiers"),
        ({"protocol": {"samples": 2}}, "different protocols"),
        ({"file": None}, "not on record"),
        ({"file": "../outside.jsonl"}, "outside analysis/"),
        ({"file": "analysis/run-009/x.jsonl"}, "cannot be read"),
        ({"file_sha": "0" * 64}, "was changed"),
        ({"env": "tool"}, "only one of the two"),
    ],
)
def test_no_difference_without_the_same_items(program, changes, why):
    rows = program(new=changes)
    assert rows
    assert {row["difference"] for row in rows} == {None}
    assert all(why in row["why"] for row in rows)


def test_damaged_items_are_no_evidence(program):
    (row, *_) = program(broken=lambda path: path.write_text("{}\n"))
    assert row["difference"] is None
    assert "was changed" in row["why"]
    assert row["new"]["mean"] == pytest.approx(25 / 40)


def test_another_cluster_is_said_not_raised(program, tmp_path):
    moved = [replace(item, cluster="x") for item in NEW]
    sha = write_items(tmp_path / "elsewhere.jsonl", moved)
    rows = program(new={"file_sha": sha}, broken=lambda path: write_items(path, moved))
    assert rows[0]["difference"] is None
    assert "another cluster" in rows[0]["why"]
