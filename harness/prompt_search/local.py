"""The run's own model as the reflection model: free, private, and as good a writer as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.core.canonical import sha256_hex
from harness.core.errors import RefusedError
from harness.core.seeds import derive_seed
from harness.core.types import FinishReason, Message
from harness.inference.chat import decode, render_chat
from harness.prompt_search.endpoint import Answer, Spent
from harness.rollouts.collect import Engine

NAME = "local"
"""What `--reflection` calls it."""


@dataclass
class LocalReflector:
    """Answers through an engine of this process.

    Args:
        engine: samples.
        context: tokens of a prompt and its answer together.
        max_tokens: tokens of an answer at most.
        seed: of the search; equal questions asked in equal order get equal answers.
    """

    engine: Engine
    tokenizer: Any
    eos_ids: frozenset[int]
    context: int
    max_tokens: int = 512
    seed: int = 0
    spent: Spent = field(default_factory=Spent)
    name = NAME
    priced = True

    def ask(self, prompt: str, allowance: float | None = None) -> Answer:
        """Return the model's answer; it costs no money.

        Raises:
            RefusedError: the prompt leaves no room for an answer.
        """
        ids = render_chat(self.tokenizer, [Message("user", prompt)])
        if len(ids) + self.max_tokens > self.context:
            raise RefusedError(
                f"the model reads {self.context} tokens; what it should reflect on has {len(ids)}",
                "name a model behind an endpoint with --reflection, or leave it out",
            )
        seed = derive_seed(self.seed, "reflection", sha256_hex(prompt), str(self.spent.requests))
        completion = self.engine.generate([ids], 1, self.max_tokens, 1.0, [[seed]])[0][0]
        used = Spent(1, len(ids), len(completion.token_ids))
        self.spent.add(used)
        finish = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        return Answer(decode(self.tokenizer, completion.token_ids, self.eos_ids), finish, used)
