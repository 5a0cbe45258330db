"""The side-by-side benchmark: its arithmetic, one small run of it for the ledger alone, and the table in the docs."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import compare_tools
import ledger
import ledger_compare

ROOT = ledger_compare.ROOT


def wrote(ids, began=0.0, ended=2.0, errors=()):
    return {
        "ids": ids,
        "errors": list(errors),
        "times": [0.5] * (len(ids) + len(errors)),
        "began": began,
        "ended": ended,
    }


def test_what_was_lost_doubled_and_refused_is_counted():
    whole = [(name, 8, 3) for name in "abcd"]
    assert ledger_compare.judge([wrote(["a", "b"]), wrote(["c", "d"], 1.0, 3.0)], whole) == {
        "rate": pytest.approx(4 / 3),
        "slowest_ms": 500,
        "errors": 0,
        "lost": 0,
        "doubled": 0,
    }
    bad = ledger_compare.judge(
        [wrote(["a", "b"]), wrote(["b", "d"], errors=["Busy"])], [*whole[:2], ("d", 8, 2), whole[0]]
    )
    assert (bad["lost"], bad["doubled"], bad["errors"]) == (1, 2, 1)  # d lacks a metric; b was told twice, a is twice


def test_a_figure_is_a_median_and_a_failure_is_summed():
    row = dict.fromkeys((key for key, _, _ in ledger_compare.ROWS), 1.0)
    found = [
        row | {"create_s": value, "lost": value, "kinds": [], "version": "1", "python": "3"} for value in (1, 2, 9)
    ]
    figures = ledger_compare.summarise([{**one, "flushes": None} for one in found])["figures"]
    assert (figures["create_s"], figures["lost"], figures["flushes"]) == (2, 12, None)


def test_a_worker_that_prints_no_result_is_an_error():
    with pytest.raises(ledger_compare.WorkerError, match="no such module"):
        ledger_compare.result_of("noise\n", "no such module")
    assert ledger_compare.result_of('noise\nRESULT {"a": 1}\nmore noise\n', "") == {"a": 1}


def test_an_exception_of_a_tool_is_counted_and_the_next_run_goes_on():
    class Tool:
        def create(self, name, number):
            if number == 2:
                raise TimeoutError
            return name

        def runs(self):
            return []

    found = compare_tools.record(Tool(), "w", 3, 1)
    assert (found["ids"], found["errors"], len(found["times"])) == (["w-1", "w-3"], ["TimeoutError"], 3)


def test_the_ledger_goes_through_every_job(tmp_path):
    options = argparse.Namespace(runs=6, writers=2, repeats=1)
    found = ledger_compare.measure(sys.executable, "harness", tmp_path / "store", options)
    assert (found["errors"], found["lost"], found["doubled"], found["kinds"]) == (0, 0, 0, [])
    assert found["flushes"] in (4, None) and found["files"] == 1  # None where there is no strace
    assert all(found[key] > 0 for key in ("create_s", "list_s", "help_ms", "command_ms", "rate", "mib"))


@pytest.mark.parametrize(("value", "code", "verdict"), [(0.5, 0, "pass"), (0.500001, 1, "FAIL")])
def test_the_ledger_benchmark_says_of_each_bar_whether_it_holds(monkeypatch, capsys, value, code, verdict):
    figures = [ledger.Figure("bytes a line", 700.0, "B"), ledger.Figure("verify 10,000 events", value, "s", 0.5)]
    monkeypatch.setattr(ledger, "measure", lambda folder, options: figures)
    monkeypatch.setattr(sys, "argv", ["ledger.py"])
    assert ledger.main() == code
    plain, judged, load = capsys.readouterr().out.splitlines()
    assert "bar" not in plain and judged.endswith(verdict) and "load average" in load
    monkeypatch.setattr(sys, "argv", ["ledger.py", "--json"])
    assert ledger.main() == code
    rows = json.loads(capsys.readouterr().out)["figures"]
    assert [row["holds"] for row in rows] == [None, not code]


def test_the_table_in_the_docs_is_that_of_the_evidence():
    document = json.loads(ledger_compare.EVIDENCE.read_text(encoding="utf-8"))
    text = ledger_compare.PAGE.read_text(encoding="utf-8")
    assert ledger_compare.page(text, document) == text
    assert next(iter(document["tools"])) == "harness" and document["runs"] == 1000 and document["writers"] == 8
    for tool, rounds in document["measured"].items():
        assert len(rounds) == document["rounds"]
        assert ledger_compare.summarise(rounds) == document["tools"][tool]


def test_the_pinned_peers_are_the_measured_ones():
    lines = (ROOT / "benchmarks" / "compare-requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    document = json.loads(ledger_compare.EVIDENCE.read_text(encoding="utf-8"))
    assert pins == {tool: found["version"] for tool, found in document["tools"].items() if tool != "harness"}
