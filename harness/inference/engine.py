"""The transformers engine: one prefill per shared prefix, all rows of all groups decoded together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor

from harness.core.types import Completion, FinishReason
from harness.inference.decode_state import DecodeState, empty_family
from harness.inference.decoder import Decoder, supports
from harness.inference.models import LoadedModel
from harness.inference.prefixes import families
from harness.inference.tree import ATTENTION, build_tree


@dataclass(slots=True)
class _Rows:
    """What decoding collects; tensors over the B rows still active, results by original row."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finished: list[FinishReason]


class TransformersEngine:
    """Sample completions with exact token ids and log probabilities.

    Args:
        loaded: base model, tokenizer and end ids.
        model: the module to sample from when it is not the base (a PEFT-wrapped model).
        max_rows: rows decoded together; bounds memory, not results' meaning.
    """

    def __init__(self, loaded: LoadedModel, model: Any | None = None, max_rows: int = 64) -> None:
        self.loaded = loaded
        self.adapted = model if hasattr(model, "get_base_model") else None
        self.causal_lm = self.adapted.get_base_model() if self.adapted is not None else loaded.model
        self.causal_lm.set_attn_implementation(ATTENTION)
        self.max_rows = max_rows
        self._decoder: Decoder | None = None

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Completion]]:
        """Sample `n` completions for each prompt.

        Args:
            prompts: token ids; every prefix that some of them share is computed once.
            n: completions per prompt.
            max_tokens: limit per completion.
            temperature: softmax temperature; logprobs are those of the tempered distribution.
            seeds: per prompt `n` integers; each decides its row's random numbers alone, so that the
                same seed under two policies gives common random numbers.

        Returns:
            In prompt order, `n` completions each.
        """
        if not prompts:
            return []
        self.causal_lm.eval()  # adapters are born in training mode, and dropout must not reach a sample
        order = [place for kin in families(prompts) for place in kin.prompts]
        per_call = max(1, self.max_rows // n)
        results: dict[int, list[Completion]] = {}
        # in bfloat16 a merged weight rounds the adapter away, so there it stays beside the weight
        resident = self.loaded.resident
        merge = self.adapted is not None and resident and self.loaded.dtype is not torch.bfloat16
        with merged_adapter(self.adapted) if merge else nullcontext():
            self._decoder = Decoder(self.causal_lm) if resident and supports(self.causal_lm) else None
            try:
                for start in range(0, len(prompts), per_call):
                    chunk = order[start : start + per_call]
                    own = [prompts[place] for place in chunk], [seeds[place] for place in chunk]
                    results |= zip(chunk, self._generate_chunk(*own, n, max_tokens, temperature), strict=True)
            finally:
                self._decoder = None  # it holds copies of the weights
        return [results[place] for place in range(len(prompts))]

    def _generate_chunk(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        n: int,
        max_tokens: int,
        temperature: float,
    ) -> list[list[Completion]]:
        state, logits = self._prefill(prompts, n, max_tokens)
        uniforms = torch.stack([_uniforms(seed, max_tokens) for row in seeds for seed in row])
        lengths = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(n)
        rows = self._decode(state, logits.repeat_interleave(n, dim=0), uniforms, lengths, max_tokens, temperature)
        completions = [
            Completion(tuple(t), tuple(p), f) for t, p, f in zip(rows.tokens, rows.logprobs, rows.finished, strict=True)
        ]
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    def _prefill(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> tuple[DecodeState, Tensor]:
        """Compute every shared prefix once; return the decode state and (T, V) next-token logits.

        Args:
            prompts: in the order of their families.
        """
        device = self.loaded.device
        tree = build_tree(prompts, [[] for _ in prompts], device)
        tree.capture = True
        hidden = self._hidden(tree.input_ids, tree.position_ids, tree)
        last = torch.tensor([branch.own.stop - 1 for branch in tree.branches], device=device)
        logits = self._logits(hidden[0, last])
        paths = [branch.path for branch in tree.branches]
        found = [
            empty_family(kin.shared, [paths[place] for place in kin.prompts], n, hidden.dtype, device)
            for kin in families(prompts)
        ]
        for layer in range(len(tree.captured)):
            key, value = (tensor[0] for tensor in tree.captured.pop(layer))
            for family in found:
                family.store(key, value, max_tokens)
        return DecodeState(found), logits

    def _decode(
        self,
        state: DecodeState,
        logits: Tensor,
        uniforms: Tensor,
        lengths: Tensor,
        max_tokens: int,
        temperature: float,
    ) -> _Rows:
        total, per_task = logits.shape[0], state.families[0].rows_per_task
        rows = _Rows([[] for _ in range(total)], [[] for _ in range(total)], [FinishReason.LENGTH] * total)
        active = torch.arange(total)
        done = torch.zeros(total, dtype=torch.bool)
        eos = torch.tensor(sorted(self.loaded.eos_ids))
        for step in range(max_tokens):
            tokens, logprobs = self._draw(logits, uniforms[active, step], temperature)
            for row, token, logprob in zip(active.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
                if not done[row]:
                    rows.tokens[row].append(token)
                    rows.logprobs[row].append(logprob)
            ended = torch.isin(tokens, eos)
            for row in active[ended & ~done[active]].tolist():
                rows.finished[row] = FinishReason.STOP
            done[active[ended]] = True
            alive = ~done[active].view(-1, per_task).all(dim=1)
            if step + 1 == max_tokens or not alive.any():
                break
            if alive.float().mean() < 0.8:  # whole groups that ended leave the batch
                keep = alive.repeat_interleave(per_task)
                state.keep_tasks(alive.to(self.loaded.device))
                active, tokens = active[keep], tokens[keep]
            device = self.loaded.device
            positions = (lengths[active] + step).to(device)
            if self._decoder is not None:
                hidden = self._decoder(tokens, positions, state)
            else:
                hidden = self._hidden(tokens.to(device)[:, None], positions[:, None], state)[:, 0]
            state.length += 1
            logits = self._logits(hidden)
        return rows

    def _draw(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return _sample(logits, uniforms, temperature)

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.causal_lm.get_output_embeddings()
        if head.bias is not None or hidden.device.type != "cpu":
            return head(hidden)
        # few rows against a large vocabulary: with the weight as the left factor the processor's
        # matrix product is up to twice as fast
        return (head.weight @ hidden.T).T

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, tree: Any) -> Tensor:
        decoder = self.causal_lm.get_decoder()
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, tree=tree)
        return output.last_hidden_state


@contextmanager
def merged_adapter(model: Any) -> Iterator[None]:
    """Fold the adapter of a PEFT model into its weights for the duration of the block.

    The original weight tensors are put back afterwards, so nothing is rounded by coming and going.

    Raises:
        TypeError: for a kind of layer whose adapter cannot be folded in (a quantised one); it would be left out.
    """
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for module in model.modules():
            if not isinstance(module, LoraLayer):
                continue
            if not isinstance(module, LoraLinear | ParamWrapper):
                raise TypeError(f"the adapter of a {type(module).__name__} cannot be merged")
            layer: Any = module
            alone = isinstance(module, ParamWrapper)  # a weight that is adapted as a parameter, not as a layer
            weight: Tensor = layer.get_param() if alone else layer.get_base_layer().weight
            originals.append((weight, weight.data))
            weight.data = weight.data + module.get_delta_weight("default").to(weight.dtype)
        with model.disable_adapter():
            yield
    finally:
        for weight, data in originals:
            weight.data = data


def _uniforms(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _sample(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Invert the distribution function: (B, V) logits and (B,) uniforms → ids and logprobs on the CPU.

    Temperature 0 is greedy: the whole probability lies on the largest logit.
    """
    if temperature == 0:
        best = logits.argmax(dim=-1).cpu()
        return best, torch.zeros(len(best))
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    thresholds = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0].cpu(), logprobs.gather(1, tokens)[:, 0].cpu()
