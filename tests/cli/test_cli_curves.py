"""Learning curves of several runs: what the table says, what is drawn, what is refused."""

import json

import pytest

from harness.ledger import Ledger
from harness.reports.curves import MOST_RUNS, Point, draw, line_style, smoothed, summarise

REWARD = "train/drugprot/reward/mean"


def training(program, run, values, **more):
    folder = program.run_dir(run)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "attempt": 1, REWARD: value, "train/loss": -value} | more for step, value in values.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def two_runs(program):
    """run-001 of the template and run-002, with metrics; run-002 was measured like run-001."""
    ledger = Ledger(program.ledger)
    ledger.append("run-002", "created", {"type": "training", "hypothesis": "h", "parent": "run-001"})
    mean = {"mean": 0.6, "low": 0.5, "high": 0.7}
    data = {
        "attempt": 1,
        "subject": "policy",
        "step": 30,
        "env": "drugprot",
        "prompt": "run",
        "means": {"reward": mean},
    }
    ledger.append("run-002", "evaluated", data)
    training(program, "run-001", {1: 0.1, 2: 0.3, 3: 0.2})
    training(program, "run-002", {1: 0.2, 2: 0.4, 3: 0.9})
    return program


def test_the_table_tells_where_each_curve_begins_ends_and_turns(cli, two_runs):
    document = cli("curves", "--window", "2", "--json").document
    assert [row["run"] for row in document["rows"]] == ["run-001", "run-002"]
    first = document["rows"][0]
    assert (first["metric"], first["steps"], first["first_step"], first["last_step"]) == (REWARD, 3, 1, 3)
    assert [first[key] for key in ("first", "last", "highest", "lowest")] == pytest.approx([0.1, 0.25, 0.25, 0.1])
    assert (first["highest_step"], first["lowest_step"]) == (3, 1)
    assert document["counts"] == {"total": 2, "shown": 2} and document["truncated"] is False
    assert document["png"] is None and document["not_comparable"] == []
    lines = cli("curves", "--window", "1").out.splitlines()
    assert lines[0] == REWARD
    assert lines[-1].split() == ["run-002", "1–3", "0.200", "0.900", "0.900", "3", "0.200", "1"]


def test_the_picture_is_written_once_and_is_the_same_twice(cli, two_runs, tmp_path):
    target = tmp_path / "curves.png"
    answer = cli("curves", "--png", target)
    assert answer.code == 0 and f"2 runs drawn into {target}" in answer.out
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    assert cli("curves", "--png", target).code == 2
    assert cli("curves", "--png", target, "--force", "--json").document["png"] == str(target)
    assert target.read_bytes() == data
    assert cli("curves", "--png", two_runs.ledger, "--force").code == 2


def test_runs_and_a_metric_can_be_named(cli, two_runs):
    document = cli("curves", "run-002", "--metric", "train/loss", "--window", "1", "--json").document
    assert [(row["run"], row["last"]) for row in document["rows"]] == [("run-002", -0.9)]
    wrong = cli("curves", "--metric", "train/los", "--json")
    assert wrong.code == 2 and "train/loss" in wrong.document["error"]["hint"]
    assert "did you mean" in cli("curves", "run-009", "--json").document["error"]["hint"]


def test_without_metrics_the_way_to_them_is_told(cli, program):
    answer = cli("curves", "--json")
    assert answer.code == 2 and "--metric" in answer.document["error"]["hint"]


def test_superseded_steps_and_other_protocols_are_not_drawn(cli, two_runs):
    with (two_runs.run_dir("run-001") / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "attempt": 2, REWARD: 0.8}) + "\n")
    document = cli("curves", "run-001", "--window", "1", "--json").document
    assert (document["rows"][0]["steps"], document["rows"][0]["last"]) == (2, 0.8)  # steps 1 and 2; 3 was trained anew
    mean = {"mean": 0.9, "low": 0.8, "high": 1.0}
    data = {
        "attempt": 1,
        "subject": "policy",
        "step": 40,
        "env": "drugprot",
        "prompt": "run",
        "means": {"reward": mean},
    }
    Ledger(two_runs.ledger).append("run-002", "evaluated", data | {"items_sha": "other"})
    assert cli("curves", "--json").document["not_comparable"] == ["run-001"]
    assert "under another protocol are not drawn: run-001" in cli("curves").out


def test_too_many_lines_for_one_picture_are_refused(cli, program):
    ledger = Ledger(program.ledger)
    names = [f"run-{number:03d}" for number in range(2, MOST_RUNS + 4)]
    for name in names:
        ledger.append(name, "created", {"type": "training", "hypothesis": "h"})
        training(program, name, {1: 0.5})
    assert cli("curves", *names).code == 2
    document = cli("curves", "--json").document  # the newest ones, as far as lines can be told apart
    assert [row["run"] for row in document["rows"]] == names[-MOST_RUNS:] and document["truncated"] is True


def test_no_two_lines_look_the_same():
    styles = [str(line_style(index)) for index in range(MOST_RUNS)]
    assert len(set(styles)) == MOST_RUNS


def test_running_means_by_hand():
    points = [
        Point("a", "m", step, value) for step, value in [(3, 3.0), (1, 1.0), (2, 9.0), (2, 2.0), (4, float("nan"))]
    ]
    frame = smoothed(points, 2)
    assert list(frame["step"]) == [1, 2, 3] and list(frame["smooth"]) == [1.0, 1.5, 2.5]
    (row,) = summarise(frame)
    assert (row["steps"], row["first"], row["last"], row["highest_step"]) == (3, 1.0, 2.5, 3)
    assert draw(frame, [Point("a", "env", 0, 0.5)], {"a": "a $x$ <b>"}, 2).startswith(b"\x89PNG")
