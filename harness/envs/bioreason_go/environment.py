"""The environment bioreason-go: judge guessed GO terms of a protein, answer with one JSON object.

Arguments: `source` (`shipped` proteins, or `records` in the layout of BioReason-Pro), and for records `path`
(parquet or JSON lines), `hub` (a data set on the Hub), `ontology` (an OBO file; the shipped release when absent),
`annotations` (a GAF file, whose experimental terms become the labels), `leaks` (drop or keep fields that carry the
answer), `heldout` (number of held-out proteins). `weights` are those of the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.core.errors import ConfigError
from harness.core.types import Episode, Score, Task
from harness.envs.base import SingleTurnSession, merge_components, unknown_split
from harness.envs.bioreason_go import prompt, verifier
from harness.envs.bioreason_go.information import Information, information
from harness.envs.bioreason_go.ontology import Ontology, load_obo, load_shipped
from harness.envs.bioreason_go.pro import Audit, load_records
from harness.envs.bioreason_go.records import ENV, ProteinRecord, load_shipped_records, task_labels, task_of
from harness.envs.bioreason_go.terms import ASPECTS
from harness.envs.bioreason_go.verifier import Gold, Scorer, Weights

SPLITS = ("train", "heldout")
HELDOUT = 512
MOST_SHOWN = 3
"""Ids of an aspect in a demonstration: all labels of nine in ten aspects, and short replies."""


class BioReasonGoArgs(BaseModel):
    """Arguments of the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Annotated[Literal["shipped", "records"], Field(description="where proteins come from")] = "shipped"
    path: Annotated[str | None, Field(description="records: a .parquet or .jsonl file")] = None
    hub: Annotated[str | None, Field(description="records: id of a data set on the Hub")] = None
    revision: Annotated[str | None, Field(description="records: commit of the data set on the Hub")] = None
    ontology: Annotated[str | None, Field(description="records: OBO file of their release")] = None
    annotations: Annotated[str | None, Field(description="records: GAF file with the labels")] = None
    leaks: Annotated[Literal["drop", "keep"], Field(description="fields that carry the answer")] = "drop"
    heldout: Annotated[int, Field(description="records: proteins to hold out", gt=0)] = HELDOUT
    weights: Annotated[Weights, Field(description="weights of the reward's components")] = Weights()


def _ordered(records: Sequence[ProteinRecord], ontology: Ontology) -> dict[str, tuple[Task, ...]]:
    """Return the tasks by split in hash order, so that the first N are a random sample, the same everywhere."""
    tasks = sorted((task_of(record, ontology) for record in records), key=lambda task: task.sha)
    return {split: tuple(task for task in tasks if task.split == split) for split in SPLITS}


def _information(records: Sequence[ProteinRecord], ontology: Ontology) -> Information:
    """Return what terms say, counted over the train labels alone: held-out labels stay unread."""
    rows = []
    for record in records:
        if record.split == "train":
            found = (ontology.index_of(go_id) for aspect in ASPECTS for go_id in record.labels[aspect])
            rows.append([index for index in found if index is not None])
    return information(ontology, rows)


@lru_cache(maxsize=1)
def shipped_tasks() -> dict[str, tuple[Task, ...]]:
    """Return the tasks of the shipped proteins by split."""
    return _ordered(load_shipped_records(), load_shipped())


@lru_cache(maxsize=1)
def shipped_information() -> Information:
    """Return what terms say, counted over the shipped train labels."""
    return _information(load_shipped_records(), load_shipped())


class BioReasonGo:
    """Read what is known of a protein, return its functions, processes and places as GO terms."""

    id = ENV

    def __init__(self, args: BioReasonGoArgs | None = None) -> None:
        self.args = args or BioReasonGoArgs()
        self.version = f"1/{self.args.source}"
        self.redistributable = self.args.source == "shipped"
        self.audit: Audit | None = None
        if self.args.source == "shipped":
            self._refuse_paths()
            self.ontology, self._tasks, counted = load_shipped(), shipped_tasks(), shipped_information()
        else:
            self.ontology = load_obo(self.args.ontology) if self.args.ontology else load_shipped()
            records, self.audit = load_records(
                path=self.args.path,
                hub=self.args.hub,
                revision=self.args.revision,
                gaf=self.args.annotations,
                ontology=self.ontology,
                drop=self.args.leaks == "drop",
                heldout=self.args.heldout,
            )
            self._tasks, counted = _ordered(records, self.ontology), _information(records, self.ontology)
        self.scorer = Scorer(self.ontology, counted, self.args.weights)
        self.verifier_version = self.scorer.version
        self._gold: dict[str, Gold] = {}

    def _refuse_paths(self) -> None:
        for name in ("path", "hub", "revision", "ontology", "annotations"):
            if getattr(self.args, name) is not None:
                raise ConfigError(f"{ENV}: `{name}` is given, but the source is shipped", 'set source = "records"')

    def data_notes(self) -> dict[str, str]:
        """Return what belongs beside any result on these tasks: release, and what an audit of the records found."""
        notes = {"ontology": f"GO {self.ontology.release}, {len(self.ontology):,} terms, {self.ontology.sha[:12]}"}
        return notes | (self.audit.as_notes() if self.audit else {})

    def components(self) -> dict[str, str]:
        """Return the shipped prompt texts."""
        return prompt.shipped_components()

    def component_names(self) -> tuple[str, ...]:
        """Return the names of the reward components."""
        return verifier.COMPONENTS

    def tasks(self, split: str) -> tuple[Task, ...]:
        """Return the tasks of `train` or `heldout`.

        Raises:
            NotFoundError: when there is no such split.
        """
        if split not in self._tasks:
            raise unknown_split(self.id, split, SPLITS)
        return self._tasks[split]

    def start(self, task: Task, components: Mapping[str, str] | None = None) -> SingleTurnSession:
        """Open a single-turn episode; `components` replace shipped texts of the same name.

        Raises:
            ConfigError: when a component is unknown, lacks a slot or does not parse.
        """
        return SingleTurnSession(prompt.render(merge_components(self.components(), components), task.fields))

    def gold(self, task: Task) -> Gold:
        """Return the labels of a task, ready to be scored against."""
        if task.answer not in self._gold:  # a pure function of the answer, so a race only computes it twice
            labels: dict[str, list[str]] = {aspect: ids for aspect, ids in task_labels(task).items()}  # noqa: C416
            self._gold[task.answer] = self.scorer.gold(labels)
        return self._gold[task.answer]

    def score(self, task: Task, episode: Episode) -> Score:
        """Score the reply; pure, and total over all texts."""
        return self.scorer.score_episode(episode, self.gold(task))

    def feedback(self, task: Task, episode: Episode, score: Score) -> str:
        """Say in words what was wrong with a reply; it names labels, so it is for prompt search on train tasks."""
        return self.scorer.feedback(episode, self.gold(task))

    def demonstration(self, task: Task) -> str | None:
        """Return a right reply in the required form, with at most three ids of each aspect."""
        labels = {aspect: ids[:MOST_SHOWN] for aspect, ids in task_labels(task).items()}
        return prompt.answer_text(f"{task.fields['gene']}, {task.fields['name']}.", labels)
