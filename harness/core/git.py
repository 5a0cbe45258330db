"""Questions to git; a program works without it, so no answer is an answer."""

from __future__ import annotations

import subprocess
from pathlib import Path

TIMEOUT_S = 20.0


def git_output(folder: Path | None, *arguments: str) -> bytes | None:
    """Return what a git command prints; None when it fails, hangs, or git is not installed.

    Bytes, since a diff holds whatever the files hold.

    Args:
        folder: where to run it; the current folder when None.
        arguments: the command without `git`.
    """
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def git_line(folder: Path | None, *arguments: str) -> str | None:
    """Return a git command's answer of one line without the line end; None also when it is empty."""
    output = git_output(folder, *arguments)
    return (output or b"").decode("utf-8", "replace").strip() or None
