"""What a run ran on: commit, dirty diff, packages, processor, GPUs, command; no secrets."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from harness.core.canonical import content_sha, sha256_hex
from harness.core.files import atomic_write
from harness.core.git import git_line, git_output
from harness.core.redact import redact, redact_argv, redact_bytes

VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES"),
    *("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONHASHSEED", "HF_HUB_OFFLINE"),
)
"""The environment variables that are recorded: what decides rounding, memory and downloads. No other is read."""
DIFF = "dirty.diff"
GPU_TIMEOUT_S = 10.0
_GPU_MEMBERS = ("name", "memory_mb", "driver", "compute_capability")
_GPU_QUERY = "--query-gpu=name,memory.total,driver_version,compute_cap"
_SCP = re.compile(r"[A-Za-z0-9._-]+@(?P<host>[A-Za-z0-9.-]+):(?P<path>[^\s/][^\s]*)")
_REMOTE = re.compile(r"(?P<scheme>https?|ssh|git)://(?:[^/\s@]*@)?(?P<rest>[^\s?#]+)")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def packages() -> dict[str, str]:
    """Return the installed distributions and their versions, sorted by name; read once per process."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def gpus() -> list[dict[str, Any]]:
    """Return name, memory, driver and compute capability of every GPU that nvidia-smi lists; none without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", _GPU_QUERY, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GPU_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Read what nvidia-smi prints with `_GPU_QUERY`, one line a GPU; a value it does not know becomes None."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_GPU_MEMBERS):
            values = [None if cell.strip().startswith("[") else cell.strip() for cell in row]
            gpu: dict[str, Any] = dict(zip(_GPU_MEMBERS, values, strict=True))
            gpu["memory_mb"] = int(gpu["memory_mb"]) if (gpu["memory_mb"] or "").isdigit() else None
            found.append(gpu)
    return found


def remote_of(url: str | None) -> str | None:
    """Return where a git remote lies without its user, password and query; None for a folder of this machine."""
    text = (url or "").strip()
    if match := _REMOTE.fullmatch(text.partition("?")[0].partition("#")[0]):
        return redact(f"{match['scheme']}://{match['rest']}")
    if match := _SCP.fullmatch(text):
        return redact(f"{match['host']}:{match['path']}")
    return None


def command_line(arguments: list[str] | None = None) -> list[str]:
    """Return the command of this process without secrets; of the program only its name, since paths tell of people."""
    first, *rest = arguments if arguments is not None else [*sys.argv] or [""]
    return redact_argv(["harness" if first.endswith(("harness", ".py")) else Path(first).name, *rest])


def capture_environment(root: Path, folder: Path, numerics: Mapping[str, Any]) -> dict[str, Any]:
    """Describe this process, write it to `folder/environment.json`, and return what the ledger keeps.

    The uncommitted diff goes to `folder/dirty.diff` with secrets cut out; the ledger holds its hash only. That of
    an earlier attempt is kept as `dirty.HASH.diff`, with the first 12 digits.

    Args:
        root: the program, a git repository or not.
        folder: the run directory.
        numerics: device, dtype, threads and processor capability the attempt computes with.
    """
    commit = git_line(root, "rev-parse", "HEAD")
    diff = _diff(root) if commit else None
    _store_diff(folder / DIFF, diff)
    installed = packages()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "commit": commit,
        "dirty_sha": sha256_hex(diff) if diff else None,
        "remote": remote_of(git_line(root, "remote", "get-url", "origin")) if commit else None,
        "command": command_line(),
        "packages_sha": content_sha(installed),
        "python": platform.python_version(),
        **numerics,
        "hardware": {
            "system": platform.system(),
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_mb": memory // 2**20,
            "gpus": gpus(),
        },
        "variables": {name: redact(os.environ[name]) for name in VARIABLES if name in os.environ},
    }
    atomic_write(folder / "environment.json", json.dumps(facts | {"packages": installed}, indent=2) + "\n")
    return facts


def _store_diff(path: Path, diff: bytes | None) -> None:
    old = path.read_bytes() if path.is_file() else None
    if old is not None and old != diff:
        path.rename(path.with_name(f"{path.stem}.{sha256_hex(old)[:12]}{path.suffix}"))
    if diff and old != diff:
        atomic_write(path, diff)


def _diff(root: Path) -> bytes | None:
    """Return what differs from the last commit, as `git apply` reads it, with secrets cut out."""
    diff = git_output(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    return redact_bytes(diff) if diff else None
