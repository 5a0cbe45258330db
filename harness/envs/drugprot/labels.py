"""The thirteen DrugProt relation types and the letters that stand for them.

Order and spelling are those of the official release (Krallinger et al. 2021, DrugProt,
doi 10.5281/zenodo.4955410), so a letter means the same label in every split but the permuted one.
"""

from __future__ import annotations

from harness.core.canonical import sha256_hex

LABELS: tuple[str, ...] = (
    "INDIRECT-DOWNREGULATOR",
    "INDIRECT-UPREGULATOR",
    "DIRECT-REGULATOR",
    "ACTIVATOR",
    "INHIBITOR",
    "AGONIST",
    "AGONIST-ACTIVATOR",
    "AGONIST-INHIBITOR",
    "ANTAGONIST",
    "PRODUCT-OF",
    "SUBSTRATE",
    "SUBSTRATE_PRODUCT-OF",
    "PART-OF",
)
LETTERS = "ABCDEFGHIJKLM"
RARE_LABELS = frozenset({"AGONIST-ACTIVATOR", "AGONIST-INHIBITOR", "SUBSTRATE_PRODUCT-OF"})
"""Under 40 of 21,035 relations each in the official train and development data."""


def letter_of(label: str, letters: str = LETTERS) -> str:
    """Return the letter of a label under a letter map (the i-th letter stands for the i-th label)."""
    return letters[LABELS.index(label)]


def permuted_letters(seed: str) -> str:
    """Return a letter map in which no label keeps its usual letter, the same for the same seed."""
    for attempt in range(1000):
        order = "".join(sorted(LETTERS, key=lambda letter: sha256_hex(f"{seed}/{attempt}/{letter}")))
        if all(a != b for a, b in zip(order, LETTERS, strict=True)):
            return order
    raise AssertionError("unreachable: a third of all permutations move every letter")
