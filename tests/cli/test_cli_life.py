"""Dead launches, tags, ideas and THREAD.md, as the commands show and change them."""

from __future__ import annotations

import os

import pytest

from harness.core.errors import ExitCode
from harness.ledger import Ledger
from harness.ledger.process import this_process


def append(program, run, kind, **data):
    Ledger(program.ledger).append(run, kind, data)


def dead():
    mine = this_process()
    head, _, ticks = mine["pid_start"].rpartition(":")
    return mine | {"pid_start": f"{head}:{int(ticks) - 1}"}


@pytest.fixture
def stale_program(program):
    """run-001 of the template, launched a second time by a process that is gone."""
    append(program, "run-001", "started", attempt=2, resumed_from=30, **dead())
    return program


def test_a_dead_launch_is_stale_everywhere(cli, stale_program):
    since = Ledger(stale_program.ledger).state().runs["run-001"].events[-1].at
    shown = f"stale since {since[:19].replace('T', ' ')} UTC"
    (row,) = cli("list", "--json").document["rows"]
    assert (row["status"], row["stale_since"]) == ("stale", since)
    assert "another process" in row["stale_reason"]
    assert cli("list", "--status", "stale", "--json").document["counts"]["matching"] == 1
    document = cli("show", "run-001", "--json").document
    assert (document["status"], document["stale_since"]) == ("stale", since)
    status = cli("status", "--json").document
    assert status["by_status"] == {"stale": 1}
    assert status["stale"] == [{"run": "run-001", "stale_since": since, "stale_reason": row["stale_reason"]}]
    assert (status["running"], status["next"]) == ([], "harness recover run-001")
    assert shown in cli("list").out
    assert shown in cli("show", "run-001").out
    assert f"run-001 since {since}" in cli("status").out


def test_a_run_that_is_not_stale_says_so_too(cli, program):
    (row,) = cli("list", "--json").document["rows"]
    assert (row["status"], row["stale_since"], row["stale_reason"]) == ("completed", None, None)


def test_recover_closes_every_stale_run_and_shows_what_it_would_do(cli, stale_program, tree):
    before = tree(stale_program.root)
    plan = cli("recover", "--dry-run", "--json").document
    assert tree(stale_program.root) == before
    done = cli("recover", "--json").document
    assert (plan["applied"], done["applied"]) == (False, True)
    (planned,), (closed,) = plan["detail"]["closed"], done["detail"]["closed"]
    assert {key: value for key, value in closed.items() if key != "event"} == planned
    assert (closed["run"], closed["outcome"], closed["failure"]) == ("run-001", "crashed", "infra")
    assert cli("status", "--json").document["next"] == "harness launch run-001 --resume"
    assert "- crashed: 1 (run-001)" in stale_program.thread.read_text()
    again = cli("recover")
    assert (again.code, again.out) == (0, "no run is stale; nothing to recover\n")
    assert "no open attempt" in cli("recover", "run-001").out


def test_recover_of_a_live_run_is_refused(cli, program):
    append(program, "run-001", "started", attempt=2, **this_process())
    before = program.ledger.read_bytes()
    answer = cli("recover", "run-001")
    assert answer.code == ExitCode.USAGE
    assert f"pid {os.getpid()}" in answer.err and "harness stop run-001" in answer.err
    assert cli("recover").out == "no run is stale; nothing to recover\n"
    assert program.ledger.read_bytes() == before


def test_a_run_on_another_host_takes_its_name_and_a_reason(cli, program):
    append(program, "run-001", "started", attempt=2, **this_process() | {"host": "node-7"})
    assert cli("status", "--json").document["running"][0]["alive"] is None
    before = program.ledger.read_bytes()
    answer = cli("recover", "run-001")
    assert (answer.code, "node-7" in answer.err) == (ExitCode.CANNOT_TELL, True)
    assert cli("recover").out == "no run is stale; nothing to recover\n"
    assert cli("recover", "run-001", "--force-host", "node-8", "--reason", "x").code == ExitCode.USAGE
    assert cli("recover", "run-001", "--force-host", "node-7").code == ExitCode.USAGE
    assert cli("recover", "--force-host", "node-7", "--reason", "x").code == ExitCode.USAGE
    assert program.ledger.read_bytes() == before
    done = cli("recover", "run-001", "--force-host", "node-7", "--reason", "scrapped", "--exit-status", "137", "--json")
    (closed,) = done.document["detail"]["closed"]
    assert "declared dead: scrapped; exit status 137" in closed["reason"]


