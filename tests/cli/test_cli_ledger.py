"""`harness ledger` as a user meets it."""

from __future__ import annotations

import json
import shutil

import pytest

from harness.cli.doctor_checks import check_git
from tests.ledger.git_program import Repository


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Repository:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_ACTOR", "agent:tester")
        repository = Repository.init(tmp_path_factory.mktemp("origin"))
        repository.make_run("run-001", "first")
        repository.commit("run-001")
        repository.make_run("run-002", "theirs", parent="run-001")
        repository.commit("theirs")
        repository.branch("work", "main~1")
        repository.make_run("run-002", "ours", parent="run-001")
        repository.commit("ours")
    return repository


@pytest.fixture
def repository(origin, tmp_path, monkeypatch) -> Repository:
    shutil.copytree(origin.root, tmp_path / "program", symlinks=True)
    monkeypatch.chdir(tmp_path / "program")
    return Repository(tmp_path / "program", origin.path)


def test_verify_says_what_it_compared_with(cli, repository) -> None:
    answer = cli("ledger", "verify", "--base", "main~1")
    assert answer.code == 0 and "everything of main~1 is here" in answer.out
    answer = cli("ledger", "verify", "--base", "main")
    assert answer.code == 1 and "behind" in answer.out and "merge main first" in answer.out
    answer = cli("ledger", "verify", "--base", "origin/main", "--json")
    assert answer.code == 3 and "git fetch origin main" in answer.document["error"]["hint"]
    assert cli("ledger", "verify", "--base", "--output=x").code == 2


def test_whole_runs_and_tails_are_found_against_base_and_head(cli, repository, tmp_path) -> None:
    answer = cli("ledger", "verify", "--json")
    assert answer.code == 0 and answer.document["verifies"] is True and answer.document["counts"]["events"] == 8
    (tmp_path / "heads.json").write_text(answer.out)
    lines = (repository.root / "runs.jsonl").read_bytes().splitlines(keepends=True)
    for left, kind in ((lines[:4], "lost_run"), (lines[:-1], "lost_event")):
        (repository.root / "runs.jsonl").write_bytes(b"".join(left))
        answer = cli("ledger", "verify", "--base", "work", "--json")
        assert answer.code == 1 and kind in {row["kind"] for row in answer.document["rows"]}
        answer = cli("ledger", "verify", "--head", tmp_path / "heads.json", "--json")
        assert answer.code == 1 and "lost_event" in {row["kind"] for row in answer.document["rows"]}
    last = json.loads(lines[-1])["sha"]
    assert cli("ledger", "verify", "--head", last).code == 1
    assert cli("ledger", "verify", "--head", "no-such-file").code == 2
    (tmp_path / "odd.json").write_text("[]")
    assert cli("ledger", "verify", "--head", tmp_path / "odd.json").code == 2


def test_a_goal_edited_after_results_is_an_error_until_it_is_amended(cli, program) -> None:
    text = program.goal.read_text()
    program.plan.write_text(program.plan.read_text() + "\nA thought.\n")
    assert [row["severity"] for row in cli("ledger", "verify", "--json").document["rows"]] == ["note"]
    program.goal.write_text(text + "\nEasier.\n")
    answer = cli("ledger", "verify")
    assert answer.code == 1 and "GOAL.md was edited after results were seen" in answer.out
    assert cli("amend", "GOAL.md", "--reason", "it was too hard").code == 0
    assert cli("ledger", "verify").code == 0
    program.goal.write_text(text)
    assert cli("ledger", "verify").code == 1


def test_a_report_that_is_gone_is_told(cli, repository) -> None:
    (repository.root / "analysis/run-001/report.md").unlink()
    for options in ((), ("--base", "main~1")):
        answer = cli("ledger", "verify", *options)
        assert answer.code == 1 and "analysis/run-001/report.md (report of run-001)" in answer.out
    repository.commit("gone")
    assert cli("ledger", "verify").code == 0
    assert cli("ledger", "verify", "--base", "main~1").code == 1


