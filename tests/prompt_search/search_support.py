"""A search that takes milliseconds: an environment, an engine that reads the prompt it gets, and proposers."""

import re

from harness.core.errors import ToolError
from harness.core.types import Completion, FailureClass, FinishReason, Message, Score, Task
from harness.envs.base import SingleTurnSession, merge_components, unknown_split
from harness.prompt_search.adapter import Evaluator, Player
from harness.prompt_search.budget import Budget, Limits, Sizes
from harness.prompt_search.cache import Cache
from harness.prompt_search.proposer import Usage
from harness.prompt_search.search import Question, search
from harness.prompt_search.splits import Guard, split_tasks
from harness.rollouts.collect import Sampling
from tests.torch_support import tiny_tokenizer

SEED = {"system": "Skill 0."}
SIZES = Sizes(validation=12, minibatch=6)
SENTENCE = "the quick brown fox jumps over the lazy dog near riverbank"


class Skills:
    """A reply is a digit, and a tenth of it is the reward."""

    id = "skills"
    version = "1"
    verifier_version = "skills-1"
    redistributable = True

    def __init__(self, count=90):
        names = [(split, index) for split, n in (("train", count), ("heldout", 10)) for index in range(n)]
        self._tasks: dict[str, tuple[Task, ...]] = {"train": (), "heldout": ()}
        for split, index in names:
            label = "ab"[index % 2]
            fields = {"text": f"{split} item {index}: {SENTENCE} number {index}"}
            task = Task(f"{split}-{index:03d}", self.id, split, fields, label, label, f"{split}-{index}")
            self._tasks[split] += (task,)
        self.fails: dict[str, int] = {}
        """Times that scoring a task still fails because a service behind it is down."""

    def components(self):
        return dict(SEED)

    def component_names(self):
        return ("right",)

    def tasks(self, split):
        if split not in self._tasks:
            raise unknown_split(self.id, split, tuple(self._tasks))
        return self._tasks[split]

    def start(self, task, components=None):
        texts = merge_components(self.components(), components)
        return SingleTurnSession((Message("system", texts["system"]), Message("user", task.fields["text"])))

    def score(self, task, episode):
        if self.fails.get(task.id, 0) > 0:
            self.fails[task.id] -= 1
            raise ToolError("the service is down")
        share = int(episode.final) / 10
        return Score(share, {"right": share}, failure=None if share else FailureClass.MODEL)


class SkilledEngine:
    """Answers the skill that the prompt names, and less of it on every fifth task; counts what it samples."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.calls: list[int] = []
        self.samples = 0

    def generate(self, prompts, n, max_tokens, temperature, seeds):
        self.calls.append(len(prompts))
        self.samples += len(prompts) * n
        return [[self._answer(prompt)] * n for prompt in prompts]

    def _answer(self, prompt):
        text = self.tokenizer.decode(prompt)
        skill, number = (int(re.findall(rf"{name} (\d+)", text)[0]) for name in ("Skill", "number"))
        reply = skill if number % 5 else 5 - skill // 2
        ids = (*self.tokenizer(str(reply))["input_ids"], 2)
        return Completion(ids, (-0.1,) * len(ids), FinishReason.STOP)


class StepProposer:
    """Proposes the next skill, up to a highest one; or whatever a function says."""

    name = "steps"
    selector = "round_robin"

    def __init__(self, write=None, *, paid=False, top=9):
        self.paid, self.asked = paid, 0
        self._write = write or (lambda text: f"Skill {min(top, int(text.split()[1].strip('.')) + 2)}.")

    def propose(self, candidate, reflective_dataset, components):
        self.asked += 1
        self.read = reflective_dataset
        return {name: self._write(candidate[name]) for name in components}

    def usage(self):
        return Usage(10, 0.01, 0.1)


def a_world(folder, *, env=None, evaluations=120, limits=None, sizes=SIZES, engine=None):
    """Return question and evaluator of a search with its cache in `folder`."""
    env = env or Skills()
    tokenizer = tiny_tokenizer()
    engine = engine or SkilledEngine(tokenizer)
    player = Player(engine, tokenizer, frozenset({2}), env, "fake", Sampling(16, 1.0, 4096), seed=0)
    guard = Guard(env.tasks("train"), env.tasks("heldout"))
    budget = Budget(limits or Limits(evaluations))
    evaluator = Evaluator(player, Cache(folder / "search.jsonl"), budget, guard, lambda update: None)
    return Question(SEED, split_tasks(env.tasks("train"), 0), sizes, 0), evaluator


def a_search(folder, *, proposer=None, **settings):
    """Run one search; returns (history, why it ended, evaluator)."""
    question, evaluator = a_world(folder, **settings)
    history, ended = search(question, evaluator, proposer or StepProposer())
    return history, ended, evaluator
