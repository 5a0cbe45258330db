"""This trainer's half of `grpo_step.py`: the engine and the update of a training step; prints one line."""

from __future__ import annotations

import dataclasses
import time

import torch
from transformers.utils import logging
from work import LEARNING_RATE, LORA, MAX_GRAD_NORM, Work, finish, parse_work, prompt_texts, reward

from harness.config.schema import LoraSection, ModelSection, OptimizerSection, TrainSection
from harness.core.types import Completion, Episode, Message, Rollout, Score, Task
from harness.inference.chat import decode
from harness.inference.engine import TransformersEngine
from harness.inference.lora import attach_lora, trainable
from harness.inference.models import LoadedModel, load_model
from harness.training.advantages import group_advantages
from harness.training.batches import Group
from harness.training.fused import fuse_adapters
from harness.training.optimizer import build_optimizer
from harness.training.policy import update_policy

TEMPERATURE = 1.0


def never_ending(work: Work) -> LoadedModel:
    """Load the model without end-of-turn ids, so that every completion has exactly `new_tokens` tokens."""
    loaded = load_model(ModelSection(name=str(work.model), dtype=work.dtype, device="cpu"))
    return dataclasses.replace(loaded, eos_ids=frozenset())


def grouped(loaded: LoadedModel, prompt: list[int], completions: list[Completion], work: Work, name: str) -> Group:
    """Return the rollouts of one prompt with their rewards and advantages, as a training step builds them.

    Raises:
        ValueError: when a completion does not have the promised length.
    """
    task = Task(name, "benchmark", "train", {}, "", "", name)
    rollouts = []
    for index, completion in enumerate(completions):
        if len(completion.token_ids) != work.new_tokens:
            raise ValueError(f"a completion has {len(completion.token_ids)} tokens, not {work.new_tokens}")
        reply = Message("assistant", decode(loaded.tokenizer, completion.token_ids, frozenset()))
        episode = Episode(name, (reply,), completion.finish_reason)
        score = Score(reward(index, work), {})
        rollouts.append(Rollout(task, name, index, tuple(prompt), (completion.segment,), episode, score))
    advantages = tuple(group_advantages([r.score.reward for r in rollouts]))
    return Group(tuple(rollouts), advantages, TEMPERATURE)


def main() -> None:
    """Run the steps and print the result line."""
    work = parse_work()
    torch.set_num_threads(work.threads)
    logging.set_verbosity_error()
    loaded = never_ending(work)
    lora = LoraSection(rank=LORA["r"], alpha=LORA["lora_alpha"], dropout=0.0, targets="all-linear")
    model = attach_lora(loaded.model, lora, seed=0)
    fuse_adapters(model)
    parameters = list(trainable(model).values())
    section = TrainSection(
        tasks_per_step=work.prompts, group_size=work.group, entropy_beta=0.0, microbatch_tokens=work.microbatch_tokens
    )
    optimizer = build_optimizer(parameters, OptimizerSection(learning_rate=LEARNING_RATE))
    engine = TransformersEngine(loaded, model)
    prompts = [loaded.tokenizer(text)["input_ids"] for text in prompt_texts(loaded.tokenizer, work)]
    steps, generate = [], []
    for step in range(work.warmup + work.steps):
        start = time.perf_counter()
        batch = prompts[step * work.prompts : (step + 1) * work.prompts]
        seeds = [[(step * work.prompts + p) * work.group + g for g in range(work.group)] for p in range(len(batch))]
        sampled = engine.generate(batch, work.group, work.new_tokens, TEMPERATURE, seeds)
        generate.append(time.perf_counter() - start)
        pairs = zip(batch, sampled, strict=True)
        groups = [grouped(loaded, prompt, rows, work, f"p{step}-{i}") for i, (prompt, rows) in enumerate(pairs)]
        stats = update_policy(engine.causal_lm, parameters, optimizer, groups, section, MAX_GRAD_NORM)
        steps.append(time.perf_counter() - start)
    finish(
        work,
        steps,
        generate,
        trainable=sum(p.numel() for p in parameters),
        grad_norm=stats.grad_norm,
        tree_tokens=stats.computed_tokens,
        logprob_gap=stats.metrics()["train/logprob_gap"],
    )


if __name__ == "__main__":
    main()
