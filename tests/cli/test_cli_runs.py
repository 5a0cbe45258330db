"""What the commands say and do: runs, rollouts, environments, decisions, processes, estimates."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from harness.cli import launch as launch_module
from harness.cli.processes import live_process
from harness.cli.progress import describe, plain_lines, with_projection
from harness.core.errors import ExitCode
from harness.ledger import Ledger
from harness.ledger.process import this_process


def append(program, run, kind, **data):
    Ledger(program.ledger).append(run, kind, data)


def plan(cli, *argv):
    answer = cli("new-run", "--hypothesis", " ".join(argv) or "again", *argv, "--json")
    assert answer.code == 0, answer.out
    return answer.document


# init, new-run


def test_init_makes_a_program_that_status_and_doctor_understand(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = cli("init", "mine", "--no-git")
    assert answer.code == 0
    assert "cd mine && harness new-run" in answer.out
    again = cli("init", "mine", "--no-git")
    assert again.code == 2
    assert "already holds" in again.err
    monkeypatch.chdir(tmp_path / "mine")
    status = cli("status", "--json").document
    assert status["runs"] == 0
    assert status["next"].startswith("harness new-run")
    assert "harness new-run" in cli("list").out


def test_new_run_needs_a_hypothesis_and_one_change(cli, program):
    missing = cli("new-run", "--from", "run-001", "--set", "lora.alpha=64")
    assert (missing.code, "hypothesis" in missing.err) == (2, True)
    two = ["--from", "run-001", "--set", "lora.alpha=64", "--set", "lora.rank=32", "--hypothesis", "both"]
    refused = cli("new-run", *two)
    assert refused.code == 2
    assert "--group" in refused.err
    grouped = cli("new-run", *two, "--group", "capacity", "--json").document
    assert grouped["detail"]["lever"] == "capacity"
    assert {change["key"] for change in grouped["detail"]["changes"] if change["counts"]} == {"lora.alpha", "lora.rank"}


def test_new_run_with_a_key_is_idempotent(cli, program):
    argv = ["--from", "run-001", "--set", "lora.alpha=64", "--key", "k1"]
    argv += ["--hypothesis", "64 learns faster"]
    first = cli("new-run", *argv, "--json").document
    second = cli("new-run", *argv, "--json").document
    assert (first["applied"], second["applied"]) == (True, False)
    assert first["target"] == second["target"] == "run-002"
    assert "exists already" in cli("new-run", *argv).out
    assert list(Ledger(program.ledger).state().runs) == ["run-001", "run-002"]


def test_new_run_names_a_misspelt_key(cli, program):
    answer = cli("new-run", "--from", "run-001", "--set", "lora.alhpa=64", "--hypothesis", "h")
    assert answer.code == 2
    assert "did you mean" in answer.err
    assert "alpha'" in answer.err


# list, show, status, diff


def test_list_filters_and_is_capped(cli, program):
    for alpha in (8, 16, 64):
        plan(cli, "--from", "run-001", "--set", f"lora.alpha={alpha}")
    rows = cli("list", "--json").document
    assert [row["run"] for row in rows["rows"]] == ["run-004", "run-003", "run-002", "run-001"]
    capped = cli("list", "--limit", "2", "--json").document
    assert (len(capped["rows"]), capped["truncated"], capped["counts"]["matching"]) == (2, True, 4)
    assert cli("list", "--limit", "2", "--all", "--json").document["truncated"] is False
    assert "2 of 4 shown" in cli("list", "--limit", "2").out
    done = cli("list", "--status", "completed", "--json").document
    assert [row["run"] for row in done["rows"]] == ["run-001"]
    assert cli("list", "--decision", "none", "--json").document["counts"]["matching"] == 4
    assert "no run matches" in cli("list", "--decision", "keep").out


def test_ids_of_rows_are_what_other_commands_take(cli, program):
    for row in cli("list", "--json").document["rows"]:
        assert cli("show", row["run"], "--json").document["run"] == row["run"]


def test_show_has_every_number_and_the_counts_of_failures(cli, program):
    document = cli("show", "run-001", "--json").document
    assert document["status"] == "completed"
    assert document["evals"][0]["failures"] == {"infra": 1}
    assert document["changes"] == []
    text = cli("show", "run-001").out
    assert "0.410 [0.330, 0.490]" in text
    assert "159 of 160" in text


def test_status_leads_through_the_loop(cli, program):
    assert "harness report run-001" in cli("status", "--json").document["next"]
    cli("decide", "run-001", "keep", "--reason", "the gain holds")
    status = cli("status", "--json").document
    assert status["next"] == "harness promote run-001 --gates heldout"
    assert status["last_decision"]["reason"] == "the gain holds"
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64")
    assert cli("status", "--json").document["next"] == "harness launch run-002"
    append(program, "run-002", "started", attempt=1, **this_process())
    assert cli("status", "--json").document["next"] == "harness wait run-002"
    assert cli("status", "--json").document["running"][0]["alive"] is True


def test_a_run_whose_process_is_gone_is_stale(cli, program):
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64")
    append(program, "run-002", "started", attempt=1, **this_process() | {"pid_start": "0:0:0:0"})
    gone = this_process()
    append(program, "run-002", "started", attempt=2, **gone | {"pid_start": gone["pid_start"][:-1] + "x"})
    row = cli("list", "--json").document["rows"][0]
    assert row["status"] == "stale"
    assert cli("status", "--json").document["next"] == "harness recover run-002"


def test_diff_shows_what_counts_and_what_does_not(cli, program):
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64", "--set", "train.seed=3")
    document = cli("diff", "run-001", "run-002", "--json").document
    counting = [row["key"] for row in document["rows"] if row["counts"]]
    assert counting == ["lora.alpha"]
    assert {"train.seed"} <= {row["key"] for row in document["rows"]}
    assert "1 of" in cli("diff", "run-001", "run-002").out
    same = cli("diff", "run-001", "run-001").out
    assert same.startswith("run-001 and run-001 do not differ\n")
    assert "no difference, the items of an eval are not on record" in same


# rollouts, env


def test_rollouts_page_sort_and_clean(cli, program):
    page = cli("rollouts", "run-001", "--worst", "--limit", "2", "--json").document
    assert [row["reward"] for row in page["rows"]] == [0.0, 0.1]
    assert page["counts"] == {"total": 8, "shown": 2, "skipped": 0}
    assert page["truncated"] is True
    best = cli("rollouts", "run-001", "--best", "--limit", "1", "--skip", "1", "--json").document
    assert [row["reward"] for row in best["rows"]] == [0.6]
    assert page["rows"][0]["completion"] == "answer 0 \x1b[31mred\x1b[0m \u202eevil"  # exact in JSON
    text = cli("rollouts", "run-001", "--limit", "1", "--prompt").out
    assert "answer 0 red evil" in text
    assert "Which?" in text
    assert "next page: --skip 1" in text
    assert cli("rollouts", "run-001", "--task", "task-3", "--json").document["counts"]["total"] == 1


def test_rollouts_name_what_is_stored(cli, program):
    assert "steps 2 to 2" in cli("rollouts", "run-001", "--step", "9").err
    assert "'drugprot'" in cli("rollouts", "run-001", "--env", "drugprt").err
    assert cli("rollouts", "run-001", "--worst", "--best").code == 2


def test_env_show_is_what_the_model_sees(cli):
    shown = cli("env", "show", "drugprot", "--json").document
    assert shown["messages"][-1]["role"] == "user"
    same = cli("env", "show", "drugprot", "--task", shown["task"], "--json").document
    assert same == shown
    assert shown["messages"][-1]["content"].splitlines()[0] in cli("env", "show", "drugprot").out


def test_env_try_scores_right_and_wrong_answers(cli):
    gold = cli("env", "show", "drugprot", "--json").document["answer"]
    right = cli("env", "try", "drugprot", "--answer", f"\\boxed{{{gold}}}", "--json").document
    assert right["components"]["accuracy"] == 1
    assert right["failure"] is None
    wrong = cli("env", "try", "drugprot", "--answer", "no idea", "--json").document
    assert wrong["failure"] == "model"
    assert wrong["reward"] < right["reward"]


def test_env_try_reads_standard_input_when_told(cli, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("\\boxed{E}"))
    assert cli("env", "try", "drugprot", "--answer", "-", "--json").document["components"]["format"] == 1
    refused = cli("env", "try", "drugprot")
    assert (refused.code, "--answer" in refused.err) == (2, True)


def test_env_names_what_exists(cli):
    assert "'drugprot'" in cli("env", "show", "drugprt").err
    assert "no task" in cli("env", "show", "drugprot", "--task", "nothing").err
    assert cli("env", "show", "drugprot", "--split", "heldou").code == 2
    assert cli("env", "show", "drugprot", "--arg", "variant").code == 2
    published = cli("env", "show", "drugprot", "--arg", "variant=published", "--json").document
    assert "published" in published["verifier"]


# decide, promote, amend, note, ledger


def test_decide_records_and_refreshes_the_thread(cli, program):
    answer = cli("decide", "run-001", "kep", "--reason", "r")
    assert (answer.code, "keep" in answer.err) == (2, True)
    assert cli("decide", "run-001", "keep").code == 2
    assert cli("decide", "run-001", "keep", "--reason", "the gain holds").code == 0
    assert "the gain holds" in program.thread.read_text()
    assert Ledger(program.ledger).events()[-1].actor.kind == "agent"
    assert cli("thread", "--check").code == 0


def test_thread_check_notices_a_stale_block(cli, program):
    cli("thread")
    append(program, "run-001", "decided", decision="keep", reason="r", by_rule=None)
    assert cli("thread", "--check").code == ExitCode.NO
    assert cli("thread", "--json").document["applied"] is True
    assert cli("thread", "--check", "--json").document["current"] is True


def test_promote_cannot_tell_without_evidence_and_says_why(cli, program):
    answer = cli("promote", "run-001", "--gates", "heldout", "--json")
    assert answer.code == ExitCode.CANNOT_TELL
    assert answer.document["applied"] is False
    assert answer.document["detail"]["reasons"]
    assert "cannot tell" in cli("promote", "run-001").out
    cli("decide", "run-001", "reject", "--reason", "worse")
    refused = cli("promote", "run-001", "--gates", "heldout", "--json")
    assert refused.code == ExitCode.NO
    assert "rejected" in refused.document["error"]["message"]
    assert cli("promote", "run-001", "--gates", "heldot").code == 2


def test_amend_records_an_edit_with_its_reason(cli, program):
    program.goal.write_text(program.goal.read_text() + "\nHigher from now on.\n")
    blocked = cli("new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis", "h")
    assert (blocked.code, "harness amend" in blocked.err) == (2, True)
    done = cli("amend", "GOAL.md", "--reason", "a better threshold", "--json").document
    assert done["target"] == "GOAL.md"
    assert cli("new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis", "h").code == 0


def test_notes_go_to_a_run_or_the_program(cli, program):
    assert cli("note", "run-001", "spike at 12").code == 0
    assert "spike at 12" in cli("show", "run-001").out
    assert cli("note", "program", "the base scores 0.31").code == 0
    assert cli("note", "run-001", "  ").code == 2


def test_ledger_verify_and_corruption(cli, program):
    assert cli("ledger", "verify", "--json").document["counts"]["events"] == 4
    lines = program.ledger.read_bytes().splitlines(keepends=True)
    program.ledger.write_bytes(lines[0].replace(b"defaults", b"Defaults") + b"".join(lines[1:]))
    found = cli("ledger", "verify", "--json")
    assert found.code == ExitCode.NO
    assert found.document["rows"][0]["line"] == 1
    assert "does not verify" in cli("ledger", "verify").out
    assert cli("list").code == ExitCode.LEDGER_CORRUPT
    assert cli("list", "--json").document["error"]["kind"] == "ledger_corrupt"


def test_a_torn_tail_is_a_warning_on_stderr(cli, program):
    with program.ledger.open("ab") as file:
        file.write(b'{"v":1,"id":"01')
    answer = cli("list", "--json")
    assert answer.code == 0
    assert answer.document["counts"]["total"] == 1
    assert "torn" in answer.err


def test_textconv_renders_for_git(cli, program):
    text = cli("ledger", "textconv", "runs.jsonl").out
    assert "run-001 created" in text
    assert cli("ledger", "textconv", "absent.jsonl").code == 2


# launch, wait, stop


def test_launch_dry_run_is_the_plan_of_the_next_attempt(cli, program):
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64")
    detail = cli("launch", "run-002", "--dry-run", "--json").document["detail"]
    assert detail["attempt"] == 1
    assert detail["config"]["lora"]["alpha"] == 64
    assert [change["key"] for change in detail["changes"] if change["counts"]] == ["lora.alpha"]
    assert cli("launch", "run-002", "--dry-run", "--detach").code == 2
    config = detail["config"]
    expected = config["optimizer"]["learning_rate"] * 64 / config["lora"]["rank"]
    assert detail["effective_step"] == pytest.approx(expected)
    shown = cli("launch", "run-002", "--dry-run").out
    assert f"{expected:.1e} (learning rate × alpha / rank)" in shown


def test_launch_warns_of_a_step_known_to_collapse(cli, program):
    plan(cli, "--from", "run-001", "--set", "optimizer.learning_rate=1e-3")
    detail = cli("launch", "run-002", "--dry-run", "--json").document["detail"]
    assert "is expected to collapse" in detail["step_warning"]
    assert "warning: the effective step" in cli("launch", "run-002", "--dry-run").out


def test_launch_refuses_a_run_that_is_running(cli, program, monkeypatch):
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64")
    with sleeper() as child:
        (program.run_dir("run-002")).mkdir(parents=True)
        append(program, "run-002", "started", attempt=1, **identity(child))
        answer = cli("launch", "run-002", "--json")
        assert answer.code == ExitCode.BUSY
        assert str(child.pid) in answer.document["error"]["message"]


@contextlib.contextmanager
def sleeper():
    """A process that does nothing, and that does not outlive the test."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def identity(child):
    from harness.ledger.process import process_start

    time.sleep(0.05)
    return this_process() | {"pid": child.pid, "pid_start": process_start(child.pid)}


