"""What a later attempt computed again: it stays on record, and it no longer counts.

An attempt that resumes from a checkpoint at step N takes everything after N from the attempts
before it; one that starts at step 0 takes every step. Pure; nothing here is stored twice, since
`started` events say where each attempt began and every metrics row says which attempt wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.core.canonical import decode_number, strict_loads

FOLDER = "superseded"
"""In a run's folder: `attempt_K/`, with the rollouts, adapters and eval items that a later attempt took from K."""


def is_superseded(data: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a later attempt started before the step of an eval, so that other weights count now.

    Args:
        data: of an `evaluated` event.
        attempts: of the run. An eval of the base model, at step 0, is never superseded; that of a warm start, at
            step 0 too, is by an attempt that started over.
    """
    attempt, step = data.get("attempt"), data.get("step")
    if not isinstance(attempt, int) or not isinstance(step, int):
        return False
    start = -1 if data.get("subject") == "policy" else 0
    return any(later["attempt"] > attempt and _from(later, start) < step for later in began(attempts))


def _from(attempt: Mapping[str, Any], start: int) -> int:
    """Return the step that an attempt began from; `start` when it began anew."""
    resumed = attempt.get("resumed_from")
    return start if resumed is None else int(resumed)


def began(attempts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the attempts that have a number, as those of every `started` event do."""
    return [attempt for attempt in attempts if isinstance(attempt.get("attempt"), int)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, numbers decoded; a line that a kill tore is left out."""
    rows = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    for line in lines:
        try:
            row = strict_loads(line)
        except ValueError:  # the attempt that resumed wrote the step again
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append({key: decode_number(v) if isinstance(v, dict) else v for key, v in row.items()})
    return rows


def superseded_rows(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Tell for every metrics row whether a later attempt trained its step, or an earlier one, again.

    So the rows that are left form one line: those of an attempt up to the step where the next one took over.
    """
    first: dict[int, int] = {}
    for row in rows:
        attempt, step = row.get("attempt"), row["step"]
        if isinstance(attempt, int):
            first[attempt] = min(first.get(attempt, step), step)
    took: dict[int, int] = {}  # attempt -> the first step that any later attempt trained
    lowest: int | None = None
    for attempt in sorted(first, reverse=True):
        if lowest is not None:
            took[attempt] = lowest
        lowest = first[attempt] if lowest is None else min(lowest, first[attempt])
    return [row.get("attempt") in took and row["step"] >= took[row["attempt"]] for row in rows]


def current_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the metrics rows that count, in file order."""
    return [row for row, old in zip(rows, superseded_rows(rows), strict=True) if not old]
