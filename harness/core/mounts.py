"""Which file system a folder lies on, and whether another machine serves it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/mounts")
_NETWORK = frozenset(
    [
        *(
            "9p",
            "acfs",
            "afp",
            "afpfs",
            "afs",
            "beegfs",
            "ceph",
            "cifs",
            "davfs",
            "gfs2",
            "glusterfs",
            "gpfs",
            "lustre",
        ),
        *("ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf"),
        *("virtiofs", "webdav"),
    ]
)
_LOCAL_FUSE = frozenset(
    ["bindfs", "encfs", "exfat", "fuse-overlayfs", "gocryptfs", "mergerfs", "ntfs", "ntfs-3g", "squashfuse"]
)
_MACOS_LINE = re.compile(r".* on (/.*) \(([\w.-]+)")
_OCTAL = re.compile(r"\\([0-7]{3})")


def is_network(kind: str) -> bool:
    """Tell whether O_APPEND and flock cannot be relied on between the machines that see a file system.

    Args:
        kind: its type, as /proc/mounts or `mount` spell it. A FUSE type that is not known to be local counts.
    """
    name = kind.lower()
    if name.startswith("fuse."):
        return name.removeprefix("fuse.") not in _LOCAL_FUSE
    return name in _NETWORK


def file_system(folder: Path) -> str | None:
    """Return the type of the file system a folder lies on; None where the system does not tell."""
    try:
        text = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        mounts = linux_mounts(text)
    except OSError:
        mounts = macos_mounts(_mount_output())
    return kind_of(Path(os.path.realpath(folder)), mounts)


def linux_mounts(text: str) -> list[tuple[Path, str]]:
    """Return mount points with their types from the text of /proc/mounts, where blanks are octal (`\\040`)."""
    rows = [line.split(" ") for line in text.splitlines()]
    return [(Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), row[1])), row[2]) for row in rows if len(row) >= 3]


def macos_mounts(text: str) -> list[tuple[Path, str]]:
    """Return mount points with their types from what `mount` prints: `server:/data on /Volumes/data (nfs, …)`."""
    found = [_MACOS_LINE.match(line) for line in text.splitlines()]
    return [(Path(match[1]), match[2]) for match in found if match]


def _mount_output() -> str:
    import subprocess  # only where there is no /proc; it takes milliseconds

    try:
        done = subprocess.run(["/sbin/mount"], capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def kind_of(folder: Path, mounts: list[tuple[Path, str]]) -> str | None:
    """Return the type of the innermost mount that holds a folder; of two on one place, the later one."""
    best, kind = -1, None
    for point, name in mounts:
        if len(point.parts) >= best and folder.is_relative_to(point):
            best, kind = len(point.parts), name
    return kind