def test_stop_ends_the_recorded_process_and_only_that(cli, program):
    with sleeper() as child:
        append(program, "run-001", "started", attempt=2, **identity(child))
        assert cli("wait", "run-001", "--timeout", "0.2").code == ExitCode.BUSY
        reaper = threading.Thread(target=child.wait)
        reaper.start()  # a zombie of ours must be reaped, as init does for a detached launch
        done = cli("stop", "run-001", "--timeout", "20", "--json")
        reaper.join()
    assert done.code == 0
    assert done.document["applied"] is True
    assert done.document["detail"]["running"] is False
    again = cli("stop", "run-001", "--json")
    assert (again.code, again.document["applied"]) == (0, False)
    assert cli("wait", "run-001", "--json").document["outcome"] == "stale"


def test_stop_leaves_a_reused_pid_alone(cli, program):
    with sleeper() as child:
        who = identity(child)
        append(program, "run-001", "started", attempt=2, **who | {"pid_start": who["pid_start"][:-1] + "x"})
        assert cli("stop", "run-001", "--json").document["applied"] is False
        assert child.poll() is None


def test_stop_refuses_what_runs_elsewhere(cli, program):
    append(program, "run-001", "started", attempt=2, host="elsewhere", pid=os.getpid(), pid_start="1")
    answer = cli("stop", "run-001")
    assert (answer.code, "elsewhere" in answer.err) == (2, True)


