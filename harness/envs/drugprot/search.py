"""What prompt search may try on DrugProt: tasks shown as examples, instruction variants, and feedback in words.

A task becomes a record of the component `demonstrations`. Its reasoning is a fixed sentence for its label, so a search
chooses which tasks are shown, in which order and in which style, and writes nothing about them itself. In every style
the last word before the box is the label, since the model that reads this ties the letter to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.core.errors import ConfigError
from harness.core.names import did_you_mean
from harness.core.types import Episode, Score, Task
from harness.envs.drugprot.labels import LABELS, LETTERS
from harness.envs.drugprot.verifier import parse_reply

_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z0-9])")
_SAYS = {
    "INDIRECT-DOWNREGULATOR": "lowers the amount of",
    "INDIRECT-UPREGULATOR": "raises the amount of",
    "DIRECT-REGULATOR": "binds",
    "ACTIVATOR": "speeds up",
    "INHIBITOR": "blocks",
    "AGONIST": "switches on",
    "AGONIST-ACTIVATOR": "switches on and speeds up",
    "AGONIST-INHIBITOR": "occupies and slows down",
    "ANTAGONIST": "shuts off",
    "PRODUCT-OF": "is made by",
    "SUBSTRATE": "is changed or carried by",
    "SUBSTRATE_PRODUCT-OF": "is changed and made by",
    "PART-OF": "is inside",
}
STYLES = {
    "excerpt": (True, "The chemical {says} the protein: {label}"),
    "label": (True, "{label}"),
    "whole": (False, "The chemical {says} the protein: {label}"),
}
"""By style, whether only the sentences that name the pair are shown, and the reasoning of a demonstration."""
VARIANTS: Mapping[str, Sequence[str]] = {
    "system": (
        "Name how the chemical acts on the protein. Options:\n[[OPTIONS]]\n"
        "Answer in the form <think>reasoning</think>\\boxed{letter}",
        "You are given a sentence about a drug or chemical and a gene or protein. Choose the one option that fits.\n"
        "[[OPTIONS]]\nThink in one short sentence that ends with the name of the option, then give its letter:"
        " <think>reasoning</think>\\boxed{letter}",
        "[[OPTIONS]]\nReply with <think>reasoning</think>\\boxed{letter}",
    ),
    "question": (
        "[[ABSTRACT]]\nWhat is [[CHEMICAL]] to [[PROTEIN]]?",
        "Text: [[ABSTRACT]]\nChemical: [[CHEMICAL]]\nProtein: [[PROTEIN]]\nRelation?",
    ),
}


def demonstrations_text(tasks: Sequence[Task], style: str) -> str:
    """Return the component `demonstrations` that shows these tasks in this order.

    Raises:
        ConfigError: for an unknown style.
    """
    if style not in STYLES:
        raise ConfigError(f"there is no style of demonstrations {style[:80]!r}", did_you_mean(style, STYLES))
    return "\n\n".join(_record(task, *STYLES[style]) for task in tasks)


def _record(task: Task, cut: bool, sentence: str) -> str:
    abstract, chemical, protein = (" ".join(task.fields[name].split()) for name in ("abstract", "chemical", "protein"))
    abstract = excerpt(abstract, chemical, protein) if cut else abstract
    think = sentence.format(says=_SAYS[task.label], label=task.label)
    return f"abstract: {abstract}\nchemical: {chemical}\nprotein: {protein}\nlabel: {task.label}\nthink: {think}"


def excerpt(abstract: str, chemical: str, protein: str) -> str:
    """Return the shortest run of sentences that names both; the whole abstract when none does.

    A small model reads long examples badly, and the sentence with the pair is what an example is about.
    """
    sentences = _SENTENCE_END.split(abstract)
    names = [chemical.casefold(), protein.casefold()]
    for length in range(1, len(sentences)):
        for start in range(len(sentences) - length + 1):
            run = " ".join(sentences[start : start + length])
            if all(name in run.casefold() for name in names):
                return run
    return abstract


def feedback(task: Task, episode: Episode, score: Score) -> str:
    """Return in words what was right or wrong with a reply: its form first, then the relation it named."""
    letters = task.fields.get("letters", LETTERS)
    gold = f"{task.answer} ({task.label})"
    problem = score.diagnostics.get("problem")
    if problem:
        return f"No valid answer: {problem}. The right answer is {gold}; it must stand in one box after the reasoning."
    answer = score.diagnostics.get("answer", "")
    if answer == task.answer:
        return f"Right: {gold}."
    named = dict(zip(letters, LABELS, strict=True)).get(answer, "no option")
    text = f"Wrong: the reply says {answer} ({named}), the right answer is {gold}."
    think = parse_reply(episode.final).think or ""
    if named not in think and task.label in think:
        return f"{text} Its reasoning names {task.label}, which is right, and then the letter of another option."
    return text
