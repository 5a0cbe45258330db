"""`harness init`: a new program from the templates that ship with the package."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness import __version__
from harness.core.errors import InfraError, RefusedError, UsageError
from harness.core.files import atomic_write, disk_hint
from harness.core.git import git_line, git_output
from harness.ledger.fold import fold
from harness.program.documents import Context, parse_page
from harness.program.gitsetup import INSTALL, SETTINGS, missing_lines, run_git, spell, template, with_lines
from harness.program.model import DOCUMENTS, Program
from harness.program.thread import render_thread

_PAGES = (*DOCUMENTS, "THREAD.md")
_OWN = (*_PAGES, "rl", "analysis", "runs.jsonl")
"""Names that make a folder a program; when one exists, nothing is written."""
_MERGED = {".gitignore": "gitignore", ".gitattributes": "gitattributes"}
_KEPT = {"README.md": "README.md", ".github/workflows/harness.yml": "workflow.yml"}


@dataclass(frozen=True, slots=True)
class InitResult:
    """What `init` did, or would do.

    Args:
        root: the program's folder.
        written: files by relative path, in the order they were written.
        kept: files that existed and were left alone.
        commands: git commands that ran.
        notes: what the user has to do, such as git that is not installed.
    """

    root: Path
    written: tuple[str, ...]
    kept: tuple[str, ...]
    commands: tuple[str, ...]
    notes: tuple[str, ...]


def init_program(
    path: Path, model: str = "smollm2-135m", *, revision: str | None = None, git: bool = True, dry_run: bool = False
) -> InitResult:
    """Write a new program: pages, folders, git files, a CI workflow; and set up git.

    A folder may already hold other files: its README and workflow stay, and lines missing from
    `.gitignore` and `.gitattributes` are added.

    Args:
        path: the folder; made when absent.
        model: the base checkpoint: an embedded name, a local folder, or a Hub id.
        revision: the commit of a Hub id.
        git: run `git init` outside a repository and set the drivers that show and merge the ledger.
        dry_run: touch nothing and say what would be done.

    Raises:
        RefusedError: when the folder already holds a program or part of one.
        UsageError: when the path is a file, or the model name is blank.
        InfraError: when the folder cannot be written.
    """
    root = Path(os.path.abspath(os.path.expanduser(path)))
    try:
        present = [name for name in _OWN if (root / name).exists()]
    except OSError as error:  # a name too long for the file system
        raise UsageError(
            f"{root} cannot be a folder: {error.strerror}", "name another, as in `harness init my-program`"
        ) from None
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file", "name a folder, as in `harness init my-program`")
    if present:
        raise RefusedError(
            f"{root} already holds {', '.join(present)}", "run `harness status` there, or name an empty folder"
        )
    contents, kept = _contents(root, model, revision)
    commands, notes = _git_commands(root) if git else ((), ())
    if not dry_run:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InfraError(f"cannot make {root}: {error.strerror}", disk_hint(error)) from error
        _write(root, contents)
        render_thread(Program(root), fold([]))  # so that `thread --check` holds from the first commit
        for command in commands:
            run_git(root, command)
    return InitResult(root, tuple(contents), kept, tuple(map(spell, commands)), notes)


def _write(root: Path, contents: dict[str, str]) -> None:
    """Write every file, or take back the new ones, so that the same command can be run again."""
    new = [root / name for name in contents if not (root / name).exists()]
    try:
        for name, text in contents.items():
            atomic_write(root / name, text)
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        for folder in sorted({path.parent for path in new} - {root}, reverse=True):
            with contextlib.suppress(OSError):  # it holds something else
                folder.rmdir()
        raise


def _contents(root: Path, model: str, revision: str | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what to write, by relative path, and which existing files to keep."""
    if not model.strip():
        raise UsageError("the model name is empty", "--model smollm2-135m is the embedded one")
    values = {
        "@model@": json.dumps(model, ensure_ascii=False),
        "@revision@": f"revision = {json.dumps(revision)}\n" if revision else "",
        "@name@": root.name,
        "@version@": __version__,
    }

    def fill(name: str) -> str:
        text = template(name)
        for mark, value in values.items():
            text = text.replace(mark, value)
        return text

    contents = {name: fill(name) for name in _PAGES}
    parse_page(Context, contents["CONTEXT.md"], "CONTEXT.md")  # a strange model name must not make a broken page
    contents |= {"rl/.gitkeep": "", "analysis/.gitkeep": ""}
    kept: list[str] = []
    for name, source in _MERGED.items():
        old = (root / name).read_text(encoding="utf-8") if (root / name).exists() else ""
        if missing := missing_lines(old, source):
            contents[name] = with_lines(old, missing)
    for name, source in _KEPT.items():
        if (root / name).exists():
            kept.append(name)
        else:
            contents[name] = fill(source)
    return contents, tuple(kept)


def _git_commands(root: Path) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return the git commands that `root` needs, and notes when git cannot run."""
    setup = tuple(("git", "config", *setting) for setting in SETTINGS)
    nearest = next(folder for folder in (root, *root.parents) if folder.is_dir())
    if shutil.which("git") is None:
        return (), (f"git is not installed; install it, then run: git init && {INSTALL}",)
    inside = git_line(nearest, "rev-parse", "--is-inside-work-tree") == "true"
    # A program in an ignored folder (a scratch copy, say) is not part of the repository around it.
    ignored = inside and git_output(nearest, "check-ignore", "--quiet", str(root / "GOAL.md")) is not None
    if inside and not ignored:
        return setup, ()
    return (("git", "init", "--quiet", "--initial-branch=main"), *setup), ()
