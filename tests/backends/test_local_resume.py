"""A run that was killed at any moment and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import random
import shutil
import time

import pytest

from harness.core.errors import NotFoundError
from harness.program import Program, init_program
from tests.launches import (
    RUN,
    assert_same_evidence,
    assert_verifies,
    attempts,
    copy_program,
    evidence,
    merged_metrics,
    plan_run,
)

pytestmark = pytest.mark.torch


def killed_launches(server, template, folder, faults_and_moments):
    """Kill one launch after the other, resuming; yield every program that completed.

    Args:
        faults_and_moments: per kill the faults of the child and the seconds after which to kill it; a child
            with a fault that kills it is not killed by the clock. A program that completes makes way for a fresh one.
    """
    number, kills = 0, 0
    program = copy_program(template, folder / "0")
    for faults, moment in faults_and_moments:
        child = server.start(program.root, "launch", RUN, "--resume", "--json", faults=faults)
        if moment is not None:
            time.sleep(moment)
            child.kill()
        ended = child.wait()
        assert_verifies(program)
        assert ended.code in (0, -9), ended
        kills += ended.code == -9
        # a kill may also come after the last event, before THREAD.md is written again
        if any(attempt["outcome"] == "completed" for attempt in attempts(program)):
            yield program
            number += 1
            program = copy_program(template, folder / str(number))
    assert server.launch(program.root, "--resume").code == 0
    assert kills > 0
    yield program


def assert_resumes_alike(server, template, folder, expected, kills):
    for program in killed_launches(server, template, folder, kills):
        assert_same_evidence(evidence(program), expected)
        assert_verifies(program)
        assert attempts(program)[-1]["outcome"] == "completed"


def moments(count, seconds, seed):
    source = random.Random(seed)
    return [([], source.uniform(0.05, 0.8) * seconds) for _ in range(count)]


def writes(count, program_writes, folder, seed):
    """Return kills before the n-th change of a file, for random n."""
    source = random.Random(seed)
    places = [source.randint(1, program_writes) for _ in range(count)]
    return [([{"kind": "writes", "root": str(folder), "die_at": place}], None) for place in places]


def test_an_uninterrupted_run_leaves_everything(finished):
    program = finished.program
    found = evidence(program)
    assert [(e["subject"], e["step"], e["n"]) for e in found["evaluated"]] == [
        ("base", 0, 6),
        ("policy", 4, 6),
        ("policy", 8, 6),
    ]
    assert list(found["metrics"]) == list(range(1, 9))
    (attempt,) = attempts(program)
    assert (attempt["outcome"], attempt["step"], attempt["resumed_from"]) == ("completed", 8, None)
    checkpoints = program.run_dir(RUN) / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_6", "step_8"]
    # the adapter learned something, and each eval saw another one
    adapters = {name: data for name, data in found["adapters"].items() if name.endswith("safetensors")}
    assert len(set(adapters.values())) == 2
    assert len({e["adapter_sha"] for e in found["evaluated"] if e["subject"] == "policy"}) == 2
    assert_verifies(program)


def test_killed_at_three_moments_and_before_two_writes(launch_server, toy_template, finished, tmp_path):
    at_times, before_writes = moments(3, finished.seconds, seed=3), writes(2, finished.writes, tmp_path, seed=2)
    kills = [at_times[0], before_writes[0], at_times[1], before_writes[1], at_times[2]]
    assert_resumes_alike(launch_server, toy_template, tmp_path, evidence(finished.program), kills)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_ten_moments(launch_server, toy_template, finished, tmp_path, seed):
    kills = moments(10, finished.seconds, seed)
    assert_resumes_alike(launch_server, toy_template, tmp_path, evidence(finished.program), kills)


@pytest.mark.slow
def test_killed_before_thirty_writes(launch_server, toy_template, finished, tmp_path):
    kills = writes(30, finished.writes, tmp_path, seed=30)
    assert_resumes_alike(launch_server, toy_template, tmp_path, evidence(finished.program), kills)


def test_a_kill_before_the_first_checkpoint_keeps_the_base_eval(launch_server, toy_program, finished):
    """The base eval is in the ledger, so it is not repeated, and its full items must still be there."""
    gate = toy_program.root / "outputs"
    gate.mkdir()
    fault = {"kind": "pause", "call": 1, "folder": str(gate)}
    child = launch_server.start(toy_program.root, "launch", RUN, faults=[fault])
    wait_until((gate / "paused").exists)
    child.kill()
    assert child.wait().code == -9
    # no checkpoint was written, so a plain launch may start over
    assert launch_server.launch(toy_program.root).code == 0
    assert_same_evidence(evidence(toy_program), evidence(finished.program))
    first, second = attempts(toy_program)
    assert (first["outcome"], first["failure"]) == ("crashed", "infra")
    assert second["resumed_from"] is None


def test_a_resume_takes_the_threads_of_the_checkpoint_and_closes_a_torn_row(launch_server, interrupted, finished):
    metrics = interrupted.run_dir(RUN) / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-25])
    assert 5 not in merged_metrics(metrics)
    ended = launch_server.launch(interrupted.root, "--resume", faults=[{"kind": "threads", "count": 2}])
    assert ended.code == 0, ended
    assert_same_evidence(evidence(interrupted), evidence(finished.program))
    assert attempts(interrupted)[-1]["resumed_from"] == 4


def wait_until(condition, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


@pytest.fixture
def embedded_program(launch_server, tmp_path):
    """The embedded model on drugprot: few steps, few items, real weights."""
    from harness.core.paths import cache_dir
    from harness.inference.models import resolve_model

    try:
        resolve_model("smollm2-135m")
    except NotFoundError as error:
        pytest.skip(f"{error}: {error.hint}")
    models = launch_server.folder / "cache" / "models"
    if not models.exists():
        models.parent.mkdir(exist_ok=True)
        models.symlink_to(cache_dir() / "models")
    root = tmp_path / "embedded"
    init_program(root, git=False)
    context = root / "CONTEXT.md"
    context.write_text(context.read_text().replace("items = 120", "items = 4").replace("interval = 15", "interval = 2"))
    sets = {"train.steps": 3, "train.tasks_per_step": 2, "train.group_size": 4, "checkpoint.interval": 1}
    plan_run(launch_server, root, sets)
    return Program(root)


@pytest.mark.slow
def test_the_embedded_model_killed_at_ten_moments(launch_server, embedded_program, tmp_path):
    whole = copy_program(embedded_program, tmp_path / "whole")
    began = time.monotonic()
    assert launch_server.start(whole.root, "launch", RUN, "--json").wait(1800).code == 0
    kills = moments(10, time.monotonic() - began, seed=10)
    assert_resumes_alike(launch_server, embedded_program, tmp_path, evidence(whole), kills)
    shutil.rmtree(tmp_path / "whole")
