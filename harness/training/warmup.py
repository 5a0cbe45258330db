"""The warm start: a few supervised steps on demonstrations before the first step of the loop.

The loss is the mean cross-entropy, in nats, of the tokens of the replies; prompts are context. It trains the same
adapter as the loop, with an AdamW of its own whose settings are the defaults of `[optimizer]` but for rate and
schedule, so that runs that differ in `[optimizer]` start from the same weights. Its state is dropped afterwards.
Tasks are addressed by seed and position, as everywhere, so a warm start that begins anew ends at the same weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from harness.config.schema import OptimizerSection, RunConfig, TrainSection
from harness.core.errors import ConfigError
from harness.core.files import atomic_write
from harness.core.seeds import derive_seed
from harness.core.types import Episode, FinishReason, Message, Rollout, Segment, Task
from harness.envs.base import Environment, demonstration
from harness.inference.chat import render_chat, render_reply
from harness.inference.models import LoadedModel
from harness.inference.tree import ATTENTION
from harness.rollouts.collect import Sampling
from harness.training.batches import Group, Plan, plan_passes
from harness.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from harness.training.policy import apply_gradient, check_room, checkpoint_activations, passes, tree_logprobs
from harness.training.room import Room, in_passes_that_fit
from harness.training.tasks import TaskStream, environment_order, environment_places

ROWS, SUMMARY = "warmup.jsonl", "warmup.json"
"""Files of a run directory: a row of metrics per supervised step, and what the warm start was."""
Record = Callable[[int, dict[str, float]], None]
"""Called after every step with its number and its metrics."""


class Source(Protocol):
    """Where demonstrations of one environment come from; a `TrainingEnv` is one."""

    env: Environment
    components: Mapping[str, str] | None
    sampling: Sampling
    demonstrated: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Imitation:
    """What one supervised step did.

    Args:
        loss: mean cross-entropy before the update, in nats per token.
        tokens: of the replies.
        grad_norm: global L2 norm before clipping.
    """

    loss: float
    tokens: int
    grad_norm: float


def choose_demonstrations(
    envs: Mapping[str, Environment], weights: Mapping[str, float], count: int, exclude: bool, seed: int
) -> dict[str, tuple[Task, ...]]:
    """Return the training tasks to demonstrate, by environment; labels come equally often as far as tasks last.

    Environments that have demonstrations share them by weight; the others have none.

    Args:
        envs: the training environments.
        weights: their shares of a step.
        count: tasks in all.
        exclude: whether the loop will go without them.
        seed: the run's.

    Raises:
        ConfigError: there are fewer tasks with a demonstration, or a label would have no task left for the loop.
    """
    offered = {name: [task for task in env.tasks("train") if demonstration(env, task)] for name, env in envs.items()}
    offered = {name: tasks for name, tasks in offered.items() if tasks}
    if not offered:
        raise ConfigError(
            f"none of the environments {', '.join(envs)} has demonstrations", "set warmup.steps = 0 for this run"
        )
    order = environment_order({name: weights[name] for name in offered}, count)
    chosen: dict[str, tuple[Task, ...]] = {}
    for name, tasks in offered.items():
        wanted = order.count(name)
        if wanted > len(tasks):
            raise ConfigError(
                f"warmup.demonstrations = {count} asks for {wanted} tasks of {name}, which has {len(tasks)} with one",
                "lower warmup.demonstrations; the same tasks recur when warmup.steps needs more",
            )
        chosen[name] = _distinct(tasks, wanted, seed)
        if exclude:
            _check_left(name, envs[name].tasks("train"), chosen[name])
    return chosen


def _distinct(tasks: Sequence[Task], count: int, seed: int) -> tuple[Task, ...]:
    stream = TaskStream(tasks, balance=True, seed=derive_seed(seed, "warmup"))
    chosen: dict[str, Task] = {}
    position = 0
    while len(chosen) < count:
        task = stream[position]
        chosen.setdefault(task.id, task)
        position += 1
    return tuple(chosen.values())


def without(tasks: Sequence[Task], demonstrated: Sequence[Task]) -> list[Task]:
    """Return the tasks that are not demonstrated, in their order."""
    ids = {task.id for task in demonstrated}
    return [task for task in tasks if task.id not in ids]


def _check_left(env: str, tasks: Sequence[Task], demonstrated: Sequence[Task]) -> None:
    lost = {task.label for task in tasks} - {task.label for task in without(tasks, demonstrated)}
    if lost:
        raise ConfigError(
            f"the demonstrations take every training task of {env} with the label {min(lost)}",
            "lower warmup.demonstrations, or set warmup.exclude_demonstrated = false",
        )


def example(loaded: LoadedModel, source: Source, task: Task) -> Group:
    """Return a task and its demonstration as a group of one rollout, as if the model had sampled it.

    Raises:
        ConfigError: the verifier calls it wrong, or it does not fit the limits that rollouts have.
    """
    reply = demonstration(source.env, task)
    if reply is None:
        raise ConfigError(f"{task.env} has no demonstration of {task.id}", "set warmup.steps = 0 for this run")
    messages = source.env.start(task, source.components).messages
    prompt = tuple(render_chat(loaded.tokenizer, messages))
    ids = tuple(render_reply(loaded.tokenizer, messages, reply, loaded.eos_ids))
    episode = Episode(task.id, (*messages, Message("assistant", reply)), FinishReason.STOP)
    score = source.env.score(task, episode)
    if score.failure is not None:
        raise ConfigError(
            f"the demonstration of {task.id} is not scored as right by {task.env}", "set warmup.steps = 0 for this run"
        )
    if len(ids) > source.sampling.max_tokens or len(prompt) + len(ids) > source.sampling.context:
        raise ConfigError(
            f"the demonstration of {task.id} takes {len(ids)} tokens after a prompt of {len(prompt)}, "
            f"beyond sampling.max_tokens = {source.sampling.max_tokens} or context = {source.sampling.context}",
            "raise that limit: the policy would learn replies that are then cut off",
        )
    segment = Segment(ids, True, (0.0,) * len(ids))
    return Group((Rollout(task, task.id, 0, prompt, (segment,), episode, score),), (1.0,))


class Batches:
    """The demonstrations of each supervised step: a function of seed and step.

    Args:
        sources: by environment; those without demonstrated tasks give none.
        weights: shares of the environments.
        per_step: demonstrations a step.
        seed: the run's.
    """

    def __init__(
        self, loaded: LoadedModel, sources: Mapping[str, Source], weights: Mapping[str, float], per_step: int, seed: int
    ) -> None:
        shown = {name: source for name, source in sources.items() if source.demonstrated}
        self._examples = {
            name: {task.id: example(loaded, source, task) for task in source.demonstrated}
            for name, source in shown.items()
        }
        own = derive_seed(seed, "warmup", "order")
        self._streams = {name: TaskStream(source.demonstrated, True, own) for name, source in shown.items()}
        self._weights = {name: weights[name] for name in shown}
        self._per_step = per_step

    def __getitem__(self, step: int) -> list[Group]:
        """Return the groups of a 1-based step."""
        places = environment_places(self._weights, (step - 1) * self._per_step, self._per_step)
        return [self._examples[name][self._streams[name][index].id] for name, index in places]


def warm_up(
    causal_lm: Any,
    parameters: Mapping[str, torch.nn.Parameter],
    batches: Batches,
    config: RunConfig,
    room: Room,
    record: Record,
    check: Callable[[], None],
) -> list[Imitation]:
    """Run the supervised steps of a run and return what each did.

    Args:
        causal_lm: the model inside the adapter wrapper.
        parameters: the adapter's, by name.
        batches: the demonstrations by step.
        config: the run's.
        room: the budget of a pass.
        record: takes the metrics of each step.
        check: called before each step; raises when a budget is spent.

    Raises:
        DivergedError: the gradient is not finite.
        MemoryError, RuntimeError: not even a pass of one demonstration fits.
    """
    section, train = config.warmup, config.train
    rates = OptimizerSection(learning_rate=section.learning_rate, schedule=section.schedule)
    optimizer = build_optimizer(parameters, rates, config.lora.rank)
    causal_lm.train()
    checkpoint_activations(causal_lm, train.activation_checkpointing)
    steps: list[Imitation] = []
    for step in range(1, section.steps + 1):
        check()
        began = time.monotonic()
        rate = learning_rate(rates, step, section.steps)
        set_learning_rate(optimizer, rate)
        torch.manual_seed(derive_seed(train.seed, "warmup", "dropout", step))
        done = imitate(causal_lm, list(parameters.values()), optimizer, batches[step], train, rates.max_grad_norm, room)
        row = {
            "warmup/loss": done.loss,
            "warmup/tokens": float(done.tokens),
            "warmup/grad_norm": done.grad_norm,
            "warmup/learning_rate": rate,
            "time/step": time.monotonic() - began,
        }
        record(step, row)
        steps.append(done)
    return steps


def write_summary(folder: Path, steps: Sequence[Imitation], demonstrated: Mapping[str, Sequence[Task]]) -> None:
    """Write what a warm start was: steps, tokens, first and last loss, and the ids of its tasks by environment."""
    summary = {
        "steps": len(steps),
        "tokens": sum(step.tokens for step in steps),
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
        "demonstrated": {name: [task.id for task in tasks] for name, tasks in demonstrated.items() if tasks},
    }
    atomic_write(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run's warm start with the number of its tasks instead of their ids; None without one."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        shown = summary.pop("demonstrated")
        return summary | {"demonstrations": sum(len(tasks) for tasks in shown.values())}
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def imitate(
    causal_lm: Any,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    section: TrainSection,
    max_grad_norm: float,
    room: Room,
) -> Imitation:
    """Run one supervised update.

    Args:
        groups: demonstrations, as `example` makes them.
        section: of the passes.
        max_grad_norm: global L2 norm the gradient is clipped to.
        room: the budget of a pass, lowered when memory runs out.

    Raises:
        DivergedError: the gradient is not finite; parameters keep their last good values.
    """
    loss = in_passes_that_fit(
        room,
        partial(plan_passes, groups, skip_idle=False),
        partial(_fresh_gradient, causal_lm, optimizer, groups, section, room),
    )
    norm = apply_gradient(parameters, optimizer, max_grad_norm, "the gradient of the warm start", "warmup")
    optimizer.zero_grad(set_to_none=True)
    return Imitation(loss, _tokens(groups), norm)


def _tokens(groups: Sequence[Group]) -> int:
    return sum(group.completion_tokens for group in groups)


def _fresh_gradient(
    causal_lm: Any,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    section: TrainSection,
    room: Room,
    plan: Plan,
) -> float:
    """Compute the gradient of the mean cross-entropy from nothing; return the loss in nats per token."""
    optimizer.zero_grad(set_to_none=True)
    causal_lm.set_attn_implementation(ATTENTION)
    count, loss = _tokens(groups), 0.0
    for batch in passes(causal_lm, plan):
        check_room(room, causal_lm, batch, section)
        logprobs, _ = tree_logprobs(causal_lm, batch.tree, batch.temperatures, with_entropy=False)
        part = -logprobs.sum() / count
        part.backward()
        loss += float(part.detach())
    return loss
