"""Locks, flushes and whole reads of the ledger's file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from harness.core.errors import BusyError, InfraError
from harness.core.files import disk_hint
from harness.core.mounts import file_system, is_network


def lock(descriptor: int, mode: int, wait_s: float, name: str) -> None:
    """Take a `flock`, waiting for other holders.

    Args:
        descriptor: of the file itself; the kernel frees the lock when its holder dies.
        mode: `fcntl.LOCK_SH` or `LOCK_EX`.
        wait_s: how long to wait, in seconds.
        name: of the file, for messages.

    Raises:
        BusyError: when it is still held after `wait_s`.
        InfraError: when the file system has no locks; a reader goes on without one.
    """
    deadline = time.monotonic() + wait_s
    pause = 0.0005
    while True:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise BusyError(f"{name} is locked by another process", "try again in a moment") from None
        except OSError as error:
            if mode == fcntl.LOCK_SH:
                return  # a file system without locks can still be read
            raise InfraError(
                f"{name} cannot be locked: {error.strerror}",
                "keep the program on a local disk; `harness doctor` checks",
            ) from error
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)


def flush(descriptor: int) -> None:
    """Return when the file's bytes are on the drive; raises OSError, after which the file must not be trusted."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # on macOS fsync stops at the drive's cache
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):  # a file system that lacks it has fsync
                raise
    os.fsync(descriptor)


def read_from(descriptor: int, offset: int) -> bytes:
    """Return all bytes of an open file from an offset on."""
    blocks = []
    while block := os.pread(descriptor, 1 << 24, offset):
        blocks.append(block)
        offset += len(block)
    return b"".join(blocks)


def read_locked(path: Path, wait_s: float = 30.0) -> tuple[bytes, os.stat_result | None]:
    """Return all bytes of a ledger, none of them from an append that is still going on, and the file's facts.

    Args:
        path: the ledger; one that does not exist is empty and has no facts.
        wait_s: how long to wait for a writer, in seconds.

    Raises:
        BusyError: when a writer holds the ledger too long.
        InfraError: when it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b"", None
    except OSError as error:
        raise InfraError(f"cannot open {path}: {error.strerror}", disk_hint(error)) from error
    try:
        lock(descriptor, fcntl.LOCK_SH, wait_s, path.name)
        return read_from(descriptor, 0), os.fstat(descriptor)
    except OSError as error:
        raise InfraError(f"cannot read {path}: {error.strerror}", disk_hint(error)) from error
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def network_warning(path: Path) -> str | None:
    """Return what to expect when a ledger lies on a network file system; None when it does not."""
    kind = file_system(path.parent)
    if kind is None or not is_network(kind):
        return None
    return (
        f"{path.name} is on a network file system ({kind}): appends from two machines at once can overwrite each "
        "other, locks may hold on one machine only, and a confirmed append may still be lost with the server. Write "
        "from one machine, run `harness ledger verify` after a network failure, or move the program to a local disk"
    )
