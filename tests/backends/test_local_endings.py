"""How a launch may end besides completing: signals, budgets, refusals; and what is left to go on from."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from harness.ledger import Ledger
from tests.launches import (
    ROOT,
    RUN,
    assert_same_evidence,
    assert_verifies,
    attempts,
    copy_program,
    edit_config,
    evidence,
    make_program,
    merged_metrics,
)

pytestmark = pytest.mark.torch


def replace_config(program, old, new):
    path = program.config_path(RUN)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def newest_checkpoint(program):
    folders = (program.run_dir(RUN) / "checkpoints").glob("step_*")
    return max(folders, key=lambda folder: int(folder.name.removeprefix("step_")))


def test_sigterm_in_a_step_is_recorded(interrupted):
    (attempt,) = attempts(interrupted)
    assert (attempt["outcome"], attempt["failure"], attempt["step"]) == ("interrupted", None, 5)
    assert attempt["reason"] == "stopped by a signal"
    assert_verifies(interrupted)


def test_sigint_in_a_step_is_130_and_says_how_to_go_on(launch_server, toy_program):
    ended = launch_server.launch(toy_program.root, faults=[{"kind": "signal", "name": "SIGINT", "call": 1}])
    assert ended.code == 130
    assert ended.error["kind"] == "interrupted"
    assert f"harness launch {RUN} --resume" in ended.error["hint"]
    assert attempts(toy_program)[-1]["outcome"] == "interrupted"
    assert_verifies(toy_program)


def test_a_terminal_that_closes_interrupts_and_leaves_no_stale_run(launch_server, toy_program):
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup, and launches keep ignoring it")
    ended = launch_server.launch(toy_program.root, faults=[{"kind": "signal", "name": "SIGHUP", "call": 1}])
    assert ended.code == 143
    assert attempts(toy_program)[-1]["outcome"] == "interrupted"
    assert_verifies(toy_program)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_to_a_process_of_its_own(launch_server, toy_program, number, code):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.launch_server", "launch", RUN],
        cwd=ROOT,
        env=launch_server.environment | {"HARNESS_PROGRAM": str(toy_program.root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where nohup runs the tests
    )
    metrics = toy_program.run_dir(RUN) / "metrics.jsonl"
    wait_for(metrics)
    process.send_signal(number)
    assert process.wait(120) == code
    assert attempts(toy_program)[-1]["outcome"] == "interrupted"
    assert_verifies(toy_program)


def pause(folder, call=1):
    return {"kind": "pause", "call": call, "folder": str(folder)}


def wait_for(path, timeout=180):
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def test_a_second_launch_is_busy(launch_server, toy_program, tmp_path):
    other = copy_program(toy_program, tmp_path / "other")
    child = launch_server.start(toy_program.root, "launch", RUN, faults=[pause(tmp_path)])
    wait_for(tmp_path / "paused")
    before = toy_program.ledger.read_bytes()
    same = launch_server.launch(toy_program.root)
    assert (same.code, same.error["kind"]) == (75, "busy")
    assert f"pid {child.pid}" in same.error["message"]
    elsewhere = launch_server.launch(other.root)
    assert (elsewhere.code, elsewhere.error["kind"]) == (75, "busy")
    assert "--wait" in elsewhere.error["hint"]
    assert launch_server.run(toy_program.root, "eval", RUN, "--json").code == 2
    assert toy_program.ledger.read_bytes() == before
    assert attempts(other) == []
    child.kill(signal.SIGTERM)
    assert child.wait().code == 143
    assert_verifies(toy_program)


def test_a_completed_run_is_not_trained_again(launch_server, finished, tmp_path):
    program = copy_program(finished.program, tmp_path / "copy")
    before = program.ledger.read_bytes()
    for flags in ([], ["--resume"]):
        ended = launch_server.launch(program.root, *flags)
        assert ended.code == 2
        assert "is completed" in ended.error["message"]
        assert "rerun" in ended.error["hint"]
    assert program.ledger.read_bytes() == before


def test_an_unfinished_run_is_not_started_over_by_accident(launch_server, interrupted):
    before = interrupted.ledger.read_bytes()
    ended = launch_server.launch(interrupted.root)
    assert ended.code == 2
    assert "unfinished attempt" in ended.error["message"]
    assert "--resume" in ended.error["hint"]
    assert interrupted.ledger.read_bytes() == before


def test_another_thread_count_is_refused(launch_server, interrupted):
    before = interrupted.ledger.read_bytes()
    edit_config(interrupted, "\n[backend]\nthreads = 2\n")
    ended = launch_server.launch(interrupted.root, "--resume")
    assert ended.code == 2
    assert "made with 1 threads, backend.threads is 2" in ended.error["message"]
    assert "undo the edit of backend.threads" in ended.error["hint"]
    assert interrupted.ledger.read_bytes() == before


def test_another_processor_capability_is_refused(launch_server, interrupted):
    ended = launch_server.launch(interrupted.root, "--resume", env={"ONEDNN_MAX_CPU_ISA": "SSE41"})
    assert ended.code == 2
    assert "not be bit-exact: capability" in ended.error["message"]
    assert attempts(interrupted)[-1]["outcome"] == "failed"
    assert attempts(interrupted)[-1]["failure"] is None
    assert_verifies(interrupted)


def test_a_changed_config_is_refused(launch_server, interrupted):
    before = interrupted.ledger.read_bytes()
    replace_config(interrupted, "learning_rate = 0.001", "learning_rate = 0.0005")
    ended = launch_server.launch(interrupted.root, "--resume")
    assert ended.code == 2
    assert "optimizer.learning_rate: 0.001 → 0.0005" in ended.error["message"]
    assert interrupted.ledger.read_bytes() == before


@pytest.mark.parametrize("damage", ["tensors", "manifest"])
def test_a_damaged_checkpoint_names_the_folder_to_delete(launch_server, interrupted, finished, damage):
    newest = newest_checkpoint(interrupted)
    if damage == "tensors":
        path = newest / "state.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    else:
        (newest / "manifest.json").write_text("[]")
    before = interrupted.ledger.read_bytes()
    ended = launch_server.launch(interrupted.root, "--resume")
    assert ended.code == 71
    assert f"delete {newest}" in ended.error["hint"]
    assert interrupted.ledger.read_bytes() == before
    if damage == "tensors":
        shutil.rmtree(newest)
        assert launch_server.launch(interrupted.root, "--resume").code == 0
        assert attempts(interrupted)[-1]["resumed_from"] == 2
        assert_same_evidence(evidence(interrupted), evidence(finished.program))


def test_a_spent_token_budget_stops_and_a_larger_one_goes_on(launch_server, toy_program, finished):
    edit_config(toy_program, "\n[budget]\ntokens = 100\n")
    ended = launch_server.launch(toy_program.root)
    assert ended.code == 4
    attempt = attempts(toy_program)[-1]
    # 32 tokens a step: the fourth step is the first to exceed 100
    assert (attempt["outcome"], attempt["step"], attempt["failure"]) == ("stopped", 4, None)
    assert "budget of 100 sampled tokens is spent after step 4" in attempt["reason"]
    assert newest_checkpoint(toy_program).name == "step_4"
    assert_verifies(toy_program)
    replace_config(toy_program, "tokens = 100", "tokens = 9000")
    assert launch_server.launch(toy_program.root, "--resume").code == 0
    assert_same_evidence(evidence(toy_program), evidence(finished.program))


def test_a_spent_time_budget_stops(launch_server, toy_program):
    edit_config(toy_program, "\n[budget]\nwall_clock_s = 0.001\n")
    assert launch_server.launch(toy_program.root).code == 4
    attempt = attempts(toy_program)[-1]
    assert (attempt["outcome"], attempt["step"]) == ("stopped", 0)
    assert "wall-clock budget of 0.001 s" in attempt["reason"]
    assert [e["step"] for e in Ledger(toy_program.ledger).state().runs[RUN].evals] == [0]


def test_spent_money_stops(launch_server, toy_program):
    """An hour at this price costs more than a number holds well, so any second is too much."""
    edit_config(toy_program, "\n[budget]\ncost = 1.0\nprice_per_hour = 1e9\n")
    assert launch_server.launch(toy_program.root).code == 4
    attempt = attempts(toy_program)[-1]
    assert (attempt["outcome"], attempt["failure"], attempt["step"]) == ("stopped", None, 0)
    assert "the budget of 1 is spent at 1e+09 an hour" in attempt["reason"]


def test_a_watchdog_stops_a_run_and_its_resume_until_the_file_says_otherwise(launch_server, toy_template, tmp_path):
    """The second minibatch of a step meets a policy that moved: its KL to the sampler is above such a limit."""
    sets = {"train.steps": 5, "train.tasks_per_step": 4, "train.minibatches": 2}
    toy_program = make_program(launch_server, tmp_path / "stopped", launch_server.folder / "model", sets)
    whole = copy_program(toy_program, tmp_path / "whole")
    assert launch_server.launch(whole.root).code == 0
    edit_config(toy_program, "\n[watchdog]\nkl_limit = 1e-30\n")
    ended = launch_server.launch(toy_program.root)
    assert ended.code == 4, ended
    attempt = attempts(toy_program)[-1]
    assert (attempt["outcome"], attempt["failure"]) == ("stopped", "model")
    assert "the watchdog kl stops the run" in attempt["reason"] and 'watchdog.kl = "mark"' in attempt["reason"]
    (seen,) = attempt["summary"]["watchdog"]
    assert (seen["rule"], seen["action"], seen["step"]) == ("kl", "stop", attempt["step"])
    assert attempt["step"] == 3
    row = merged_metrics(toy_program.run_dir(RUN) / "metrics.jsonl")[attempt["step"]]
    assert row["watchdog/kl"] == 1.0
    again = launch_server.launch(toy_program.root, "--resume")
    assert again.code == 4
    assert attempts(toy_program)[-1]["step"] == attempt["step"]
    replace_config(toy_program, "kl_limit = 1e-30", 'kl_limit = 1e-30\nkl = "mark"')
    assert launch_server.launch(toy_program.root, "--resume").code == 0
    found, expected = evidence(toy_program), evidence(whole)
    assert found["metrics"][3].pop("watchdog/kl") == 1.0
    assert_same_evidence(found, expected)
    assert attempts(toy_program)[-1]["summary"]["watchdog"][0]["action"] == "mark"
    assert_verifies(toy_program)


def test_twenty_steps_without_spread_stop_the_run(launch_server, toy_template, tmp_path):
    model = launch_server.folder / "model"
    sets = {
        "env.toy.args.reward": "constant",
        "train.steps": 30,
        "train.tasks_per_step": 1,
        "train.group_size": 2,
        "train.preflight_groups": 3,
    }
    program = make_program(launch_server, tmp_path / "constant", model, sets)
    refused = launch_server.launch(program.root)
    assert refused.code == 2, refused
    assert "0 of 3 groups of the base model have spread" in refused.error["message"]
    assert f"harness launch {RUN} --anyway" in refused.error["hint"]
    assert not (program.run_dir(RUN) / "metrics.jsonl").exists()
    attempt = attempts(program)[-1]
    assert (attempt["outcome"], attempt["failure"], attempt["step"]) == ("failed", None, 0)
    assert attempt["summary"]["preflight"]["preflight/informative_share"] == 0.0
    ended = launch_server.launch(program.root, "--anyway")
    assert ended.code == 4, ended
    attempt = attempts(program)[-1]
    assert (attempt["outcome"], attempt["step"]) == ("stopped", 20)
    assert "no group had any spread in the last 20 steps" in attempt["reason"]
    assert attempt["summary"]["zero_spread_last5"] == 1.0
    assert_verifies(program)


def test_training_on_a_held_out_item_is_refused(launch_server, toy_template, tmp_path):
    program = make_program(
        launch_server, tmp_path / "leak", launch_server.folder / "model", {"env.toy.args.leak": "true"}
    )
    ended = launch_server.launch(program.root)
    assert ended.code == 2
    assert "heldout-00" in ended.error["message"]
    assert "is trained on too" in ended.error["message"]
    assert not (program.run_dir(RUN) / "metrics.jsonl").exists()


def test_the_environment_is_captured(finished):
    import json

    facts = json.loads((finished.program.run_dir(RUN) / "environment.json").read_text())
    (attempt,) = attempts(finished.program)
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert facts["packages"]["torch"]
    assert attempt["environment"] == {k: v for k, v in facts.items() if k != "packages"}
    assert (facts["threads"], facts["device"]) == (1, "cpu")
    # an allow-list: nothing of the environment but the named variables
    text = (finished.program.run_dir(RUN) / "environment.json").read_text()
    assert os.environ.get("HOME", "/nowhere-home") not in text.replace('"/"', "")
