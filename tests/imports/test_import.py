"""`harness import` from the command line to the ledger: numbers, files, parents, nothing twice, never promoted."""

import csv
import io
import json
import math
import os
import shutil

import pytest

from harness.core.errors import InfraError
from harness.imports.plan import Request, apply_import, plan_import
from harness.imports.record import metrics_table
from harness.ledger import Ledger
from harness.ledger.verify import verify
from tests.imports import builders


@pytest.fixture
def exports(tmp_path):
    return builders.write_exports(tmp_path / "exports")


def tree(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def state(program):
    return Ledger(program.ledger).state()


def test_every_run_gets_a_number_provenance_and_files_with_hashes(program, cli, exports):
    answer = cli("import", exports, "--json")
    assert answer.code == 0
    document = answer.document
    assert (document["applied"], document["detail"]["new"], document["detail"]["format"]) == (True, 2, "wandb-csv")
    assert [row["run"] for row in document["detail"]["runs"]] == ["run-001", "run-002"]
    first, second = state(program).runs.values()
    assert (first.kind, first.status, second.status) == ("import", "completed", "stopped")
    assert first.created["provenance"] == "imported"
    assert first.created["source"]["name"] == "exports"  # never a path of this machine
    assert first.created["final"]["train/toy_env/reward/mean"] == 0.3
    assert first.created["renamed"]["train/toy_env/reward/mean"] == "reward/mean"
    files = [entry["file"] for entry in first.created["files"]]
    assert files == ["analysis/run-001/data/metrics.csv", "analysis/run-001/import/config.json"]
    assert [finding for finding in verify(program.ledger) if finding.severity == "error"] == []


def test_a_changed_or_missing_imported_file_is_found(program, cli, exports):
    cli("import", exports)
    path = program.analysis_dir("run-001") / "data" / "metrics.csv"
    path.write_text(path.read_text().replace("0.3", "0.9"))
    (program.analysis_dir("run-002") / "import" / "config.json").unlink()
    kinds = [(finding.kind, finding.run) for finding in verify(program.ledger) if finding.severity == "error"]
    assert kinds == [("changed_file", "run-001"), ("missing_file", "run-002")]


def test_secrets_of_a_config_stay_out_of_everything(program, cli, exports):
    answer = cli("import", exports)
    assert "secret value(s) of the config" in answer.out
    assert "[redacted]" in (program.analysis_dir("run-001") / "import" / "config.json").read_text()
    for path, data in tree(program.root).items():
        assert b"abc123secret" not in data, path


def test_the_same_source_again_adds_nothing(program, cli, exports, tmp_path):
    cli("import", exports)
    before = tree(program.root)
    again = cli("import", exports, "--json").document
    assert (again["applied"], again["detail"]["new"], again["detail"]["known"]) == (False, 0, 2)
    assert [row["run"] for row in again["detail"]["runs"]] == ["run-001", "run-002"]
    shutil.copytree(exports, tmp_path / "renamed")
    assert cli("import", tmp_path / "renamed", "--json").document["detail"]["known"] == 2
    assert tree(program.root) == before


def test_a_source_that_has_grown_is_a_later_state_and_both_stay(program, cli, tmp_path):
    folder = tmp_path / "tb" / "a"
    folder.mkdir(parents=True)
    points = [(1, "train/reward", 0.25)]
    (folder / "events.out.tfevents.1").write_bytes(builders.event_file(points))
    cli("import", tmp_path / "tb")
    (folder / "events.out.tfevents.1").write_bytes(builders.event_file([*points, (2, "train/reward", 0.5)]))
    (row,) = cli("import", tmp_path / "tb", "--json").document["detail"]["runs"]
    assert (row["run"], row["earlier"], row["last_step"]) == ("run-002", "run-001", 2)
    assert state(program).runs["run-002"].created["earlier"] == "run-001"


def test_a_dry_run_names_the_same_runs_and_touches_nothing(program, cli, exports):
    before = tree(program.root)
    planned = cli("import", exports, "--infer-parents", "--dry-run", "--json").document
    assert tree(program.root) == before
    done = cli("import", exports, "--infer-parents", "--json").document
    assert (planned["applied"], planned["dry_run"], done["applied"]) == (False, True, True)
    assert planned["detail"] == done["detail"]


def test_parents_are_guessed_only_when_asked_and_marked(program, cli, exports):
    cli("import", exports, "--only", "base")
    assert state(program).runs["run-001"].parent is None
    rows = cli("import", exports, "--infer-parents", "--json").document["detail"]["runs"]
    assert [(row["parent"], row["parent_by"]) for row in rows] == [(None, None), ("run-001", "inferred")]
    created = state(program).runs["run-002"].created
    (change,) = [change for change in created["changes"] if change["counts"]]
    assert (change["key"], change["old"], change["new"]) == ("learning_rate", 1e-6, 1e-5)
    assert {change["key"] for change in created["changes"] if not change["counts"]} == {"name", "wandb.name"}


def test_parents_can_be_declared_by_name_or_run(program, cli, exports):
    cli("import", exports, "--only", "faster - lr")
    (row,) = cli("import", exports, "--only", "base", "--parent", "base=run-001", "--json").document["detail"]["runs"]
    assert (row["run"], row["parent"], row["parent_by"]) == ("run-002", "run-001", "declared")
    for arguments, told in (
        (("--parent", "base"), "no CHILD=PARENT"),
        (("--parent", "bas=run-001"), "did you mean 'base'"),
        (("--parent", "base=nobody"), "there is no run 'nobody'"),
        (("--only", "nobody"), "no run 'nobody'"),
        (("--reward", "reward/meen"), "did you mean 'reward/mean'"),
        (("--format", "wandb"), "did you mean 'wandb-"),
    ):
        answer = cli("import", exports, *arguments)
        assert answer.code == 2
        assert told in answer.err
    circle = cli("import", builders.write_exports(program.root / "other"), "--parent", "base=base")
    assert circle.code == 2 and "circle" in circle.err


def test_promote_refuses_an_imported_run_whatever_its_numbers_say(program, cli, exports):
    cli("import", exports)
    answer = cli("promote", "run-001", "--json")
    assert answer.code == 1
    assert "imported" in answer.document["error"]["message"]
    assert state(program).champion is None
    assert not any(event.kind in ("gated", "promoted") for event in Ledger(program.ledger).events())


def test_an_imported_run_is_no_parent_of_a_new_one(program, cli, exports):
    cli("import", exports)
    answer = cli("new-run", "--from", "run-001", "--hypothesis", "It goes on")
    assert answer.code == 2
    assert "no config to start from" in answer.err


def test_the_learning_curve_and_the_evals_are_in_the_report(program, cli, exports):
    cli("import", exports, "--infer-parents")
    assert cli("report", "run-002").code == 0
    folder = program.analysis_dir("run-002")
    text = (folder / "report.md").read_text()
    assert "Provenance" in text and "imported as wandb-csv from exports" in text
    assert "the parent is a guess" in text
    assert "never promoted" in text
    assert (folder / "plots" / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "plots" / "components-toy_env.png").exists()
    assert cli("report", "run-002", "--check").code == 0
    assert [finding for finding in verify(program.ledger) if finding.severity == "error"] == []


def test_a_run_of_unknown_names_gets_its_curve_from_the_option(program, cli, tmp_path):
    (tmp_path / "tb").mkdir()
    points = [(step, "score/eval", step / 4) for step in range(4)]
    (tmp_path / "tb" / "events.out.tfevents.1").write_bytes(builders.event_file(points))
    cli("import", tmp_path / "tb", "--reward", "score/eval")
    created = state(program).runs["run-001"].created
    assert created["renamed"] == {"train/imported/reward/mean": "score/eval"}
    cli("report", "run-001")
    assert (program.analysis_dir("run-001") / "plots" / "learning.png").exists()


def test_a_run_of_unknown_names_is_drawn_as_logged_and_asks_for_the_reward(program, cli, tmp_path):
    (tmp_path / "tb").mkdir()
    points = [(step, name, step / 4) for step in range(4) for name in ("aux", "score/eval")]
    (tmp_path / "tb" / "events.out.tfevents.1").write_bytes(builders.event_file(points))
    assert "`--reward METRIC` names it" in cli("import", tmp_path / "tb").out
    cli("report", "run-001")
    assert [path.name for path in (program.analysis_dir("run-001") / "plots").iterdir()] == ["logged.png"]


def test_show_tells_the_settings_and_the_last_values(program, cli, exports):
    cli("import", exports)
    shown = cli("show", "run-002")
    for text in ("as wandb-csv from exports", "learning_rate", "1e-05", "train/toy_env/reward/mean", "[redacted]"):
        assert text in shown.out
    document = cli("show", "run-002", "--json").document
    assert document["imported"]["settings"]["lora_alpha"] == 16
    assert document["evals"][0]["means"]["reward"] == {"mean": 0.25}  # no items, no interval


def test_verifiers_items_give_an_interval_and_compact_evidence(program, cli, tmp_path):
    rows = [builders.result_row(example, float(example % 2)) for example in range(6)]
    builders.write_results(tmp_path / "toy", rows, num_examples=6, rollouts_per_example=1)
    assert cli("import", tmp_path / "toy").code == 0
    (data,) = state(program).runs["run-001"].evals
    assert (data["n"], data["requested"], data["failures"]) == (6, 6, {"model": 3})
    reward = data["means"]["reward"]
    assert reward["low"] < reward["mean"] == 0.5 < reward["high"]
    items = program.root / data["file"]
    assert b"Which" not in items.read_bytes()
    assert [finding for finding in verify(program.ledger) if finding.severity == "error"] == []
    cli("report", "run-001")
    shown = (program.analysis_dir("run-001") / "rollouts.md").read_text()
    assert "\x1b" not in shown and "Which?" not in shown


def test_hostile_names_reach_no_terminal_and_no_page(program, cli, tmp_path):
    evil = "\x1b]0;owned\x07\u202eevil | `x` <img src=x>"
    records = [
        builders.wandb_run(evil, {"note": evil}),
        builders.wandb_history(0, **{"=cmd|x": 1, "train/reward": 0.5}),
    ]
    (tmp_path / "run-1.wandb").write_bytes(builders.wandb_log([*records, builders.wandb_exit(0)]))
    for arguments in (("import", tmp_path), ("list",), ("show", "run-001"), ("report", "run-001"), ("lineage",)):
        answer = cli(*arguments)
        assert answer.code == 0, answer.err
        assert "\x1b" not in answer.out + answer.err and "\u202e" not in answer.out + answer.err
    page = (program.analysis_dir("run-001") / "report.md").read_text()
    assert "\u202e" not in page and "\\<img src=x\\>" in page
    assert "<img src=x" not in (program.analysis_dir("run-001") / "report.html").read_text()
    assert (program.analysis_dir("run-001") / "data" / "metrics.csv").read_text().startswith("step,cmd|x,")


def test_many_imports_at_once_give_out_each_number_once(program, exports, tmp_path):
    plans = []
    for number in range(4):
        folder = tmp_path / f"tb{number}"
        folder.mkdir()
        (folder / "events.out.tfevents.1").write_bytes(builders.event_file([(number, "loss", 0.5)]))
        plans.append(plan_import(program, Request(folder)))
    assert {row.run for plan in plans for row in plan.rows} == {"run-001"}  # as each saw it
    for plan in plans:
        apply_import(program, plan)
    assert sorted(row.run for plan in plans for row in plan.rows) == [f"run-00{number}" for number in range(1, 5)]
    late = plan_import(program, Request(exports))
    twin = plan_import(program, Request(exports))
    apply_import(program, late)
    apply_import(program, twin)  # planned before the first was recorded, decided again under the lock
    assert [row.known for row in twin.rows] == [True, True]
    assert len(state(program).runs) == 6


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_disk_that_fails_leaves_ledger_and_analysis_as_they_were(program, exports, monkeypatch, failing):
    before = tree(program.root)
    plan = plan_import(program, Request(exports))
    calls, sync = [], os.fsync

    def fail(descriptor):
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        return sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InfraError):
        apply_import(program, plan)
    monkeypatch.undo()
    assert tree(program.root) == before


