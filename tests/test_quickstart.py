"""The quickstart's verdict and its bookkeeping, without training: the checks on numbers, the loop on a fake command."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import quickstart
import quickstart_checks as checks


def mean(value, half=0.02):
    return {"mean": value, "low": value - half, "high": value + half}


def shown(**changes):
    """Return what `harness show run-001 --json` holds of a good run, with parts replaced."""
    policy = {
        "env": "drugprot",
        "subject": "policy",
        "prompt": "run",
        "step": 30,
        "n": 130,
        "means": {"reward": mean(0.5), "accuracy": mean(0.4), "format": mean(0.9), "reasoning": mean(0.2)},
        "gain": {"reward": mean(0.1), "accuracy": mean(0.0), "format": mean(0.4), "reasoning": mean(0.0)},
        "extra": {"answers": {"A": 50, "E": 60, "I": 20}},
    }
    policy |= {key: value for key, value in changes.items() if key in policy}
    base = policy | {"subject": "base", "step": 0, "means": {"reward": mean(0.4), "accuracy": mean(0.4)}, "gain": {}}
    other = policy | {"prompt": "shipped", "step": 30, "gain": {"reward": mean(-1)}}
    summary = {"zero_spread_last5": changes.get("zero_spread", 0.3)}
    attempts = [
        {"attempt": 1, "outcome": "interrupted", "step": 12},
        {"attempt": 2, "outcome": "completed", "step": changes.get("steps", 30), "summary": summary},
    ]
    return {"evals": [policy, other, policy | {"step": 15, "gain": {"reward": mean(-1)}}, base], "attempts": attempts}


def failed(document):
    return [check.name for check in checks.checks(checks.gather(document)) if not check.ok]


def test_a_good_run_passes_and_is_read_from_the_last_eval_under_its_own_prompt():
    evidence = checks.gather(shown())
    assert failed(shown()) == []
    assert (evidence.step, evidence.items, evidence.steps, evidence.zero_spread) == (30, 130, 30, 0.3)
    assert evidence.gain["reward"].mean == 0.1
    assert evidence.base["reward"].mean == 0.4


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"gain": {"reward": mean(0.02, 0.02), "accuracy": mean(0.1)}}, ["reward"]),  # touches 0
        ({"gain": {"reward": mean(-0.2), "accuracy": mean(0.1)}}, ["reward"]),
        ({"gain": {"reward": mean(0.2), "accuracy": mean(-0.05)}}, ["accuracy"]),
        ({"gain": {"reward": mean(0.2), "accuracy": mean(-0.02, 0.03)}}, []),  # reaches over 0
        ({"gain": {"reward": mean(0.2)}}, ["accuracy"]),
        ({"gain": {"reward": {"mean": {"$non_finite": "nan"}}, "accuracy": mean(0)}}, ["reward"]),
        ({"n": 99}, ["items"]),
        ({"steps": 24, "step": 24}, ["steps"]),
        ({"steps": 40}, ["evaluated"]),
        ({"extra": {"answers": {"A": 61, "E": 39}}}, ["letters"]),
        ({"extra": {"answers": {"A": 60, "E": 40}}}, []),
        ({"extra": {}}, ["letters"]),
        ({"zero_spread": 0.8}, ["spread"]),
        ({"zero_spread": None}, ["spread"]),
    ],
)
def test_each_check_fails_on_its_own_ground(change, names):
    assert failed(shown(**change)) == names


def test_a_run_without_an_eval_or_a_completed_attempt_is_no_evidence():
    for broken in ({}, shown() | {"evals": []}, shown() | {"attempts": [{"outcome": "stopped", "step": 30}]}):
        with pytest.raises(LookupError, match="no completed attempt"):
            checks.gather(broken)


def test_no_answer_at_all_is_named_and_fails():
    check = next(check for check in checks.checks(checks.gather(shown(extra={}))) if check.name == "letters")
    assert check == ("letters", False, "no answer was counted, at most 60%")


def test_letters_are_counted_among_answers_only():
    assert checks.top_letter({"A": 3, "B": 1}) == ("A", 0.75)
    assert math.isnan(checks.top_letter({})[1])
    assert checks.letter_counts({"answers": {"A": 2}, "top_answer_share": 1.0}) == {"A": 2.0}


def test_the_table_shows_form_and_knowledge_apart():
    rows = checks.table(checks.gather(shown()))
    assert [row.split()[0] for row in rows] == ["held-out", *checks.SHOWN]
    assert "+0.400 [+0.380, +0.420]" in rows[3]
    assert rows[3].split()[1] == "-"  # the base's format was not measured


FAKE = """
import json, os, sys
from pathlib import Path
log = Path(os.environ["FAKE_LOG"])
with log.open("a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
name = sys.argv[1]
if name == "init":
    Path(sys.argv[2]).mkdir()
if name == os.environ.get("FAKE_FAIL"):
    sys.exit(int(os.environ["FAKE_CODE"]))
if name == "show":
    print(os.environ["FAKE_SHOW"])
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a package named harness that only logs its arguments before the real one."""
    package = tmp_path / "lib" / "harness"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_SHOW", json.dumps(shown()))
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")

    def calls():
        return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    return calls


def test_the_loop_runs_every_command_once_and_a_refused_promotion_is_tolerated(fake, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_FAIL", "promote")
    monkeypatch.setenv("FAKE_CODE", "1")
    assert quickstart.run(1, 5.0, tmp_path / "q") == 0
    names = [call[0] for call in fake()]
    first = ["init", "doctor", "new-run", "launch", "report", "show", "decide", "promote"]
    expected = [*first, "report", "status", "list", "new-run"]
    assert names == expected
    assert "train.seed=1" in fake()[2]
    assert fake()[6][:3] == ["decide", "run-001", "keep"]
    assert fake()[-1][-1] == "--dry-run"
    out = capfd.readouterr().out
    assert "$ harness promote run-001 --gates heldout" in out
    assert "all checks passed" in out
    assert "install" in out


def test_a_collapsed_run_is_rejected_not_promoted_and_exits_1(fake, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_SHOW", json.dumps(shown(zero_spread=0.95)))
    assert quickstart.run(0, 0.0, tmp_path / "q") == 1
    assert [c[:3] for c in fake() if c[0] in ("decide", "promote")] == [["decide", "run-001", "reject"]]
    assert "COLLAPSED: 95% groups without spread" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("ledger", "second"),
    [
        ({"status": "interrupted"}, [["launch", "run-001", "--resume"]]),
        ({"status": "created", "attempts": []}, [["launch", "run-001"]]),
        ({"status": "completed"}, []),
    ],
)
def test_a_killed_launch_goes_on_and_earlier_phases_are_not_repeated(fake, tmp_path, monkeypatch, ledger, second):
    monkeypatch.setenv("FAKE_FAIL", "launch")
    monkeypatch.setenv("FAKE_CODE", "143")
    with pytest.raises(quickstart.Stop) as stop:
        quickstart.run(0, 0.0, tmp_path / "q")
    assert stop.value.code == 143
    monkeypatch.delenv("FAKE_FAIL")
    monkeypatch.setenv("FAKE_SHOW", json.dumps(shown() | ledger))
    quickstart.run(0, 0.0, tmp_path / "q")
    names = [call[0] for call in fake()]
    assert names.count("init") == 1
    assert names.count("doctor") == 1
    assert [call for call in fake() if call[0] == "launch"] == [["launch", "run-001"], *second]


def test_a_finished_program_is_kept_and_the_next_start_makes_another(fake, tmp_path):
    for _ in range(2):
        quickstart.run(0, 0.0, tmp_path / "q")
    assert [call[1] for call in fake() if call[0] == "init"] == ["seed-0", "seed-0-2"]


def test_preflight_stops_on_a_small_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "disk_need", lambda exists: (1e9, "everything"))
    with pytest.raises(quickstart.Stop) as stop:
        quickstart.preflight(tmp_path / ".venv", quickstart.HOME)
    assert stop.value.code == 71
    assert "1000000000.0 GiB free needed" in capsys.readouterr().out
