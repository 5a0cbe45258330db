"""Room for a pass: what is free, what a pass takes, and smaller passes when it was too much.

On the processor nothing can be caught when the kernel ends a process that took too much. So a pass is measured
before it is begun: the bytes that one token keeps for the backward pass, counted on a short pass of the same model,
times its tokens, against what the machine, the control group and the limit of address space leave. On a device the
allocator's own error is early enough.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from harness.core.errors import is_out_of_memory
from harness.inference.saved import saved_bytes
from harness.inference.streaming import copied_bytes
from harness.inference.tree import TreeBatch, build_tree
from harness.training.batches import Plan
from harness.training.head import COPIES

PROBE_TOKENS = 64
MARGIN = 1.1
"""Over the counted bytes: allocator overhead, gradients of the adapters, moments of the optimizer."""
_CGROUP = Path("/sys/fs/cgroup")
Result = TypeVar("Result")


class NoRoomError(MemoryError):
    """A pass was not begun, since it would not have fitted."""


@dataclass(frozen=True, slots=True)
class Used:
    """Bytes of this process: resident, and of address space."""

    resident: int
    space: int

    @classmethod
    def now(cls) -> Used:
        """Return what the process uses at this moment."""
        info = psutil.Process().memory_info()
        return cls(int(info.rss), int(info.vms))


def free_bytes(base: Used, now: Used) -> int:
    """Return the bytes a pass may take.

    Args:
        base: what the process used before its first pass. What it has taken since then is free between passes,
            although the allocator has not given it back.
        now: what it uses at this moment.
    """
    grown = max(now.resident - base.resident, 0)
    limits = [int(psutil.virtual_memory().available) + grown, *(left + grown for left in _control_groups())]
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        limits.append(space - min(base.space, now.space))
    return max(min(limits), 0)


def _control_groups(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the bytes that each memory limit of a control group, this process's or one above it, leaves."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            number, names, path = line.split(":", 2)
            if number == "0" or "memory" in names.split(","):
                second = number == "0"
                base = root if second else root / "memory"
                folder = base / path.lstrip("/")
                while True:
                    left = _left(folder, second)
                    if left is not None:
                        yield left
                    if folder == base or base not in folder.parents:
                        break
                    folder = folder.parent


def _left(folder: Path, second: bool) -> int | None:
    """Return limit minus usage of one control group, of the second version or the first; None without a limit."""
    names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, usage = (int((folder / name).read_text()) for name in names)
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group here, or "max"
        return None
    cache = int(stat.get("inactive_file" if second else "total_inactive_file", 0))  # the kernel takes it back by itself
    return limit - usage + cache


def saved_bytes_per_token(causal_lm: Any, forward: Callable[[TreeBatch], Tensor]) -> float:
    """Return the bytes that a training pass keeps for its backward pass, per token, logits apart.

    The model runs without dropout and without checkpointing of activations, and no random number is drawn.

    Args:
        causal_lm: the model inside the adapter wrapper.
        forward: the training forward pass over a tree.
    """
    device = causal_lm.device
    half = PROBE_TOKENS // 2
    tree = build_tree([[1] * half], [[[1] * half]], device)
    training = causal_lm.training
    causal_lm.eval()
    try:
        kept = saved_bytes(
            lambda: forward(tree), lambda: [*causal_lm.parameters(), *causal_lm.buffers(), *tree.biases.values()]
        )
        return max(kept - copied_bytes(causal_lm), 0) / PROBE_TOKENS  # weights on a visit do not grow with the tokens
    finally:
        causal_lm.train(training)


@dataclass(slots=True)
class Room:
    """The token budget of a pass in one attempt; lowered when memory runs out, and never raised again.

    Args:
        tokens: budget of one pass.
        lowered: how often it was lowered.
        bytes_per_token: what a token keeps for the backward pass; 0 until it is measured.
        base: what the process used before its first pass.
    """

    tokens: int
    lowered: int = 0
    bytes_per_token: float = 0.0
    base: Used | None = None

    def check(
        self, causal_lm: Any, tree: TreeBatch, logits: int, forward: Callable[[TreeBatch], Tensor], checkpointing: bool
    ) -> None:
        """Check, on the processor, that a pass fits into what is free.

        Args:
            causal_lm: the model inside the adapter wrapper.
            tree: the pass.
            logits: rows of logits that exist at the same time.
            forward: the training forward pass over a tree.
            checkpointing: whether the activations of a layer are computed again in the backward pass.

        Raises:
            NoRoomError: it does not.
        """
        if tree.input_ids.device.type != "cpu":
            return
        if self.base is None:
            self.bytes_per_token = saved_bytes_per_token(causal_lm, forward)
            self.base = Used.now()
        need = pass_bytes(causal_lm.config, tree, logits, self.bytes_per_token, checkpointing)
        free = free_bytes(self.base, Used.now())
        if need > free:
            raise NoRoomError(
                f"not enough memory for a pass of {tree.tokens} tokens: it takes about {need / 2**20:,.0f} MiB, "
                f"and {free / 2**20:,.0f} MiB are free"
            )

    def shrink(self, largest: int) -> None:
        """Halve the budget after a step whose largest pass had `largest` tokens did not fit."""
        self.tokens = max(min(self.tokens, largest) // 2, 1)
        self.lowered += 1


def pass_bytes(config: Any, tree: TreeBatch, logits: int, per_token: float, checkpointing: bool) -> int:
    """Return the bytes a forward and backward pass takes at its peak, about.

    Args:
        config: the model's, for its layers, width and vocabulary.
        tree: the pass.
        logits: rows of logits that exist at the same time.
        per_token: bytes that a token keeps for the backward pass when nothing is computed twice.
        checkpointing: whether only the input of each layer is kept.
    """
    layers = max(int(config.num_hidden_layers), 1)
    one_layer = per_token / layers
    kept = per_token
    if checkpointing:  # the inputs of all layers in at most float32, and one layer in full
        kept = 4.0 * layers * config.hidden_size + one_layer
    lengths = [(region.before, region.own.stop - region.start) for region in tree.regions]
    masks = sum(own * (before + own) for before, own in lengths)
    scores = 4 * COPIES * logits * int(config.vocab_size)
    # one more layer's worth for the gradients that flow through it
    return int(MARGIN * (tree.tokens * (kept + one_layer) + 4 * masks + scores))


def in_passes_that_fit(room: Room, plan: Callable[[int], Plan], action: Callable[[Plan], Result]) -> Result:
    """Run an action on the passes of a batch; when memory runs out, again from its start with half the budget.

    Args:
        room: holds the budget, which stays as low as it was found to be needed.
        plan: from a budget to the passes.
        action: begins anew on every call; the random state is then what it was at the first.

    Raises:
        MemoryError, RuntimeError: what the action raised, when every pass is a single rollout already, or when it
            is no lack of memory.
    """
    on_processor = torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    while True:
        passes = plan(room.tokens)
        try:
            return action(passes)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or not passes.divisible:
                raise
        # outside the block above, whose exception holds the tensors of the try
        room.shrink(passes.largest)
        gc.collect()
        torch.set_rng_state(on_processor)
        if on_devices:
            torch.cuda.empty_cache()
            torch.cuda.set_rng_state_all(on_devices)
