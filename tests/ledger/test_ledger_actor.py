"""Who acts, and whether an attempt's process still lives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.core.errors import UsageError
from harness.ledger import Actor, Ledger
from harness.ledger import actor as actor_module
from harness.ledger.actor import current_actor, person_name
from harness.ledger.process import is_alive, process_start, this_process

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the token has these parts on Linux only")


@pytest.fixture
def _fresh_name():
    person_name.cache_clear()
    yield
    person_name.cache_clear()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HARNESS_ACTOR": "agent:coder 2"}, Actor("agent", "coder 2")),
        ({"HARNESS_ACTOR": "person:Ada", "CI": "true"}, Actor("person", "Ada")),
        ({"HARNESS_ACTOR": "agent:a\x1b\nb"}, Actor("agent", "a\x1b b")),
        ({"CI": "true"}, Actor("ci", "ci")),
        ({"CI": "1", "GITHUB_ACTOR": "octo"}, Actor("ci", "octo")),
    ],
)
def test_the_environment_names_the_actor(environ, expected) -> None:
    assert current_actor(environ) == expected


@pytest.mark.parametrize("value", ["agent", "agent:", "agent: ", "robot:x", ":x"])
def test_a_malformed_actor_is_refused(value) -> None:
    with pytest.raises(UsageError, match="HARNESS_ACTOR"):
        current_actor({"HARNESS_ACTOR": value})


@pytest.mark.parametrize("environ", [{}, {"CI": "false"}, {"CI": "0"}])
@pytest.mark.usefixtures("_fresh_name")
def test_people_are_known_from_git(environ, tmp_path, monkeypatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "config", "user.name", "Grace Hopper"], check=True)
    monkeypatch.chdir(tmp_path)
    assert current_actor(environ) == Actor("person", "Grace Hopper")


@pytest.mark.usefixtures("_fresh_name")
def test_without_git_the_login_name_serves(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(actor_module.getpass, "getuser", lambda: "grace")
    assert person_name() == "grace"
    person_name.cache_clear()

    def nobody() -> str:
        raise KeyError("uid")

    monkeypatch.setattr(actor_module.getpass, "getuser", nobody)
    assert person_name() == "unknown"


def test_a_malformed_actor_writes_nothing(path, monkeypatch) -> None:
    monkeypatch.setenv("HARNESS_ACTOR", "nobody")
    with pytest.raises(UsageError):
        Ledger(path).append("run-001", "created", {})
    assert not path.exists()


def test_this_process_is_alive_and_a_dead_one_is_not() -> None:
    mine = this_process()
    assert mine["pid"] == os.getpid() and is_alive(mine) is True
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = {**mine, "pid": child.pid, "pid_start": process_start(child.pid)}
    assert is_alive(theirs) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(theirs) is False  # a zombie has ended too
    child.communicate()
    assert is_alive(theirs) is False


@linux
def test_a_reused_pid_is_not_the_attempt() -> None:
    mine = this_process()
    head, _, ticks = mine["pid_start"].rpartition(":")
    assert is_alive({**mine, "pid_start": f"{head}:{int(ticks) - 1}"}) is False


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"host": None}, {"pid": None}, {"pid": "1"}, {"pid_start": None}]
)
def test_what_cannot_be_told_is_none(changes) -> None:
    assert is_alive({**this_process(), **changes}) is None
    assert is_alive({}) is None


@linux
def test_machine_boot_and_container_are_told_apart() -> None:
    mine = this_process()
    machine, boot, namespace, ticks = mine["pid_start"].split(":")
    assert is_alive({**mine, "pid_start": f"00000000:{boot}:{namespace}:{ticks}"}) is None  # a namesake
    assert is_alive({**mine, "pid_start": f"{machine}:00000000:{namespace}:{ticks}"}) is False  # before a reboot
    assert is_alive({**mine, "pid_start": f"{machine}:{boot}:00000000:{ticks}"}) is None  # another container
