"""Play tasks with an engine and score what comes back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.core.errors import ConfigError
from harness.core.failures import Stage, failure_of
from harness.core.redact import redact
from harness.core.types import Completion, Episode, FailureClass, Message, Rollout, Score, Task, failed_score
from harness.envs.base import Environment
from harness.inference.chat import decode, render_chat


class Engine(Protocol):
    """What samples: token ids in, token ids with log probabilities out."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Completion]]:
        """Return `n` completions per prompt, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the rollouts of one environment are sampled.

    Args:
        max_tokens: tokens per reply.
        temperature: softmax temperature.
        context: limit of prompt and reply together, in tokens.
    """

    max_tokens: int
    temperature: float
    context: int


@dataclass(slots=True)
class Timing:
    """Seconds and tokens spent, added up over calls."""

    generate_s: float = 0.0
    score_s: float = 0.0
    tokens: int = 0


def score_episode(env: Environment, task: Task, episode: Episode) -> Score:
    """Score an episode; a verifier that raises is a failure of its class (see `core.failures`), never a zero."""
    try:
        return env.score(task, episode)
    except Exception as error:  # the one place where any exception of foreign code becomes a record
        failure = failure_of(error, Stage.SCORE) or FailureClass.VERIFIER
        return failed_score(failure, redact(f"{type(error).__name__}: {error}")[:500])


def collect(
    engine: Engine,
    tokenizer: Any,
    eos_ids: frozenset[int],
    env: Environment,
    tasks: Sequence[Task],
    n: int,
    sampling: Sampling,
    seeds: Sequence[Sequence[int]],
    components: Mapping[str, str] | None = None,
    timing: Timing | None = None,
) -> list[Rollout]:
    """Return `n` scored rollouts of each task, task by task.

    Args:
        seeds: per task `n` sampling seeds.
        components: prompt texts that replace the shipped ones.
        timing: added to when given.

    Raises:
        ConfigError: when a prompt leaves no room for a reply within the context.
    """
    timing = timing or Timing()
    openings = [env.start(task, components).messages for task in tasks]
    prompts = [render_chat(tokenizer, messages) for messages in openings]
    for task, prompt in zip(tasks, prompts, strict=True):
        if len(prompt) + sampling.max_tokens > sampling.context:
            raise ConfigError(
                f"task {task.id}: {len(prompt)} prompt tokens and {sampling.max_tokens} for the reply"
                f" exceed the context of {sampling.context}",
                "use a shorter prompt or lower max_tokens: in the run's file for training, in CONTEXT.md for evals",
            )
    started = time.monotonic()
    groups = engine.generate(prompts, n, sampling.max_tokens, sampling.temperature, seeds)
    timing.generate_s += time.monotonic() - started
    started = time.monotonic()
    rollouts = []
    for task, messages, prompt, completions in zip(tasks, openings, prompts, groups, strict=True):
        for index, completion in enumerate(completions):
            timing.tokens += len(completion.token_ids)
            reply = Message("assistant", decode(tokenizer, completion.token_ids, eos_ids))
            episode = Episode(task.id, (*messages, reply), completion.finish_reason)
            score = score_episode(env, task, episode)
            rollouts.append(Rollout(task, task.id, index, tuple(prompt), completion, episode, score))
    timing.score_s += time.monotonic() - started
    return rollouts
