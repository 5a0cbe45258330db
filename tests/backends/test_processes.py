"""Runs of several processes: what one process gives, and ends that leave nothing hanging."""

from __future__ import annotations

import os
from typing import Any

import pytest
from safetensors.torch import load_file

from harness.core.errors import UsageError
from harness.core.seat import Seat, seat_of
from tests.launches import (
    ROOT,
    RUN,
    assert_same_evidence,
    assert_verifies,
    attempts,
    copy_program,
    evidence,
    make_program,
)

pytestmark = pytest.mark.torch
SETS: dict[str, Any] = {"train.steps": 3, "train.tasks_per_step": 3, "checkpoint.interval": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "minibatches": {
        "train.minibatches": 2,
        "train.importance": "token",
        "train.kl_beta": 0.01,
        "sampling.max_tokens": 8,
    },
    "one task": {"train.tasks_per_step": 1, "train.steps": 2},  # one of the two processes never has anything to do
    "no bonus": {"train.entropy_beta": 0.0, "train.loss": "grpo", "train.steps": 2, "train.advantage": "batch_std"},
}

NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in ("minibatches", "no bonus") else []) for name in VARIANTS
]


def launch(server, program, *flags, faults=((), ()), extra=({}, {})):
    """Launch a run as torchrun does: every process by the same command; return how each ended."""
    store = server.folder / f"store-{server.count}"
    seats = [Seat(rank, 2, rank, str(store)) for rank in range(2)]
    children = [
        server.start(program.root, "launch", RUN, "--json", *flags, env=seat.environment() | more, faults=own)
        for seat, own, more in zip(seats, faults, extra, strict=True)
    ]
    return [child.wait(600) for child in children]


@pytest.fixture(scope="session")
def model(session_server, toy_template):
    return session_server.folder / "model"


@pytest.fixture(scope="session")
def pair(session_server, model):
    """Return a function that gives the same run with one process and with two, both finished."""
    made = {}

    def programs(name):
        if name not in made:
            sets = SETS | VARIANTS[name]
            root = session_server.folder / name
            why = ("--outside-plan", "a test")
            alone = make_program(session_server, root / "alone", model, sets, flags=why)
            ended = session_server.launch(alone.root)
            assert ended.code == 0, ended
            two = make_program(session_server, root / "two", model, sets | {"backend.processes": 2}, flags=why)
            first, second = launch(session_server, two)
            assert (first.code, second.code) == (0, 0), (first, second)
            assert second.out == ""
            made[name] = alone, two
        return made[name]

    return programs


def weights(program):
    folder = program.run_dir(RUN) / "adapters"
    return {path.parent.name: load_file(path) for path in sorted(folder.glob("*/adapter_model.safetensors"))}


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_learn_what_one_does(pair, name):
    alone, two = map(evidence, pair(name))
    for part in ("rollouts", "full evals", "compact evals"):
        assert alone[part].keys() == two[part].keys()
    assert alone["rollouts"] == two["rollouts"]  # the same tokens, the same rewards, the same advantages
    left, right = (weights(program) for program in pair(name))
    assert left.keys() == right.keys() and left
    for step, tensors in left.items():
        for key, tensor in tensors.items():
            assert (tensor - right[step][key]).abs().max() < 1e-5, (step, key)
    assert any(tensor.abs().max() > 1e-4 for key, tensor in left[max(left)].items() if "lora_B" in key)


@pytest.mark.parametrize("name", NAMES)
def test_their_metrics_are_those_of_the_whole_step(pair, name):
    alone, two = (evidence(program)["metrics"] for program in pair(name))
    assert alone.keys() == two.keys()
    for step, row in alone.items():
        assert row.keys() == two[step].keys()
        for key, value in row.items():
            if key != "perf/tree_tokens":  # a root that two processes share is computed by both
                assert two[step][key] == pytest.approx(value, rel=1e-3, abs=2e-5), (step, key)


