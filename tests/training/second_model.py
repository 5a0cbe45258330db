"""An engine with the contract of vLLM's on a second copy of a model: it can be slow, keep an old adapter, or die."""

from __future__ import annotations

import threading
from pathlib import Path

from peft import set_peft_model_state_dict
from safetensors.torch import load_file

from harness.config.schema import VllmSection
from harness.core.errors import InfraError
from harness.inference.engine import TransformersEngine
from harness.inference.lora import WEIGHTS
from harness.inference.vllm_engine import VllmEngine
from harness.inference.vllm_settings import EngineSettings
from tests.torch_support import loaded, tiny_llama, with_adapter


class SecondModel(VllmEngine):
    """Samples from a copy of the model that has the adapter it is asked for, or goes on with an old one.

    Args:
        folder: for its log.
        base: the copy; None makes one.
    """

    def __init__(self, folder: Path, base=None):
        settings = EngineSettings(folder, "float32", "cpu", 4, 1, 512, VllmSection())
        base = base or loaded(tiny_llama())
        super().__init__(settings, base.eos_ids or frozenset({2}), folder / "log")
        self.model = with_adapter(base.model)
        self.engine = TransformersEngine(base, self.model)
        self.adapters: dict[str, dict] = {}
        self.calls: list[tuple[str, str]] = []
        self.stale = self.silent = False
        self.dead = threading.Event()
        self.delay_s = 0.0
        self.die_at: int | None = None
        self._alone = threading.Lock()

    @property
    def versions(self):
        return list(self.adapters)

    @property
    def closed(self):
        return self.dead.is_set()

    def _draw(self, rows, max_tokens, temperature, version):
        who = threading.current_thread().name
        self.calls.append((who, version))
        if who == "sampling-ahead" and self.dead.wait(self.delay_s):
            raise InfraError("the second model is gone", "start it again")
        if self.die_at is not None and len(self.calls) >= self.die_at:
            self.dead.set()
        if self.dead.is_set():
            raise InfraError("the second model is gone", "start it again")
        with self._alone:
            if version in self.adapters and not self.stale:
                set_peft_model_state_dict(self.model, self.adapters[version])
            prompts, seeds = [row.prompt for row in rows], [[row.seed] for row in rows]
            drawn = self.engine.generate(prompts, 1, max_tokens, temperature, seeds)
        return [completion for (completion,) in drawn]

    def _load(self, version, folder):
        self.adapters[version] = load_file(folder / WEIGHTS)

    def _unload(self, version):
        del self.adapters[version]

    def _loaded(self):
        return set() if self.silent else set(self.adapters)

    def close(self):
        self.dead.set()
