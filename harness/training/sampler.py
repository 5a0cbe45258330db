"""Bring the policy to an engine that holds weights of its own, and see that the two are one model.

After every sync a probe draws completions of fixed prompts with fixed seeds and compares the log probabilities that
the engine reports with the trainer's of the same tokens. An engine that goes on with an old adapter, drops part of
one, or reads the prefix cache of another policy answers like a model that was never trained (verl#7495, vllm#41384).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from harness.core.errors import InfraError
from harness.core.seeds import derive_seed
from harness.core.types import Completion
from harness.inference.agreement import Agreement, compare
from harness.inference.experts import rewrite_per_expert
from harness.inference.lora import save_adapter
from harness.inference.models import LoadedModel
from harness.inference.tree import ATTENTION, build_tree
from harness.inference.vllm_engine import VllmEngine
from harness.training.policy import tree_logprobs

FOLDER = "sampler"
"""Folder of a run directory that versions of the adapter pass through; it is gone once the attempt ended."""
PROBES, SAMPLES, LENGTH = 4, 2, 16
"""Prompts of the probe, completions of each, and tokens of a completion at most."""
Prompts = Callable[[int], Sequence[Sequence[int]]]
"""Called with a number, returns so many prompts, always the same ones."""


class Sampler:
    """The engine of a run with the adapter that it was given last.

    Args:
        engine: vLLM, colocated or as a server.
        loaded: the trainer's base model.
        model: the same with its adapters.
        folder: the run directory; versions of the adapter pass through a folder of it.
        attempt: number of the attempt; part of every version's name.
        seed: the run's.
        temperature: that rollouts are sampled at.
        prompts: of the probe.
    """

    def __init__(
        self,
        engine: VllmEngine,
        loaded: LoadedModel,
        model: PeftModel,
        folder: Path,
        attempt: int,
        seed: int,
        temperature: float,
        prompts: Prompts,
    ) -> None:
        self.engine, self.loaded, self.model = engine, loaded, model
        self.folder, self.attempt, self.seed = folder / FOLDER, attempt, seed
        self.temperature, self._prompts = temperature, prompts
        self.agreement: Agreement | None = None
        self._sha = ""
        self._steps: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._chats: Sequence[Sequence[int]] = ()
        shutil.rmtree(self.folder, ignore_errors=True)  # what a killed attempt left

    def bring(self, step: int) -> dict[str, float]:
        """Give the engine the policy as it is after a step, and probe it; nothing when no weight has changed.

        Returns:
            Metrics `probe/max`, `probe/mean`, `probe/p99`, `probe/signed` in nats, and `time/sync` in seconds.

        Raises:
            InfraError: the adapter cannot be written, or the engine is lost.
        """
        began = time.monotonic()
        folder = self.folder / f"step_{step}"
        sha = save_adapter(self.model, folder)
        if sha == self._sha:
            shutil.rmtree(folder, ignore_errors=True)
            self._steps[str(self.engine.version)] = step
            return {}
        if self.loaded.model.config.model_type == "afmoe":
            rewrite_per_expert(folder)
        version = f"policy-{self.attempt}-{step}-{sha[:12]}"
        self.engine.sync(version, folder)
        self._sha = sha
        self._steps[version], self._folders[version] = step, folder
        for old in self._folders.keys() - self.engine.live:
            path = self._folders.pop(old)
            if path not in self._folders.values():
                shutil.rmtree(path, ignore_errors=True)
        self.agreement = found = self.probe()
        return {
            "probe/max": found.largest,
            "probe/mean": found.mean,
            "probe/p99": found.p99,
            "probe/signed": found.signed,
            "time/sync": time.monotonic() - began,
        }

    def check(self) -> None:
        """Check that the last probe found one policy on both sides.

        Raises:
            InfraError: it found two. Nothing that was sampled from then on would be the policy's.
        """
        if self.agreement is not None and not self.agreement.holds(self.loaded.dtype):
            raise InfraError(
                f"vLLM does not sample from the policy that is trained ({self.engine.version}): "
                f"{self.agreement.describe(self.loaded.dtype)}",
                'backend.engine = "transformers" in a new run does without vLLM; `harness model check` tests the model',
            )

    def age(self, version: str, step: int) -> int:
        """Return how many steps the policy of `step` is beyond the last one at which `version` was the policy."""
        return step - self._steps[version]

    def describe(self) -> str:
        """Return what the last probe said, for the log."""
        found = "not probed" if self.agreement is None else self.agreement.describe(self.loaded.dtype)
        return f"vLLM samples from {self.engine.version}; probe: {found}"

    def probe(self) -> Agreement:
        """Compare the engine's log probabilities of what it draws with the trainer's.

        Raises:
            InfraError: the engine is lost.
        """
        # rendered once: the environment is another thread's when a run samples ahead
        prompts = self._chats = self._chats or self._prompts(PROBES)
        seeds = [[derive_seed(self.seed, "probe", p, s) for s in range(SAMPLES)] for p in range(len(prompts))]
        drawn = self.engine.generate(prompts, SAMPLES, LENGTH, self.temperature, seeds)
        reported = [value for rows in drawn for row in rows for value in row.logprobs]
        return compare(torch.tensor(reported, dtype=torch.float64), self._trainer_logprobs(prompts, drawn))

    @torch.no_grad()
    def _trainer_logprobs(self, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[Completion]]) -> Tensor:
        """Return (N,) log probabilities of all completions under the trainer's policy, a prompt at a time."""
        causal_lm: Any = self.model.get_base_model()
        training = causal_lm.training
        causal_lm.eval()
        causal_lm.set_attn_implementation(ATTENTION)
        pieces = []
        try:
            for prompt, rows in zip(prompts, drawn, strict=True):
                tree = build_tree([prompt], [[row.token_ids for row in rows]], self.loaded.device)
                count = sum(len(row.token_ids) for row in rows)
                dtype = torch.promote_types(self.loaded.dtype, torch.float32)
                temperatures = torch.full((count,), self.temperature, dtype=dtype, device=self.loaded.device)
                pieces.append(tree_logprobs(causal_lm, tree, temperatures, with_entropy=False)[0].double().cpu())
        finally:
            causal_lm.train(training)
        return torch.cat(pieces)
