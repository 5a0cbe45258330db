"""Words shared by all parts: tasks, episodes, scores, rollouts, and where a failure belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.core.canonical import content_sha


class FailureClass(StrEnum):
    """Where a failure belongs; decides whether an item counts in a mean."""

    MODEL = "model"
    """Wrong, invalid, or truncated by its own length: counts against the model."""
    TOOL = "tool"
    """An upstream service failed: left out of the mean, counted and shown."""
    INFRA = "infra"
    """Engine, memory, time-out, machine: left out of the mean, counted and shown."""
    VERIFIER = "verifier"
    """Scoring raised: left out of the mean, counted and shown."""


class FinishReason(StrEnum):
    """Why a completion ended, as the engine saw it, or an episode of several turns, as its loop did."""

    STOP = "stop"
    """An end-of-sequence token was sampled; of an episode: and the environment asked for no further reply."""
    LENGTH = "length"
    """The token limit of a reply was reached first."""
    MAX_TURNS = "max_turns"
    """The environment would have gone on, but the last turn was used."""
    CONTEXT = "context"
    """The environment would have gone on, but the context has no room for another whole reply."""

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens, not of turns, cut it."""
        return self in (FinishReason.LENGTH, FinishReason.CONTEXT)


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Asked to stop by a signal, and it said so."""
    CRASHED = "crashed"
    """Its process is gone without a word; written by `harness recover` or by the next launch."""
    STOPPED = "stopped"


class Decision(StrEnum):
    """What people or agents concluded from a run."""

    KEEP = "keep"
    REJECT = "reject"
    RERUN = "rerun"
    """Infrastructure spoiled it; the same run gets a new attempt."""
    RETUNE = "retune"
    """Right idea, wrong setting."""
    INCONCLUSIVE = "inconclusive"


class Verdict(StrEnum):
    """What a gate says."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    FAIL = "fail"
    CANNOT_TELL = "cannot_tell"
    NOT_RUN = "not_run"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One example of an environment.

    Args:
        id: stable across releases of the same source; unique in the environment.
        env: environment id.
        split: `train`, `heldout`, or a named diagnostic split.
        fields: what the prompt is rendered from (shown to the model).
        answer: the gold; never shown to the model.
        label: class used for balanced sampling.
        cluster: unit of independent variation (a pair, a document); intervals cluster by it.
        meta: what reports may show beside it (phrasing, source identifier).
    """

    id: str
    env: str
    split: str
    fields: Mapping[str, str]
    answer: str
    label: str
    cluster: str
    meta: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        """Content hash: changes whenever what the model sees or the gold changes."""
        return content_sha({"id": self.id, "fields": dict(self.fields), "answer": self.answer})


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of an episode's tokens after the prompt: one reply, or the text that led to the next one.

    Args:
        token_ids: in order; they are never decoded and tokenised again.
        sampled: whether the model wrote them; only these are trained.
        logprobs: of sampled ids the natural log probability under the sampling distribution, one each; else empty.
    """

    token_ids: tuple[int, ...]
    sampled: bool
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one sample.

    Args:
        token_ids: sampled ids, the end-of-sequence token included when one was sampled.
        logprobs: natural log probability of each id under the sampling distribution.
        finish_reason: from the engine, never guessed from the last id.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

    @property
    def segment(self) -> Segment:
        """The completion as one reply of an episode."""
        return Segment(self.token_ids, True, self.logprobs)


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task as the verifier sees it: messages only, no token ids."""

    task_id: str
    messages: tuple[Message, ...]
    finish_reason: FinishReason

    @property
    def prompt_text(self) -> str:
        """What the model was shown, as records store it: every message but the last, under its role."""
        return "\n\n".join(f"[{m.role}]\n{m.content}" for m in self.messages[:-1])

    @property
    def final(self) -> str:
        """Text of the last assistant message; empty when there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier says of an episode.

    Args:
        reward: scalar for training and for the composite held-out mean.
        components: the named parts of the reward, unweighted, each in [0, 1].
        metrics: further numbers, weight zero.
        diagnostics: short texts for people (what was wrong).
        failure: None when the answer is right; `model` for wrong or invalid answers; other
            classes take the item out of every mean.
    """

    reward: float
    components: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    diagnostics: Mapping[str, str] = field(default_factory=dict)
    failure: FailureClass | None = None

    @property
    def counts(self) -> bool:
        """Whether this item belongs in a mean's denominator."""
        return self.failure in (None, FailureClass.MODEL)


@dataclass(frozen=True, slots=True)
class Rollout:
    """An episode with its tokens: what training learns from.

    The prompt and all segments are one sequence; the model sampled each reply with everything before it as its input.

    Args:
        group: id shared by the rollouts of one task whose rewards form one baseline.
        prompt_ids: tokens the model was given first.
        segments: what follows, replies and text of the environment in turn; the last one is a reply.
        version: name of the policy that sampled all of it, where that may be an older one than is trained.
    """

    task: Task
    group: str
    index: int
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    episode: Episode
    score: Score
    version: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each of `token_ids`, whether the model wrote it."""
        return tuple(segment.sampled for segment in self.segments for _ in segment.token_ids)

    @property
    def completion(self) -> Completion:
        """Only what the model wrote, over all turns, with the reason the episode ended."""
        written = [segment for segment in self.segments if segment.sampled]
        return Completion(
            tuple(token for segment in written for token in segment.token_ids),
            tuple(logprob for segment in written for logprob in segment.logprobs),
            self.episode.finish_reason,
        )

    @property
    def turns(self) -> int:
        """Number of replies."""
        return sum(segment.sampled for segment in self.segments)


def failed_score(failure: FailureClass, reason: str) -> Score:
    """Return the score of an item that could not be scored; its reward is never used."""
    return Score(reward=0.0, components={}, diagnostics={"error": reason}, failure=failure)
