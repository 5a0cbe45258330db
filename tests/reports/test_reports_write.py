"""Writing and checking reports: same inputs, same bytes, with and without the run directory."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.errors import ConfigError, NotFoundError, UsageError
from harness.envs.registry import ENVIRONMENTS
from harness.evaluation.records import read_items, write_items
from harness.ledger import Ledger
from harness.program import Program
from harness.reports import check_report, write_report
from harness.reports import summary as summary_module
from harness.reports import write as write_module
from harness.reports.blocks import Block, Code, Heading
from harness.reports.compact import choose_samples, merge_metrics, metrics_csv, parse_metrics
from harness.reports.markdown import render_markdown
from harness.reports.model import Estimate
from harness.reports.sections import estimate
from harness.reports.write import MAX_FOLDER_BYTES, build_report
from tests.reports.reports_synthetic import (
    ACTOR,
    ENV,
    RUN,
    Recorder,
    created,
    items,
    load_bench,
    make_run,
    rollout,
    write_lines,
)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def report(program: Program) -> str:
    return build_report(program, RUN)["report.md"].decode()


def test_everything_is_written_once_and_a_second_time_changes_nothing(trained):
    first = write_report(trained, RUN)
    names = {str(path.relative_to(trained.analysis_dir(RUN))) for path in first.paths}
    assert first.changed
    assert {"report.md", "report.html", "rollouts.md", "data/metrics.csv", "data/rollouts.jsonl"} <= names
    plots = ("gain-bench", "heldout-bench", "labels-bench", "learning", "components-bench", "rollouts", "optimisation")
    assert {f"plots/{name}.png" for name in plots} <= names
    before = snapshot(trained.analysis_dir(RUN))
    assert not write_report(trained, RUN).changed
    assert snapshot(trained.analysis_dir(RUN)) == before
    assert check_report(trained, RUN) == []


def test_a_reviewer_without_outputs_gets_the_same_bytes(trained, real_plots):
    write_report(trained, RUN)
    before = snapshot(trained.analysis_dir(RUN))
    shutil.rmtree(trained.outputs)
    ENVIRONMENTS.pop(ENV)  # nor the data of the environment
    assert check_report(trained, RUN) == []
    shutil.rmtree(trained.analysis_dir(RUN) / "plots")
    (trained.analysis_dir(RUN) / "report.md").unlink()
    assert write_report(trained, RUN).changed
    assert snapshot(trained.analysis_dir(RUN)) == before


def test_another_process_with_another_locale_and_hash_seed_agrees(trained, real_plots):
    write_report(trained, RUN)
    shutil.rmtree(trained.outputs)
    script = (
        "import sys; from pathlib import Path; from harness.program import Program;"
        "from harness.reports import check_report;"
        "print(check_report(Program.find(Path(sys.argv[1]), environ={}), 'run-002'))"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo", "LC_ALL": "C", "MPLBACKEND": "svg"}
    (trained.root / "matplotlibrc").write_text("lines.linewidth: 9\nfont.size: 30\n")
    done = subprocess.run(
        [sys.executable, "-c", script, str(trained.root)], env=environ, cwd=trained.root, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_folder_stays_small(trained):
    paths = write_report(trained, RUN).paths
    assert sum(path.stat().st_size for path in paths) < MAX_FOLDER_BYTES
    assert (trained.analysis_dir(RUN) / "report.md").stat().st_size < 1_000_000


def test_the_first_screen_answers_what_why_and_whether(trained):
    first_screen = report(trained).split("## Gates")[0]
    for expected in (
        "Alpha 64 learns faster",
        "**keep**",
        "`lora.alpha` | `32` | `64`",
        "no collapse",
        "accuracy",
        "format",
    ):
        assert expected.replace("32`", "32.0`").replace("64`", "64.0`") in first_screen
    assert len(first_screen.splitlines()) < 45


def test_held_out_numbers_are_those_of_the_ledger(trained):
    final = Ledger(trained.ledger).state().runs[RUN].evals[-1]
    gain = final["gain"]["accuracy"]
    shown = f"{gain['mean']:+.3f}** ({gain['low']:+.3f} to {gain['high']:+.3f})"
    assert shown in report(trained)


@pytest.mark.parametrize("name", ["report.md", "report.html", "rollouts.md", "data/metrics.csv", "plots/learning.png"])
def test_check_names_a_changed_and_a_missing_file(trained, name):
    write_report(trained, RUN)
    path = trained.analysis_dir(RUN) / name
    path.write_bytes(path.read_bytes() + b"x")
    assert check_report(trained, RUN) == [f"{name} is stale"]
    path.unlink()
    expected = f"{RUN} has no report" if name == "report.md" else f"{name} is missing"
    assert check_report(trained, RUN) == [expected]


def test_a_new_decision_makes_the_report_stale(trained):
    write_report(trained, RUN)
    Ledger(trained.ledger).append(RUN, "decided", {"decision": "reject", "reason": "On reflection."}, actor=ACTOR)
    stale = check_report(trained, RUN)
    assert "report.md is stale" in stale
    assert "plots/learning.png is stale" not in stale
    write_report(trained, RUN)
    assert "**reject**" in (trained.analysis_dir(RUN) / "report.md").read_text()


def test_events_of_other_runs_leave_a_report_current(trained):
    write_report(trained, RUN)
    Ledger(trained.ledger).append("run-003", "created", created(), actor=ACTOR)
    assert check_report(trained, RUN) == []


def test_plots_of_an_earlier_report_are_found_and_removed(trained):
    write_report(trained, RUN)
    old = trained.analysis_dir(RUN) / "plots/gone.png"
    old.write_bytes(b"old")
    assert check_report(trained, RUN) == ["plots/gone.png belongs to no current report"]
    write_report(trained, RUN)
    assert not old.exists()
    assert (trained.analysis_dir(RUN) / "evals").is_dir()


def test_a_report_drawn_by_another_matplotlib_is_compared_without_its_images(trained):
    write_report(trained, RUN)
    folder = trained.analysis_dir(RUN)
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").write_bytes(page.replace(write_module.GENERATOR.encode(), b"harness; matplotlib 3.0"))
    (folder / "plots/learning.png").write_bytes(b"other renderer")
    assert check_report(trained, RUN) == []
    text = (folder / "report.html").read_bytes()
    (folder / "report.html").write_bytes(text.replace(b"Alpha 64", b"Alpha 65"))
    assert check_report(trained, RUN) == ["report.html is stale"]


def test_prompts_that_may_not_be_redistributed_stay_out_of_every_file(program, monkeypatch):
    spec = ENVIRONMENTS[ENV]
    monkeypatch.setitem(
        ENVIRONMENTS, ENV, type(spec)(ENV, lambda args: load_bench({"redistributable": False}), "b", spec.args)
    )
    make_run(program)
    write_report(program, RUN)
    everything = b"".join(snapshot(program.analysis_dir(RUN)).values())
    assert b"Aspirin" not in everything
    assert b"may not be redistributed" in everything
    assert b"Blocking COX-1 is inhibition" in everything
    assert b"train-00" in everything


def test_an_environment_nobody_can_load_keeps_its_prompts_to_itself(program):
    make_run(program)
    ENVIRONMENTS.pop(ENV)
    write_report(program, RUN)
    assert b"Aspirin" not in b"".join(snapshot(program.analysis_dir(RUN)).values())


def test_redistributable_prompts_are_shown(trained):
    assert "Aspirin blocks COX" in build_report(trained, RUN)["rollouts.md"].decode()


def test_captured_variables_are_not_copied(trained):
    files = build_report(trained, RUN)
    assert b"hf_canary" not in b"".join(files.values())
    assert b"2.13.0" in files["report.md"]


@pytest.mark.parametrize(("source", "shared"), [({}, True), ({"source": "official", "path": "."}, False)])
def test_the_official_drugprot_text_is_never_shared(source, shared):
    assert summary_module.redistributable("drugprot", source) is shared


def test_damaged_compact_data_are_an_error_and_not_a_report(trained):
    write_report(trained, RUN)
    shutil.rmtree(trained.outputs)
    for name in ("data/rollouts.jsonl", "data/summary.json", "data/metrics.csv"):
        path = trained.analysis_dir(RUN) / name
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2] + b"\x22{,")
        with pytest.raises(ConfigError, match="damaged"):
            build_report(trained, RUN)
        path.write_bytes(good)


def test_unknown_and_malformed_runs_are_refused(trained):
    with pytest.raises(NotFoundError):
        write_report(trained, "run-099")
    with pytest.raises(UsageError):
        write_report(trained, "../run-002")


def test_a_run_that_was_only_created_has_a_report(program):
    Recorder(program).add("created", created())
    write_report(program, RUN)
    text = report(program)
    assert "The run has not been started." in text
    assert "No held-out eval is recorded." in text
    assert check_report(program, RUN) == []


def test_a_run_without_gate_event_shows_the_bar_as_not_run(program):
    record = Recorder(program)
    record.add("created", created())
    base = items(0.3, 0.6, 1)
    record.evaluated(base, "base", 0)
    record.evaluated(items(0.6, 0.9, 3), "policy", 10, base=base)
    text = report(program)
    assert "≥ 0.3" in text
    assert text.count("not run") >= 3
    assert "**pass**" not in text


def test_a_run_on_the_shipped_prompt_has_one_base_and_one_gain(program):
    record = Recorder(program)
    record.add("created", created())
    base = items(0.3, 0.6, 1)
    record.evaluated(base, "base", 0)
    record.evaluated(items(0.6, 0.9, 3), "policy", 10, base=base, base_shipped=base)
    text = report(program)
    assert "| Metric | Base | Policy | Gain |" in text
    assert "shipped prompt" not in text


def test_only_a_score_is_coloured_good_or_bad():
    fall = Estimate(-0.2, -0.3, -0.1)
    assert estimate(fall, signed=True)[0].tone == "bad"
    assert estimate(Estimate(0.2, 0.1, 0.3), signed=True)[0].tone == "good"
    length = estimate(fall, signed=True, judged=False)[0]
    assert (length.style, length.tone) == ("strong", "")


def test_non_finite_numbers_are_shown_as_such(program):
    record = Recorder(program)
    record.add("created", created())
    nan = {"$non_finite": "nan"}
    estimate = {"mean": nan, "low": {"$non_finite": "-inf"}, "high": {"$non_finite": "inf"}}
    means = {"reward": estimate, "accuracy": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    for subject, step in (("base", 0), ("policy", 5)):
        head = {"subject": subject, "step": step, "env": ENV, "prompt": "run", "n": 3, "requested": 3}
        record.add("evaluated", {**head, "failures": {}, "means": means, "gain": means})
    assert "not finite (−∞ to ∞)" in report(program)


def warnings_of(program: Program) -> str:
    return report(program).split("## Warnings")[1].split("\n## ")[0]


def test_collapse_is_said_loudly(program):
    make_run(program, collapse=True)
    assert "Collapse sign" in warnings_of(program)
    assert "Warnings | **" in report(program)


def test_what_a_watchdog_marked_is_a_warning(program):
    record = Recorder(program)
    record.add("created", created())
    record.add("started", {"attempt": 1, "host": "h", "pid": 1, "pid_start": "1"})
    seen = [
        {"rule": "entropy", "action": "mark", "step": 7, "key": "k", "reason": "train/entropy fell"},
        {"rule": "kl", "action": "stop", "step": 9, "key": "k", "reason": "train/kl_sampler is 9"},
    ]
    ended = {"attempt": 1, "outcome": "stopped", "reason": "the watchdog kl stops the run", "step": 9}
    record.add("finished", ended | {"summary": {"watchdog": seen}})
    said = warnings_of(program)
    assert "A watchdog marked the run: entropy at step 7: train/entropy fell." in said
    assert "The last attempt ended as stopped: the watchdog kl stops the run." in said
    assert "train/kl_sampler is 9" not in said


def test_one_answer_for_everything_is_a_sign_of_collapse(program):
    record = Recorder(program)
    record.add("created", created())
    flat = [
        type(i)(i.task, i.cluster, 0, i.reward, i.components, {}, i.failure, "p", "c", None, {"answer": "E"})
        for i in items(0.5, 1, 3)
    ]
    record.evaluated(items(0.3, 0.6, 1), "base", 0)
    record.evaluated(flat, "policy", 10, base=items(0.3, 0.6, 1))
    assert "one answer is 100% of the held-out answers" in warnings_of(program)


def test_a_gain_in_form_alone_is_called_one(program):
    record = Recorder(program)
    record.add("created", created())
    base = items(0.3, 0.3, 1)
    better = [
        type(i)(i.task, i.cluster, 0, i.reward + 0.1, {**i.components, "format": 1.0}, {}, i.failure) for i in base
    ]
    record.evaluated(base, "base", 0)
    record.evaluated(better, "policy", 10, base=base)
    assert "in form, not in knowledge" in warnings_of(program)


def test_changed_item_files_are_noticed(trained):
    path = next((trained.analysis_dir(RUN) / "evals").glob("step_30.*"))
    path.write_bytes(path.read_bytes()[:-2] + b"\n")
    assert "differ from their hash in the ledger" in warnings_of(trained)


def test_item_paths_outside_the_program_are_not_opened(trained):
    secret = trained.root.parent / "outside.jsonl"
    secret.write_text("secret\n")
    event = Ledger(trained.ledger).state().runs[RUN].evals[-1]
    Ledger(trained.ledger).append(RUN, "evaluated", {**event, "file": "../outside.jsonl"}, actor=ACTOR)
    assert "differ from their hash" in warnings_of(trained)


def test_metrics_merge_by_step_and_a_resumed_attempt_wins():
    rows: list[dict[str, Any]] = [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0, "b": 5},
        {"step": 2, "a": 3.0, "note": "x"},
        {"a": 9},
    ]
    merged = merge_metrics(rows)
    assert merged.steps == (1, 2)
    assert merged.columns["a"] == (1.0, 3.0)
    assert math.isnan(merged.columns["b"][0])
    assert merged.columns["b"][1] == 5


def test_metrics_survive_csv_and_long_runs_are_thinned_with_their_last_step():
    metrics = merge_metrics([{"step": s, "a": s / 3, "b": math.inf} for s in range(1, 1001)])
    assert parse_metrics(metrics_csv(metrics), "x").steps == metrics.steps
    thin = parse_metrics(metrics_csv(metrics, 4000), "x")
    assert len(metrics_csv(metrics, 4000)) <= 4000
    assert thin.steps[0] == 1 and thin.steps[-1] == 1000
    assert thin.columns["a"][-1] == pytest.approx(1000 / 3, rel=1e-5)
    assert thin.columns["b"][0] == math.inf


def damage(path: Path, *texts: bytes) -> int:
    """Append lines to a file and return the number of the first of them."""
    lines = path.read_bytes().count(b"\n")
    with path.open("ab") as file:
        file.write(b"".join(text + b"\n" for text in texts))
    return lines + 1


def test_damaged_lines_are_told_with_file_and_line(trained):
    outputs = trained.run_dir(RUN)
    metrics = damage(outputs / "metrics.jsonl", b'{"step": 99, "train/ben', b"[]")
    last = max((outputs / "rollouts").glob("step_*/*.jsonl"), key=lambda path: int(path.parent.name[5:]))
    name = last.relative_to(outputs).as_posix()
    torn = damage(last, b'{"task": "torn')
    written = write_report(trained, RUN)
    assert dict(written.damaged) == {"metrics.jsonl": (metrics, metrics + 1), name: (torn,)}
    text = report(trained)
    assert f"lines {metrics}, {metrics + 1} could not be read and are left out." in text.replace("\\", "")
    assert f"line {torn} could not be read and is left out." in text.replace("\\", "")
    assert check_report(trained, RUN) == []
    shutil.rmtree(trained.outputs)  # a reviewer is told the same
    assert check_report(trained, RUN) == []


def test_whole_files_leave_no_trace_in_the_summary(trained):
    assert write_report(trained, RUN).damaged == ()
    assert "damaged" not in (trained.analysis_dir(RUN) / "data/summary.json").read_text()


def test_an_old_summary_that_counts_broken_lines_still_warns(trained):
    write_report(trained, RUN)
    shutil.rmtree(trained.outputs)
    path = trained.analysis_dir(RUN) / "data/summary.json"
    path.write_text(path.read_text().replace('"broken_lines":0', '"broken_lines":2,\n"damaged":[1,{"file":"x"}]'))
    assert "2 line(s) of metrics.jsonl could not be read" in report(trained)


def test_samples_are_best_worst_and_random_and_depend_on_the_run_only():
    rows = [rollout(5, i, f"c{i}", i / 20) for i in range(20)] + [rollout(5, 20, "lost", 9.0, failure="infra")]
    picks = choose_samples(RUN, ENV, {1: rows[:3], 5: rows})
    assert picks == choose_samples(RUN, ENV, {1: rows[:3], 5: list(reversed(rows))})
    assert [p["reward"] for p in picks if p["pick"] == "best"] == [0.95, 0.9]
    assert sorted(p["reward"] for p in picks if p["pick"] == "worst") == [0.0, 0.05]
    assert len([p for p in picks if p["pick"] == "random"]) == 3
    assert len({(p["step"], p["index"]) for p in picks}) == len(picks)
    others = [choose_samples(f"run-{n:03d}", ENV, {5: rows}) for n in range(5)]
    assert len({tuple(p["index"] for p in chosen if p["pick"] == "random") for chosen in others}) > 1


def test_fewer_rollouts_than_places_are_each_shown_once():
    rows = [rollout(5, i, f"c{i}", 0.5) for i in range(3)]
    assert sorted(p["index"] for p in choose_samples(RUN, ENV, {5: rows})) == [0, 1, 2]
    assert choose_samples(RUN, ENV, {5: []}) == []


def test_huge_completions_are_cut_visibly_and_the_folder_stays_small(trained):
    folder = trained.run_dir(RUN) / "rollouts/step_30"
    huge = [rollout(30, i, "x" * 200_000 + "\ud800", 0.5, prompt="y" * 200_000) for i in range(40)]
    write_lines(folder / f"{ENV}.jsonl", huge)
    for name in ("other", "third"):
        write_lines(folder / f"{name}.jsonl", huge)
    files = build_report(trained, RUN)
    assert sum(map(len, files.values())) < MAX_FOLDER_BYTES
    assert b"characters omitted" in files["rollouts.md"]


def test_markdown_over_the_limit_drops_blocks_and_says_so():
    blocks: list[Block] = [Heading(1, "run"), *(Code("x" * 1000) for _ in range(100))]
    text = render_markdown(blocks, limit=20_000)
    assert len(text.encode()) < 20_000
    assert text.rstrip().endswith("blocks omitted: the report would pass 20000 bytes.**")
    assert "omitted" not in render_markdown(blocks)


def test_baselines_of_an_environment_are_shown(trained, monkeypatch):
    class Module:
        @staticmethod
        def report_rows(env, tasks):
            cue = sum(("E" if int(task.id[-3:]) < 133 else "A") == task.answer for task in tasks) / len(tasks)
            constant = sum(task.label == "ACTIVATOR" for task in tasks) / len(tasks)
            return [("always ACTIVATOR", "accuracy", constant), ("keyword rule", "accuracy", cue)]

    monkeypatch.setattr(summary_module, "_exists", lambda name: name == "harness.envs.bench.baselines")
    monkeypatch.setitem(sys.modules, "harness.envs.bench.baselines", Module)
    text = report(trained)
    assert "| always ACTIVATOR | accuracy | 0.286 |" in text
    assert "| keyword rule | accuracy | 0.950 |" in text
    assert "'keyword rule' reaches accuracy 0.950 without a model" in text
    assert "'always ACTIVATOR' reaches" not in text


def test_metrics_of_a_part_of_the_items_and_wide_baselines_are_shown(trained, monkeypatch):
    class Metrics:
        @staticmethod
        def corpus_metrics(items):
            return {"fmax": len(items) / 1000}

    class Baselines:
        @staticmethod
        def report_rows(env, tasks):
            return [("copy", "reward", 0.25), ("copy", "similarity", 0.5), ("table", "similarity", 1.0)]

    path = trained.analysis_dir(RUN) / "evals/step_30.policy.bench.jsonl"
    records = [replace(r, metrics={"part": 0.25} if n % 2 else {}) for n, r in enumerate(read_items(path))]
    write_items(path, records)
    counted = sum(record.counts for record in records)
    have = sum(record.counts and bool(record.metrics) for record in records)
    modules = {"harness.envs.bench.metrics": Metrics, "harness.envs.bench.baselines": Baselines}
    monkeypatch.setattr(summary_module, "_exists", modules.__contains__)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    text = report(trained)
    assert f"| part | {have} | — | 0.250 |" in text
    assert f"| fmax | {counted} | 0.140 | {counted / 1000:.3f} |" in text
    assert "| Metric | copy | table |" in text
    assert "| reward | 0.250 | — |" in text
    assert "| similarity | 0.500 | 1.000 |" in text
