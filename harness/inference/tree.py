"""Attention over a tree of shared prefixes, for training and for generation.

All prompts of a batch share a root (system text, demonstrations), the completions of a group share
their task's suffix. Every shared token is computed once. Two layouts go through one attention
function, registered with transformers, that reads its layout from the keyword `tree`:

- `TreeBatch`: one flat sequence [root | suffix 1, completions 1… | suffix 2, completions 2… | …].
  A token sees the root, its own task's suffix and its own completion, causally.
- `DecodeState`: one new token per row; keys and values of root, suffix and row are kept apart, so
  that the root is read once for all rows and nothing is copied when a token is added.

A completion is all that follows its prompt: one reply, or the replies of several turns with the
environment's text between them. Only its trained tokens are predicted. A layer with a sliding window
of W sees a token's own position and the W - 1 before it on its path: distances are those of positions,
not of places in the layout.

Prefix sharing in attention: Juravsky et al. 2024 (Hydragen, arXiv 2402.05099); here the scores of
the levels are concatenated before one softmax, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from harness.inference.prefix_attention import Part, parted_attention, tree_parts

ATTENTION = "harness_tree"


@dataclass(slots=True)
class Branch:
    """One task in the flat layout: where it starts, how long its suffix and completions are."""

    start: int
    suffix: int
    completions: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Index after the branch's last token."""
        return self.start + self.suffix + sum(self.completions)


