"""A base whose blocks rest in the processor's memory and visit the device one at a time.

For a model that does not fit into one GPU. At rest a block's frozen weights stay where the loader put them: as they
stand in the files, which it maps into memory where it need not join them, so the kernel reads and drops their pages.
Before a block runs its weights are copied to the device, in the dtype that is computed in; after it the copies are let
go. Adapters, embeddings, output head and what stands outside the blocks stay on the device.

A backward pass needs the weights again, so in training blocks are always computed twice, and what autograd keeps
between the two passes is the input of each block and no weight. The hooks of accelerate leave weights without content
between two visits, which neither adapters on parameters (experts) nor the trainer's own operations can stand; here a
weight at rest is an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

_VISIT = "harness_visit"


class _Visit:
    """Brings the weights of one block and lets them go; visits may be nested.

    A visiting weight is a parameter of its own: autograd keeps the object it met, and must not find another content
    in it later.

    Args:
        block: adapters may be attached to it later.
        device: where the block computes.
        dtypes: what each of its weights is computed in.
    """

    def __init__(self, block: torch.nn.Module, device: torch.device, dtypes: Mapping[Parameter, torch.dtype]) -> None:
        self.home = [
            (module, name, parameter, dtypes[parameter])
            for module in block.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self.device, self.depth = device, 0

    def begin(self, *_: Any) -> None:
        """Copy the weights to the device."""
        if not self.depth:
            for module, name, rest, dtype in self.home:
                there = rest.data.to(self.device, dtype, non_blocking=True)
                module._parameters[name] = Parameter(there, requires_grad=False)
        self.depth += 1

    def end(self, *_: Any) -> None:
        """Put the weights at rest back in their place."""
        self.depth -= 1
        if not self.depth:
            for module, name, rest, _dtype in self.home:
                module._parameters[name] = rest

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies, where a visit makes any."""
        moved = ((rest, dtype) for *_, rest, dtype in self.home if (rest.device, rest.dtype) != (self.device, dtype))
        return sum(rest.numel() * dtype.itemsize for rest, dtype in moved)

    def around(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Run a block's computation with its weights there."""
        self.begin()
        try:
            return forward(*args)
        finally:  # the second computation of a block stops in its middle, by an exception
            self.end()


def stream_blocks(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Let the blocks of a loaded base rest where they are, and put everything else on the device.

    Args:
        model: a causal LM on the processor, without adapters, in the dtype of its files.
        device: where it computes.
        dtype: what it computes in; weights that a model type wants in float32 stay so.
    """
    exact = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    dtypes = {parameter: torch.float32 if any(part in name for part in exact) else dtype
              for name, parameter in model.named_parameters()}  # fmt: skip
    blocks = list(model.get_decoder().layers)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    for parameter in dtypes.keys() - inside:
        parameter.data = parameter.data.to(device, dtypes[parameter])
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)
    for block in blocks:
        visit = _Visit(block, device, dtypes)
        block.register_forward_pre_hook(visit.begin)
        block.register_forward_hook(visit.end, always_call=True)
        setattr(block, _VISIT, visit)


def copied_bytes(causal_lm: Any) -> int:
    """Return the bytes that visits of all blocks copy; 0 for a model whose blocks stay."""
    return sum(
        getattr(block, _VISIT).copied_bytes for block in causal_lm.get_decoder().layers if hasattr(block, _VISIT)
    )


def is_streamed(causal_lm: Any) -> bool:
    """Tell whether the blocks of a model only visit the device."""
    return any(hasattr(block, _VISIT) for block in causal_lm.get_decoder().layers)


def computing_twice(block: Any) -> Callable[..., Any]:
    """Return what runs a block's computation so that the backward pass repeats it, its weights there both times.

    Not reentrant: the inputs of a model whose own weights are frozen need no gradient, and the reentrant form then
    gives the adapters none (TRL#2671).
    """
    visit: _Visit | None = getattr(block, _VISIT, None)

    def run(forward: Callable[..., Any], *args: Tensor) -> Any:
        inner = forward if visit is None else partial(visit.around, forward)
        return checkpoint(inner, *args, use_reentrant=False)

    return run
