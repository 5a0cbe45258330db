"""Play tasks with an engine, turn by turn, and score what comes back.

An episode is one sequence of tokens: the prompt, the first reply, what the environment answered, the next reply, and
so on. What was sampled stays as it was sampled. All episodes that go on sample their next reply in one call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from harness.core.errors import ConfigError
from harness.core.failures import Stage, failure_of
from harness.core.redact import redact
from harness.core.seeds import derive_seed
from harness.core.types import (
    Completion,
    Episode,
    FailureClass,
    FinishReason,
    Message,
    Rollout,
    Score,
    Segment,
    Task,
    failed_score,
)
from harness.envs.base import Environment, Session
from harness.inference.chat import decode, render_chat, render_suffix


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


@runtime_checkable
class Players(Protocol):
    """An engine that has several processes play the episodes, each of them some tasks."""

    def play(
        self,
        env: Environment,
        tasks: Sequence[Task],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        components: Mapping[str, str] | None,
        timing: Timing,
    ) -> list[Rollout]:
        """Return what `collect` would."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the rollouts of one environment are sampled.

    Args:
        max_tokens: tokens per reply.
        temperature: softmax temperature.
        context: limit of prompt, replies and text between them together, in tokens.
        max_turns: replies per episode.
    """

    max_tokens: int
    temperature: float
    context: int
    max_turns: int = 1


@dataclass(slots=True)
class Timing:
    """Seconds and tokens spent, added up over calls."""

    generate_s: float = 0.0
    score_s: float = 0.0
    tokens: int = 0


def score_episode(env: Environment, task: Task, episode: Episode) -> Score:
    """Score an episode; a verifier that raises is a failure of its class (see `core.failures`), never a zero.

    A reward or component that is no finite number is a verifier's failure too: it would poison every mean it meets.
    """
    try:
        score = env.score(task, episode)
        if not all(map(math.isfinite, (score.reward, *score.components.values()))):
            raise ValueError(f"a reward that is not finite: {score.reward}, {dict(score.components)}")
        return score
    except Exception as error:  # the one place where any exception of foreign code becomes a record
        return _failed(error)


def _failed(error: Exception) -> Score:
    failure = failure_of(error, Stage.SCORE) or FailureClass.VERIFIER
    return failed_score(failure, redact(f"{type(error).__name__}: {error}")[:500])


@dataclass(frozen=True, slots=True)
class _Player:
    """What all episodes of one call share."""

    tokenizer: Any
    eos_ids: frozenset[int]
    env: Environment
    sampling: Sampling


@dataclass(slots=True)
class _Play:
    """One episode in progress; `finish` is set once it is over."""

    task: Task
    index: int
    seed: int
    session: Session
    messages: list[Message]
    prompt: tuple[int, ...]
    ids: list[int]
    segments: list[Segment] = field(default_factory=list)
    finish: FinishReason | None = None
    failed: Score | None = None

    def hear(self, completion: Completion, turn: int, player: _Player) -> None:
        """Take a reply into the episode, and what the environment answers when there is another turn."""
        reply = decode(player.tokenizer, completion.token_ids, player.eos_ids)
        self.messages.append(Message("assistant", reply))
        self.segments.append(completion.segment)
        self.ids += completion.token_ids
        if completion.finish_reason is FinishReason.LENGTH:
            self.finish = FinishReason.LENGTH  # a reply that was cut is nothing to answer to
            return
        try:
            following = self.session.step(reply)
        except Exception as error:  # a tool behind the session failed, or the environment has a bug
            self.failed, self.finish = _failed(error), FinishReason.STOP
            return
        if following is None:
            self.finish = FinishReason.STOP
        elif turn == player.sampling.max_turns:
            self.finish = FinishReason.MAX_TURNS
        else:
            self._go_on(following, player)

    def _go_on(self, following: Sequence[Message], player: _Player) -> None:
        suffix = render_suffix(player.tokenizer, self.messages[:-1], following, player.eos_ids)
        if len(self.ids) + len(suffix) + player.sampling.max_tokens > player.sampling.context:
            self.finish = FinishReason.CONTEXT
            return
        self.messages += following
        self.segments.append(Segment(tuple(suffix), False))
        self.ids += suffix

    def rollout(self, env: Environment) -> Rollout:
        """Return the scored rollout of an episode that is over."""
        episode = Episode(self.task.id, tuple(self.messages), self.finish or FinishReason.STOP)
        score = self.failed or score_episode(env, self.task, episode)
        return Rollout(self.task, self.task.id, self.index, self.prompt, tuple(self.segments), episode, score)


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
        seeds: per task `n` sampling seeds; later turns derive theirs from it.
        components: prompt texts that replace the shipped ones.
        timing: added to when given.

    Raises:
        ConfigError: when a prompt leaves no room for a reply within the context, or the model's chat template does
            not keep earlier turns as they were sampled.
    """
    timing = timing or Timing()
    if isinstance(engine, Players):
        return engine.play(env, tasks, n, sampling, seeds, components, timing)
    player = _Player(tokenizer, eos_ids, env, sampling)
    plays = [play for task, own in zip(tasks, seeds, strict=True) for play in _open(player, task, n, own, components)]
    live = plays
    for turn in range(1, sampling.max_turns + 1):
        started = time.monotonic()
        if turn == 1:
            prompts = [play.prompt for play in plays[::n]]
            groups = engine.generate(prompts, n, sampling.max_tokens, sampling.temperature, seeds)
        else:
            again = [[derive_seed(play.seed, "turn", turn)] for play in live]
            prompts = [tuple(play.ids) for play in live]
            groups = engine.generate(prompts, 1, sampling.max_tokens, sampling.temperature, again)
        timing.generate_s += time.monotonic() - started
        started = time.monotonic()
        for play, completion in zip(live, (c for group in groups for c in group), strict=True):
            timing.tokens += len(completion.token_ids)
            play.hear(completion, turn, player)
        live = [play for play in live if play.finish is None]
        timing.score_s += time.monotonic() - started
        if not live:
            break
    started = time.monotonic()
    rollouts = [play.rollout(env) for play in plays]
    timing.score_s += time.monotonic() - started
    return rollouts


def _open(
    player: _Player, task: Task, n: int, seeds: Sequence[int], components: Mapping[str, str] | None
) -> list[_Play]:
    """Begin the `n` episodes of a task, each with a session of its own and all with the same prompt."""
    sessions = [player.env.start(task, components) for _ in range(n)]
    messages = sessions[0].messages
    prompt = tuple(render_chat(player.tokenizer, messages))
    sampling = player.sampling
    if len(prompt) + sampling.max_tokens > sampling.context:
        raise ConfigError(
            f"task {task.id}: {len(prompt)} prompt tokens and {sampling.max_tokens} for the reply"
            f" exceed the context of {sampling.context}",
            "use a shorter prompt or lower max_tokens: in the run's file for training, in CONTEXT.md for evals",
        )
    opened = enumerate(zip(sessions, seeds, strict=True))
    return [_Play(task, index, seed, own, list(messages), prompt, list(prompt)) for index, (own, seed) in opened]