def test_a_launch_here_is_refused_while_another_host_may_run_it(cli, program):
    append(program, "run-001", "started", attempt=2, **this_process() | {"host": "node-7"})
    before = program.ledger.read_bytes()
    for flags in (["--resume"], ["--detach"]):
        answer = cli("launch", "run-001", *flags)
        assert (answer.code, "--force-host node-7" in answer.err) == (ExitCode.CANNOT_TELL, True)
    assert program.ledger.read_bytes() == before
    assert not (program.run_dir("run-001") / "detached.json").exists()


def test_waiting_for_a_dead_launch_names_the_way_out(cli, stale_program):
    answer = cli("wait", "run-001", "--json")
    assert answer.code == ExitCode.INFRA
    assert answer.document["outcome"] == "stale"
    assert "harness recover run-001" in answer.document["hint"]


def test_a_decision_on_a_stale_run_points_to_recover_and_a_crash_to_rerun(cli, stale_program):
    answer = cli("decide", "run-001", "reject", "--reason", "it is dead")
    assert (answer.code, "harness recover run-001" in answer.err) == (ExitCode.USAGE, True)
    cli("recover")
    for decision in ("reject", "keep", "retune"):
        answer = cli("decide", "run-001", decision, "--reason", "it is dead")
        assert answer.code == ExitCode.USAGE
        assert "infra failure ended the last attempt" in answer.err
        assert "harness decide run-001 rerun" in answer.err
    assert cli("decide", "run-001", "rerun", "--reason", "out of memory").code == 0


def test_superseded_evals_are_marked(cli, program):
    append(program, "run-001", "started", attempt=2, resumed_from=None, **this_process())
    append(program, "run-001", "finished", attempt=2, outcome="interrupted")
    evals = cli("show", "run-001", "--json").document["evals"]
    assert [data["superseded"] for data in evals] == [bool(data["step"]) for data in evals]
    assert any(data["superseded"] for data in evals)
    assert "superseded" in cli("show", "run-001").out
    assert cli("list", "--json").document["rows"][0]["reward"] == {}


def test_superseded_rollouts_are_shown_on_request(cli, program):
    folder = program.run_dir("run-001")
    kept = folder / "superseded" / "attempt_1" / "rollouts"
    kept.parent.mkdir(parents=True)
    (folder / "rollouts").rename(kept)
    assert cli("rollouts", "run-001").code == ExitCode.USAGE
    rows = cli("rollouts", "run-001", "--attempt", "1", "--json").document["rows"]
    assert rows and all(row["superseded"] for row in rows)
    assert "run-001 attempt 1 (superseded) step 2" in cli("rollouts", "run-001", "--attempt", "1").out
    assert "kept here: attempts 1" in cli("rollouts", "run-001", "--attempt", "2").err


# Tags and ideas


def test_tag_and_untag(cli, program):
    assert cli("tag", "run-001", "baseline").out == "run-001: baseline\n"
    assert cli("tag", "run-001", "baseline", "--json").document["applied"] is False
    assert cli("list", "--tag", "baseline", "--json").document["counts"]["matching"] == 1
    assert cli("list", "--json").document["rows"][0]["tags"] == ["baseline"]
    assert "baseline" in cli("show", "run-001").out
    assert cli("tag", "run-001", "baseline", "--remove").out == "run-001: no tags\n"
    for evil in ("../x", "a b", "\x1b[31m"):
        answer = cli("tag", "run-001", evil)
        assert (answer.code, "\x1b" in answer.err) == (ExitCode.USAGE, False)
    assert cli("tag", "run-009", "x").code == ExitCode.USAGE


