"""Runs the command line with the toy environment, in children that fail on request.

`python -m tests.launch_server launch run-001` runs one command. Without arguments it imports every
package once and then forks a child for each request on standard input, one JSON object per line:
`{"do": "start", "argv", "cwd", "env", "out", "err", "faults"}` answers `{"pid"}`,
`{"do": "wait", "pid", "timeout"}` answers `{"code"}` (null when it still runs).

Faults are made where they happen in life: limits and full disks by the kernel, deaths by SIGKILL.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.cli.main import main
from tests.toy_env import register


def nth_call(module: Any, name: str, call: int, action: Callable[[], Callable[[], None] | None]) -> None:
    """Run `action` around the n-th call of a function: before it, and what it returns after it."""
    real, seen = getattr(module, name), [0]

    def wrapper(*args, **kwargs):
        seen[0] += 1
        after = action() if seen[0] == call else None
        try:
            return real(*args, **kwargs)
        finally:
            if after:
                after()

    setattr(module, name, wrapper)


def write_place(at: str) -> tuple[Any, str]:
    """Return the module or class and the function that writes a kind of file."""
    from harness.ledger.store import Ledger
    from harness.training import loop

    return {
        "checkpoint": (loop, "save_checkpoint"),
        "adapter": (loop, "save_adapter"),
        "metrics": (loop, "append_row"),
        "ledger": (Ledger, "append"),
    }[at]


def signal_place(at):
    """Return where a signal comes: module or class, function, and whether after the call instead of before it."""
    from harness.backends import local
    from harness.ledger.store import Ledger
    from harness.rollouts import collect
    from harness.training import checkpoints, crew, warmup

    return {
        "step": (crew, "update_policy", False),
        "load": (local, "load_model", True),
        "eval": (collect, "score_episode", False),
        "checkpoint": (checkpoints, "save_file", True),  # the tensors are there, the manifest is not
        "started": (Ledger, "append_locked", True),
        "event": (Ledger, "append", False),
        "warmup": (warmup, "imitate", False),
    }[at]


def send_signal(name, call, at="step"):
    module, function, late = signal_place(at)

    def send():
        os.kill(os.getpid(), getattr(signal, name))

    nth_call(module, function, call, lambda: send if late else send())


def raise_error(message, call, at="step"):
    """Let foreign code fail with an exception that nobody expects."""
    module, function, _ = signal_place(at)

    def fail():
        raise RuntimeError(message)

    nth_call(module, function, call, fail)


def pause_in_step(call, folder):
    from harness.training import crew

    def pause():
        (Path(folder) / "paused").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.02)

    nth_call(crew, "update_policy", call, pause)


def limit_file_size(at, call, limit, restore):
    """Let no file grow beyond `limit` bytes from the n-th write of a kind on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lower():
        size = os.path.getsize(limit) + 40 if isinstance(limit, str) else limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        return (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))) if restore else None

    module, name = write_place(at)
    nth_call(module, name, call, lower)


def fill_disk(at, call, ballast):
    """Write a file until the disk is full, at the n-th write of a kind."""

    def fill():
        with open(ballast, "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    module, name = write_place(at)
    nth_call(module, name, call, fill)


def watch_writes(root, die_at=0, count=None):
    """Count the operations that change files under `root`; SIGKILL this process before one of them."""
    names = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
    seen = [0]

    def hook(event, args):
        changes = event in names or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if not changes or not isinstance(args[0], str | os.PathLike) or not os.fspath(args[0]).startswith(root):
            return
        seen[0] += 1
        if seen[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: Path(count).write_text(str(seen[0])) if count else None


def set_threads(count):
    import torch

    torch.set_num_threads(count)


FAULTS: dict[str, Callable[..., Callable[[], object] | None]] = {
    "signal": send_signal,
    "raise": raise_error,
    "pause": pause_in_step,
    "limit": limit_file_size,
    "fill": fill_disk,
    "writes": watch_writes,
    "threads": set_threads,
}


def run_child(request):
    """Become the command; never returns."""
    code = 70
    try:
        for target, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, target)
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        ends = [FAULTS[fault.pop("kind")](**fault) for fault in request["faults"]]
        sys.argv = [request.get("argv0", "harness"), *request["argv"]]
        code = main()
        for end in filter(None, ends):
            end()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(pid, timeout):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


WARM = (
    "torch._dynamo",
    "scipy.stats",
    "transformers.models.llama.modeling_llama",
    "harness.backends.local",
    "harness.cli.judge",
    "harness.cli.launch",
)
"""What commands import late, imported once before the forks."""


def serve():
    for name in WARM:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from harness.backends.capture import packages

    packages()
    get_checkpoint_conversion_mapping("llama")  # a thousand patterns, compiled once per process
    alive = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                run_child(request)
            alive.add(pid)
            answer = {"pid": pid}
        else:
            code = wait_for(request["pid"], request["timeout"])
            answer = {"code": code}
            if code is not None:
                alive.discard(request["pid"])
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # tearing the interpreter down with everything imported takes seconds


if __name__ == "__main__":
    register()
    if sys.argv[1:]:
        sys.exit(main())
    serve()
