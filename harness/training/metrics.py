"""`metrics.jsonl`: rows of numbers by step, appended as they come, merged by readers."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.core.canonical import canonical_json, encode_non_finite
from harness.core.errors import InfraError
from harness.core.files import disk_hint
from harness.core.types import FailureClass
from harness.training.advantages import spread
from harness.training.batches import Group


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row; a torn last line (the machine died while writing) is closed off first.

    Raises:
        InfraError: when the disk refuses.
    """
    data = (canonical_json(encode_non_finite(row), sort=False) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(descriptor, data)
            if written != len(data):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InfraError(f"cannot append to {path}: {error.strerror}", disk_hint(error)) from error


def _component(group: Group, name: str) -> list[float | None]:
    scores = [rollout.score for rollout in group.rollouts]
    return [None if i in group.outside else score.components.get(name, 0.0) for i, score in enumerate(scores)]


def rollout_metrics(by_env: Mapping[str, Sequence[Group]]) -> dict[str, float]:
    """Return what a step's groups say: rewards, components, spread, lengths, failures.

    Args:
        by_env: environment id → its groups.
    """
    metrics: dict[str, float] = {}
    groups = [group for env_groups in by_env.values() for group in env_groups]
    for env, env_groups in by_env.items():
        scores = [r.score for group in env_groups for r in group.rollouts if r.score.counts]
        if not scores:
            continue
        rewards = [score.reward for score in scores]
        metrics[f"train/{env}/reward/mean"] = sum(rewards) / len(rewards)
        metrics[f"train/{env}/reward/std"] = spread(rewards)
        for name in sorted({key for score in scores for key in score.components}):
            values = [score.components[name] for score in scores if name in score.components]  # of tasks that have it
            metrics[f"train/{env}/component/{name}"] = sum(values) / len(values)
            within = [spread(_component(group, name)) for group in env_groups]
            metrics[f"train/{env}/component_spread/{name}"] = sum(within) / len(within)
    spreads = [spread(group.rewards) for group in groups]
    metrics["train/group_spread"] = sum(spreads) / len(spreads)
    # by advantage, not by reward: a penalty for length or normalised components may tell equal rewards apart
    metrics["train/zero_spread_share"] = sum(not any(group.advantages) for group in groups) / len(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    metrics["train/tokens/mean"] = sum(lengths) / len(lengths)
    metrics["train/tokens/min"] = float(min(lengths))
    metrics["train/tokens/max"] = float(max(lengths))
    turns = [rollout.turns for rollout in rollouts]
    if max(turns) > 1:
        metrics["train/turns/mean"] = sum(turns) / len(turns)
    cut = sum(rollout.episode.finish_reason.truncated for rollout in rollouts)
    metrics["train/truncated_share"] = cut / len(rollouts)
    for failure in FailureClass:
        count = sum(rollout.score.failure is failure for rollout in rollouts)
        if count:
            metrics[f"train/failures/{failure}"] = float(count)
    return metrics


def progress_row(step: int, steps: int, row: Mapping[str, float], envs: Sequence[str]) -> dict[str, Any]:
    """Return what a progress callback is told of a finished step."""
    rewards = [row[key] for env in envs if (key := f"train/{env}/reward/mean") in row]
    return {
        "phase": "train",
        "step": step,
        "steps": steps,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "zero_spread": row["train/zero_spread_share"],
        "entropy": row.get("train/entropy"),
        "kl": row.get("train/kl_sampler"),
        "grad_norm": row.get("optim/grad_norm"),
        "tokens_per_s": row["perf/tokens_per_s"],
    }


def peak_memory_mb() -> float:
    """Return the largest resident set of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak / 2**20 if sys.platform == "darwin" else peak / 2**10)