def test_reports_can_be_built_again_and_compared(cli, program) -> None:
    assert cli("report", "run-001").code == 0
    assert cli("ledger", "verify", "--reports").code == 0
    page = program.analysis_dir("run-001") / "report.md"
    page.write_text(page.read_text() + "Much better than it is.\n")
    assert cli("ledger", "verify").code == 0
    answer = cli("ledger", "verify", "--reports")
    assert answer.code == 1 and "report.md is stale" in answer.out


def test_merge_writes_ours_and_names_what_a_person_must_solve(cli, repository, tmp_path) -> None:
    names = {"base": "main~1", "ours": "work", "theirs": "main"}
    for name, commit in names.items():
        (tmp_path / name).write_text(repository.git("show", f"{commit}:runs.jsonl").stdout)
    paths = [tmp_path / name for name in names]
    answer = cli("ledger", "merge", *paths, "--json")
    assert answer.code == 1 and answer.document["applied"] is True and answer.document["detail"]["events"] == 12
    assert "harness ledger renumber run-002" in answer.document["detail"]["problems"][0]
    assert (tmp_path / "ours").read_text().count("\n") == 12
    assert cli("ledger", "merge", *paths).code == 0
    (tmp_path / "theirs").write_text("<<<<<<< HEAD\n")
    answer = cli("ledger", "merge", *paths)
    assert answer.code == 1 and "conflict marker" in answer.out and "was not merged" in answer.out
    assert cli("ledger", "merge", tmp_path / "none", *paths[1:]).code == 2


def test_renumber_from_the_command_line(cli, repository, tree) -> None:
    before = tree(repository.root)
    answer = cli("ledger", "renumber", "run-002", "--base", "main", "--dry-run", "--json")
    assert answer.code == 0 and answer.document["dry_run"] and not answer.document["applied"]
    assert answer.document["detail"]["moves"] == [{"from": "run-002", "to": "run-003"}]
    assert {k: v for k, v in tree(repository.root).items() if ".git" not in k.parts} == {
        k: v for k, v in before.items() if ".git" not in k.parts
    }
    answer = cli("ledger", "renumber", "run-002", "--base", "main")
    assert answer.code == 0 and "run-002 has the number run-003" in answer.out
    assert "moved rl/run-002.toml to rl/run-003.toml" in answer.out
    answer = cli("ledger", "renumber", "run-002", "--base", "main")
    assert answer.code == 0 and "nothing to do: run-002 is run-003" in answer.out
    assert cli("show", "run-003", "--json").document["hypothesis"] == "ours"
    assert cli("note", "run-003", "still works").code == 0
    assert cli("ledger", "verify").code == 0
    assert cli("ledger", "renumber", "run-001", "--base", "main").code == 2


def test_a_collision_is_told_wherever_the_ledger_is_read(cli, repository) -> None:
    repository.git("merge", "--no-edit", "main", check=False)
    answer = cli("list", "--status", "completed")
    assert "harness ledger renumber run-002" in answer.err and "theirs" in answer.out and "ours" not in answer.out
    answer = cli("note", "run-002", "which one?")
    assert answer.code == 2 and "two branches" in answer.err
    answer = cli("new-run", "--hypothesis", "h", "--from", "run-002", "--set", "train.steps=3")
    assert answer.code == 2


def test_install_in_a_clone(cli, repository) -> None:
    assert "already" in cli("ledger", "install").out
    repository.git("config", "--remove-section", "merge.harness-ledger")
    assert "would run git config merge.harness-ledger" in cli("ledger", "install", "--dry-run").out
    assert "harness ledger install" in {finding.advice for finding in check_git(repository.root, in_program=True)}
    assert cli("ledger", "install", "--json").document["applied"] is True
    assert repository.git("config", "merge.harness-ledger.driver").stdout == "harness ledger merge %O %A %B\n"
