"""What autograd keeps between a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], Tensor], apart_from: Callable[[], Iterable[Tensor]]) -> int:
    """Return the bytes that autograd keeps for the backward pass of what `run` builds, each storage once.

    Args:
        run: builds a graph and returns its root; the graph cannot be walked back afterwards.
        apart_from: asked once `run` is done; tensors that are there anyway, whose storages do not count.
    """
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> None:
        # held until the end, or its memory would be used again and one storage counted for two
        kept.setdefault(tensor.untyped_storage()._cdata, tensor.detach())

    def never(_: None) -> Tensor:
        raise AssertionError("there is no backward pass here")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, never):
        run()
    owned = {tensor.untyped_storage()._cdata for tensor in apart_from()}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in owned)
