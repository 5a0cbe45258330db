"""Ledgers to test on, and scripts that run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.ledger import Actor, Ledger, NewEvent
from harness.ledger.events import format_time, make_event

ROOT = Path(__file__).parents[2]
START_NS = 1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z
ADA = Actor("person", "Ada")


@pytest.fixture(autouse=True)
def _actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_ACTOR", "agent:tester")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.jsonl"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path)


@pytest.fixture(scope="session")
def event() -> Callable:
    """Make an event at a given second with a given id; unknown kinds allowed."""

    def make(run="run-001", kind="noted", data=None, second=0, number=0, prev=(), critical=False):
        return make_event(
            NewEvent(run, kind, {"text": "x"} if data is None else data, critical, ADA),
            id=f"01J{number:023d}",
            at=format_time(START_NS + second * 10**9),
            prev=prev,
            kinds=None,
        )

    return make


@pytest.fixture
def script() -> Callable:
    """Start a Python script in its own process with the package importable."""

    def start(source: str, *arguments: object) -> subprocess.Popen[str]:
        environment = dict(os.environ, PYTHONPATH=str(ROOT), HARNESS_ACTOR="agent:tester")
        return subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start
