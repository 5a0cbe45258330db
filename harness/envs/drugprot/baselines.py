"""What needs no model: constant answers and cue words. Reports show them beside a policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from harness.core.types import Task
from harness.envs.base import Environment
from harness.envs.drugprot.labels import LABELS, letter_of

_CUES: tuple[tuple[str, str], ...] = (
    ("ANTAGONIST", r"antagoni\w*|receptor blockade"),
    ("AGONIST", r"(?<!ant)agoni\w*|mimic\w*"),
    ("SUBSTRATE", r"substrates?|metaboli[sz]\w*|hydroly[sz]\w*|transport(?:s|ed)|cleav\w*|oxidi[sz]\w*|taken up"),
    ("PRODUCT-OF", r"product|synthesi[sz]\w*|generat\w*|produc(?:es?|ed|tion)|convert\w*|biosynthesis"),
    ("PART-OF", r"residues?|subunits?|amino acids?|cofactor|side chain"),
    (
        "INDIRECT-DOWNREGULATOR",
        r"down-?regulat\w*|(?:reduc|decreas|lower|suppress|repress)\w*(?=.{0,60}(?:express|mrna|level|transcript))",
    ),
    (
        "INDIRECT-UPREGULATOR",
        r"up-?regulat\w*|induc\w*|(?:rais|increas|elevat|enhanc)\w*(?=.{0,60}(?:express|mrna|level|transcript))",
    ),
    ("INHIBITOR", r"inhibit\w*|block\w*|suppress\w*|inactivat\w*|abolish\w*|reduc\w*"),
    ("ACTIVATOR", r"activat\w*|stimulat\w*|potentiat\w*|enhanc\w*|open(?:s|ed)"),
    ("DIRECT-REGULATOR", r"bind\w*|bound|interact\w*|affinity|modulat\w*"),
)
_COMPILED = tuple((label, re.compile(rf"\b(?:{cue})\b", re.IGNORECASE)) for label, cue in _CUES)


def _sentences_with_both(fields: Mapping[str, str]) -> str:
    names = fields["chemical"].lower(), fields["protein"].lower()
    sentences = re.split(r"(?<=[.!?])\s+", fields["abstract"])
    both = [s for s in sentences if all(name in s.lower() for name in names)]
    return " ".join(both) or fields["abstract"]


def keyword_baseline(task: Task) -> str:
    """Return the letter of the first label, in a fixed order, with a cue in a sentence that names both.

    Without a cue the answer is INHIBITOR, the most frequent label of the official data.
    """
    text = _sentences_with_both(task.fields)
    label = next((label for label, cue in _COMPILED if cue.search(text)), "INHIBITOR")
    return letter_of(label, task.fields["letters"])


def accuracy(tasks: Sequence[Task], answer: Callable[[Task], str]) -> float:
    """Return the share of tasks that `answer` gets right, in [0, 1].

    Raises:
        ValueError: without tasks.
    """
    if not tasks:
        raise ValueError("no tasks")
    return sum(answer(task) == task.answer for task in tasks) / len(tasks)


def constant_baselines(tasks: Sequence[Task]) -> dict[str, float]:
    """Return, for each label, the accuracy of always giving its letter."""
    counts = [(label, sum(task.label == label for task in tasks)) for label in LABELS]
    return {label: count / len(tasks) for label, count in counts if tasks}


def report_rows(env: Environment, tasks: Sequence[Task]) -> list[tuple[str, str, float]]:
    """Return (baseline, metric, value) of the best constant answer, chosen on the tasks themselves, and the cue words.

    Args:
        env: not needed; every environment's baselines are asked the same way.
        tasks: at least one.
    """
    constant = constant_baselines(tasks)
    label = max(sorted(constant), key=lambda name: constant[name])
    return [
        (f"always {label}", "accuracy", constant[label]),
        ("keyword rule", "accuracy", accuracy(tasks, keyword_baseline)),
    ]
