"""Rollouts as JSON values, for the other processes of a run: numbers come back exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.types import Episode, FailureClass, FinishReason, Message, Rollout, Score, Segment, Task


def to_wire(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON values; of its task only the id."""
    episode, score = rollout.episode, rollout.score
    return {
        "task": rollout.task.id,
        "group": rollout.group,
        "index": rollout.index,
        "prompt_ids": list(rollout.prompt_ids),
        "segments": [[list(s.token_ids), s.sampled, list(s.logprobs)] for s in rollout.segments],
        "messages": [[message.role, message.content] for message in episode.messages],
        "finish": episode.finish_reason.value,
        "score": {
            "reward": score.reward,
            "components": dict(score.components),
            "metrics": dict(score.metrics),
            "diagnostics": dict(score.diagnostics),
            "failure": score.failure and score.failure.value,
        },
    }


def from_wire(data: Mapping[str, Any], tasks: Mapping[str, Task]) -> Rollout:
    """Return the rollout that `to_wire` spelt.

    Args:
        data: what it returned.
        tasks: by id.
    """
    score = data["score"]
    failure = FailureClass(score["failure"]) if score["failure"] else None
    messages = tuple(Message(role, content) for role, content in data["messages"])
    return Rollout(
        tasks[data["task"]],
        data["group"],
        data["index"],
        tuple(data["prompt_ids"]),
        tuple(Segment(tuple(ids), sampled, tuple(logprobs)) for ids, sampled, logprobs in data["segments"]),
        Episode(data["task"], messages, FinishReason(data["finish"])),
        Score(score["reward"], score["components"], score["metrics"], score["diagnostics"], failure),
    )
