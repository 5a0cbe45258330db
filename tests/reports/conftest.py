"""Fixtures: a synthetic program whose environment is known to the registry."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import BaseModel

from harness.envs.registry import ENVIRONMENTS, EnvSpec
from harness.program import Program
from harness.reports import write
from harness.reports.model import ReportData
from harness.reports.plots import Plot, render_plots
from harness.reports.search_model import Search
from harness.reports.search_plots import search_plots
from tests.reports.reports_synthetic import ENV, load_bench, make_program, make_run


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the small environment."""
    spec = EnvSpec(ENV, load_bench, "bench", BaseModel)
    monkeypatch.setitem(ENVIRONMENTS, ENV, spec)


@pytest.fixture
def program(tmp_path: Path, bench: None) -> Program:
    """Return an empty program."""
    return make_program(tmp_path)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the trained program once."""
    root = tmp_path_factory.mktemp("template")
    make_run(make_program(root))
    return root


@pytest.fixture
def trained(template: Path, tmp_path: Path, bench: None) -> Program:
    """Return a program with one trained, gated and decided run."""
    shutil.copytree(template, tmp_path / "program")
    return Program.find(tmp_path / "program", environ={})


@pytest.fixture
def real_plots() -> None:
    """Ask for plots that are drawn anew each time."""


_drawn: dict[str, dict[str, Plot]] = {}


@pytest.fixture(autouse=True)
def plots_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw plots once for all data of the same shape, in tests that are not about drawing."""
    if "real_plots" in request.fixturenames:
        return

    def remembered(data: ReportData) -> dict[str, Plot]:
        key = repr((len(data.evals), bool(data.labels), len(data.metrics.steps)))
        if key not in _drawn:
            _drawn[key] = render_plots(data)
        return _drawn[key]

    def searched(search: Search, confidence: float) -> dict[str, Plot]:
        key = f"search {len(search.candidates)}"
        if key not in _drawn:
            _drawn[key] = search_plots(search, confidence)
        return _drawn[key]

    monkeypatch.setattr(write, "render_plots", remembered)
    monkeypatch.setattr(write, "search_plots", searched)
