"""Compare the log probabilities of trainer and sampler on fixed texts, in bfloat16.

    python benchmarks/parity_bf16.py [--tokens 10240] [--rows 32] [--store FILE]

Abstracts of the embedded corpus, joined and cut into pieces of 64 tokens behind 4 that are given. The sampler is led
along each piece: it decodes one token after the other from its cache, as when it samples, but the token is the
text's. The trainer computes the same pieces in packed passes of its own, with gradient, as when it trains. Both have
the same LoRA adapter with an effect. Each group of rows is appended to the store, and a second call goes on behind
them: without bfloat16 instructions it is emulated at some 8 GFLOP/s a core, where the whole takes about half an hour.

Exit code 0 when the mean absolute difference, its 99th percentile and the signed mean keep their bounds, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.config.schema import LoraSection, ModelSection
from harness.envs.drugprot.corpus import embedded_tasks
from harness.inference.agreement import compare
from harness.inference.engine import TransformersEngine
from harness.inference.lora import attach_lora, trainable
from harness.inference.models import LoadedModel, load_model
from harness.inference.prefixes import families
from harness.inference.tree import ATTENTION, build_tree
from harness.training.fused import fuse_adapters
from harness.training.policy import tree_logprobs

GIVEN, LENGTH = 4, 64
"""Tokens of a piece that are given, and that are compared."""
SIGNED, ERRORS = 0.005, 3.0
"""Bounds of the signed mean: nats, and standard errors from zero."""
B_SCALE = 0.01


class Forced(TransformersEngine):
    """The sampler, led along texts: what would be drawn is replaced, what is computed is not."""

    @torch.inference_mode()
    def follow(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Tensor:
        """Return (N,) log probabilities of all tokens of the texts, text by text; all have one length."""
        self.causal_lm.eval()
        self.causal_lm.set_attn_implementation(ATTENTION)
        order = [place for kin in families(prompts) for place in kin.prompts]
        own = [list(texts[place]) for place in order]
        state, logits = self._prefill([prompts[place] for place in order], 1, len(own[0]))
        wanted = torch.tensor(own, dtype=torch.float64)  # in the place of the numbers that decide a draw
        lengths = torch.tensor([len(prompts[place]) for place in order])
        rows = self._decode(state, logits, wanted, lengths, len(own[0]), 1.0)
        if rows.tokens != own:
            raise ValueError("the sampler left the texts")
        found = torch.empty(len(order), len(own[0]), dtype=torch.float64)
        found[order] = torch.tensor(rows.logprobs, dtype=torch.float64)
        return found.flatten()

    def _draw(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        tokens = uniforms.long()
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


class Verdict(NamedTuple):
    """Differences of trainer minus sampler over N tokens, in nats.

    Args:
        error: standard error of the signed mean, were tokens independent.
        by_piece: the same when the tokens of a piece are not.
    """

    tokens: int
    largest: float
    mean: float
    p99: float
    signed: float
    error: float
    by_piece: float
    passed: bool


def judge(trainer: Tensor, sampler: Tensor) -> Verdict:
    """Return whether (N,) log probabilities of whole pieces agree; the smaller standard error decides."""
    found = compare(trainer, sampler)
    gap = trainer - sampler
    error = float(gap.std() / len(gap) ** 0.5)
    pieces = gap.view(-1, LENGTH).mean(1)
    by_piece = float(pieces.std() / len(pieces) ** 0.5)
    level = abs(found.signed) < SIGNED and abs(found.signed) <= ERRORS * min(error, by_piece)
    passed = found.holds(torch.bfloat16) and level
    return Verdict(found.tokens, found.largest, found.mean, found.p99, found.signed, error, by_piece, passed)


def pieces(tokenizer: Any, count: int) -> list[list[int]]:
    """Return pieces of `GIVEN + LENGTH` tokens of the corpus's abstracts, in order.

    Raises:
        ValueError: the corpus has fewer.
    """
    texts = dict.fromkeys(task.fields["abstract"] for task in embedded_tasks()["train"])
    ids = tokenizer(" ".join(texts), add_special_tokens=False)["input_ids"]
    size = GIVEN + LENGTH
    found = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)][:count]
    if len(found) < count:
        raise ValueError(f"the corpus has {len(found)} pieces, not {count}")
    return found


def with_effect(loaded: LoadedModel) -> Any:
    """Return the model with adapters of rank 16, B drawn at random, as a run has it after some steps."""
    model = attach_lora(loaded.model, LoraSection(rank=16, alpha=32), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            if "lora_B" in name:
                parameter.copy_(B_SCALE * torch.randn(parameter.shape, generator=generator))
    fuse_adapters(model)
    return model


def trained(causal_lm: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return (N,) log probabilities of a packed pass of the trainer; it keeps what a backward pass would need."""
    causal_lm.train()
    causal_lm.set_attn_implementation(ATTENTION)
    tree = build_tree([row[:GIVEN] for row in rows], [[row[GIVEN:]] for row in rows], causal_lm.device)
    ones = torch.ones(len(rows) * LENGTH, device=causal_lm.device)
    return tree_logprobs(causal_lm, tree, ones, with_entropy=False)[0].detach().double().cpu()


def measure(loaded: LoadedModel, rows: list[list[int]], per_group: int, store: Path) -> None:
    """Append the log probabilities of the rows that the store does not have yet."""
    model = with_effect(loaded)
    engine = Forced(loaded, model)
    done = len(stored(store)) if store.is_file() else 0
    for start in range(done * per_group, len(rows), per_group):
        group = rows[start : start + per_group]
        began = time.process_time()
        sampler = engine.follow([row[:GIVEN] for row in group], [row[GIVEN:] for row in group])
        trainer = trained(model.get_base_model(), group)
        line = {"first": start, "trainer": trainer.tolist(), "sampler": sampler.tolist()}
        with store.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        found = compare(trainer, sampler)
        seconds = time.process_time() - began
        print(f"  pieces {start + len(group)} of {len(rows)}: {seconds:.0f} s of processor, mean {found.mean:.4f}, "
              f"signed {found.signed:+.5f}", flush=True)  # fmt: skip


def stored(store: Path) -> list[dict[str, Any]]:
    """Return the groups of a store."""
    return [json.loads(line) for line in store.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    """Measure what is missing and print the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=160 * LENGTH)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=32, help="pieces that are computed together")
    parser.add_argument("--store", type=Path, help="file of what was measured; a second call goes on behind it")
    options = parser.parse_args()
    loaded = load_model(ModelSection(dtype="bfloat16", device=options.device))
    rows = pieces(loaded.tokenizer, -(-options.tokens // LENGTH))
    store = options.store or Path("outputs") / f"parity_bf16_{options.rows}.jsonl"
    store.parent.mkdir(parents=True, exist_ok=True)
    measure(loaded, rows, options.rows, store)
    both = [torch.tensor([v for line in stored(store) for v in line[side]], dtype=torch.float64)
            for side in ("trainer", "sampler")]  # fmt: skip
    found = judge(*both)
    print(f"{found.tokens} tokens of fixed text, bfloat16: mean |d| {found.mean:.3g}, 99th percentile "
          f"{found.p99:.3g}, largest {found.largest:.3g} nats")  # fmt: skip
    print(f"signed mean {found.signed:+.2e}, standard error {found.error:.2e} by token and {found.by_piece:.2e} by "
          f"piece: {abs(found.signed) / min(found.error, found.by_piece):.2f} of the smaller one (at most {ERRORS:g}; "
          f"below {SIGNED:g} nats)")  # fmt: skip
    print("passed" if found.passed else "FAILED")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