@dataclass(slots=True)
class TreeBatch:
    """A batch in the flat layout.

    Args:
        input_ids: (1, N) token ids.
        position_ids: (1, N) positions on the path from the root.
        root: number of tokens shared by every branch.
        branches: in layout order.
        trained: per branch and completion which tokens are predicted; None means all of them.
        captured: per layer the (key, value) of all N tokens, filled when `capture` is set.
        biases: attention masks by place, window and dtype, made once for all layers.
        parts: who sees whom block by block, made once for all layers; see `prefix_attention`.
    """

    input_ids: Tensor
    position_ids: Tensor
    root: int
    branches: list[Branch]
    trained: Sequence[Sequence[Sequence[bool]]] | None = None
    capture: bool = False
    captured: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    biases: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return self.root + max((b.suffix + max(b.completions, default=0) for b in self.branches), default=0)

    def blocks(self) -> list[Part]:
        """Return who sees whom, block by block."""
        if not self.parts:
            shapes = [(branch.start, branch.suffix, branch.completions) for branch in self.branches]
            self.parts += tree_parts(self.root, self.tokens, shapes)
        return self.parts

    @property
    def tokens(self) -> int:
        """Number of tokens computed."""
        return int(self.input_ids.shape[1])

    def prediction_index(self) -> Tensor:
        """Return the flat indices whose output predicts the trained tokens, in layout order.

        The first token of each completion is predicted by the last token of its suffix, the first of a later
        turn by the last token of the text before it.
        """
        return self._index([source for source, _ in self._predictions()])

    def target_ids(self) -> Tensor:
        """Return the trained tokens in layout order, aligned with `prediction_index`."""
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

    def bias(self, place: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores of a branch over [root | branch]: 0 where it sees, -inf elsewhere.

        Args:
            place: index of the branch; -1 is the root over itself.
            window: positions a token sees, its own among them; None for all.
            dtype: of the scores.

        Returns:
            (length, root + length) for a branch, (root, root) for the root; None where plain causal attention
            over the root is meant.
        """
        root = self.root
        span = window if window is not None and window < self.depth else 0
        if place < 0 and not span:
            return None
        key = (place, span, dtype)
        if key not in self.biases:
            if place < 0:
                own, seen = slice(0, root), torch.ones(root, root, dtype=torch.bool).tril_()
            else:
                branch = self.branches[place]
                own = slice(branch.start, branch.stop)
                inside = _branch_mask(branch.suffix, branch.completions)
                seen = torch.cat([inside.new_ones(len(inside), root), inside], dim=1)
            seen = seen.to(self.input_ids.device)
            if span:
                positions = self.position_ids[0]
                others = positions[:root] if place < 0 else torch.cat([positions[:root], positions[own]])
                seen = seen & (others[None, :] > positions[own, None] - span)
            self.biases[key] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                ~seen, float("-inf")
            )
        return self.biases[key]


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all sequences share, leaving each at least one of its own."""
    limit = min(len(sequence) for sequence in sequences) - 1
    first = sequences[0]
    for index in range(limit):
        if any(sequence[index] != first[index] for sequence in sequences):
            return index
    return max(limit, 0)


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
    root: int,
    device: torch.device,
    trained: Sequence[Sequence[Sequence[bool]]] | None = None,
) -> TreeBatch:
    """Lay out prompts and their completions as one flat tree.

    Args:
        prompts: one per branch; the first `root` ids of all must be equal.
        completions: per prompt the token ids of each completion; may be empty.
        root: shared tokens, smaller than every prompt.
        trained: one flag per completion token; None trains all of them.

    Raises:
        ValueError: when a prompt has no token beyond the root.
    """
    ids = list(prompts[0][:root])
    positions = list(range(root))
    branches = []
    for prompt, rows in zip(prompts, completions, strict=True):
        suffix = list(prompt[root:])
        if not suffix:
            raise ValueError("a prompt has no token beyond the shared root")
        lengths = tuple(len(row) for row in rows)
        branches.append(Branch(len(ids), len(suffix), lengths))
        ids += suffix
        positions += range(root, len(prompt))
        for row in rows:
            ids += row
            positions += range(len(prompt), len(prompt) + len(row))
    return TreeBatch(
        torch.tensor([ids], dtype=torch.long, device=device),
        torch.tensor([positions], dtype=torch.long, device=device),
        root,
        branches,
        trained,
    )


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer during decoding; shapes with K key/value heads of size D."""

    root_k: Tensor  # (K, P, D)
    root_v: Tensor
    task_k: Tensor  # (T, K, S, D), right-padded
    task_v: Tensor
    row_k: Tensor  # (B, K, M, D), filled up to `DecodeState.length`
    row_v: Tensor


@dataclass(slots=True)
class DecodeState:
    """One decoding step for B = T * G rows, task by task.

    Args:
        pad_bias: (T, 1, 1, S) zero where a suffix token is real, -inf where it is padding.
        padded: whether any of it is padding.
        length: tokens of each row already stored in `row_k`.
    """

    layers: list[LayerCache]
    pad_bias: Tensor
    rows_per_task: int
    length: int = 0
    padded: bool = True
    windows: dict[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)

    def window_bias(self, window: int) -> tuple[Tensor, Tensor]:
        """Return what a sliding window adds to the scores of root and suffix for the token being decoded.

        Args:
            window: positions a token sees, its own among them.

        Returns:
            (T, 1, 1, P) for the root and (T, 1, 1, S) for the suffix, the padding included; made once per step
            for all layers.
        """
        if window not in self.windows or self.windows[window][0] != self.length:
            own = (self.pad_bias[:, 0, 0] == 0).sum(-1)  # real suffix tokens of each task
            root, width = self.layers[0].root_k.shape[1], self.pad_bias.shape[-1]
            first = root + own + self.length - window + 1  # the earliest position that is still seen
            places = torch.arange(root + width, device=first.device)
            hidden = torch.where(places[None, :] < first[:, None], float("-inf"), 0.0).to(self.pad_bias.dtype)
            hidden = hidden[:, None, None, :]
            self.windows[window] = (self.length, hidden[..., :root], self.pad_bias + hidden[..., root:])
        return self.windows[window][1:]

    def keep_tasks(self, keep: Tensor) -> None:
        """Drop the tasks (and their rows) that are not in the boolean vector `keep` (T,)."""
        rows = keep.repeat_interleave(self.rows_per_task)
        self.pad_bias = self.pad_bias[keep]
        self.windows.clear()
        for layer in self.layers:
            layer.task_k, layer.task_v = layer.task_k[keep], layer.task_v[keep]
            layer.row_k, layer.row_v = layer.row_k[rows], layer.row_v[rows]


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
    root = tree.root
    root_k, root_v = key[:, :, :root], value[:, :, :root]
    pieces = []
    if root:
        bias = tree.bias(-1, window, query.dtype)
        pieces.append(
            F.scaled_dot_product_attention(
                query[:, :, :root], root_k, root_v, attn_mask=bias, is_causal=bias is None, scale=scaling
            )
        )
    for place, branch in enumerate(tree.branches):
        own = slice(branch.start, branch.stop)
        pieces.append(
            F.scaled_dot_product_attention(
                query[:, :, own],
                torch.cat([root_k, key[:, :, own]], dim=2),
                torch.cat([root_v, value[:, :, own]], dim=2),
                attn_mask=tree.bias(place, window, query.dtype),
                scale=scaling,
            )
        )
    return torch.cat(pieces, dim=2)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, state: DecodeState, layer: int, scaling: float, window: int | None = None
) -> Tensor:
    """Attend one new token per row; query (B, H, D), key and value (B, K, D) → (B, H, D).

    The scores of the three levels stand task by task, (T, K, G * H / K, ·), in which root and suffix need no copy.
    """
    cache, step = state.layers[layer], state.length
    cache.row_k[:, :, step] = key
    cache.row_v[:, :, step] = value
    rows, heads, size = query.shape
    tasks, kv_heads = cache.task_k.shape[:2]
    group, repeats = rows // tasks, heads // kv_heads
    grouped = query.reshape(rows, kv_heads, repeats, size) * scaling

    def by_task(tensor: Tensor) -> Tensor:
        shape = (tasks, kv_heads, group * repeats, tensor.shape[-1])
        return tensor.reshape(tasks, group, kv_heads, repeats, -1).transpose(1, 2).reshape(shape)

    def by_head(tensor: Tensor) -> Tensor:  # all tasks' rows of a head together, for the root they share
        return tensor.transpose(0, 1).reshape(kv_heads, rows * repeats, -1)

    def by_row(tensor: Tensor) -> Tensor:
        return tensor.view(tasks, kv_heads, group, repeats, -1).transpose(1, 2).reshape(rows, kv_heads, repeats, -1)

    first = 0 if window is None else max(0, step + 1 - window)
    row_k, row_v = cache.row_k[:, :, first : step + 1], cache.row_v[:, :, first : step + 1]
    queries = by_task(grouped)
    at_suffix = queries @ cache.task_k.transpose(2, 3)
    bias = state.pad_bias if window is None else state.window_bias(window)[1]
    if state.padded or window is not None:
        at_suffix += bias
    scores = [at_suffix, by_task(grouped @ row_k.transpose(2, 3))]
    root = cache.root_k.shape[1]
    if root:
        at_root = (by_head(queries) @ cache.root_k.transpose(1, 2)).view(kv_heads, tasks, -1, root).transpose(0, 1)
        scores.append(at_root if window is None else at_root + state.window_bias(window)[0])
    widths = [score.shape[-1] for score in scores]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32).to(query.dtype).split(widths, -1)
    result = weights[0] @ cache.task_v
    if root:
        result += (by_head(weights[2]) @ cache.root_v).view(kv_heads, tasks, -1, size).transpose(0, 1)
    return (by_row(result) + by_row(weights[1].contiguous()) @ row_v).reshape(rows, heads, size)


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
