"""What the report of a prompt search says, as plain values: from the record of the search and its ledger events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.canonical import decode_number, sha256_hex, strict_loads
from harness.core.errors import ConfigError
from harness.core.ids import check_name
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import mean_of, paired_difference
from harness.reports.model import Estimate

KIND = "prompt_search"
RECORD = "data/search.json"
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that went through a whole validation.

    Args:
        index: 0 is the seed.
        parents: it was made from.
        texts: all components.
        changed: components that differ from the first parent's.
        scores: reward by validation task.
        mean: over them.
        gain: over the seed, paired; None for the seed.
        evaluations: of the search when it was validated.
        best: validation tasks on which candidates differ and none has more reward.
        alone: those of them on which every other one has less.
    """

    index: int
    parents: tuple[int, ...]
    texts: Mapping[str, str]
    changed: tuple[str, ...]
    scores: Mapping[str, float]
    mean: Estimate
    gain: Estimate | None
    evaluations: int
    best: int
    alone: int


@dataclass(frozen=True, slots=True)
class Step:
    """What became of a proposal: `accepted`, `rejected` on its first trial, or `refused` before it."""

    what: str
    why: str
    evaluations: int


@dataclass(frozen=True, slots=True)
class Example:
    """A validation task with the reply under the seed prompt and under the chosen one."""

    task: str
    before: str
    after: str
    rewards: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Score:
    """One prompt in the final scoring, metric by metric; `gain` is the chosen prompt's over it."""

    name: str
    means: Mapping[str, Estimate]
    gain: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class Search:
    """Everything the report of a search shows beside what every report shows.

    Args:
        facts: what was searched and what it took, by name, in order.
        chosen: index of the chosen candidate.
        parts: by `validation` and `scoring` the prompts that were compared.
        sizes: items and clusters of each part.
        intact: whether the record is the one that the ledger names.
    """

    env: str
    prompt: str
    facts: Mapping[str, str]
    ended: str
    candidates: tuple[Candidate, ...]
    chosen: int
    steps: tuple[Step, ...]
    examples: tuple[Example, ...]
    shown: tuple[str, ...]
    parts: Mapping[str, tuple[Score, ...]]
    sizes: Mapping[str, tuple[int, int]]
    intact: bool

    @property
    def seed(self) -> Candidate:
        """The prompt the search began with."""
        return self.candidates[0]

    @property
    def found(self) -> Candidate:
        """The chosen prompt."""
        return self.candidates[self.chosen]


def read_search(record: bytes, attempts: Sequence[Mapping[str, Any]], confidence: float) -> Search:
    """Return the search that a record and the run's attempts tell of.

    Args:
        record: the bytes of `data/search.json`.
        attempts: of the run; the last one that completed holds the result.
        confidence: of the intervals that are computed here.

    Raises:
        ConfigError: when the record is not what a search writes.
    """
    last: Mapping[str, Any] = next((a for a in reversed(attempts) if a.get("search")), {})
    named = {str(f.get("file", "")).rpartition("/")[2]: f.get("sha") for f in last.get("files") or ()}
    intact = named.get(RECORD.rpartition("/")[2]) == sha256_hex(record)
    try:
        return _search(strict_loads(record), last.get("search") or {}, confidence, intact)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{RECORD} is no record of a prompt search: {error}", "restore it with git: `git checkout -- analysis/`"
        ) from error


def _search(data: Mapping[str, Any], result: Mapping[str, Any], confidence: float, intact: bool) -> Search:
    candidates = _candidates(data, confidence)
    chosen = int(data["chosen"])
    if candidates[chosen].index != chosen or chosen < 0:
        raise ValueError("the chosen candidate is none of them")
    parts = {name: data[name] for name in ("validation", "scoring")}
    return Search(
        env=check_name(str(result.get("env") or "unknown"), "environment"),
        prompt=str(result.get("prompt") or ""),
        facts=_facts(data, result),
        ended=str(data["ended"]),
        candidates=candidates,
        chosen=chosen,
        steps=tuple(Step(str(s["what"]), str(s["why"]), int(s["evaluations"])) for s in data["steps"]),
        examples=tuple(_example(row) for row in data["examples"]),
        shown=tuple(str(task) for task in data["shown"]),
        parts={name: _scores(part) for name, part in parts.items()},
        sizes={name: (int(part["items"]), int(part["clusters"])) for name, part in parts.items()},
        intact=intact,
    )


def _candidates(data: Mapping[str, Any], confidence: float) -> tuple[Candidate, ...]:
    history = sorted(data["history"], key=lambda row: int(row["index"]))
    clusters = data["clusters"]
    scores = [{str(task): decode_number(score) for task, score in row["scores"].items()} for row in history]
    items = [
        [ItemRecord(task, str(clusters[task]), 0, reward, {}, {}, None) for task, reward in found.items()]
        for found in scores
    ]
    winners = {task: _winners([found.get(task, -math.inf) for found in scores]) for task in scores[0]}
    made = []
    for number, row in enumerate(history):
        texts = {str(name): str(text) for name, text in row["components"].items()}
        parents = tuple(int(parent) for parent in row["parents"])
        before = history[parents[0]]["components"] if parents else texts
        gain = paired_difference(items[number], items[0], "reward", confidence) if number else None
        mean = mean_of(items[number], "reward", confidence)
        made.append(
            Candidate(
                index=int(row["index"]),
                parents=parents,
                texts=texts,
                changed=tuple(name for name, text in texts.items() if before.get(name) != text),
                scores=scores[number],
                mean=Estimate(mean.mean, mean.low, mean.high),
                gain=None if gain is None else Estimate(gain.mean, gain.low, gain.high),
                evaluations=int(row["evaluations"]),
                best=sum(number in names for names in winners.values()),
                alone=sum(names == [number] for names in winners.values()),
            )
        )
    return tuple(made)


def _winners(rewards: Sequence[float]) -> list[int]:
    """Return who has the most; nobody where all are equal, since such a task tells nothing."""
    top = max(rewards) - _EQUAL
    return [n for n, reward in enumerate(rewards) if reward >= top] if min(rewards) < top else []


def _example(row: Mapping[str, Any]) -> Example:
    before, after = (decode_number(value) for value in row["reward"])
    return Example(str(row["task"]), str(row["before"] or ""), str(row["after"] or ""), (before, after))


def _scores(part: Mapping[str, Any]) -> tuple[Score, ...]:
    """Return the compared prompts: the found one, the seed, then the others."""
    names = ["found", *sorted(part["gain"], key=lambda name: (name != "seed", name))]
    return tuple(Score(name, _estimates(part[name]), _estimates(part["gain"].get(name) or {})) for name in names)


def _estimates(found: Mapping[str, Any]) -> dict[str, Estimate]:
    return {str(name): Estimate.read(value) for name, value in found.items()}


def _facts(data: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, str]:
    spent, limits, sizes = data["spent"], data["limits"], data["sizes"]
    told = {
        "environment": result.get("env"),
        "search of that environment": result.get("number"),
        "model": result.get("model"),
        "proposals by": result.get("reflection"),
        "seed": result.get("seed"),
        "hash of the seed prompt": data.get("seed_sha"),
        "hash of the chosen prompt": data.get("prompt_sha"),
        "tasks per validation": sizes["validation"],
        "tasks of a first trial": sizes["minibatch"],
    }
    for name, used in spent.items():
        limit = limits.get(name)
        number = f"{decode_number(used):,.6g}"
        told[f"{name} spent"] = number if limit is None else f"{number} of {decode_number(limit):,.6g}"
    return {name: str(value) for name, value in told.items() if value is not None}
