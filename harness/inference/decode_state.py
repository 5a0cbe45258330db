"""What decoding keeps: keys and values of shared prefixes once, of each task's suffix and of each row apart.

Prompts that share a long prefix form a family (`prefixes.families`), whose prefix is read once for all its rows. The
scores of the three levels are concatenated before one softmax, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer and family during decoding; shapes with K key/value heads of size D."""

    root_k: Tensor  # (K, P, D)
    root_v: Tensor
    task_k: Tensor  # (T, K, S, D), right-padded
    task_v: Tensor
    row_k: Tensor  # (B, K, M, D), filled up to `DecodeState.length`
    row_v: Tensor


@dataclass(slots=True)
class Family:
    """Tasks whose prompts share a prefix of P tokens, with B = T * G rows, task by task.

    Args:
        pad_bias: (T, 1, 1, S) zero where a suffix token is real, -inf where it is padding.
        rows_per_task: G.
        padded: whether any of it is padding.
        prefix: (P,) places of the common prefix in the layout of the prefill.
        suffixes: per task the places of its own tokens there.
        windows: what sliding windows hide, with the step it was made for.
    """

    layers: list[LayerCache]
    pad_bias: Tensor
    rows_per_task: int
    padded: bool
    prefix: Tensor
    suffixes: list[Tensor]
    windows: dict[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.pad_bias) * self.rows_per_task

    def store(self, key: Tensor, value: Tensor, max_tokens: int) -> None:
        """Add a layer with what the prefill computed.

        Args:
            key: (K, N, D) over the flat layout.
            value: the same.
            max_tokens: of each row; room for them is made once.
        """
        heads, _, size = key.shape
        tasks = key.new_zeros(2, len(self.suffixes), heads, self.pad_bias.shape[-1], size)
        for index, places in enumerate(self.suffixes):
            tasks[0, index, :, : len(places)] = key[:, places]
            tasks[1, index, :, : len(places)] = value[:, places]
        rows = key.new_zeros(2, self.rows, heads, max_tokens, size)
        roots = key[:, self.prefix], value[:, self.prefix]
        self.layers.append(LayerCache(*roots, tasks[0], tasks[1], rows[0], rows[1]))

    def window_bias(self, window: int, step: int) -> tuple[Tensor, Tensor]:
        """Return what a sliding window adds to the scores of root and suffix for the token being decoded.

        Args:
            window: positions a token sees, its own among them.
            step: tokens of each row that are stored already.

        Returns:
            (T, 1, 1, P) for the root and (T, 1, 1, S) for the suffix, the padding included; made once per step
            for all layers.
        """
        if window not in self.windows or self.windows[window][0] != step:
            own = (self.pad_bias[:, 0, 0] == 0).sum(-1)  # real suffix tokens of each task
            root, width = self.layers[0].root_k.shape[1], self.pad_bias.shape[-1]
            first = root + own + step - window + 1  # the earliest position that is still seen
            places = torch.arange(root + width, device=first.device)
            hidden = torch.where(places[None, :] < first[:, None], float("-inf"), 0.0).to(self.pad_bias.dtype)
            hidden = hidden[:, None, None, :]
            self.windows[window] = (step, hidden[..., :root], self.pad_bias + hidden[..., root:])
        return self.windows[window][1:]

    def keep_tasks(self, keep: Tensor) -> None:
        """Drop the tasks (and their rows) that are not in the boolean vector `keep` (T,)."""
        rows = keep.repeat_interleave(self.rows_per_task)
        self.pad_bias = self.pad_bias[keep]
        self.windows.clear()
        for layer in self.layers:
            layer.task_k, layer.task_v = layer.task_k[keep], layer.task_v[keep]
            layer.row_k, layer.row_v = layer.row_k[rows], layer.row_v[rows]


@dataclass(slots=True)
class DecodeState:
    """One decoding step for the rows of all families, family by family.

    Args:
        length: tokens of each row already stored in `row_k`.
    """

    families: list[Family]
    length: int = 0

    def keep_tasks(self, keep: Tensor) -> None:
        """Drop the tasks (and their rows) that are not in the boolean vector `keep`, over the tasks of all families."""
        parts = keep.split([len(family.pad_bias) for family in self.families])
        for family, part in zip(self.families, parts, strict=True):
            family.keep_tasks(part)
        self.families = [family for family in self.families if family.rows]


def empty_family(
    shared: int, paths: Sequence[Sequence[int]], rows_per_task: int, dtype: torch.dtype, device: torch.device
) -> Family:
    """Return a family without keys and values.

    Args:
        shared: tokens of the common prefix.
        paths: per task the places of its prompt's tokens in the layout of the prefill.
        rows_per_task: rows that follow each prompt.
        dtype: of the scores.
    """
    suffixes = [torch.tensor(path[shared:], device=device) for path in paths]
    longest = max(map(len, suffixes))
    bias = torch.full((len(paths), longest), float("-inf"), dtype=dtype, device=device)
    for index, suffix in enumerate(suffixes):
        bias[index, : len(suffix)] = 0
    padded = any(len(suffix) < longest for suffix in suffixes)
    prefix = torch.tensor(paths[0][:shared], dtype=torch.long, device=device)
    return Family([], bias[:, None, None, :], rows_per_task, padded, prefix, suffixes)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, state: DecodeState, layer: int, scaling: float, window: int | None = None
) -> Tensor:
    """Attend one new token per row; query (B, H, D), key and value (B, K, D) → (B, H, D)."""
    if len(state.families) == 1:
        return _family_attention(query, key, value, state.families[0], layer, state.length, scaling, window)
    rows = [family.rows for family in state.families]
    parts = zip(query.split(rows), key.split(rows), value.split(rows), state.families, strict=True)
    return torch.cat([_family_attention(*part, layer, state.length, scaling, window) for part in parts])


def _family_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    family: Family,
    layer: int,
    step: int,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Attend one new token per row of a family.

    The scores of the three levels stand task by task, (T, K, G * H / K, ·), in which root and suffix need no copy.
    """
    cache = family.layers[layer]
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
    bias = family.pad_bias if window is None else family.window_bias(window, step)[1]
    if family.padded or window is not None:
        at_suffix += bias
    scores = [at_suffix, by_task(grouped @ row_k.transpose(2, 3))]
    root = cache.root_k.shape[1]
    if root:
        at_root = (by_head(queries) @ cache.root_k.transpose(1, 2)).view(kv_heads, tasks, -1, root).transpose(0, 1)
        scores.append(at_root if window is None else at_root + family.window_bias(window, step)[0])
    widths = [score.shape[-1] for score in scores]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32).to(query.dtype).split(widths, -1)
    result = weights[0] @ cache.task_v
    if root:
        result += (by_head(weights[2]) @ cache.root_v).view(kv_heads, tasks, -1, size).transpose(0, 1)
    return (by_row(result) + by_row(weights[1].contiguous()) @ row_v).reshape(rows, heads, size)
