"""What a run ran on: commit, dirty diff, packages, processor, memory; no secrets, by allow-list."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from harness.core.canonical import content_sha, sha256_hex
from harness.core.files import atomic_write
from harness.core.git import git_line, git_output

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES")


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


def capture_environment(root: Path, folder: Path, numerics: Mapping[str, Any]) -> dict[str, Any]:
    """Describe this process, write it to `folder/environment.json`, and return what the ledger keeps.

    The uncommitted diff goes to `folder/dirty.diff`; the ledger holds its hash only.

    Args:
        root: the program, a git repository or not.
        folder: the run directory.
        numerics: device, dtype, threads and processor capability the attempt computes with.
    """
    commit = git_line(root, "rev-parse", "HEAD")
    diff = git_output(root, "diff", "HEAD") if commit else None
    if diff:
        atomic_write(folder / "dirty.diff", diff)
    installed = packages()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "commit": commit,
        "dirty_sha": sha256_hex(diff) if diff else None,
        "packages_sha": content_sha(installed),
        "python": platform.python_version(),
        **numerics,
        "hardware": {
            "system": platform.system(),
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_mb": memory // 2**20,
        },
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    atomic_write(folder / "environment.json", json.dumps(facts | {"packages": installed}, indent=2) + "\n")
    return facts
