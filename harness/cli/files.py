"""Answers written into files of the user's choice, and which files such an answer may not replace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.errors import RefusedError, UsageError
from harness.core.files import atomic_write

if TYPE_CHECKING:
    from harness.program.model import Program


def check_target(here: Program, path: Path, *, force: bool) -> None:
    """Refuse a path at which an answer would destroy something.

    Args:
        here: the program whose own files are never a target.
        path: where the answer shall go.
        force: replace a file that exists.

    Raises:
        UsageError: when the file exists and `force` is not set, or the path is a folder.
        RefusedError: when the path belongs to the program: its pages, ledger, configs, reports, git files.
    """
    target = path.resolve()
    own = {here.goal, here.context, here.plan, here.thread, here.ledger}
    folders = (here.rl, here.root / ".git", here.outputs)
    if target in {file.resolve() for file in own} or any(target.is_relative_to(f.resolve()) for f in folders):
        raise RefusedError(f"{path} belongs to the program and is not overwritten", "name another file")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", f"name a file, such as {path / 'runs.csv'}")
    if path.exists() and not force:
        raise UsageError(f"{path} exists", "--force replaces it")


def write_answer(here: Program, path: Path, data: bytes, *, force: bool) -> str:
    """Write an answer atomically and return its path as text.

    Raises:
        As `check_target`, and InfraError when the disk refuses.
    """
    check_target(here, path, force=force)
    atomic_write(path, data)
    return str(path)
