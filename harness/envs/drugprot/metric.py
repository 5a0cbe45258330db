"""The relation-extraction metric of the official evaluation: precision, recall, F1 over mentions.

Gold and prediction are sets of (document, type, chemical mention, protein mention); counts are
summed over all types (micro) and given for each type. Repeats count once, arguments may come in
either order, unknown types, documents and mentions are left out.

Source: DrugProt evaluation (Miranda-Escalada et al. 2023, Database baad080). The official script
numbers the pairs of all abstracts in one row but lets the last pair of an abstract share its
number with the first of the next, which can merge two gold relations; here pairs are keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.envs.drugprot.labels import LABELS

Mention = tuple[str, str]
"""(pmid, entity id)."""
Row = tuple[str, str, str, str]
"""(pmid, relation type, first entity id, second entity id)."""


@dataclass(frozen=True, slots=True)
class F1:
    """Counts of one type, or of all.

    Args:
        true_positive: predicted and gold.
        predicted: all predicted.
        gold: all gold; the support.
    """

    true_positive: int
    predicted: int
    gold: int

    @property
    def precision(self) -> float:
        """Share of predictions that are right; 0 without predictions."""
        return self.true_positive / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the gold that was found; 0 without gold."""
        return self.true_positive / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.predicted + self.gold
        return 2 * self.true_positive / total if total else 0.0


def _relations(
    rows: Iterable[Row], chemicals: set[Mention], proteins: set[Mention], pmids: set[str]
) -> set[tuple[str, str, str, str]]:
    found = set()
    for pmid, label, first, second in rows:
        for chemical, protein in ((first, second), (second, first)):
            if (pmid, chemical) in chemicals and (pmid, protein) in proteins and label in LABELS and pmid in pmids:
                found.add((pmid, label, chemical, protein))
    return found


def relation_f1(
    gold: Iterable[Row],
    predicted: Iterable[Row],
    chemicals: Iterable[Mention],
    proteins: Iterable[Mention],
    pmids: Iterable[str],
) -> dict[str, F1]:
    """Return the counts by relation type, and of all types under `micro`.

    Args:
        gold: relations of the annotators.
        predicted: relations to score.
        chemicals: all chemical mentions.
        proteins: all gene and protein mentions, of whatever subtype.
        pmids: the documents to score.
    """
    sides = set(chemicals), set(proteins), set(pmids)
    truth, guess = _relations(gold, *sides), _relations(predicted, *sides)
    result = {}
    for label in LABELS:
        of_type = [{row for row in rows if row[1] == label} for rows in (truth, guess)]
        result[label] = F1(len(of_type[0] & of_type[1]), len(of_type[1]), len(of_type[0]))
    result["micro"] = F1(len(truth & guess), len(guess), len(truth))
    return result
