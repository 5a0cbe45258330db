"""A machine that fails: full disks at every kind of write, and adapters that are no longer what was stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from harness.ledger import Ledger
from tests.launches import (
    RUN,
    assert_same_evidence,
    assert_verifies,
    attempts,
    copy_program,
    evidence,
)

pytestmark = pytest.mark.torch

FULL = (
    {"at": "checkpoint", "call": 2, "limit": 4096, "restore": True},
    {"at": "adapter", "call": 1, "limit": 4096, "restore": True},
    {"at": "ledger", "call": 1, "limit": "runs.jsonl", "restore": False},
    {"at": "metrics", "call": 2, "limit": "outputs/run-001/metrics.jsonl", "restore": False},
)
"""One attempt after the other: checkpoint of step 4, adapter of step 4, its eval in the ledger, row of step 6."""


def test_files_that_cannot_grow_end_in_71_and_resume(launch_server, toy_program, finished):
    """`limit` is the kernel's: a write is refused, or cut short 40 bytes beyond what is there."""
    for number, settings in enumerate(FULL, 1):
        limit = settings["limit"]
        place = str(toy_program.root / limit) if isinstance(limit, str) else limit
        fault = {"kind": "limit", **settings, "limit": place}
        ended = launch_server.launch(toy_program.root, "--resume", faults=[fault])
        assert ended.code == 71, (settings, ended)
        assert "cannot" in ended.error["message"]
        assert ended.error["hint"]
        assert_verifies(toy_program)
        attempt = attempts(toy_program)[-1]
        assert attempt["attempt"] == number
        if settings["restore"]:  # otherwise the ledger could not grow either; the next launch closes the attempt
            assert (attempt["outcome"], attempt["failure"]) == ("failed", "infra")
    assert launch_server.launch(toy_program.root, "--resume").code == 0
    assert_same_evidence(evidence(toy_program), evidence(finished.program))
    assert [a["resumed_from"] for a in attempts(toy_program)] == [None, 2, 4, 4, 4]
    assert_verifies(toy_program)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root; the file size limits above cover the same paths")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=False)
    if done.returncode:
        pytest.skip("this kernel does not let a test mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_in_71_and_resumes_when_there_is_space(launch_server, toy_template, finished, small_disk):
    program = copy_program(toy_template, small_disk / "program")
    ballast = small_disk / "ballast"
    for at, call in (("checkpoint", 2), ("ledger", 1)):
        fault = {"kind": "fill", "at": at, "call": call, "ballast": str(ballast)}
        ended = launch_server.launch(program.root, "--resume", faults=[fault])
        assert ended.code == 71, (at, ended)
        assert "space" in ended.error["hint"]
        assert shutil.disk_usage(small_disk).free == 0
        assert_verifies(program)
        ballast.unlink()
    assert launch_server.launch(program.root, "--resume").code == 0
    assert_same_evidence(evidence(program), evidence(finished.program))
    assert_verifies(program)


def truncate(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def put_nan(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "adapter_model.safetensors")
    name = sorted(state)[3]
    state[name][0, 0] = float("nan")
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def change_shape(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "adapter_model.safetensors")
    name = sorted(state)[0]
    state[name] = state[name][:-1].clone()
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "missing or corrupt"),
        (put_nan, "non-finite"),
        (change_shape, "does not fit the model"),
    ],
)
def test_eval_of_a_corrupt_adapter_is_71_with_a_hint(launch_server, finished, tmp_path, damage, words):
    program = copy_program(finished.program, tmp_path / "copy")
    folder = program.run_dir(RUN) / "adapters" / "step_8"
    damage(folder)
    before = program.ledger.read_bytes()
    subject = str(folder) if damage is put_nan else RUN
    ended = launch_server.run(program.root, "eval", subject, "--json")
    assert ended.code == 71, ended
    assert ended.error["kind"] == "infra"
    assert words in ended.error["message"]
    assert ended.error["hint"]
    assert program.ledger.read_bytes() == before


def test_eval_repeats_what_the_launch_recorded(launch_server, finished, tmp_path):
    program = copy_program(finished.program, tmp_path / "copy")
    recorded = Ledger(program.ledger).state().runs[RUN].evals[-1]
    ended = launch_server.run(program.root, "eval", RUN, "--json")
    assert ended.code == 0, ended
    (row,) = json.loads(ended.out)["rows"]
    assert row == recorded
    again = Ledger(program.ledger).state().runs[RUN].evals
    assert len(again) == 4 and again[-1] == recorded
    assert_verifies(program)
    loose = launch_server.run(program.root, "eval", str(program.run_dir(RUN) / "adapters/step_8"), "--json")
    (row,) = json.loads(loose.out)["rows"]
    assert (row["means"], row["items_sha"]) == (recorded["means"], recorded["items_sha"])
    missing = launch_server.run(program.root, "eval", RUN, "--step", "3", "--json")
    assert missing.code == 2
    assert "adapters of steps 4, 8" in missing.error["message"]
