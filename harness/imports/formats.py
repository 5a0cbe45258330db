"""The formats that can be imported, and which one a source has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.core.errors import UsageError
from harness.core.names import did_you_mean
from harness.imports import mlflow, tensorboard, trl, verifiers, wandb_csv, wandb_offline
from harness.imports.model import ImportedRun
from harness.imports.source import Source, SourceError


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Args:
        looks_like: whether a source holds it; quick, and never raises for a readable source.
        read: its runs, in the order they were made as far as the source tells.
        summary: what it is, for `--help` and messages.
    """

    looks_like: Callable[[Source], bool]
    read: Callable[[Source], list[ImportedRun]]
    summary: str


FORMATS: dict[str, Format] = {
    "wandb-offline": Format(wandb_offline.looks_like, wandb_offline.read, "W&B run folders and .wandb logs"),
    "mlflow": Format(mlflow.looks_like, mlflow.read, "an MLflow file store (mlruns/)"),
    "tensorboard": Format(tensorboard.looks_like, tensorboard.read, "TensorBoard event files"),
    "verifiers": Format(verifiers.looks_like, verifiers.read, "results.jsonl or traces.jsonl of verifiers evals"),
    "trl": Format(trl.looks_like, trl.read, "trainer_state.json and completions of TRL"),
    "wandb-csv": Format(wandb_csv.looks_like, wandb_csv.read, "W&B chart exports (CSV by Step)"),
}
"""In the order of detection; of a folder that holds several, the first is taken and the others are named."""


def choose(source: Source, name: str = "") -> str:
    """Return the format of a source.

    Args:
        source: the source.
        name: the format the user named; found when empty.

    Raises:
        UsageError: when `name` is no format.
        SourceError: when no format fits, or several do and none was named.
    """
    if name:
        if name not in FORMATS:
            raise UsageError(f"there is no format {name[:80]!r}", did_you_mean(name, FORMATS))
        return name
    found = [known for known, entry in FORMATS.items() if entry.looks_like(source)]
    if not found:
        known = "; ".join(f"{known}: {entry.summary}" for known, entry in FORMATS.items())
        raise SourceError(f"{source.path} has no format that can be imported", known)
    if len(found) > 1:
        raise SourceError(
            f"{source.path} holds several formats: {', '.join(found)}", f"name one with --format {found[0]}"
        )
    return found[0]
