"""Ends vLLM's processes when the process that started them is killed and cannot: `python -m … PARENT_PID`.

vLLM's engine outlives a parent that dies by SIGKILL, and keeps the memory of the device. This helper holds the other
end of a pipe from the parent; when the pipe closes, the parent is gone, and what it had started goes too.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SCAN_S = 1.0
"""Seconds between two looks at what the parent has started, as long as it has not said that it is done."""


class Guard:
    """The parent's side: a helper that is told which processes are vLLM's and outlives this one for a moment."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        others = [str(process.pid) for process in self._before]
        command = [sys.executable, "-m", "harness.inference.vllm_guard", str(os.getpid()), *others]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._helper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # who reads the parent's output need not wait for the helper
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent
            env=environment,
        )
        self.processes: list[psutil.Process] = []

    def started(self, root: int | None = None) -> None:
        """Note what has been started; `processes` holds it.

        Args:
            root: process id; it and what is below it is to end in the end. None: all that this process has started.
        """
        self.processes = self._found() if root is None else [psutil.Process(root)]
        named = [[process.pid, process.create_time()] for process in self.processes]
        pipe: Any = self._helper.stdin
        with suppress(OSError):  # a helper that somebody ended guards nothing, and stops nothing
            pipe.write(json.dumps(named).encode() + b"\n")
            pipe.flush()

    def end(self, patience_s: float = 0.0) -> None:
        """End every process that was started, and the helper.

        Args:
            patience_s: seconds they have to end by themselves after a SIGTERM; 0 kills at once.
        """
        found = with_descendants(self.processes or self._found())
        if patience_s:
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            psutil.wait_procs(found, timeout=patience_s)
        kill(found)
        with suppress(OSError):
            self._helper.communicate(timeout=30)

    def _found(self) -> list[psutil.Process]:
        return started_since({process.pid for process in self._before}, os.getpid(), self._helper.pid)

    def whole(self) -> bool:
        """Return whether every process is still there."""
        return all(map(lives, self.processes))


def started_since(before: Collection[int], parent: int, helper: int) -> list[psutil.Process]:
    """Return the processes below a parent whose ids are not in `before`.

    Python's own watcher of shared memory is not among them, nor the helper.
    """
    found = [child for child in psutil.Process(parent).children(recursive=True) if child.pid not in before]
    return [child for child in found if child.pid != helper and "resource_tracker" not in " ".join(_command(child))]


def with_descendants(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return processes and everything below them, each once."""
    found = dict.fromkeys(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found |= dict.fromkeys(process.children(recursive=True))
    return list(found)


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return []
    return command


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill what is left of some processes, and wait until they are gone; psutil knows a reused id from theirs."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def watch(parent: int, before: Collection[int]) -> None:
    """Wait until standard input closes, then end what the parent has started.

    Args:
        parent: its process id.
        before: ids of processes below it that are none of vLLM's.
    """
    found: set[psutil.Process] = set()
    told = b""
    while not told.endswith(b"\n"):
        if select.select([0], [], [], SCAN_S)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                return kill(with_descendants(list(found)))
            told += piece
        else:
            with suppress(psutil.NoSuchProcess):
                found |= set(started_since(before, parent, os.getpid()))
    while os.read(0, 1 << 16):
        pass
    return kill(with_descendants(_named(json.loads(told))))


def _named(pairs: Sequence[tuple[int, float]]) -> list[psutil.Process]:
    """Return the processes of (id, time of creation) that are still there."""
    processes = []
    for number, created in pairs:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(number)
            if process.create_time() == created:
                processes.append(process)
    return processes


if __name__ == "__main__":
    os.chdir(Path(sys.executable).anchor)  # it holds no folder
    watch(int(sys.argv[1]), set(map(int, sys.argv[2:])))
