"""Fixtures: a synthetic program whose environment is known to the registry."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel
from reports_synthetic import ENV, Bench, make_program, make_run

from harness.envs.registry import ENVIRONMENTS, EnvSpec
from harness.program import Program


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the small environment."""
    spec = EnvSpec(ENV, lambda args: Bench(**args), "bench", BaseModel)
    monkeypatch.setitem(ENVIRONMENTS, ENV, spec)


@pytest.fixture
def program(tmp_path: Path, bench: None) -> Program:
    """Return an empty program."""
    return make_program(tmp_path)


@pytest.fixture
def trained(program: Program) -> Program:
    """Return a program with one trained, gated and decided run."""
    make_run(program)
    return program
