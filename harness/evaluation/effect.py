"""How much of a gain belongs to a searched prompt, how much to RL, and whether RL absorbs it; pure.

Three models (the base, one trained under the seed prompt, one under the chosen prompt) meet the same items under both
prompts. Every number below is a weighted sum of these six cells per item, so the parts add up on the same items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import PairedInterval, contrast

SEED, CHOSEN, BASE = "seed", "chosen", "base"
Cell = tuple[str, str]
"""(model, prompt): model `base`, `seed` or `chosen` (the prompt it was trained under), prompt `seed` or `chosen`."""
CELLS: tuple[Cell, ...] = tuple((model, prompt) for model in (BASE, SEED, CHOSEN) for prompt in (SEED, CHOSEN))


@dataclass(frozen=True, slots=True)
class Effect:
    """One question about the six cells.

    Args:
        name: in records.
        title: in tables.
        plus: cells that are added.
        minus: cells that are taken away.
    """

    name: str
    title: str
    plus: tuple[Cell, ...]
    minus: tuple[Cell, ...]


EFFECTS = (
    Effect("total", "prompt and RL together", ((CHOSEN, CHOSEN),), ((BASE, SEED),)),
    Effect("prompt_before", "prompt, before RL", ((BASE, CHOSEN),), ((BASE, SEED),)),
    Effect("rl_seed", "RL, under the seed prompt", ((SEED, SEED),), ((BASE, SEED),)),
    Effect(
        "interaction",
        "both: what neither gives alone",
        ((CHOSEN, CHOSEN), (BASE, SEED)),
        ((SEED, SEED), (BASE, CHOSEN)),
    ),
    Effect("rl_chosen", "RL, under the chosen prompt", ((CHOSEN, CHOSEN),), ((BASE, CHOSEN),)),
    Effect("prompt_after", "prompt, after RL under each", ((CHOSEN, CHOSEN),), ((SEED, SEED),)),
    Effect("swap_seed", "chosen prompt given to the model of the seed prompt", ((SEED, CHOSEN),), ((SEED, SEED),)),
    Effect(
        "swap_chosen",
        "seed prompt given back to the model of the chosen prompt",
        ((CHOSEN, SEED),),
        ((CHOSEN, CHOSEN),),
    ),
)
"""The first is the second, third and fourth together; the fourth is also the sixth less the second."""

VERDICTS = {
    "kept": "The prompt's gain is there before RL and after it, and RL takes nothing of it away that can be told.",
    "absorbed": "The prompt's gain is there before RL; after it none can be told, and RL under that prompt gave less.",
    "partly absorbed": "The prompt's gain is there before RL and after it, and after it is smaller.",
    "grown": "The prompt's gain after RL is larger than before it.",
    "only after RL": "No gain of the prompt can be told before RL, and one can be told after it.",
    "no effect": "No gain of the prompt can be told, neither before RL nor after it.",
    "harmful": "The prompt lowers the result.",
    "cannot tell": "The prompt's gain is there before RL; after RL the interval holds both zero and that gain.",
}


def prompt_effects(
    cells: Mapping[Cell, Sequence[ItemRecord]], metric: str = "reward", confidence: float = 0.95
) -> dict[str, PairedInterval]:
    """Return every effect of `EFFECTS` by name, with its paired and clustered interval.

    Args:
        cells: records of all six evals, of the same items.
        metric: `reward`, a component or a metric.
        confidence: two-sided coverage.

    Raises:
        KeyError: when a cell is missing.
        NotFoundError, UsageError: as `statistics.contrast`.
    """
    evals = [cells[cell] for cell in CELLS]
    return {
        effect.name: contrast(
            evals, [float((cell in effect.plus) - (cell in effect.minus)) for cell in CELLS], metric, confidence
        )
        for effect in EFFECTS
    }


def verdict(effects: Mapping[str, PairedInterval]) -> str:
    """Return what became of the prompt's gain, one of `VERDICTS`; only intervals that leave zero out say anything."""
    before, after, change = (effects[name] for name in ("prompt_before", "prompt_after", "interaction"))
    if after.high < 0 or (before.high < 0 and not after.low > 0):
        return "harmful"
    if not before.low > 0:
        return "only after RL" if after.low > 0 else "no effect"
    if after.low > 0:
        return "partly absorbed" if change.high < 0 else "grown" if change.low > 0 else "kept"
    return "absorbed" if change.high < 0 else "cannot tell"
