"""Whole runs through the command line with vLLM: one that completes, engines that are killed, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from harness.inference.agreement import TOLERANCE
from harness.ledger import Ledger
from harness.ledger.superseded import read_rows
from harness.program import Program
from harness.rollouts.store import read_rollouts
from tests.launches import RUN, Ended, attempts, make_program

ROOT = Path(__file__).parents[2]
SETS = {
    "backend.engine": "vllm",
    "model.dtype": "float32",
    "train.steps": 3,
    "checkpoint.interval": 1,
    "sampling.context": 256,
    "train.group_size": 4,
    "backend.vllm.kv_cache_gib": 0.25,
}


class Shell:
    """Runs commands with the toy environment, each in a process of its own."""

    def __init__(self, cache):
        self.environment = os.environ | {
            "HARNESS_CACHE": str(cache),
            "HARNESS_ACTOR": "agent:tester",
            "PYTHONPATH": str(ROOT),
            "TOY_SECRET_TOKEN": "hf_" + "x" * 34,
        }
        for name in ("HARNESS_PROGRAM", "HARNESS_DEBUG", "CI"):
            self.environment.pop(name, None)

    def start(self, root, *argv):
        command = [sys.executable, "-m", "tests.launch_server", *map(str, argv)]
        return subprocess.Popen(
            command,
            cwd=root,
            env=self.environment | {"HARNESS_PROGRAM": str(root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, root, *argv):
        process = self.start(root, *argv)
        out, err = process.communicate(timeout=600)
        return Ended(process.returncode, out, err)


@pytest.fixture(scope="module")
def shell(folder):
    return Shell(folder / "cache")


def program_for(shell, llama, root, **sets):
    sets = {key.replace("__", "."): value for key, value in sets.items()}
    return make_program(shell, root, llama.folder, SETS | sets, engine="vllm", flags=("--outside-plan", "a test"))


def until_a_new_row(program, process, count):
    """Wait until the run has written more than `count` rows, and return its processes."""
    metrics = program.run_dir(RUN) / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while len(read_rows(metrics)) <= count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes):
    return psutil.wait_procs(processes, timeout=60)[1] == []


def test_a_run_trains_with_vllm_and_its_probe_agrees_at_every_step(shell, llama, tmp_path):
    program = program_for(shell, llama, tmp_path / "program")
    ended = shell.run(program.root, "launch", RUN, "--json")
    assert ended.code == 0, ended
    assert (
        json.loads(ended.out)["detail"]["outcome"] == "completed"
    )  # nothing of vLLM's own output is on standard output
    rows = [row for row in read_rows(program.run_dir(RUN) / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["probe/max"] <= TOLERANCE
        assert row["train/logprob_gap"] <= TOLERANCE and row["time/sync"] > 0
    (attempt,) = attempts(program)
    assert attempt["outcome"] == "completed" and attempt["sampled_tokens"] > 0
    log = (program.run_dir(RUN) / "logs" / "vllm_1.log").read_text()
    assert "EngineCore" in log and shell.environment["TOY_SECRET_TOKEN"] not in log
    assert not (program.run_dir(RUN) / "sampler").exists()
    steps = {line["step"] for line in json.loads(shell.run(program.root, "show", RUN, "--json").out)["evals"]}
    assert steps == {0, 3}


def test_a_run_samples_ahead_and_no_rollout_is_older_than_the_bound(shell, llama, tmp_path):
    sets = {"backend__vllm__mode": "server", "train__max_staleness": 1, "train__steps": 4}
    program = program_for(shell, llama, tmp_path / "program", **sets)
    ended = shell.run(program.root, "launch", RUN, "--json")
    assert ended.code == 0, ended
    folder = program.run_dir(RUN)
    table = [row for row in read_rows(folder / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in table] == [1, 2, 3, 4]
    for row in table:
        assert 0 < row["probe/max"] <= TOLERANCE
        assert row["train/staleness_max"] <= 1 and row["train/groups_stale"] == 0
        # what an older policy gave its own tokens is not what the trainer gives them, and is not taken for it
        assert (row["train/logprob_gap"] > TOLERANCE) == (row["train/staleness_max"] == 1)
    assert table[0]["train/staleness_max"] == 0 and sum(row["train/staleness_mean"] for row in table) >= 2
    for row in table:
        names = {line["version"] for line in read_rollouts(folder / f"rollouts/step_{row['step']}/toy.jsonl")}
        (age,) = {row["step"] - 1 - int(name.split("-")[2]) for name in names}
        assert age == row["train/staleness_max"]
    assert not (folder / "sampler").exists()
    ended = shell.run(program.root, "eval", RUN, "--json")
    assert ended.code == 0, ended
    assert "EngineCore" in (folder / "logs" / "vllm_eval.log").read_text()
    found = [data for data in Ledger(program.ledger).state().runs[RUN].evals if data["step"] == 4]
    assert len(found) == 2 and found[0]["file_sha"] == found[1]["file_sha"]  # the same engine, the adapter on disk


def killed_engine(shell, llama, root, mode):
    """Kill the engine of a run, resume it, then end the run itself in the hardest way that a user can."""
    ahead = {"train__max_staleness": 1} if mode == "server" else {}  # a thread waits for the server when it dies
    program: Program = program_for(shell, llama, root, backend__vllm__mode=mode, train__steps=400, **ahead)
    process = shell.start(program.root, "launch", RUN, "--json")
    children = until_a_new_row(program, process, 0)
    victim = next(child for child in children if child.ppid() == process.pid and is_vllm(child))
    victim.kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 71, (out, err)
    error = json.loads(out)["error"]
    assert error["kind"] == "infra" and "vllm_1.log" in error["hint"]
    assert gone(children)
    (attempt,) = attempts(program)
    assert (attempt["outcome"], attempt["failure"]) == ("failed", "infra")

    count = len(read_rows(program.run_dir(RUN) / "metrics.jsonl"))
    process = shell.start(program.root, "launch", RUN, "--resume", "--json")
    children = until_a_new_row(program, process, count)
    assert len(children) > 1
    process.send_signal(signal.SIGKILL if mode == "colocated" else signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == (-9 if mode == "colocated" else 143)
    assert gone(children)


def test_a_killed_engine_is_a_failure_of_the_machine_and_nothing_outlives_a_run(folder, llama, tmp_path):
    modes = ("colocated", "server")
    with ThreadPoolExecutor(len(modes)) as pool:  # side by side, on two machines as far as the harness can see
        ends = [
            pool.submit(killed_engine, Shell(folder / f"cache-{mode}"), llama, tmp_path / mode, mode) for mode in modes
        ]
        for end in ends:
            end.result()


def is_vllm(process):
    """Whether a child of a launch is vLLM's, and neither the guard nor Python's watcher of shared memory."""
    line = " ".join(process.cmdline())
    return "VLLM::" in line or "vllm_child" in line
