"""Which process an attempt is, and whether it still lives.

A pid alone is reused; a pid with its start time, boot and pid namespace is one process for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.canonical import sha256_hex

_PROC = Path("/proc")


def this_process() -> dict[str, Any]:
    """Return `host`, `pid` and `pid_start` of the calling process, as `started` events store them."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "pid_start": process_start(os.getpid())}


def process_start(pid: int) -> str | None:
    """Return a token of when and where a live process began; None when there is no such process.

    On Linux `machine:boot:namespace:ticks` (the first three short hashes); elsewhere what `ps` says.
    Source: proc(5), fields 3 (state) and 22 (starttime) of /proc/PID/stat.
    """
    if not (_PROC / "self" / "stat").exists():
        return _start_by_ps(pid)
    try:
        # The command name stands in parentheses and may itself hold spaces and parentheses.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":  # a zombie has ended
        return None
    return f"{_place()}:{fields[19]}"


def _place() -> str:
    machine = next((_read(Path(p)) for p in ("/etc/machine-id", "/var/lib/dbus/machine-id") if _read(Path(p))), "")
    boot = _read(_PROC / "sys/kernel/random/boot_id")
    try:
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        namespace = ""
    return ":".join(sha256_hex(f"harness {part}")[:8] for part in (machine, boot, namespace))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _start_by_ps(pid: int) -> str | None:
    import subprocess  # slow to import, and only for systems without /proc

    result = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False, env={"LC_ALL": "C"}
    )
    state, _, started = result.stdout.strip().partition(" ")
    return None if not started or state.startswith("Z") else " ".join(started.split())


class Liveness(NamedTuple):
    """Whether a process still runs (None: it cannot be told from here), and how that is known."""

    alive: bool | None
    why: str


def look(attempt: Mapping[str, Any]) -> Liveness:
    """Tell whether the process of an attempt still runs, and why that is known or not.

    Args:
        attempt: `host`, `pid` and `pid_start` as its `started` event stores them.

    Returns:
        True or False for a process of this machine; None when it cannot be told: another host,
        another machine of the same name, another container, or an event without these members.
    """
    host, pid, start = attempt.get("host"), attempt.get("pid"), attempt.get("pid_start")
    if host != os.uname().nodename:
        return Liveness(None, f"it runs on {host}" if host else "its event names no host")
    if not isinstance(pid, int) or not isinstance(start, str):
        return Liveness(None, "its event names no process")
    if start.count(":") == 3 and (_PROC / "self" / "stat").exists():
        machine, boot, namespace, _ = start.split(":")
        here_machine, here_boot, here_namespace = _place().split(":")
        if machine != here_machine:
            return Liveness(None, f"it runs on another machine that is called {host} too")
        if boot != here_boot:
            return Liveness(False, f"{host} was started again since")
        if namespace != here_namespace:
            return Liveness(None, f"it runs in another container of {host}")
    now = process_start(pid)
    if now == start:
        return Liveness(True, f"pid {pid} of {host} lives")
    return Liveness(False, f"pid {pid} of {host} is gone" if now is None else f"pid {pid} is another process by now")


def is_alive(attempt: Mapping[str, Any]) -> bool | None:
    """Tell whether the process of an attempt still runs; None when it cannot be told (see `look`)."""
    return look(attempt).alive
