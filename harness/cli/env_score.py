"""Score a file of completions: what `harness env score` does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import ConfigError, NotFoundError
from harness.core.names import did_you_mean
from harness.core.types import Episode, FinishReason, Message
from harness.envs.rows import json_lines

if TYPE_CHECKING:
    from harness.envs.base import Environment

_HINT = 'write one object a line: {"task": ID, "completion": TEXT}'


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise NotFoundError(f"no file {path}", _HINT)
    return json_lines(path, _HINT)


def _finish(value: Any, where: str) -> FinishReason:
    try:
        return FinishReason(value)
    except ValueError:
        known = ", ".join(FinishReason)
        raise ConfigError(
            f"{where}: finish {str(value)[:40]!r} is none of {known}", "leave it out for `stop`"
        ) from None


def score_lines(path: Path, env: Environment, split: str) -> list[dict[str, Any]]:
    """Return the score of every line, in their order.

    Raises:
        NotFoundError: when there is no such file or split, or a line names a task the split does not have.
        ConfigError: when a line is no object, lacks a text, or there is none.
    """
    tasks = {task.id: task for task in env.tasks(split)}
    rows = []
    for where, row in _lines(path):
        for key in ("task", "completion"):
            if not isinstance(row.get(key), str):
                raise ConfigError(f"{where}: `{key}` is missing or no text", _HINT)
        task = tasks.get(row["task"])
        if task is None:
            hint = did_you_mean(row["task"], tasks, "--split chooses another split, --arg another source")
            raise NotFoundError(f"{where}: no task {row['task'][:80]!r} in split {split!r} of {env.id}", hint)
        finish = _finish(row.get("finish", "stop"), where)
        messages = (*env.start(task).messages, Message("assistant", row["completion"]))
        score = env.score(task, Episode(task.id, messages, finish))
        rows.append(
            {
                "task": task.id,
                "reward": score.reward,
                "components": dict(score.components),
                "metrics": dict(score.metrics),
                "diagnostics": dict(score.diagnostics),
                "failure": score.failure,
            }
        )
    if not rows:
        raise ConfigError(f"{path.name} holds no completion", _HINT)
    return rows


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of the reward and of every component over the lines that have it, and the share that is right."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        values["reward"].append(row["reward"])
        for name, value in row["components"].items():
            values[name].append(value)
        values["right"].append(float(row["failure"] is None))
    return {name: round(sum(found) / len(found), 6) for name, found in values.items()}
