"""The trainer's own parts for the checks and estimates of a model, which stand a layer below."""

from __future__ import annotations

from harness.inference.parity import Trainer
from harness.training.fused import fuse_adapters
from harness.training.head import CHUNK, COPIES
from harness.training.policy import tree_logprobs


def trainer() -> Trainer:
    """Return the parts of the trainer that a model is checked and measured with."""
    return Trainer(tree_logprobs, fuse_adapters, CHUNK * COPIES)
