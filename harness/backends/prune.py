"""Delete what a decided run no longer needs from `outputs/`: its checkpoints, and the rollouts between first and last.

Adapters, evals, metrics, logs and the rollouts of the first and the last step always stay: promotion, reports and
later evals are made from them. Nothing that git tracks is touched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from harness.core.errors import InfraError
from harness.core.files import disk_hint, step_folders
from harness.core.git import git_output
from harness.core.ids import run_number
from harness.core.types import Decision
from harness.ledger import RunState, State
from harness.program import Program

OPEN = frozenset({str(Decision.RERUN)})
"""Decisions after which a run goes on, so that it keeps everything."""


@dataclass(frozen=True, slots=True)
class Item:
    """One folder to delete.

    Args:
        run: whose it is.
        what: `checkpoint`, `rollouts` or `superseded` (what a later attempt trained again).
        path: the folder.
        size: bytes of the files in it.
    """

    run: str
    what: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A run that is left alone, and why."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What would be deleted, and which runs are left alone."""

    items: tuple[Item, ...]
    kept: tuple[Kept, ...]

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(item.size for item in self.items)


def plan_prune(
    program: Program,
    state: State,
    *,
    runs: Sequence[str] = (),
    keep_last: int = 3,
    older_than_days: float = 0.0,
    now: datetime | None = None,
) -> PrunePlan:
    """Return what the policy allows to delete; touches nothing.

    Args:
        program: the program.
        state: of its ledger.
        runs: only these; every run with a folder under outputs/ when empty.
        keep_last: so many of the youngest decided runs keep everything.
        older_than_days: only runs that were decided at least so long ago.
        now: the time to count from; that of the clock when None.
    """
    now = now or datetime.now(UTC)
    here = [run for run in state.runs.values() if program.run_dir(run.run).is_dir()]
    decided = [run.run for run in here if run.decision and str(run.decision) not in OPEN]
    youngest = sorted(decided, key=run_number)[-keep_last:] if keep_last else []
    items: list[Item] = []
    kept: list[Kept] = []
    for run in here:
        if runs and run.run not in runs:
            continue
        reason = _reason_to_keep(run, run.run in youngest, keep_last, now - timedelta(days=older_than_days))
        if reason:
            kept.append(Kept(run.run, reason))
        else:
            items += _items(program, run.run)
    return PrunePlan(tuple(items), tuple(kept))


def _reason_to_keep(run: RunState, young: bool, keep_last: int, before: datetime) -> str:
    """Say why a run keeps everything; empty when it does not."""
    if run.attempts and run.attempts[-1].get("outcome") is None:
        return "its last attempt is open"
    if not run.decision:
        return "nothing was decided"
    if str(run.decision) in OPEN:
        return f"decided {run.decision}: it goes on"
    if young:
        return f"one of the {keep_last} youngest decided runs"
    if datetime.fromisoformat(str(run.decisions[-1]["at"])) > before:
        return "decided too recently"
    return ""


def _items(program: Program, run: str) -> list[Item]:
    """Return the folders of a run that may go, those that git tracks or that are links left out."""
    folder = program.run_dir(run)
    rollouts = [path for _, path in step_folders(folder / "rollouts")]
    named = [("checkpoint", path) for path in sorted((folder / "checkpoints").glob("*"))]
    named += [("rollouts", path) for path in rollouts[1:-1]]
    for attempt in sorted((folder / "superseded").glob("attempt_*")):
        named += [("superseded", path) for path in sorted(attempt.glob("rollouts"))]
    tracked = _tracked(program, folder)
    return [
        Item(run, what, path, folder_size(path))
        for what, path in named
        if path.is_dir() and not path.is_symlink() and not any(name.is_relative_to(path) for name in tracked)
    ]


def _tracked(program: Program, folder: Path) -> list[Path]:
    """Return the files below a folder that git tracks; outside of git there are none."""
    listed = git_output(program.root, "ls-files", "-z", "--", str(folder)) or b""
    return [program.root / os.fsdecode(name) for name in listed.split(b"\0") if name]


def folder_size(folder: Path) -> int:
    """Return the bytes of the files below a folder; links count as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                total += path.stat().st_size
    return total


def apply_prune(items: Iterable[Item], on_removed: Callable[[Item], None]) -> int:
    """Delete the folders and return how many bytes they held.

    A folder is renamed before it is emptied, so that a kill half way leaves no checkpoint that looks whole.

    Args:
        items: of a plan.
        on_removed: called after each.

    Raises:
        InfraError: when the disk refuses; what was deleted before stays deleted.
    """
    freed = 0
    for item in items:
        doomed = item.path.with_name(f".{item.path.name}.pruned")
        try:
            shutil.rmtree(doomed, ignore_errors=True)
            item.path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise InfraError(f"cannot delete {item.path}: {error.strerror}", disk_hint(error)) from error
        freed += item.size
        on_removed(item)
    return freed
