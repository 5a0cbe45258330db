"""What git has to know of a ledger: how to show it, and how to merge it.

Attributes are committed with the program. Git never takes commands from a repository, so every clone
needs the settings once: `harness init` sets them, `harness ledger install` does so in a clone.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from harness.core.errors import InfraError, NotFoundError
from harness.core.files import atomic_write
from harness.core.git import git_line

SETTINGS = (
    ("diff.harness-ledger.textconv", "harness ledger textconv"),
    ("merge.harness-ledger.name", "union of the events of both sides"),
    ("merge.harness-ledger.driver", "harness ledger merge %O %A %B"),
)
"""Settings of a clone, by key; their values name the command as a shell finds it."""
INSTALL = "harness ledger install"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a clone lacks, or lacked.

    Args:
        commands: the git commands that set it up.
        attributes: lines missing from `.gitattributes`.
    """

    commands: tuple[tuple[str, ...], ...]
    attributes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.commands and not self.attributes


def template(name: str) -> str:
    """Return the text of a template that ships with the package."""
    return (files("harness.program") / "templates" / name).read_text(encoding="utf-8")


def missing_lines(old: str, name: str = "gitattributes") -> tuple[str, ...]:
    """Return the lines of a template that a file of this text lacks."""
    return tuple(line for line in template(name).splitlines() if line not in old.splitlines())


def with_lines(old: str, lines: tuple[str, ...]) -> str:
    """Return a file's text with lines added at its end."""
    return old + ("\n" if old and not old.endswith("\n") else "") + "".join(f"{line}\n" for line in lines)


def setup_of(root: Path) -> Setup:
    """Return what a program's clone lacks; settings that somebody changed on purpose count as there."""
    commands = tuple(
        ("git", "config", key, value) for key, value in SETTINGS if not git_line(root, "config", "--get", key)
    )
    return Setup(commands, missing_lines(_attributes(root)))


def install(root: Path, *, dry_run: bool = False) -> Setup:
    """Set up git for the ledger in this clone; repeating it changes nothing.

    Args:
        root: the program's folder.
        dry_run: touch nothing and return what would be done.

    Raises:
        NotFoundError: when the program is in no git repository.
        InfraError: when git or the disk says no.
    """
    if git_line(root, "rev-parse", "--show-toplevel") is None:
        raise NotFoundError(f"{root} is in no git repository, or git is not installed", f"cd {root} && git init")
    found = setup_of(root)
    if not dry_run:
        if found.attributes:
            atomic_write(root / ".gitattributes", with_lines(_attributes(root), found.attributes))
        for command in found.commands:
            run_git(root, command)
    return found


def spell(command: tuple[str, ...]) -> str:
    """Return a command as one would type it."""
    return " ".join(f'"{part}"' if " " in part else part for part in command)


def on_path() -> bool:
    """Tell whether git, which starts commands through a shell, finds `harness`."""
    return shutil.which("harness") is not None


def run_git(root: Path, command: tuple[str, ...]) -> None:
    """Run a git command that sets something up.

    Raises:
        InfraError: when it fails.
    """
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InfraError(
            f"`{spell(command)}` failed: {done.stderr.strip()[:200]}", "the files are written; run the command by hand"
        )


def _attributes(root: Path) -> str:
    path = root / ".gitattributes"
    return path.read_text(encoding="utf-8") if path.exists() else ""
