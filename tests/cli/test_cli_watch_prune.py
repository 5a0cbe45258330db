"""`harness watch` on runs of a program, `harness prune` on what they left."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from harness.backends.prune import plan_prune
from harness.cli.state import read_state
from harness.core.canonical import canonical_json
from harness.ledger import Ledger

SHARED = Path(os.environ.get("HARNESS_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
PUBLISHED = SHARED / "published-runs"


def write_metrics(program, run, rewards):
    path = program.run_dir(run) / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "attempt": 1, "train/drugprot/reward/mean": value} for step, value in enumerate(rewards, 1)]
    path.write_text("".join(canonical_json(row, sort=False) + "\n" for row in rows))


def test_watch_says_stop_with_exit_code_1_and_clear_with_0(cli, program):
    write_metrics(program, "run-001", [0.5] * 30)
    clear = cli("watch", "run-001")
    assert clear.code == 0 and "30 steps" in clear.out and "clear: no watchdog says anything" in clear.out
    write_metrics(program, "run-001", [0.5] * 30 + [0.0] * 5)
    stop = cli("watch", "run-001", "--json")
    assert stop.code == 1
    (finding,) = stop.document["findings"]
    assert (finding["rule"], finding["step"], stop.document["verdict"]) == ("collapse", 33, "stop")
    assert "stop  step 33  collapse: train/drugprot/reward/mean fell from 0.5 to 0" in cli("watch", "run-001").out


def test_watch_takes_the_limits_of_the_runs_file(cli, program):
    write_metrics(program, "run-001", [0.5] * 30 + [0.0] * 5)
    path = program.config_path("run-001")
    path.write_text(path.read_text() + '\n[watchdog]\ncollapse = "mark"\n')
    answer = cli("watch", "run-001", "--json")
    assert (answer.code, answer.document["verdict"]) == (0, "mark")


def test_watch_without_metrics_says_what_to_do(cli, program):
    answer = cli("watch", "run-001")
    assert answer.code == 2 and "run-001 has no metrics here" in answer.err and "harness report run-001" in answer.err


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published runs are not at {PUBLISHED}")
def test_watch_of_the_imported_published_runs(cli, empty_program):
    imported = cli("import", PUBLISHED, "--json").document["detail"]["runs"]
    assert len(imported) == 12
    for row in imported:
        answer = cli("watch", row["run"], "--json")
        assert answer.document["noise"] == "12 evaluations of the base model"
        stopped = row["name"] == "w1-alpha64-lr1e-5"
        assert (answer.code, answer.document["verdict"]) == ((1, "stop") if stopped else (0, "clear")), row["name"]
        if stopped:
            assert [f["step"] for f in answer.document["findings"]][:2] == [50, 77]


# --- prune -------------------------------------------------------------------------------------------------------


def fill(program, run, steps=4):
    """Write what a trained run leaves, one kibibyte a file."""
    folder = program.run_dir(run)
    names = [f"rollouts/step_{step}/drugprot.jsonl" for step in range(1, steps + 1)]
    names += [f"checkpoints/step_{step}/{name}" for step in (3, 4) for name in ("manifest.json", "state.safetensors")]
    names += [f"adapters/step_{step}/adapter_model.safetensors" for step in (2, 4)]
    names += ["evals/step_4/policy.drugprot.jsonl", "metrics.jsonl", "logs/attempt_1.log"]
    names += ["superseded/attempt_1/rollouts/step_3/drugprot.jsonl", "superseded/attempt_1/evals/step_4/x.jsonl"]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1024)


GONE = {
    "checkpoints/step_3/manifest.json",
    "checkpoints/step_3/state.safetensors",
    "checkpoints/step_4/manifest.json",
    "checkpoints/step_4/state.safetensors",
    "rollouts/step_2/drugprot.jsonl",
    "rollouts/step_3/drugprot.jsonl",
    "superseded/attempt_1/rollouts/step_3/drugprot.jsonl",
}


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def decide(program, run, decision="reject"):
    Ledger(program.ledger).append(run, "decided", {"decision": decision, "reason": "r", "by_rule": False})


@pytest.fixture
def trained(program):
    """run-001 finished, with everything a run leaves in outputs/."""
    fill(program, "run-001")
    return program


def test_prune_deletes_checkpoints_and_rollouts_of_a_decided_run_and_nothing_else(cli, trained, tree):
    decide(trained, "run-001")
    folder = trained.run_dir("run-001")
    before, everything = names(folder), tree(trained.root)
    plan = cli("prune", "--keep-last", "0", "--dry-run", "--json").document
    assert tree(trained.root) == everything
    assert (plan["applied"], plan["dry_run"]) == (False, True)
    assert plan["detail"]["bytes"] == 1024 * len(GONE)
    done = cli("prune", "--keep-last", "0", "--json")
    assert done.code == 0 and done.document["applied"] is True
    assert done.document["detail"] == plan["detail"]
    assert before - names(folder) == GONE and names(folder) < before
    assert {item["what"] for item in plan["detail"]["items"]} == {"checkpoint", "rollouts", "superseded"}
    again = cli("prune", "--keep-last", "0", "--json").document
    assert again["applied"] is False and again["detail"]["bytes"] == 0


def test_prune_prints_what_and_how_much(cli, trained):
    decide(trained, "run-001")
    told = cli("prune", "run-001", "--keep-last", "0", "--dry-run").out
    assert "checkpoint" in told and told.splitlines()[-1] == "would free 0.0 MiB in 5 folders of outputs/"
    done = cli("prune", "run-001", "--keep-last", "0")
    assert "deleted outputs/run-001/checkpoints/step_4" in done.err
    assert done.out.splitlines()[-1] == "freed 0.0 MiB in 5 folders of outputs/"


@pytest.mark.parametrize(
    ("decision", "options", "reason"),
    [
        (None, ("--keep-last", "0"), "nothing was decided"),
        ("rerun", ("--keep-last", "0"), "decided rerun: it goes on"),
        ("reject", (), "one of the 3 youngest decided runs"),
        ("keep", ("--keep-last", "0", "--older-than", "1"), "decided too recently"),
    ],
)
def test_a_run_that_may_still_be_needed_keeps_everything(cli, trained, decision, options, reason):
    if decision:
        decide(trained, "run-001", decision)
    before = names(trained.run_dir("run-001"))
    answer = cli("prune", *options, "--json").document
    assert answer["detail"]["kept"] == [{"run": "run-001", "reason": reason}]
    assert names(trained.run_dir("run-001")) == before


def test_an_open_attempt_keeps_everything(cli, trained):
    decide(trained, "run-001")
    Ledger(trained.ledger).append("run-001", "started", {"attempt": 2, "host": "elsewhere", "pid": 1, "pid_start": "1"})
    answer = cli("prune", "--keep-last", "0", "--json").document
    assert answer["detail"]["kept"] == [{"run": "run-001", "reason": "its last attempt is open"}]


def test_age_counts_from_the_decision(trained, monkeypatch):
    decide(trained, "run-001")
    state = read_state(trained)
    later = datetime.now(UTC) + timedelta(days=8)
    for days, items in ((7.0, 5), (9.0, 0)):
        plan = plan_prune(trained, state, keep_last=0, older_than_days=days, now=later)
        assert len(plan.items) == items


def test_what_git_tracks_and_links_stay(cli, trained, tmp_path):
    decide(trained, "run-001")
    root, folder = trained.root, trained.run_dir("run-001")
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (folder / "checkpoints/step_9").symlink_to(outside)
    for words in (["init", "-q"], ["add", "-f", "outputs/run-001/checkpoints/step_4/manifest.json"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    cli("prune", "--keep-last", "0")
    left = names(folder)
    assert {"checkpoints/step_4/manifest.json", "checkpoints/step_4/state.safetensors"} <= left
    assert not any(name.startswith("checkpoints/step_3") for name in left)
    assert (outside / "precious").read_text() == "x"


def test_prune_of_an_unknown_run_is_refused(cli, program):
    answer = cli("prune", "run-099")
    assert answer.code == 2 and "run-099" in answer.err
