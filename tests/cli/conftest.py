"""A program with one finished run, and the command line run in this process."""

import json
import shutil
from typing import NamedTuple

import pytest

from harness.cli.main import main
from harness.core.canonical import canonical_json
from harness.ledger import Ledger
from harness.program import Program, init_program

MEAN = {"mean": 0.41, "low": 0.33, "high": 0.49}


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("HARNESS_PROGRAM", "HARNESS_DEBUG", "CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HARNESS_ACTOR", "agent:tester")


@pytest.fixture
def cli(capsys):
    """Run a command line and return its exit code and streams."""

    def run(*argv):
        capsys.readouterr()
        code = main([str(part) for part in argv])
        return Answer(int(code), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A program with run-001 created by the real command, then finished by hand."""
    root = tmp_path_factory.mktemp("template") / "program"
    init_program(root, git=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("HARNESS_ACTOR", "agent:tester")
        patch.delenv("HARNESS_PROGRAM", raising=False)
        assert main(["new-run", "--hypothesis", "The defaults train at all"]) == 0
        finish(Ledger(root / "runs.jsonl"), "run-001")
    folder = root / "outputs/run-001/rollouts/step_2"
    folder.mkdir(parents=True)
    rows = [
        {
            "task": f"task-{number}",
            "group": "g0",
            "index": number,
            "prompt": "[user]\nWhich?",
            "completion": f"answer {number} \x1b[31mred\x1b[0m \u202eevil",
            "finish": "stop",
            "reward": number / 10,
            "components": {"accuracy": 0.0, "format": 1.0},
            "metrics": {},
            "diagnostics": {},
            "failure": "model",
            "advantage": 0.1 - number / 10,
            "tokens": 7,
        }
        for number in range(8)
    ]
    (folder / "drugprot.jsonl").write_text("".join(canonical_json(row, sort=False) + "\n" for row in rows))
    return root


def finish(ledger, run, outcome="completed"):
    started = {"attempt": 1, "host": "elsewhere", "pid": 1, "pid_start": "1"}
    ledger.append(run, "started", started)
    evaluated = {"attempt": 1, "subject": "policy", "step": 30, "env": "drugprot", "prompt": "run", "n": 159}
    evaluated |= {"requested": 160, "failures": {"infra": 1}, "means": {"reward": MEAN}, "gain": {"reward": MEAN}}
    ledger.append(run, "evaluated", evaluated)
    ledger.append(run, "finished", {"attempt": 1, "outcome": outcome, "step": 30, "failure": None, "reason": ""})


@pytest.fixture
def program(template, tmp_path, monkeypatch):
    """A copy of the template that a test may change, as the current folder."""
    root = tmp_path / "program"
    shutil.copytree(template, root)
    monkeypatch.chdir(root)
    return Program(root)


@pytest.fixture
def empty_program(tmp_path, monkeypatch):
    init_program(tmp_path / "empty", git=False)
    monkeypatch.chdir(tmp_path / "empty")
    return Program(tmp_path / "empty")


@pytest.fixture
def tree():
    """Return a function to every path below a folder with its bytes: what a dry run must leave as it is."""

    def look(root):
        paths = sorted(root.rglob("*"))
        return {path.relative_to(root): path.read_bytes() if path.is_file() else None for path in paths}

    return look