def test_a_refused_append_takes_the_moved_folders_back(program, exports, monkeypatch):
    plan = plan_import(program, Request(exports))
    before = tree(program.root)

    def refuse(self, build):
        build(self.state())
        raise InfraError("the disk is full")

    monkeypatch.setattr(Ledger, "append_locked", refuse)
    with pytest.raises(InfraError):
        apply_import(program, plan)
    monkeypatch.undo()
    assert tree(program.root) == before


def test_what_stands_in_the_way_is_moved_aside(program, cli, exports):
    left = program.analysis_dir("run-001") / "report.md"
    left.parent.mkdir(parents=True)
    left.write_text("left over")
    cli("import", exports)
    assert not left.exists()
    assert [path.read_text() for path in (program.outputs / "orphans").rglob("report.md")] == ["left over"]


def test_metric_tables_keep_values_exactly_and_long_ones_their_rare_points():
    short, kept = metrics_table({"a": {1: 0.1 + 0.2, 2: math.nan}, "b": {2: -math.inf, 3: 7.0}})
    assert list(csv.reader(io.StringIO(short))) == [
        ["step", "a", "b"],
        ["1", "0.30000000000000004", ""],
        ["2", "nan", "-inf"],
        ["3", "", "7"],
    ]
    assert kept == 3
    long = {"loss": {step: step / 7 for step in range(20_000)}, "eval": dict.fromkeys((1, 777, 19_998), 0.5)}
    text, kept = metrics_table(long, limit=50_000)
    rows = list(csv.reader(io.StringIO(text)))
    assert len(text) <= 50_000 and kept < 20_000
    assert [row[0] for row in rows[1:] if row[1] != ""] == ["1", "777", "19998"]
    assert rows[-1][0] == "19999"


def test_large_configs_are_kept_as_a_file_alone(program, cli, tmp_path):
    records = [builders.wandb_run("big", {f"key{number}": "y" * 1000 for number in range(100)})]
    (tmp_path / "run-1.wandb").write_bytes(builders.wandb_log([*records, builders.wandb_history(0, loss=1)]))
    cli("import", tmp_path)
    created = state(program).runs["run-001"].created
    assert "settings" not in created
    config = json.loads((program.analysis_dir("run-001") / "import" / "config.json").read_text())
    assert len(config) == 100
