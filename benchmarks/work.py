"""The work both halves of `grpo_step.py` do: prompts, rewards, sizes, and the line each child prints.

Prompts are made of words that are one token each, so that their length is exact under the model's own tokenizer and
no two prompts share more than a few tokens. Rewards depend on the place in the group alone, so every group has spread
and every rollout but the middle one has a non-zero advantage. Nothing is scored, so the step is all model.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
RESULT = "RESULT "


class Work(NamedTuple):
    """One measured job.

    Args:
        model: folder with the model's safetensors and tokenizer.
        prompts: groups per step.
        group: rollouts per prompt.
        prompt_tokens: exact length of every prompt.
        new_tokens: exact length of every completion.
        warmup: steps before the clock counts.
        steps: measured steps.
        dtype: bfloat16 or float32.
        threads: processor threads.
        per_device: rows of one forward and backward pass (TRL only).
        checkpointing: gradient checkpointing (TRL only).
        continuous: transformers' continuous batching for generation (TRL only).
        microbatch_tokens: tokens of one forward and backward pass (harness only).
    """

    model: Path
    prompts: int = 4
    group: int = 8
    prompt_tokens: int = 600
    new_tokens: int = 64
    warmup: int = 1
    steps: int = 2
    dtype: str = "bfloat16"
    threads: int = 2
    per_device: int = 8
    checkpointing: bool = False
    continuous: bool = False
    microbatch_tokens: int = 2048

    @property
    def rows(self) -> int:
        """Rollouts of one step."""
        return self.prompts * self.group

    def argv(self) -> list[str]:
        """Return the arguments that make a child parse the same work."""
        return ["--work", json.dumps(self._asdict(), default=str)]


def parse_work() -> Work:
    """Read the work from a child's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=json.loads, required=True)
    fields = parser.parse_args().work
    return Work(**fields | {"model": Path(fields["model"])})


def prompt_texts(tokenizer: Any, work: Work, seed: int = 0) -> list[str]:
    """Return (warmup + steps) * prompts different texts of exactly `prompt_tokens` tokens.

    Raises:
        ValueError: when a text does not have the promised length.
    """
    words = [token[1:] for token in sorted(tokenizer.get_vocab()) if token[0] == "Ġ" and token[1:].isalpha()]
    words = [word for word in words if word.isascii() and len(word) > 3]
    generator = random.Random(seed)  # noqa: S311 - filler text
    texts = []
    for _ in range((work.warmup + work.steps) * work.prompts):
        texts.append("".join(f" {word}" for word in generator.choices(words, k=work.prompt_tokens)))
        length = len(tokenizer(texts[-1])["input_ids"])
        if length != work.prompt_tokens:
            raise ValueError(f"a prompt has {length} tokens, not {work.prompt_tokens}")
    return texts


def reward(index: int, work: Work) -> float:
    """Return the reward of the rollout at `index` in its group, in [0, 1]."""
    return (index % work.group) / (work.group - 1)


def peak_mib() -> float:
    """Return the largest resident set of this process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)


def finish(work: Work, steps: list[float], generate: list[float], **more: Any) -> None:
    """Print the result line of a child.

    Args:
        work: what was done.
        steps: seconds of every step, warm-up included.
        generate: seconds of every step's sampling, warm-up included.
        more: further facts for the file.
    """
    measured = steps[work.warmup :]
    result = {
        "step_s": statistics.median(measured),
        "generate_s": statistics.median(generate[work.warmup :]),
        "steps_s": [round(value, 3) for value in steps],
        "peak_mib": round(peak_mib(), 1),
        **more,
    }
    print(RESULT + json.dumps(result), flush=True)
