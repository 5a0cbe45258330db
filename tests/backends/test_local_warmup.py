"""A launch with a warm start: what it records, and that a kill before, in or after it changes nothing."""

from __future__ import annotations

import shutil

import pytest

from harness.core.canonical import strict_loads
from harness.evaluation.heldout import evaluate
from harness.ledger import Ledger
from harness.training.warmup import read_summary
from tests.launches import (
    RUN,
    assert_same_evidence,
    assert_verifies,
    attempts,
    copy_program,
    evidence,
    make_program,
    merged_metrics,
    save_tiny_model,
)
from tests.toy_env import SPEC

pytestmark = pytest.mark.torch

SETS = {
    "train.steps": 2,
    "checkpoint.interval": 1,
    "train.preflight_groups": 2,
    "warmup.steps": 3,
    "warmup.items_per_step": 3,
    "warmup.demonstrations": 6,
    "warmup.learning_rate": 0.01,
}


@pytest.fixture(scope="module")
def warm_template(session_server):
    model = session_server.folder / "model"
    model = model if model.exists() else save_tiny_model(model)
    flags = ("--outside-plan", "a warm start")
    return make_program(session_server, session_server.folder / "warm", model, SETS, flags=flags)


@pytest.fixture(scope="module")
def warm(session_server, warm_template):
    """The uninterrupted run."""
    program = copy_program(warm_template, session_server.folder / "warm-finished")
    ended = session_server.launch(program.root)
    assert ended.code == 0, ended
    return program


def everything(program):
    rows = merged_metrics(program.run_dir(RUN) / "warmup.jsonl")
    return evidence(program) | {"warmup": rows, "summary": read_summary(program.run_dir(RUN))}


def test_the_warm_start_is_evaluated_at_step_0_and_counted(warm):
    found = everything(warm)
    assert [(e["subject"], e["step"], e["prompt"]) for e in found["evaluated"]] == [
        ("base", 0, "run"),
        ("policy", 0, "run"),
        ("policy", 2, "run"),
    ]
    base, policy, _ = found["evaluated"]
    assert "adapter_sha" not in base and policy["gain"]["reward"]["n"] == 6
    assert list(found["warmup"]) == [1, 2, 3] and list(found["metrics"]) == [1, 2]
    (attempt,) = attempts(warm)
    summary = attempt["summary"]["warmup"]
    assert (summary["steps"], summary["demonstrations"]) == (3, 6)
    assert summary["loss_last"] < summary["loss_first"]
    assert attempt["tokens"] == attempt["sampled_tokens"] + summary["tokens"]
    assert sorted(p.name for p in (warm.run_dir(RUN) / "adapters").iterdir()) == ["step_0", "step_2"]
    assert_verifies(warm)


def test_the_loop_goes_without_the_demonstrated_tasks(warm):
    ids = strict_loads((warm.run_dir(RUN) / "warmup.json").read_bytes())["demonstrated"]["toy"]
    assert len(set(ids)) == 6 and all(task.startswith("train-") for task in ids)
    rollouts = b"".join(path.read_bytes() for path in (warm.run_dir(RUN) / "rollouts").rglob("*.jsonl"))
    sampled = {strict_loads(line)["task"] for line in rollouts.splitlines()}
    assert sampled and not sampled & set(ids)


KILLS = [
    (("warmup", 2), None),  # in the warm start: begins anew
    (("eval", 3), 0),  # behind it, in its eval; that of the base is on record
    (("step", 1), 0),
    (("step", 2), 1),
]
"""Where the kill comes, and the step that the next attempt goes on from."""


def test_kills_before_in_and_after_the_warm_start_change_nothing(launch_server, warm_template, warm, tmp_path):
    program = copy_program(warm_template, tmp_path / "warm")
    for (at, call), expected in KILLS:
        fault = {"kind": "signal", "name": "SIGKILL", "call": call, "at": at}
        assert launch_server.launch(program.root, "--resume", faults=[fault]).code == -9
        if expected is None:
            assert not (program.run_dir(RUN) / "checkpoints").exists()
    assert launch_server.launch(program.root, "--resume").code == 0
    assert [attempt["resumed_from"] for attempt in attempts(program)] == [None, *(step for _, step in KILLS)]
    assert_same_evidence(everything(program), everything(warm))
    assert attempts(program)[-1]["summary"]["warmup"] == attempts(warm)[-1]["summary"]["warmup"]
    assert_verifies(program)


def test_an_attempt_that_starts_over_sets_the_warm_start_aside(launch_server, warm_template, warm, tmp_path):
    program = copy_program(warm_template, tmp_path / "warm")
    fault = {"kind": "signal", "name": "SIGKILL", "call": 1, "at": "step"}
    assert launch_server.launch(program.root, faults=[fault]).code == -9
    shutil.rmtree(program.run_dir(RUN) / "checkpoints")  # damaged ones are deleted like this
    assert launch_server.launch(program.root).code == 0
    kept = program.run_dir(RUN) / "superseded" / "attempt_1"
    for name in ("warmup.jsonl", "warmup.json", "adapters/step_0", "evals/step_0/policy.toy.jsonl"):
        assert (kept / name).exists(), name
    assert not (kept / "evals" / "step_0" / "base.toy.jsonl").exists()
    assert_same_evidence(everything(program), everything(warm))
    evals = Ledger(program.ledger).state().runs[RUN].evals
    found = [(e["subject"], e["step"], e["attempt"]) for e in evals]
    assert found == [("base", 0, 1), ("policy", 0, 1), ("policy", 0, 2), ("policy", 2, 2)]
    assert_verifies(program)


def test_step_0_of_a_warm_run_can_be_evaluated_again(warm, tmp_path, monkeypatch):
    from harness.envs.registry import ENVIRONMENTS

    monkeypatch.setitem(ENVIRONMENTS, "toy", SPEC)
    program = copy_program(warm, tmp_path / "warm")
    (row,) = evaluate(program, RUN, 0, lambda update: None)
    assert (row["subject"], row["step"]) == ("policy", 0)
    earlier = next(
        e for e in Ledger(program.ledger).state().runs[RUN].evals if (e["subject"], e["step"]) == ("policy", 0)
    )
    assert row["file_sha"] == earlier["file_sha"] and row["adapter_sha"] == earlier["adapter_sha"]
