"""The evaluation cache of a search: append-only lines, each flushed to disk before its result is used.

A search that was killed starts again from its seed and meets every earlier evaluation and paid proposal here, so it
comes to where it was without paying twice; nothing else of its state is stored. Failures of machine, tool or
verifier are noted and never answer for an evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.canonical import canonical_json, content_sha, strict_loads
from harness.core.errors import InfraError
from harness.core.files import disk_hint, file_lock, fsync_dir
from harness.core.types import FailureClass
from harness.evaluation.records import ItemRecord, dump_items, parse_items
from harness.prompt_search.proposer import Usage

EVALUATION, PROPOSAL, FAILURE, LOST = "evaluation", "proposal", "failure", "lost"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One task played once under one candidate.

    Args:
        item: its full record.
        feedback: what the environment says was wrong.
        tokens: sampled.
        seconds: its share of the batch it was played in.
    """

    item: ItemRecord
    feedback: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a paid proposer answered.

    Args:
        texts: new texts by component; empty when it had none.
        tokens: of the request and the answer.
        money: as its prices say.
        seconds: waited.
    """

    texts: Mapping[str, str]
    tokens: int
    money: float
    seconds: float


def evaluation_key(candidate: str, task: str, seed: int, model: str, sampling: str) -> str:
    """Return the key of an evaluation.

    Args:
        candidate: hash of all texts.
        task: id and content hash of the task.
        seed: of the sample.
        model: name, revision and adapter.
        sampling: settings, environment and verifier.
    """
    return content_sha([EVALUATION, candidate, task, seed, model, sampling])


class Cache:
    """The lines of one search, in memory and on disk.

    Args:
        path: the JSONL file; made by the first append. A torn last line, all that a kill can leave, is cut off.

    Raises:
        InfraError: when another line is damaged, naming it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.evaluations: dict[str, Evaluation] = {}
        self.proposals: dict[str, Proposal] = {}
        self.failed_tokens = 0
        self.lost = Usage()
        """What proposals took that came to nothing: an endpoint that failed in the end is paid all the same."""
        if path.exists():
            self._load()

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                self._take(strict_loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise InfraError(
                    f"{self.path}, line {number} is damaged: {error}",
                    "take that line out; its evaluation is then made again",
                ) from error

    def _take(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == EVALUATION:
            item = parse_items(canonical_json(row["item"], sort=False).encode() + b"\n", str(self.path))[0]
            if not item.counts:
                raise ValueError("a failure of no model stands as an evaluation")
            self.evaluations[row["key"]] = Evaluation(item, row["feedback"], row["tokens"], row["seconds"])
        elif row["kind"] == PROPOSAL:
            self.proposals[row["key"]] = Proposal(row["texts"], row["tokens"], row["money"], row["seconds"])
        elif row["kind"] == FAILURE:
            self.failed_tokens += row["tokens"]
        elif row["kind"] == LOST:
            self._lose(Usage(row["tokens"], row["money"], row["seconds"]))

    def _lose(self, usage: Usage) -> None:
        old = self.lost
        self.lost = Usage(old.tokens + usage.tokens, old.money + usage.money, old.seconds + usage.seconds)

    def add_evaluations(self, found: Iterable[tuple[str, Evaluation]]) -> None:
        """Store evaluations; on return they survive power loss.

        Raises:
            ValueError: for a failure that is not the model's: it must never answer for an evaluation.
            InfraError: when the disk fails.
        """
        rows = []
        for key, evaluation in found:
            if not evaluation.item.counts:
                raise ValueError(f"{evaluation.item.task} failed as {evaluation.item.failure}: not an evaluation")
            item = strict_loads(dump_items([evaluation.item], compact=False).rstrip(b"\n"))
            row = {"kind": EVALUATION, "key": key, "item": item, "feedback": evaluation.feedback}
            rows.append(row | {"tokens": evaluation.tokens, "seconds": evaluation.seconds})
            self.evaluations[key] = evaluation
        self._append(rows)

    def add_proposal(self, key: str, proposal: Proposal) -> None:
        """Store what a paid proposer answered; raises as `add_evaluations`."""
        row = {"kind": PROPOSAL, "key": key, "texts": dict(proposal.texts), "tokens": proposal.tokens}
        self._append([row | {"money": proposal.money, "seconds": proposal.seconds}])
        self.proposals[key] = proposal

    def note_lost(self, usage: Usage) -> None:
        """Note what a proposal took that ended in an error; the next attempt begins with it on its account."""
        if usage.tokens or usage.money:
            lost = {"tokens": usage.tokens, "money": usage.money, "seconds": usage.seconds}
            self._append([{"kind": LOST, **lost}])
            self._lose(usage)

    def note_failure(self, task: str, failure: FailureClass, why: str, tokens: int) -> None:
        """Note an evaluation that the machine, a tool or the verifier spoiled: its tokens were spent."""
        self._append([{"kind": FAILURE, "task": task, "failure": str(failure), "why": why, "tokens": tokens}])
        self.failed_tokens += tokens

    def _append(self, rows: list[dict[str, Any]]) -> None:
        data = "".join(canonical_json(row, sort=False) + "\n" for row in rows).encode()
        new = not self.path.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if new:
                fsync_dir(self.path.parent)
        except OSError as error:
            raise InfraError(f"cannot write {self.path}: {error.strerror}", disk_hint(error)) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the cache for one process, so that two never pay for the same evaluation.

        Raises:
            BusyError: when another process searches with it.
        """
        with file_lock(self.path.with_suffix(".lock"), wait_s=0, what="the evaluations of this search:"):
            yield
