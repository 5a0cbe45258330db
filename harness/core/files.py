"""Files that are either whole or absent, and locks the kernel releases."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.core.errors import BusyError, InfraError


def fsync_dir(path: Path) -> None:
    """Flush a directory, so that a new name in it survives power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`: temporary file beside it, fsync, rename, fsync of the folder.

    Readers see the old bytes or the new bytes. The mode of an existing file is kept.

    Raises:
        InfraError: on a full disk, a quota, a read-only folder, or when `path` is no file; the old one is untouched.
    """
    payload = data.encode() if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    if target.exists() and not target.is_file():  # renaming over a device would replace it for the whole machine
        raise InfraError(f"{path} is no regular file, so it cannot be replaced", "name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
        fsync_dir(target.parent)
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror}", disk_hint(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def step_folders(parent: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of everything named `step_N` in a folder, by step; nothing where there is no folder."""
    named = ((path.name.removeprefix("step_"), path) for path in parent.glob("step_*"))
    return sorted((int(name), path) for name, path in named if name.isdecimal())


def disk_hint(error: OSError) -> str:
    """Return what to do about an operating-system error on write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some disk space (outputs/ holds the large files) and run the same command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "check the owner and the mode of the file and its folder"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return "look at what stands at that path; `git status` shows what a program's files should be"
    return "`harness doctor` checks the disk"


@contextlib.contextmanager
def file_lock(
    path: Path, *, wait_s: float = 30.0, what: str = "lock", on_wait: Callable[[], None] | None = None
) -> Iterator[int]:
    """Hold an exclusive `flock` on `path` (created when absent); yields its descriptor.

    flock belongs to the open file, so the kernel releases it when the holder dies, and a
    library that opens and closes the same file does not drop it (as fcntl locks would).

    Args:
        path: the file to lock; never deleted.
        wait_s: how long to wait in seconds; 0 gives up at once.
        what: the noun for the message.
        on_wait: called once when somebody else holds the lock and the wait begins.

    Raises:
        BusyError: when the lock is still held after `wait_s`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InfraError(f"cannot open {path}: {error.strerror}", disk_hint(error)) from error
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(f"{what} {path.name} is held by another process", "try again later") from None
                if on_wait:
                    on_wait()
                    on_wait = None
                time.sleep(0.005)
        yield descriptor
    finally:
        os.close(descriptor)
