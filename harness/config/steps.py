"""The effective step of a LoRA run, and whether runs with such a step are known to have collapsed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Collapse:
    """One published or committed run that collapsed under AdamW at a constant rate.

    Args:
        parameters: weights of the base model.
        step: learning rate x alpha / rank.
        source: what happened, and where it is written down.
    """

    parameters: float
    step: float
    source: str


COLLAPSES = (
    Collapse(
        135e6,
        3e-4 * 32 / 16,
        "SmolLM2-135M, alpha 32, rank 16, 3e-4: 76 % of the held-out answers are one letter (note on run-001)",
    ),
    Collapse(
        26e9,
        1e-5 * 64 / 16,
        "Trinity Mini 26B-A3B, alpha 64, 1e-5, rank 16 assumed: format reward 0.00 at step 77 and "
        "held-out reward 0.63 at step 50, from 0.70 (w1-alpha64-lr1e-5 of LokaHQ/Trinity-Mini-DrugProt-Think)",
    ),
)
"""By size. The next smaller step on record of either model did not collapse: 4e-4 and 2e-5. The files of the second do
not state the rank; 16 is the trainer's default."""
_SIZES = {"smollm2-135m": 135e6}


def known_size(model: str) -> float | None:
    """Return the number of weights of an embedded model by its name, without reading it; None for others."""
    return _SIZES.get(model)


def effective_step(config: RunConfig) -> float:
    """Return learning rate x alpha / rank: what one unit of an AdamW update of A or B moves the weights by."""
    return config.optimizer.learning_rate * config.lora.alpha / config.lora.rank


def collapse_step(parameters: float | None) -> float:
    """Return the smallest effective step known to collapse a model of this size.

    On and beyond the two sizes in `COLLAPSES` the recorded step, between them a straight line in the logarithms
    of both: two points are all there is, so it is a warning's threshold and no law.

    Args:
        parameters: weights of the base model; None takes the largest model's, the lower bound.
    """
    small, large = COLLAPSES
    if parameters is None or parameters >= large.parameters:
        return large.step
    if parameters <= small.parameters:
        return small.step
    share = math.log(parameters / small.parameters) / math.log(large.parameters / small.parameters)
    return float(small.step * (large.step / small.step) ** share)


def step_warning(config: RunConfig, parameters: float | None = None) -> str | None:
    """Return why the effective step of a run is risky, or None.

    Args:
        config: the run; other optimizers than AdamW and Muon, whose update has AdamW's scale, are not judged.
        parameters: weights of the base model, if known.
    """
    step, limit = effective_step(config), collapse_step(parameters)
    if config.optimizer.name == "sgd" or step < limit * (1 - 1e-9):
        return None
    nearest = min(
        COLLAPSES, key=lambda known: abs(math.log((parameters or COLLAPSES[-1].parameters) / known.parameters))
    )
    size = f"a model of {parameters / 1e6:,.0f} M weights" if parameters else "a model of unknown size"
    return (
        f"the effective step {step:.1e} reaches {limit:.1e}, from where {size} is expected to collapse; "
        f"known: {nearest.source}"
    )