def test_only_process_0_writes_the_ledger(pair):
    alone, two = pair("plain")
    assert_verifies(two)
    (expected,), (attempt,) = attempts(alone), attempts(two)
    assert attempt["outcome"] == "completed"
    for key in ("tokens", "sampled_tokens", "step"):
        assert attempt[key] == expected[key], key


@pytest.fixture(scope="session")
def two_template(session_server, model):
    return make_program(session_server, session_server.folder / "two", model, SETS | {"backend.processes": 2})


@pytest.fixture
def two_program(two_template, tmp_path):
    return copy_program(two_template, tmp_path / "two")


KILL = {"kind": "signal", "name": "SIGKILL", "call": 2}


def test_a_process_that_dies_ends_the_run_as_infra_failure_and_a_resume_ends_like_no_death(
    launch_server, two_program, pair
):
    first, second = launch(launch_server, two_program, faults=((), (KILL,)))
    assert (first.code, second.code) == (71, -9), (first, second)
    assert "process 1 of the 2 of this run is gone" in first.error["message"]
    (attempt,) = attempts(two_program)
    assert (attempt["outcome"], attempt["failure"], attempt["step"]) == ("failed", "infra", 1)
    assert_verifies(two_program)
    first, second = launch(launch_server, two_program, "--resume")
    assert (first.code, second.code) == (0, 0), (first, second)
    assert_same_evidence(evidence(two_program), evidence(pair("plain")[1]))


@pytest.mark.slow
def test_the_others_end_when_process_0_is_killed(launch_server, two_program):
    first, second = launch(launch_server, two_program, faults=((KILL,), ()))
    assert (first.code, second.code) == (-9, 0), (first, second)
    assert attempts(two_program)[0]["outcome"] is None  # nobody was left to write it; the next launch closes it


def test_a_signal_to_process_0_interrupts_the_run(launch_server, two_program):
    stop = {"kind": "signal", "name": "SIGTERM", "call": 2}
    first, second = launch(launch_server, two_program, faults=((stop,), ()))
    assert (first.code, second.code) == (143, 0), (first, second)
    (attempt,) = attempts(two_program)
    assert (attempt["outcome"], attempt["failure"]) == ("interrupted", None)


def test_what_another_process_refuses_is_refused(launch_server, two_program):
    """A prompt that does not fit is a wrong config, no lost process, whoever meets it."""
    first, second = launch(launch_server, two_program, extra=({}, {"TOY_PROMPT": "word " * 3000}))
    assert (first.code, second.code) == (2, 0), (first, second)
    assert "exceed the context" in first.error["message"]


def test_a_seat_survives_the_environment_and_nonsense_is_refused():
    seat = Seat(1, 2, 1, "file")
    assert seat_of(seat.environment()) == seat
    assert seat_of({"RANK": "1", "WORLD_SIZE": "2"}) is None  # of something else: neither torchrun nor a launch says so
    assert seat_of({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "3"}) == Seat(0, 3, 0)
    for wrong in ({}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        with pytest.raises(UsageError):
            seat_of({"TORCHELASTIC_RUN_ID": "x"} | wrong)


def test_a_number_of_processes_that_torchrun_did_not_start_is_refused(launch_server, two_program):
    ended = launch_server.launch(two_program.root, env=Seat(0, 3, 0, os.devnull).environment())
    assert ended.code == 2 and "backend.processes is 2" in ended.error["message"]


@pytest.mark.slow
def test_a_launch_starts_the_others_itself(launch_server, two_program, pair, tmp_path):
    """The other process is a fresh interpreter; it knows the toy environment from a module that Python imports."""
    (tmp_path / "sitecustomize.py").write_text("from tests.toy_env import register\n\nregister()\n")
    ended = launch_server.launch(two_program.root, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert ended.code == 0, ended
    assert_same_evidence(evidence(two_program), evidence(pair("plain")[1]))
    log = two_program.run_dir(RUN) / "logs" / "process_1.log"
    assert "Traceback" not in log.read_text()
