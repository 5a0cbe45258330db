"""Stored rollouts: one JSON line each, in `outputs/<run>/rollouts/step_N/<env>.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.core.canonical import canonical_json, encode_non_finite, strict_loads
from harness.core.errors import InfraError
from harness.core.files import atomic_write
from harness.core.redact import redactor
from harness.core.types import Rollout


def rollout_record(rollout: Rollout, advantage: float) -> dict[str, Any]:
    """Return what is stored of a rollout: texts, score, advantage and lengths.

    `turns` when there were several, `version` of the policy when it may be an older one than was trained.
    """
    score, written = rollout.score, rollout.completion
    extra: dict[str, Any] = {"turns": rollout.turns} if rollout.turns > 1 else {}
    if rollout.version is not None:
        extra["version"] = rollout.version
    return {
        "task": rollout.task.id,
        "group": rollout.group,
        "index": rollout.index,
        "prompt": rollout.episode.prompt_text,
        "completion": rollout.episode.final,
        "finish": str(written.finish_reason),
        "reward": score.reward,
        "components": dict(score.components),
        "metrics": dict(score.metrics),
        "diagnostics": dict(score.diagnostics),
        "failure": score.failure and str(score.failure),
        "advantage": advantage,
        "tokens": len(written.token_ids),
    } | extra


def write_rollouts(path: Path, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> None:
    """Write the rollouts of one step and environment; a secret that a tool or a prompt let in is replaced.

    Raises:
        InfraError: when the disk refuses.
    """
    records = [redactor().data(rollout_record(r, a)) for r, a in zip(rollouts, advantages, strict=True)]
    atomic_write(path, "".join(canonical_json(encode_non_finite(record), sort=False) + "\n" for record in records))


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield stored rollouts in file order.

    Raises:
        InfraError: naming file and line when one does not parse.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record: dict[str, Any] = strict_loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not a JSON object")
            except ValueError as error:
                raise InfraError(
                    f"{path}:{number}: {error}", "train the step again with `harness launch --resume`"
                ) from error
            yield record
