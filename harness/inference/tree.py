"""Attention over a tree of shared prefixes, for training and for generation.

Whatever prompts begin with in common is computed once: the text all of them share, what those of one environment share
(system text, demonstrations), the whole prompt of the completions of a group. Two layouts go through one attention
function, registered with transformers, that reads its layout from the keyword `tree`:

- `TreeBatch`: one flat sequence in which everything that shares a prefix stands behind it, as in
  [root | prefix A | suffix 1, completions 1… | suffix 2, completions 2… | prefix B | suffix 3, …].
  A token sees the prefixes on its path, its own task's suffix and its own completion, causally.
- `DecodeState`: one new token per row; keys and values of a family's common prefix, of each task's suffix and of each
  row are kept apart, so that a prefix is read once for all rows and nothing is copied when a token is added.

A completion is all that follows its prompt: one reply, or the replies of several turns with the
environment's text between them. Only its trained tokens are predicted. A layer with a sliding window
of W sees a token's own position and the W - 1 before it on its path: distances are those of positions,
not of places in the layout.

Prefix sharing in attention: Juravsky et al. 2024 (Hydragen, arXiv 2402.05099); here the scores of
the levels are concatenated before one softmax, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from harness.inference.decode_state import DecodeState, decode_attention
from harness.inference.prefix_attention import Part, parted_attention, tree_parts
from harness.inference.prefixes import shared_prefixes

ATTENTION = "harness_tree"


@dataclass(slots=True)
class Branch:
    """Tokens of one prompt, or of a prefix that several share, and the completions behind them.

    Args:
        start: place in the flat layout.
        suffix: tokens of the prompt that no prefix above holds.
        completions: their lengths; none behind a prefix.
        above: places of the prefixes on the path, outermost first.
        stop: place after the last token that sees the suffix: of the branch's last completion, or of the last branch
            below a prefix.
    """

    start: int
    suffix: int
    completions: tuple[int, ...]
    above: tuple[slice, ...] = ()
    stop: int = 0

    @property
    def own(self) -> slice:
        """Places of suffix and completions."""
        return slice(self.start, self.start + self.suffix + sum(self.completions))

    @property
    def before(self) -> int:
        """Number of tokens on the path above."""
        return sum(part.stop - part.start for part in self.above)

    @property
    def path(self) -> list[int]:
        """Places of the prompt's tokens, from its first to its last."""
        parts = (*self.above, slice(self.start, self.start + self.suffix))
        return [place for part in parts for place in range(part.start, part.stop)]

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield runs of tokens that follow each other on a path: start, stop, and where those that see it end."""
        end = self.start + self.suffix
        yield self.start, end, self.stop
        for length in self.completions:
            yield end, end + length, end + length
            end += length


@dataclass(slots=True)
class TreeBatch:
    """A batch in the flat layout.

    Args:
        input_ids: (1, N) token ids.
        position_ids: (1, N) positions on the path from the root.
        branches: one per prompt, in the order the prompts were given.
        prefixes: those that prompts share, in layout order.
        trained: per branch and completion which tokens are predicted; None means all of them.
        captured: per layer the (key, value) of all N tokens, filled when `capture` is set.
        biases: attention masks by place, window and dtype, made once for all layers.
        parts: who sees whom block by block, made once for all layers; see `prefix_attention`.
    """

    input_ids: Tensor
    position_ids: Tensor
    branches: list[Branch]
    prefixes: list[Branch] = field(default_factory=list)
    trained: Sequence[Sequence[Sequence[bool]]] | None = None
    capture: bool = False
    captured: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    biases: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    @property
    def regions(self) -> list[Branch]:
        """Prefixes and branches in layout order; together they hold every token once."""
        return sorted((*self.prefixes, *self.branches), key=lambda region: region.start)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return max((b.before + b.suffix + max(b.completions, default=0) for b in self.branches), default=0)

    def blocks(self) -> list[Part]:
        """Return who sees whom, block by block."""
        if not self.parts:
            self.parts += tree_parts([span for region in self.regions for span in region.spans()])
        return self.parts

    @property
    def tokens(self) -> int:
        """Number of tokens computed."""
        return int(self.input_ids.shape[1])

    def prediction_index(self) -> Tensor:
        """Return the flat indices whose output predicts the trained tokens, branch by branch as they were given.

        The first token of each completion is predicted by the last token of its suffix, the first of a later
        turn by the last token of the text before it.
        """
        return self._index([source for source, _ in self._predictions()])

    def target_ids(self) -> Tensor:
        """Return the trained tokens, aligned with `prediction_index`."""
        return self.input_ids[0, self._index([target for _, target in self._predictions()])]

    def _predictions(self) -> list[tuple[int, int]]:
        pairs = []
        for place, branch in enumerate(self.branches):
            start = branch.start + branch.suffix
            for row, length in enumerate(branch.completions):
                sources = [branch.start + branch.suffix - 1, *range(start, start + length - 1)]
                flags = self.trained[place][row] if self.trained is not None else (True,) * length
                pairs += [(source, start + i) for i, source in enumerate(sources[:length]) if flags[i]]
                start += length
        return pairs

    def _index(self, places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.long, device=self.input_ids.device)

    def bias(self, region: Branch, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to a region's scores over [path above | region]: 0 where it sees, -inf elsewhere.

        Args:
            region: a branch or a prefix.
            window: positions a token sees, its own among them; None for all.
            dtype: of the scores.

        Returns:
            (length, tokens above + length); None where plain causal attention within the region is meant.
        """
        span = window if window is not None and window < self.depth else 0
        if not (span or region.above or region.completions):
            return None
        key = (region.start, span, dtype)
        if key not in self.biases:
            inside = _branch_mask(region.suffix, region.completions)
            seen = torch.cat([inside.new_ones(len(inside), region.before), inside], dim=1)
            seen = seen.to(self.input_ids.device)
            if span:
                positions = self.position_ids[0]
                others = torch.cat([positions[part] for part in (*region.above, region.own)])
                seen = seen & (others[None, :] > positions[region.own, None] - span)
            self.biases[key] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                ~seen, float("-inf")
            )
        return self.biases[key]


