"""The section on what a searched prompt and RL each gave: six means, what follows from them, and a verdict."""

from __future__ import annotations

from harness.evaluation.effect import BASE, CHOSEN, EFFECTS, SEED, VERDICTS
from harness.reports.blocks import Block, Heading, Paragraph, Table, code, strong, text
from harness.reports.inline import estimate
from harness.reports.model import Estimate, PromptEffect, ReportData, reward_parts


def effect_blocks(data: ReportData) -> list[Block]:
    """Return the section; nothing when the effect of the run's prompt was never measured."""
    blocks: list[Block] = []
    for effect in data.effects:
        blocks += _environment(data, effect)
    return [Heading(2, "Prompt and RL"), *blocks] if blocks else []


def _environment(data: ReportData, effect: PromptEffect) -> list[Block]:
    metrics = [name for name in reward_parts(effect.effects, data, effect.env) if name in effect.effects]
    found = effect.verdicts.get("reward", "")
    items, clusters = effect.items
    intro = (
        f"Base, {effect.seed_run} (trained under the seed prompt) and {effect.chosen_run} (trained under the chosen "
        f"one), each under both prompts, on the same {items} held-out items in {clusters} clusters."
    )
    blocks: list[Block] = [
        Heading(3, f"{effect.env}, against {effect.seed_run}"),
        Paragraph(strong(found) + text(f": {VERDICTS.get(found, '')}")),
        Paragraph(text(intro)),
        _means(effect, metrics),
        Paragraph(text("What each gives, as paired differences; the first row is the next three together.")),
        _parts(effect, metrics),
    ]
    if effect.differs:
        keys = code(", ".join(effect.differs))
        note = text("The two runs differ in more than the prompt, which may be a cause as well: ", "warn")
        blocks.append(Paragraph(note + keys))
    return blocks


def _means(effect: PromptEffect, metrics: list[str]) -> Table:
    models = ((BASE, "base"), (SEED, effect.seed_run), (CHOSEN, effect.chosen_run))
    rows = tuple(
        (
            text(metric),
            text(name),
            *(estimate(effect.cells.get((model, prompt), {}).get(metric)) for prompt in (SEED, CHOSEN)),
        )
        for metric in metrics
        for model, name in models
    )
    return Table(("Metric", "Model", "Seed prompt", "Chosen prompt"), rows, frozenset({2, 3}))


def _parts(effect: PromptEffect, metrics: list[str]) -> Table:
    def value(metric: str, name: str) -> Estimate | None:
        return effect.effects[metric].get(name)

    rows = tuple(
        (text(part.title), *(estimate(value(metric, part.name), signed=True) for metric in metrics)) for part in EFFECTS
    )
    return Table(("What", *metrics), rows, frozenset(range(1, 1 + len(metrics))))