@pytest.mark.parametrize(
    ("finished", "code"),
    [
        ({"outcome": "completed"}, 0),
        ({"outcome": "stopped"}, 4),
        ({"outcome": "failed", "failure": "infra"}, 71),
        ({"outcome": "failed", "failure": "model"}, 1),
        ({"outcome": "interrupted"}, 1),
    ],
)
def test_wait_ends_with_the_outcome(cli, program, finished, code):
    append(program, "run-001", "started", attempt=2, host="elsewhere", pid=1, pid_start="1")
    append(program, "run-001", "finished", attempt=2, step=7, **finished)
    answer = cli("wait", "run-001", "--json")
    assert answer.code == code
    assert answer.document["outcome"] == finished["outcome"]


def test_wait_on_a_run_that_was_never_launched_cannot_tell(cli, program):
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64")
    assert cli("wait", "run-002").code == ExitCode.CANNOT_TELL


def test_live_process_prefers_the_open_attempt():
    here = this_process()
    assert live_process([], here) == (here, True)
    assert live_process([{"outcome": "completed"}], {}) == ({"outcome": "completed"}, False)
    attempt = here | {"outcome": None}
    assert live_process([attempt], {}) == (attempt, True)


def test_detach_starts_a_session_of_its_own_and_records_it(cli, program, monkeypatch, tmp_path):
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64")
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@" "$HARNESS_PROGRAM" "$HARNESS_NO_INPUT"\nps -o sess= -p $$\nsleep 30\n')
    fake.chmod(0o755)
    monkeypatch.setattr(launch_module.sys, "executable", str(fake))
    done = cli("launch", "run-002", "--detach", "--resume", "--json").document
    detail = done["detail"]
    log = program.root / detail["log"]
    deadline = time.monotonic() + 10
    while log.read_text().count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    first, session = log.read_text().splitlines()
    assert first == f"-m harness launch run-002 --resume {program.root} 1"
    assert int(session) == detail["pid"]
    assert json.loads((program.run_dir("run-002") / "detached.json").read_text())["pid"] == detail["pid"]
    assert cli("wait", "run-002", "--timeout", "0.1").code == ExitCode.BUSY
    assert cli("launch", "run-002").code == ExitCode.BUSY
    os.kill(detail["pid"], 9)
    os.waitpid(detail["pid"], 0)
    assert cli("wait", "run-002").code == ExitCode.CANNOT_TELL


