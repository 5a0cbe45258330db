"""An environment that a random model earns varied rewards in: the share of early letters in its reply."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict

from harness.core.types import Message, Score, Task
from harness.envs.base import SingleTurnSession, merge_components, unknown_split
from harness.envs.registry import ENVIRONMENTS, EnvSpec, parse_args

LABELS = ("A", "B", "C")
EARLY = frozenset("abcdefghijklm")


class ToyArgs(BaseModel):
    """`constant` gives every reply the same reward, `raises` is a verifier with a bug."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    reward: Literal["early", "constant", "raises"] = "early"
    leak: bool = False


def toy_task(index, split):
    label = LABELS[index % len(LABELS)]
    name = f"{split}-{index:02d}"
    word = os.environ.get("TOY_PROMPT", "word")  # what a tool might let into a prompt
    return Task(name, "toy", split, {"word": f"{word} {name}"}, label, label, f"cluster-{name}")


def early_share(text):
    return sum(letter in EARLY for letter in text) / len(text) if text else 0.0


class Toy:
    id = "toy"
    version = "1"
    redistributable = True

    def __init__(self, args):
        self.args = args
        self.verifier_version = f"toy-1/{args.reward}"
        heldout = [toy_task(index, "heldout") for index in range(6)]
        train = [toy_task(index, "train") for index in range(24)]
        self._tasks = {"train": tuple(train + (heldout[:1] if args.leak else [])), "heldout": tuple(heldout)}

    def components(self):
        return {"system": "Write something."}

    def component_names(self):
        return ("early",)

    def tasks(self, split):
        if split not in self._tasks:
            raise unknown_split(self.id, split, tuple(self._tasks))
        return self._tasks[split]

    def start(self, task, components=None):
        texts = merge_components(self.components(), components)
        return SingleTurnSession((Message("system", texts["system"]), Message("user", task.fields["word"])))

    def demonstration(self, task):
        return "abc " * (1 + LABELS.index(task.label))

    def score(self, task, episode):
        if self.args.reward == "raises":
            raise RuntimeError("the verifier has a bug")
        share = early_share(episode.final)
        return Score(0.5 if self.args.reward == "constant" else share, {"early": share})


SPEC = EnvSpec("toy", lambda args: Toy(parse_args("toy", ToyArgs, args)), "letters", ToyArgs)


def register():
    """Add the environment to the registry of this process."""
    ENVIRONMENTS["toy"] = SPEC
