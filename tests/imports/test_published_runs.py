"""The twelve published runs of Trinity-Mini-DrugProt-Think, as their authors describe them."""

import os
from pathlib import Path

import pytest

from harness.imports import wandb_csv
from harness.imports.source import Source
from harness.ledger import Ledger
from harness.ledger.verify import verify

SHARED = Path(os.environ.get("HARNESS_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
RUNS = SHARED / "published-runs"
pytestmark = pytest.mark.skipif(not RUNS.is_dir(), reason=f"the published runs are not at {RUNS}")

# name: (last step, last held-out step, last held-out reward, learning rate, alpha, max tokens, parent)
FACTS = {
    "w1-baseline-fast": (100, 75, 0.71565, 1e-6, 16, 512, None),
    "w1-alpha64-baseline": (100, 75, 0.736525, 1e-6, 64, 512, "w1-baseline-fast"),
    "w1-alpha32-baseline": (100, 75, 0.70685, 1e-6, 32, 512, "w1-baseline-fast"),
    "w1-alpha128-baseline": (70, 50, 0.689325, 1e-6, 128, 512, "w1-baseline-fast"),
    "w1-alpha64-lr1e-5": (82, 50, 0.6288, 1e-5, 64, 512, "w1-alpha64-baseline"),
    "w1-alpha64-lr3e-6": (100, 75, 0.768675, 3e-6, 64, 512, "w1-alpha64-baseline"),
    "w1-alpha64-lr3e-6-b64-r16": (100, 75, 0.74685, 3e-6, 64, 512, "w1-alpha64-lr3e-6"),
    "w1-alpha64-lr5e-6": (100, 75, 0.788375, 5e-6, 64, 512, "w1-alpha64-baseline"),
    "w1-alpha64-lr3e-6-2048-max-tokens": (100, 75, 0.76475, 3e-6, 64, 2048, "w1-alpha64-lr3e-6"),
    "w1-alpha64-lr3e-6-1024-max-tokens": (100, 75, 0.751425, 3e-6, 64, 1024, "w1-alpha64-lr3e-6"),
    "w2-alpha64-lr3e-6-2048-max-tokens-t0.15": (100, 75, 0.722975, 3e-6, 64, 2048, "w1-alpha64-lr3e-6-2048-max-tokens"),
    "w2-alpha64-lr3e-6-2048-max-tokens-r4": (100, 75, 0.7541, 3e-6, 64, 2048, "w1-alpha64-lr3e-6-2048-max-tokens"),
}
STOPPED = {"w1-alpha64-lr1e-5", "w1-alpha128-baseline"}


def read():
    return {run.name: run for run in wandb_csv.read(Source(RUNS))}


def test_all_twelve_are_read_with_the_configs_they_were_launched_with():
    runs = read()
    assert list(runs) == list(FACTS)
    for name, (last, step, reward, rate, alpha, tokens, _) in FACTS.items():
        run, config = runs[name], runs[name].config
        assert (run.last_step, run.evals[-1].step) == (last, step), name
        assert run.evals[-1].means["reward"] == pytest.approx(reward, abs=1e-6), name
        assert (config["learning_rate"], config["lora_alpha"]) == (rate, alpha), name
        assert (config["sampling"]["max_tokens"], config["wandb"]["name"]) == (tokens, name), name
        assert run.env == "openmed_drugprot"
        assert run.outcome == ("stopped" if name in STOPPED else "completed"), name


def test_every_number_of_the_exports_arrives_unchanged():
    import csv

    runs = read()
    seen = 0
    for path in sorted(RUNS.glob("*.csv")):
        titles, *rows = list(csv.reader(path.open()))
        for index, title in enumerate(titles[1:], 1):
            name, _, metric = title.rpartition(" - ")
            if metric.endswith(("__MIN", "__MAX")):
                continue
            cells = {int(row[0]): float(row[index]) for row in rows if row[index]}
            assert runs[name].metrics[metric] == cells, title
            seen += len(cells)
    assert seen > 7000


def test_the_run_with_the_highest_rate_collapsed_around_step_77():
    series = read()["w1-alpha64-lr1e-5"].metrics["reward/mean"]
    assert min(value for step, value in series.items() if 20 <= step <= 70) > 0.5
    assert max(value for step, value in series.items() if step >= 77) < 0.01


def test_the_first_held_out_row_of_all_twelve_is_the_untrained_model():
    firsts = [run.evals[0] for run in read().values()]
    assert {(first.subject, first.step, first.source_step, first.requested) for first in firsts} == {
        ("base", 0, 1, 200)
    }
    rewards = [first.means["reward"] for first in firsts]
    assert len(rewards) == 12 and 0.69 < min(rewards) < max(rewards) < 0.74


def test_a_program_made_for_them_lists_compares_and_draws_them(program, cli):
    answer = cli("import", RUNS, "--infer-parents", "--json")
    assert answer.code == 0
    detail = answer.document["detail"]
    assert (detail["new"], detail["known"], detail["format"]) == (12, 0, "wandb-csv")
    ids = {row["name"]: row["run"] for row in detail["runs"]}
    assert {row["name"]: row["parent"] for row in detail["runs"]} == {
        name: ids[facts[-1]] if facts[-1] else None for name, facts in FACTS.items()
    }
    listed = cli("list", "--json").document
    rewards = {row["run"]: row["reward"]["openmed_drugprot"]["mean"] for row in listed["rows"]}
    assert listed["counts"]["total"] == 12
    assert rewards == {ids[name]: pytest.approx(facts[2], abs=1e-6) for name, facts in FACTS.items()}
    assert max(rewards, key=rewards.__getitem__) == ids["w1-alpha64-lr5e-6"]
    stopped = {row["run"] for row in listed["rows"] if row["status"] == "stopped"}
    assert stopped == {ids[name] for name in STOPPED}
    compared = cli("diff", ids["w1-alpha64-baseline"], ids["w1-alpha64-lr1e-5"], "--json").document
    assert [(row["key"], row["old"], row["new"]) for row in compared["rows"] if row["counts"]] == [
        ("learning_rate", 1e-6, 1e-5)
    ]
    tree = cli("lineage", "--json").document
    assert {row["run"]: row["parent"] for row in tree["rows"]} == {row["run"]: row["parent"] for row in listed["rows"]}
    ranked = cli("list", "--sort", "-reward", "--json").document
    assert [row["run"] for row in ranked["rows"]] == sorted(ids.values(), key=rewards.__getitem__, reverse=True)
    assert ranked["not_comparable"] == []  # one import, one protocol
    shown = cli("show", ids["w1-alpha128-baseline"])
    assert "stopped" in shown.out and "lora_alpha" in shown.out and "0.689" in shown.out
    run = ids["w1-alpha64-lr1e-5"]
    assert cli("report", run).code == 0
    assert (program.analysis_dir(run) / "plots" / "learning.png").stat().st_size > 10_000
    text = (program.analysis_dir(run) / "report.md").read_text()
    assert "0.698 → 0.629" in text and "learning_rate" in text and "plots/learning.png" in text
    assert cli("promote", ids["w1-alpha64-lr5e-6"]).code == 1
    assert [finding for finding in verify(program.ledger) if finding.severity == "error"] == []
    assert cli("import", RUNS, "--json").document["detail"]["new"] == 0
    assert sum(event.kind == "imported" for event in Ledger(program.ledger).events()) == 12


def test_the_learning_curves_of_all_twelve_say_what_their_authors_say(program, cli, tmp_path):
    assert cli("import", RUNS, "--infer-parents").code == 0
    document = cli("curves", "--png", tmp_path / "curves.png", "--json").document
    rows = {row["name"]: row for row in document["rows"]}
    assert set(rows) == set(FACTS) and document["not_comparable"] == []
    assert {name: row["last_step"] for name, row in rows.items()} == {name: facts[0] for name, facts in FACTS.items()}
    collapsed = rows.pop("w1-alpha64-lr1e-5")
    assert collapsed["highest"] > 0.6 and collapsed["last"] < 0.01 and collapsed["lowest_step"] >= 77
    assert min(row["last"] for row in rows.values()) > 0.4  # no other run collapsed
    assert (tmp_path / "curves.png").stat().st_size > 50_000