def _branch_mask(suffix: int, completions: Sequence[int]) -> Tensor:
    """Return (length, length) bool: who sees whom inside a branch."""
    length = suffix + sum(completions)
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[:, :suffix] = True
    start = suffix
    for count in completions:
        mask[start : start + count, start : start + count] = True
        start += count
    return mask.tril_()


def build_tree(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    device: torch.device,
    trained: Sequence[Sequence[Sequence[bool]]] | None = None,
) -> TreeBatch:
    """Lay out prompts and their completions as one flat tree, every prefix that prompts share once.

    Args:
        prompts: one per branch.
        completions: per prompt the token ids of each completion; may be empty.
        trained: one flag per completion token; None trains all of them.

    Raises:
        ValueError: when a prompt has no token.
    """
    ids: list[int] = []
    positions: list[int] = []
    laid: dict[tuple[int, int], Branch] = {}
    branches: dict[int, Branch] = {}

    def lay(tokens: Sequence[int], depth: int) -> int:
        ids.extend(tokens)
        positions.extend(range(depth, depth + len(tokens)))
        return len(ids) - len(tokens)

    for place, path in shared_prefixes(prompts).walk():
        prompt, depth = prompts[place], 0
        above: tuple[slice, ...] = ()
        for prefix in path:
            if prefix.key not in laid:
                start = lay(prompt[prefix.start : prefix.stop], prefix.start)
                laid[prefix.key] = Branch(start, prefix.stop - prefix.start, (), above)
            above = (*above, laid[prefix.key].own)
            depth = prefix.stop
        start = lay(prompt[depth:], depth)
        for row in completions[place]:
            lay(row, len(prompt))
        lengths = tuple(map(len, completions[place]))
        branches[place] = Branch(start, len(prompt) - depth, lengths, above, len(ids))
        for prefix in path:
            laid[prefix.key].stop = len(ids)
    flat = [torch.tensor([row], dtype=torch.long, device=device) for row in (ids, positions)]
    return TreeBatch(flat[0], flat[1], [branches[i] for i in range(len(prompts))], list(laid.values()), trained)


def _expand_heads(tensor: Tensor, repeats: int) -> Tensor:
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


def _flat_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: TreeBatch, scaling: float, window: int | None
) -> Tensor:
    """Attend in the flat layout; query (1, H, N, D), key and value (1, K, N, D) → (1, H, N, D)."""
    repeats = query.shape[1] // key.shape[1]
    key, value = _expand_heads(key, repeats), _expand_heads(value, repeats)
    if query.device.type == "cpu" and (window is None or window >= tree.depth):
        return parted_attention(query, key, value, tree.blocks(), scaling)
    pieces = []
    for region in tree.regions:
        bias = tree.bias(region, window, query.dtype)
        seen = (*region.above, region.own)
        pieces.append(
            F.scaled_dot_product_attention(
                query[:, :, region.own],
                torch.cat([key[:, :, part] for part in seen], dim=2),
                torch.cat([value[:, :, part] for part in seen], dim=2),
                attn_mask=bias,
                is_causal=bias is None,
                scale=scaling,
            )
        )
    return torch.cat(pieces, dim=2)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: TreeBatch | DecodeState | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in the transformers interface; returns (B, N, H, D) and no weights.

    Without `tree` it is plain causal attention over unpadded sequences. A layer with a sliding window says so in its
    attribute `sliding_window`.
    """
    window: int | None = getattr(module, "sliding_window", None)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if isinstance(tree, DecodeState):
        q, k, v = (tensor[:, :, 0] for tensor in (query, key, value))
        output = decode_attention(q, k, v, tree, module.layer_idx, scale, window)[:, :, None]
    elif isinstance(tree, TreeBatch):
        if tree.capture:
            tree.captured[module.layer_idx] = (key, value)
        output = _flat_attention(query, key, value, tree, scale, window)
    else:
        output = _causal_attention(query, key, value, scale, window)
    return output.transpose(1, 2).contiguous(), None


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    repeats, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = _expand_heads(key, repeats), _expand_heads(value, repeats)
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scaling)
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_().triu_(1 - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
