"""An environment whose demonstrations differ in worth, and an engine that answers as well as its prompt lets it."""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

from pydantic import BaseModel

from harness.core.errors import ConfigError
from harness.core.types import Completion, FailureClass, FinishReason, Message, Score, Task
from harness.envs.base import SingleTurnSession, merge_components, unknown_split
from harness.envs.registry import EnvSpec
from harness.prompt_search.adapter import Evaluator, Player
from harness.prompt_search.budget import Budget, Limits, sizes_for
from harness.prompt_search.cache import Cache
from harness.prompt_search.offline import OfflineProposer
from harness.prompt_search.record import find
from harness.prompt_search.search import Question
from harness.prompt_search.splits import Guard, split_tasks
from harness.rollouts.collect import Sampling

LABELS = ("A", "B", "C")
END = 3


class RiddleArgs(BaseModel):
    pass


def riddle(index, split):
    label = LABELS[index % 3]
    text = f"riddle {split} {index}: the word is {label.lower() * 3}"
    return Task(
        f"{split}-{index}", "riddles", split, {"text": text}, label, label, f"{split}-cluster-{index // 6}-{label}"
    )


class Riddles:
    id, version, verifier_version, redistributable = "riddles", "1", "riddles-1", True

    def __init__(self, args=None):
        self._tasks = {
            "train": tuple(riddle(index, "train") for index in range(420)),
            "heldout": tuple(riddle(index, "heldout") for index in range(12)),
        }
        self.broken: Any = lambda task: None
        """Returns a failure class for a task whose verifier cannot answer."""

    def components(self):
        return {"system": "Solve it.", "demonstrations": ""}

    def component_names(self):
        return ("accuracy",)

    def tasks(self, split):
        if split not in self._tasks:
            raise unknown_split(self.id, split, tuple(self._tasks))
        return self._tasks[split]

    def start(self, task, components=None):
        texts = merge_components(self.components(), components)
        if not texts["system"]:
            raise ConfigError("the component `system` is empty")
        system = f"{texts['system']}\n{texts['demonstrations']}"
        return SingleTurnSession((Message("system", system), Message("user", task.fields["text"])))

    def score(self, task, episode):
        failure = self.broken(task)
        right = episode.final == task.answer
        return Score(
            float(right), {"accuracy": float(right)}, failure=failure or (None if right else FailureClass.MODEL)
        )

    def feedback(self, task, episode, score):
        return "right" if score.reward else f"the answer is {task.answer}, not {episode.final}"

    def instruction_variants(self):
        return {"system": ("Solve it well.", "Answer with one letter.")}

    def demonstration_styles(self):
        return ("arrow", "equals")

    def demonstrations(self, tasks, style):
        sign = {"arrow": "->", "equals": "="}[style]
        return {"demonstrations": "\n\n".join(f"{task.fields['text']} {sign} {task.answer}" for task in tasks)}


SPEC = EnvSpec("riddles", lambda args: Riddles(), "riddles", RiddleArgs)


class Letters:
    """A tokenizer whose ids are code points."""

    chat_template = "yes"

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in chat) + "<assistant>"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join("<end>" if i == END else chr(i) for i in ids)


def worth(index):
    """Return what a demonstration is worth: one in three helps."""
    return hashlib.sha256(f"worth {index}".encode()).digest()[0] % 3 == 0


def chance(prompt):
    """Return how often a prompt is answered rightly."""
    shown = {int(number) for number in re.findall(r"riddle train (\d+): the word is \w+ (?:->|=)", prompt)}
    good = sum(worth(number) for number in shown)
    return min(0.95, 0.15 + 0.2 * good + 0.05 * ("well" in prompt))


class Solver:
    """The engine; `moments` are calls at which the process dies, before or after it has answered."""

    def __init__(self, before=(), after=()):
        self.before, self.after = set(before), set(after)
        self.calls, self.played = 0, 0
        self.asked = []

    def generate(self, prompts, n, max_tokens, temperature, seeds):
        self.calls += 1
        if self.calls in self.before:
            raise KeyboardInterrupt
        found = [[self._answer(prompt, seed) for seed in own] for prompt, own in zip(prompts, seeds, strict=True)]
        if self.calls in self.after:
            raise KeyboardInterrupt
        self.played += len(prompts)
        self.asked += [("".join(map(chr, prompt)), own[0]) for prompt, own in zip(prompts, seeds, strict=True)]
        return found

    def _answer(self, prompt, seed):
        text = "".join(map(chr, prompt))
        gold = re.findall(r"<user>.*the word is (\w)", text)[-1].upper()
        right = random.Random(seed).random() < chance(text)
        return Completion((ord(gold if right else "X"), END), (-0.1, -0.1), FinishReason.STOP)


def world(folder, engine, evaluations=200, seed=0, env=None, proposer=None, **limits):
    """Return question, evaluator and proposer of a search whose cache lies in a folder."""
    env = env or Riddles()
    sizes = sizes_for(evaluations)
    question = Question(env.components(), split_tasks(env.tasks("train"), seed), sizes, seed)
    guard = Guard(env.tasks("train"), env.tasks("heldout"))
    player = Player(engine, Letters(), frozenset([END]), env, "solver", Sampling(4, 0.7, 4096), seed)
    budget = Budget(Limits(evaluations, **limits))
    evaluator = Evaluator(player, Cache(folder / "evaluations.jsonl"), budget, guard, lambda update: None)
    played = (*question.trial, *question.validation)
    pool = question.parts.demonstrations
    offline = OfflineProposer(env, pool, played, evaluator.seen, evaluator.texts, seed, count=6)
    return question, evaluator, proposer or offline


def found(folder, engine, evaluations=200, seed=0, items=240):
    """Return what a search of its own finds."""
    question, evaluator, proposer = world(folder, engine, evaluations, seed)
    return find(question, evaluator, proposer, 0.95, items)