# progress, estimate


def test_plain_progress_shows_each_phase_and_the_last_step(capsys):
    now = iter([0.0, 0.1, 0.2, 5.0, 5.1, 5.2])
    report = plain_lines(lambda: next(now))
    for step in (1, 2, 3, 4):
        report({"phase": "train", "step": step, "steps": 4, "reward": 0.5})
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "train  1/4  reward 0.5"
    assert err[-1].startswith("train  4/4")
    assert len(err) < 4


def test_describe_leaves_out_what_is_no_number():
    assert describe({"phase": "eval", "env": "x", "reward": None, "loss": 0.25}) == "eval  x  loss 0.25"


def test_after_two_steps_the_rest_is_projected():
    seen, now = [], iter([10.0, 14.0])
    report = with_projection(seen.append, lambda: next(now))
    report({"phase": "eval", "step": 4, "steps": 4})
    for step in range(6, 10):  # a resumed run begins later than at step 1
        report({"phase": "train", "step": step, "steps": 30})
    (projection,) = [update for update in seen if update["phase"] == "estimate"]
    assert projection["message"].startswith("4.0 s a step, 1.5 min to step 30")
    assert "GiB" in projection["message"]
    assert len(seen) == 6


def test_report_warns_of_damaged_rollouts_on_standard_error(cli, program):
    outputs = program.run_dir("run-001")
    (outputs / "metrics.jsonl").write_text('{"step": 2, "train/drugprot/reward/mean": 0.5}\n')
    with (outputs / "rollouts/step_2/drugprot.jsonl").open("ab") as file:
        file.write(b'{"task": "torn')
    answer = cli("report", "run-001")
    assert answer.code == 0
    told = "warning: run-001: rollouts/step_2/drugprot.jsonl line 9 could not be read and is left out\n"
    assert told in answer.err
    (row,) = cli("report", "run-001", "--json").document["detail"]["reports"]
    assert row["damaged"] == [{"file": "rollouts/step_2/drugprot.jsonl", "lines": [9]}]


