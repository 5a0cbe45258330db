"""The part of a report that a warm start adds: what the loop added to it, and what reads nothing beside both."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from harness.evaluation.records import read_items
from harness.evaluation.statistics import paired_difference
from harness.reports import summary as summary_module
from harness.reports.write import build_report, check_report, write_report
from tests.reports.reports_synthetic import ENV, RUN, Recorder, created, items, write_outputs

WARMUP = {"steps": 40, "demonstrations": 100, "tokens": 8000, "loss_first": 2.5, "loss_last": 0.25}


def warm_run(program, final=0.9, steps=(0, 30)):
    record = Recorder(program)
    record.add("created", created())
    record.add("started", {"attempt": 1, "host": "h", "pid": 1, "pid_start": "1"})
    base = items(0.3, 0.6, 1)
    record.evaluated(base, "base", 0)
    for step in steps:
        record.evaluated(items(0.45 if step == 0 else final, 0.95, 3 + step), "policy", step, base=base)
    ended = {"attempt": 1, "outcome": "completed", "reason": None, "step": steps[-1], "wall_s": 1.0, "tokens": 9}
    record.add("finished", ended | {"summary": {"warmup": WARMUP}})
    write_outputs(program.run_dir(RUN))
    return program


def report(program):
    return build_report(program, RUN)["report.md"].decode().replace("\\", "")


def test_base_warm_start_and_final_stand_side_by_side_with_the_paired_difference(program, real_plots):
    text = report(warm_run(program))
    assert "40 supervised steps on 100 training tasks (8000 tokens of replies; loss 2.500 → 0.250" in text
    assert "| Metric | Base | Warm start | Step 30 | Step 30 − warm start |" in text
    warm, final = (read_items(program.analysis_dir(RUN) / f"evals/step_{step}.policy.{ENV}.jsonl") for step in (0, 30))
    found = paired_difference(final, warm, "accuracy")
    spelt = f"**+{found.mean:.3f}** (+{found.low:.3f} to +{found.high:.3f})"
    assert (
        found.low > 0 and spelt in text.split("Against its own warm start")[1].split("| accuracy |")[1].split("\n")[0]
    )
    assert f"accuracy over its own warm start {spelt}" in text.split("## Change")[0]
    assert "| 0, warm start |" in text
    assert "step 0 is the base model and, above or below it, the warm start" in text


def test_references_and_answers_are_shown_where_the_right_answers_are_known(program):
    text = report(warm_run(program))
    found = re.search(r"\| always ([A-Z-]+) \| 1.000 \|", text)  # every task of the environment has one answer
    assert found is not None
    label = found[1]
    row = next(line for line in text.split("\n") if line.startswith("| format only"))
    answers = json.loads(build_report(program, RUN)["data/summary.json"])["warm_start"][0]["answers"]
    given = {one["answer"]: one["final"] for one in answers}
    assert float(row.split("|")[2]) == pytest.approx(given["E"] / sum(given.values()), abs=5e-4)
    shown = next(line for line in text.split("\n") if line.startswith(f"| E {label} |"))
    assert "100.0%" in shown and f"{given['E'] / sum(given.values()):.1%}" in shown
    assert "| cue words |" not in text


def test_no_gain_over_the_warm_start_is_a_warning_even_when_the_base_is_beaten(program):
    text = report(warm_run(program, final=0.45))
    assert "accuracy is not shown to rise over the run's own warm start" in text.split("## Warnings")[1]
    (row,) = json.loads(build_report(program, RUN)["data/summary.json"])["warm_start"]
    assert row["gain"]["accuracy"]["low"] <= 0


def test_a_run_that_only_warmed_up_shows_that(program):
    text = report(warm_run(program, steps=(0,)))
    assert "| Metric | Base | Warm start |" in text
    assert "− warm start" not in text
    assert "warm_start" not in json.loads(build_report(program, RUN)["data/summary.json"])


def test_the_same_bytes_without_the_run_directory(program):
    write_report(warm_run(program), RUN)
    shutil.rmtree(program.outputs)
    assert check_report(program, RUN) == []


def test_a_run_without_warm_start_has_nothing_of_it(trained):
    files = build_report(trained, RUN)
    assert b"warm" not in files["report.md"]
    assert "warm_start" not in json.loads(files["data/summary.json"])
    assert summary_module.env_module(ENV, "baselines") is None
