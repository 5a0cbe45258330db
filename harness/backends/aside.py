"""What an earlier attempt left beyond the step where the next one begins: set aside, never deleted.

Only checkpoints go, since a started-over run must not resume from them. Everything else moves to
`superseded/attempt_K/` in the run's folder, so that it is on record and nothing takes it for current.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.core.errors import InfraError
from harness.core.files import disk_hint, step_folders
from harness.ledger.superseded import FOLDER

_MOVED = ("rollouts", "adapters", "evals")
_BEGUN = ("metrics.jsonl", "warmup.jsonl", "warmup.json", "adapters/step_0")


def set_aside(folder: Path, attempt: int, resumed_from: int | None) -> list[Path]:
    """Move what attempt `attempt` and those before it left after the step to resume from.

    Args:
        folder: the run's folder under outputs/.
        attempt: number of the last attempt on record.
        resumed_from: step of the checkpoint; None when the run starts over at step 0.

    Returns:
        Where things were moved to. Killed half way, the next call moves the rest.

    Raises:
        InfraError: when the disk refuses.
    """
    kept = folder / FOLDER / f"attempt_{attempt}"
    try:
        if resumed_from is None:  # first, so that a kill right here leaves nothing to resume from by mistake
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        moves = [(path, kept / path.relative_to(folder)) for path in _later(folder, resumed_from or 0)]
        if resumed_from is None:
            moves += [(path, kept / path.relative_to(folder)) for path in _begun(folder)]
        return [_move(source, target) for source, target in moves]
    except OSError as error:
        raise InfraError(f"cannot set aside what attempt {attempt} left: {error}", disk_hint(error)) from error


def _later(folder: Path, step: int) -> list[Path]:
    """Return the folders of steps after one, of everything that is stored by step."""
    return [path for name in _MOVED for number, path in step_folders(folder / name) if number > step]


def _begun(folder: Path) -> list[Path]:
    """Return what only an attempt that starts over writes again: the metrics, and everything of a warm start."""
    named = [folder / name for name in _BEGUN]
    return [path for path in (*named, *(folder / "evals" / "step_0").glob("policy.*")) if path.exists()]


def _move(source: Path, target: Path) -> Path:
    """Rename, under a new name when an attempt that died early left the same step before."""
    target.parent.mkdir(parents=True, exist_ok=True)
    number = 2
    unique = target
    while unique.exists():
        unique = target.with_name(f"{target.name}.{number}")
        number += 1
    source.rename(unique)
    return unique
