"""The small shared parts of core: names, numbers, folders, git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.core.errors import InfraError
from harness.core.files import atomic_write
from harness.core.git import git_line, git_output
from harness.core.names import did_you_mean
from harness.core.numbers import number_or_none, spell_duration, spell_interval
from harness.core.paths import cache_dir


def test_a_near_name_is_suggested_before_the_rest() -> None:
    assert did_you_mean("aplha", ["rank", "alpha"]) == "did you mean 'alpha'?"
    assert did_you_mean("lst", ["list"], "see --help") == "did you mean 'list'? see --help"
    assert did_you_mean("zzz", ["rank", "alpha"]) == "known: rank, alpha"
    assert did_you_mean("zzz", ["rank"], "see --help") == "see --help"
    assert did_you_mean("zzz", []) == ""


@pytest.mark.parametrize(("seconds", "text"), [(1.25, "1.2 s"), (42, "42 s"), (600, "10.0 min"), (7200, "2.0 h")])
def test_durations(seconds: float, text: str) -> None:
    assert spell_duration(seconds) == text


def test_what_is_no_number_is_absent() -> None:
    assert number_or_none(3) == 3.0 and number_or_none({"$non_finite": "inf"}) == float("inf")
    assert [number_or_none(value) for value in (None, True, "3", [], {})] == [None] * 5


def test_intervals_are_spelt_as_far_as_they_go() -> None:
    assert spell_interval({"mean": 0.5124, "low": 0.43, "high": 0.594}) == "0.512 [0.430, 0.594]"
    assert spell_interval({"mean": 0.5, "low": None}) == "0.500"
    assert [spell_interval(value) for value in (None, {}, [], {"low": 1})] == ["-"] * 4


def test_the_cache_is_named_by_the_nearest_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("HARNESS_CACHE")
    assert cache_dir() == tmp_path / "b" / "harness"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / "c" / ".cache" / "harness"


def test_git_answers_or_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "latin"], check=True)
    assert git_line(tmp_path, "rev-parse", "--is-inside-work-tree") == "true"
    assert b"+caf\xe9\n" in (git_output(tmp_path, "diff", "--cached") or b"")
    assert git_line(tmp_path, "config", "no.such") is None
    assert git_output(tmp_path / "absent", "status") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_output(tmp_path, "status") is None


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    """As root, a rename over /dev/null would take it from the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InfraError, match="no regular file"):
        atomic_write(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]