def test_an_idea_goes_from_next_to_thread_and_status_to_a_run(cli, program):
    assert "no idea is open" in cli("next").out
    assert cli("new-run", "--next", "--from", "run-001").code == ExitCode.USAGE
    left = cli("next", "--hypothesis", "Alpha 64 learns faster", "--because", "the loss was flat", "--json").document
    assert left["applied"] is True
    assert cli("next", "--hypothesis", "Alpha 64 learns  faster", "--json").document["applied"] is False
    assert "Alpha 64 learns faster" in cli("next").out and "because the loss was flat" in cli("next").out
    assert "Alpha 64 learns faster (because the loss was flat)" in program.thread.read_text()
    assert cli("status", "--json").document["ideas"][0]["hypothesis"] == "Alpha 64 learns faster"
    assert "Alpha 64 learns faster" in cli("status").out
    cli("decide", "run-001", "reject", "--reason", "r")
    assert cli("status", "--json").document["next"] == "harness new-run --next"
    both = cli("new-run", "--next", "--hypothesis", "x", "--from", "run-001", "--set", "lora.alpha=64")
    assert both.code == ExitCode.USAGE
    made = cli("new-run", "--next", "--from", "run-001", "--set", "lora.alpha=64", "--json").document["detail"]
    assert made["hypothesis"] == "Alpha 64 learns faster"
    assert made["idea"] == left["detail"]["ideas"][0]["id"]
    assert cli("next", "--json").document["rows"] == []
    assert "left by" not in program.thread.read_text()


def test_the_same_words_take_an_idea_up_and_drop_closes_it(cli, program):
    for text in ("Rank 32 helps", "Alpha 64 learns faster"):
        cli("next", "--hypothesis", text)
    cli("new-run", "--hypothesis", "Rank 32 helps", "--from", "run-001", "--set", "lora.rank=32", "--outside-plan", "x")
    (idea,) = cli("next", "--json").document["rows"]
    assert idea["hypothesis"] == "Alpha 64 learns faster"
    assert cli("next", "--drop", idea["id"]).code == ExitCode.USAGE  # without a reason
    assert cli("next", "--drop", "zz", "--reason", "x").code == ExitCode.USAGE
    assert cli("next", "--hypothesis", "a", "--drop", idea["id"]).code == ExitCode.USAGE
    assert cli("next", "--because", "a").code == ExitCode.USAGE
    assert cli("next", "--drop", idea["id"][:14], "--reason", "answered").out.startswith("idea dropped")
    assert cli("status", "--json").document["ideas"] == []


def test_new_run_and_launch_refuse_a_secret_in_the_config(cli, program):
    key = "hf_" + "A1b2C3d4E5f6G7h8"
    before = program.ledger.read_bytes()
    argv = ["new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis"]
    refused = cli(*argv, f"the key {key} helps")
    assert (refused.code, "hypothesis holds what looks like an access key" in refused.err) == (ExitCode.USAGE, True)
    assert key not in refused.err + refused.out
    assert program.ledger.read_bytes() == before and not program.config_path("run-002").exists()
    assert cli(*argv, "Alpha 64 learns faster").code == 0
    path = program.config_path("run-002")
    path.write_text(path.read_text().replace("alpha = 64", f'alpha = 64\n[model]\nrevision = "{key}"'))
    refused = cli("launch", "run-002", "--dry-run")
    assert refused.code == ExitCode.USAGE
    assert key not in refused.err + refused.out


# THREAD.md


def test_thread_check_fails_when_the_block_is_stale_and_free_text_stays(cli, program):
    cli("thread")
    assert cli("thread", "--check").code == 0
    program.thread.write_text("Mine.\n" + program.thread.read_text() + "\nMine too, no newline")
    assert cli("thread", "--check").code == 0
    append(program, "run-001", "decided", decision="keep", reason="merged from another branch")
    before = program.thread.read_bytes()
    check = cli("thread", "--check", "--json")
    assert (check.code, check.document["current"]) == (ExitCode.NO, False)
    assert program.thread.read_bytes() == before
    cli("thread")
    assert cli("thread", "--check").code == 0
    text = program.thread.read_text()
    assert text.startswith("Mine.\n") and text.endswith("\nMine too, no newline")
