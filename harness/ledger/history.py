"""What git knows of a program: its ledger and its files at another commit."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import CannotTellError, UsageError
from harness.core.git import git_line, git_output


def commit_of(root: Path, ref: str) -> str:
    """Return the hash of the commit a name stands for.

    Args:
        root: the program's folder.
        ref: a branch, a tag or a commit, such as `origin/main`.

    Raises:
        UsageError: when the name can be none.
        CannotTellError: when this clone does not have it.
    """
    if not ref or ref.startswith("-") or "\0" in ref:
        raise UsageError(f"{ref[:80]!r} names no commit", "--base origin/main")
    found = git_line(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if found is None:
        remote, _, branch = ref.partition("/")
        fetch = f"git fetch {remote} {branch}" if branch else "git fetch"
        raise CannotTellError(
            f"git does not know {ref[:80]!r} here",
            f"{fetch}, or in a GitHub workflow: actions/checkout, fetch-depth: 0",
        )
    return found


def merge_base(root: Path, one: str, other: str) -> str | None:
    """Return the last commit two commits have in common; None in a shallow clone, or for strangers."""
    return git_line(root, "merge-base", one, other)


def file_at(root: Path, commit: str, name: str) -> bytes | None:
    """Return a file's bytes at a commit; None when it was not there.

    Args:
        root: the program's folder.
        commit: a commit's hash, or an index stage such as `:2`.
        name: path relative to the program.
    """
    return git_output(root, "show", f"{commit}:./{name}")


def files_at(root: Path, commit: str, folder: str) -> list[str]:
    """Return the paths of the files below a folder at a commit, relative to the program."""
    listed = git_output(root, "ls-tree", "-r", "-z", "--name-only", commit, "--", f"./{folder}/")
    return [name.decode("utf-8", "surrogateescape") for name in (listed or b"").split(b"\0") if name]


def commits_with(root: Path, *names: str, limit: int = 500) -> list[str]:
    """Return the hashes of commits of every branch that changed one of some files or folders, newest first.

    The two sides of a merge in progress come first: no branch may name them.
    """
    heads = [git_line(root, "rev-parse", "--verify", "--quiet", ref) for ref in _UNFINISHED]
    paths = [f"./{name}" for name in names]
    listed = git_line(root, "log", "--all", "--full-history", f"--max-count={limit}", "--format=%H", "--", *paths)
    return list(dict.fromkeys([*filter(None, heads), *(listed or "").split()]))


def every_version(root: Path, name: str, limit: int = 200) -> list[bytes]:
    """Return what a file is on every branch and tag that this clone knows, and on both sides of a merge in progress."""
    listed = git_line(root, "for-each-ref", f"--count={limit}", "--sort=-committerdate", "--format=%(objectname)")
    commits = [*(listed or "").split(), *_UNFINISHED]
    found = (file_at(root, commit, name) for commit in dict.fromkeys(commits))
    return [data for data in found if data is not None]


_UNFINISHED = ("HEAD", "MERGE_HEAD", "REBASE_HEAD", "CHERRY_PICK_HEAD", "ORIG_HEAD")