def test_env_show_lists_arguments_and_data_of_bioreason_go(cli):
    shown = cli("env", "show", "bioreason-go", "--json").document
    assert shown["arguments"]["weights"]["similarity"] > 0
    assert "43,558 terms" in shown["data"]["ontology"]
    right = cli("env", "try", "bioreason-go", "--answer", "{}", "--json").document
    assert (right["reward"], right["failure"]) == (0, "model")


def test_env_score_scores_a_file(cli, tmp_path):
    shown = cli("env", "show", "drugprot", "--json").document
    path = tmp_path / "answers.jsonl"
    lines = [
        {"task": shown["task"], "completion": f"\\boxed{{{shown['answer']}}}", "tokens": 3},
        {"task": shown["task"], "completion": "no idea", "finish": "length"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    scored = cli("env", "score", str(path), "--env", "drugprot", "--json").document
    assert [row["components"]["accuracy"] for row in scored["rows"]] == [1, 0]
    assert scored["rows"][1]["metrics"]["truncated"] == 1
    assert scored["counts"] == {"total": 2, "tasks": 1}
    assert scored["means"]["accuracy"] == scored["means"]["right"] == 0.5
    assert "mean of" in cli("env", "score", str(path), "--env", "drugprot").out


def test_env_score_names_the_line_that_is_wrong(cli, tmp_path):
    task = cli("env", "show", "drugprot", "--json").document["task"]
    path = tmp_path / "answers.jsonl"
    for text, message in (
        ("{", "answers.jsonl:1 is not JSON"),
        ("[]", "answers.jsonl:1 is no object"),
        ('{"completion": "x"}', "`task` is missing"),
        (json.dumps({"task": task, "completion": 3}), "`completion` is missing or no text"),
        (json.dumps({"task": task + "x", "completion": "x"}), "no task"),
        (json.dumps({"task": task, "completion": "x", "finish": "bored"}), "'bored' is none of stop"),
        ("\n", "holds no completion"),
    ):
        path.write_text(text)
        answer = cli("env", "score", str(path), "--env", "drugprot")
        assert (answer.code, message in answer.err) == (2, True), (text, answer.err)
    assert "no file" in cli("env", "score", str(tmp_path / "none"), "--env", "drugprot").err
    assert "leave one" in cli("env", "try", "drugprot", "--model", "a", "--answer", "b").err
