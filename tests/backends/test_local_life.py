"""The life of a launch: signals at every stage, kills that `recover` closes, and what a resume takes over."""

from __future__ import annotations

import json

import pytest

from harness.ledger import Ledger
from harness.ledger.superseded import current_rows, is_superseded, read_rows
from tests.launches import RUN, assert_same_evidence, assert_verifies, attempts, evidence, files

pytestmark = pytest.mark.torch


def signal_at(at, call=1, name="SIGTERM"):
    return {"kind": "signal", "name": name, "call": call, "at": at}


STAGES = [
    ("started", 1, 0),  # while `started` is on its way to the disk
    ("load", 1, 0),
    ("eval", 3, 0),  # in the middle of the base eval
    ("checkpoint", 1, 2),  # the tensors of step 2 are written, their manifest is not
    ("eval", 22, 4),  # a preflight and four steps of four rollouts, then in the eval of step 4
]
"""Where the signal comes, at which call, and the step the attempt had reached."""


def test_a_signal_at_any_stage_ends_in_interrupted(launch_server, toy_program, finished):
    """One attempt after the other is interrupted at another stage; the run that is left is that of no interruption."""
    for number, (at, call, step) in enumerate(STAGES, 1):
        name = "SIGINT" if number % 2 else "SIGTERM"
        ended = launch_server.launch(toy_program.root, "--resume", faults=[signal_at(at, call, name)])
        assert ended.code == (130 if name == "SIGINT" else 143), (at, ended)
        last = attempts(toy_program)[-1]
        found = (last["attempt"], last["outcome"], last["failure"], last["reason"], last["step"])
        assert found == (number, "interrupted", None, "stopped by a signal", step), at
        assert_verifies(toy_program)
    assert launch_server.launch(toy_program.root, "--resume").code == 0
    assert_same_evidence(evidence(toy_program), evidence(finished.program))


def test_a_signal_while_the_end_is_written_does_not_undo_it(launch_server, toy_program, finished):
    # three evals, then `finished`
    ended = launch_server.launch(toy_program.root, faults=[signal_at("event", 4)])
    assert ended.code == 143
    (attempt,) = attempts(toy_program)
    assert (attempt["outcome"], attempt["step"]) == ("completed", 8)
    assert_same_evidence(evidence(toy_program), evidence(finished.program))


def test_a_killed_launch_is_stale_recovered_and_resumed(launch_server, toy_program, finished):
    """Killed in step 6, resumed at step 4: steps 5 and 6 of the first attempt stay on record."""
    root, outputs = toy_program.root, toy_program.run_dir(RUN)
    ended = launch_server.launch(root, faults=[signal_at("step", 6, "SIGKILL")])
    assert ended.code == -9
    (row,) = json.loads(launch_server.run(root, "list", "--json").out)["rows"]
    assert row["status"] == "stale" and row["stale_since"]
    (outputs / "rollouts" / "step_5" / "marked").write_text("of the first attempt")
    closed = json.loads(launch_server.run(root, "recover", RUN, "--exit-status", "137", "--json").out)
    (event,) = closed["detail"]["closed"]
    assert (event["outcome"], event["failure"], event["step"]) == ("crashed", "infra", 5)
    refused = launch_server.run(root, "decide", RUN, "reject", "--reason", "it died", "--json")
    assert refused.code == 2 and "infra failure" in refused.error["message"]
    assert launch_server.launch(root, "--resume").code == 0
    assert_same_evidence(evidence(toy_program), evidence(finished.program))
    kept = outputs / "superseded" / "attempt_1" / "rollouts"
    assert sorted(path.name for path in kept.iterdir()) == ["step_5"]
    assert (kept / "step_5" / "marked").read_text() == "of the first attempt"
    rows = read_rows(outputs / "metrics.jsonl")
    assert [(row["attempt"], row["step"]) for row in rows] == [(1, step) for step in range(1, 6)] + [
        (2, step) for step in range(5, 9)
    ]
    assert [(row["attempt"], row["step"]) for row in current_rows(rows)] == [(1, step) for step in range(1, 5)] + [
        (2, step) for step in range(5, 9)
    ]
    first, second = attempts(toy_program)
    assert first["outcome"] == "crashed" and second["resumed_from"] == 4
    assert second["sampled_tokens"] == second["tokens"] // 2  # steps 5 to 8 of 8, all of one length
    assert_verifies(toy_program)


def test_a_run_that_starts_over_keeps_the_older_attempt_and_takes_nothing_from_it(launch_server, finished, tmp_path):
    from tests.launches import copy_program

    program = copy_program(finished.program, tmp_path / "again")
    root, outputs = program.root, program.run_dir(RUN)
    before = {name: files(outputs / name) for name in ("rollouts", "adapters")}
    decided = launch_server.run(root, "decide", RUN, "inconclusive", "--reason", "to begin with")
    assert decided.code == 0, decided
    Ledger(program.ledger).append(RUN, "decided", {"decision": "rerun", "reason": "a lost eval", "by_rule": None})
    ended = launch_server.launch(root, faults=[signal_at("step", 3)])
    assert ended.code == 143, ended
    kept = outputs / "superseded" / "attempt_1"
    assert {name: files(kept / name) for name in before} == before
    assert len(read_rows(kept / "metrics.jsonl")) == 8
    run = Ledger(program.ledger).state().runs[RUN]
    assert [(data["step"], is_superseded(data, run.attempts)) for data in run.evals] == [
        (0, False),
        (4, True),
        (8, True),
    ]
    assert run.attempts[-1]["step"] == 2  # of this attempt, whatever the files of the first one say
    promoted = launch_server.run(root, "promote", RUN, "--json")
    assert promoted.code == 3  # the current attempt did not complete
    assert launch_server.launch(root, "--resume").code == 0
    run = Ledger(program.ledger).state().runs[RUN]
    again = [(data["attempt"], data["step"]) for data in run.evals if not is_superseded(data, run.attempts)]
    assert again == [(1, 0), (3, 4), (3, 8)]
    assert_same_evidence(evidence(program), evidence(finished.program))
    assert_verifies(program)
