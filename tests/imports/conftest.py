"""A fresh program, and the command line run in this process."""

import json
from typing import NamedTuple

import pytest

from harness.cli.main import main
from harness.program import Program, init_program


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """An empty program as the current folder."""
    for name in ("HARNESS_PROGRAM", "HARNESS_DEBUG", "CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HARNESS_ACTOR", "agent:tester")
    init_program(tmp_path / "program", git=False)
    monkeypatch.chdir(tmp_path / "program")
    return Program(tmp_path / "program")


@pytest.fixture
def cli(capsys):
    """Run a command line and return its exit code and streams."""

    def run(*argv):
        capsys.readouterr()
        code = main([str(part) for part in argv])
        return Answer(int(code), *capsys.readouterr())

    return run
