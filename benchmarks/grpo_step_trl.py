"""TRL's half of `grpo_step.py`: GRPOTrainer on the same prompts, lengths, rewards and adapters; prints one line."""

from __future__ import annotations

import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import LEARNING_RATE, LORA, MAX_GRAD_NORM, Work, finish, parse_work, prompt_texts, reward


class Clock(TrainerCallback):
    """Takes the time of every optimizer step and, at the reward call, of its sampling."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generate: list[float] = []
        self.last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the first step."""
        self.last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End one step and start the next."""
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.last = now

    def sampled(self) -> None:
        """Note that the completions of this step are there."""
        self.generate.append(time.perf_counter() - self.last)


def settings(work: Work, folder: str) -> GRPOConfig:
    """Return TRL's configuration for this work: no reference model, no logging, nothing saved.

    All rows of a step are sampled in one call; `per_device` rows go through each forward and backward pass.
    """
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=work.dtype == "bfloat16",
        model_init_kwargs={"dtype": work.dtype},
        per_device_train_batch_size=work.per_device,
        gradient_accumulation_steps=work.rows // work.per_device,
        num_generations=work.group,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        gradient_checkpointing=work.checkpointing,
        use_transformers_continuous_batching=work.continuous,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        max_steps=work.warmup + work.steps,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    """Run the steps and print the result line."""
    work = parse_work()
    torch.set_num_threads(work.threads)
    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    clock = Clock()

    def by_place(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.sampled()
        lengths = {len(ids) for ids in completion_ids}
        if lengths != {work.new_tokens}:
            raise ValueError(f"completions have {sorted(lengths)} tokens, not {work.new_tokens}")
        return [reward(index, work) for index in range(len(completions))]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(work.model),
            reward_funcs=by_place,
            args=settings(work, folder),
            train_dataset=Dataset.from_dict({"prompt": prompt_texts(tokenizer, work)}),
            processing_class=tokenizer,
            peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        trainer.train()
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    versions = {name: version(name) for name in ("trl", "transformers", "peft", "torch")}
    finish(work, clock.steps, clock.generate, trainable=trainable, versions=versions)


if __name__ == "__main__":
    main()
