"""The DrugProt environment: thirteen-way relation choice with a verifiable letter.

Arguments: `source` (`embedded` or `official`), `path` (folder or file of the official release;
the variable HARNESS_DRUGPROT when absent), `variant` (`hardened` or `published` reward),
`exclude_embedded` (leave embedded pairs out of official held-out tasks).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.core.errors import ConfigError
from harness.core.types import Episode, Score, Task
from harness.envs.base import SingleTurnSession, merge_components, unknown_split
from harness.envs.drugprot import prompt, search, verifier
from harness.envs.drugprot.corpus import embedded_facts, embedded_tasks
from harness.envs.drugprot.labels import letter_of, permuted_letters
from harness.envs.drugprot.official import OfficialCorpus, load_official

PATH_VARIABLE = "HARNESS_DRUGPROT"
SPLITS = ("train", "heldout", "heldout-permuted")
PERMUTED_LETTERS = permuted_letters("heldout-permuted")


class DrugProtArgs(BaseModel):
    """Arguments of the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Annotated[Literal["embedded", "official"], Field(description="where tasks come from")] = "embedded"
    path: Annotated[str | None, Field(description="official release: folder of TSVs, or a .jsonl or .parquet")] = None
    variant: Annotated[verifier.Variant, Field(description="reward variant")] = "hardened"
    exclude_embedded: Annotated[bool, Field(description="leave embedded pairs out of official held-out tasks")] = True


def permute(task: Task) -> Task:
    """Return a held-out task under the permuted letter map.

    All tasks share one map, in which no label keeps its letter: a policy that learned which
    letter is frequent, and not what the options say, loses its accuracy here.
    """
    return replace(
        task,
        id=f"{task.id}-p",
        split="heldout-permuted",
        fields={**task.fields, "letters": PERMUTED_LETTERS},
        answer=letter_of(task.label, PERMUTED_LETTERS),
    )


class DrugProt:
    """Read an abstract, name the relation between a chemical and a protein."""

    id = "drugprot"

    def __init__(self, args: DrugProtArgs | None = None) -> None:
        self.args = args or DrugProtArgs()
        self.version = f"1/{self.args.source}"
        self.redistributable = self.args.source == "embedded"  # the official abstracts may not be passed on
        self.verifier_version = verifier.verifier_version(self.args.variant)
        self.corpus: OfficialCorpus | None = None
        self._tasks = self._load()

    def _load(self) -> dict[str, tuple[Task, ...]]:
        if self.args.source == "embedded":
            if self.args.path is not None:
                raise ConfigError("drugprot: `path` is given, but the source is embedded", 'set source = "official"')
            by_split = embedded_tasks()
        else:
            path = self.args.path or os.environ.get(PATH_VARIABLE)
            if not path:
                raise ConfigError(
                    "drugprot: the official source needs a path",
                    f"set env.drugprot.args.path, or the variable {PATH_VARIABLE}",
                )
            exclude = {fact.pair for fact in embedded_facts()} if self.args.exclude_embedded else set()
            self.corpus = load_official(Path(path), exclude)
            by_split = self.corpus.tasks
        return {**by_split, "heldout-permuted": tuple(permute(task) for task in by_split["heldout"])}

    def components(self) -> dict[str, str]:
        """Return the shipped prompt texts."""
        return prompt.shipped_components()

    def component_names(self) -> tuple[str, ...]:
        """Return the names of the reward components."""
        return verifier.COMPONENTS

    def tasks(self, split: str) -> tuple[Task, ...]:
        """Return the tasks of `train`, `heldout` or `heldout-permuted`.

        Raises:
            NotFoundError: when there is no such split.
        """
        if split not in self._tasks:
            raise unknown_split(self.id, split, SPLITS)
        return self._tasks[split]

    def start(self, task: Task, components: Mapping[str, str] | None = None) -> SingleTurnSession:
        """Open a single-turn episode; `components` replace shipped texts of the same name.

        Raises:
            ConfigError: when a component is unknown or lacks a slot.
        """
        return SingleTurnSession(prompt.render(merge_components(self.components(), components), task.fields))

    def score(self, task: Task, episode: Episode) -> Score:
        """Score the reply; pure, and total over all texts."""
        return verifier.score_episode(episode, task.answer, self.args.variant)

    def feedback(self, task: Task, episode: Episode, score: Score) -> str:
        """Say in words what was right or wrong with a reply."""
        return search.feedback(task, episode, score)

    def instruction_variants(self) -> Mapping[str, Sequence[str]]:
        """Return texts that prompt search may try in place of the shipped ones."""
        return search.VARIANTS

    def demonstration_styles(self) -> Sequence[str]:
        """Return the styles of reasoning a task can be shown with."""
        return tuple(search.STYLES)

    def demonstrations(self, tasks: Sequence[Task], style: str) -> dict[str, str]:
        """Return the component that shows these tasks as examples; raises ConfigError for an unknown style."""
        return {"demonstrations": search.demonstrations_text(tasks, style)}
