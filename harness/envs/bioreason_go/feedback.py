"""Say in words what was wrong with an answer, for prompt search and for people; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.envs.bioreason_go.ontology import Ontology
from harness.envs.bioreason_go.terms import ASPECT_NAMES, Aspect

if TYPE_CHECKING:
    from harness.envs.bioreason_go.verifier import AspectResult, Gold, GoldAspect

SHOWN = 3  # ids named of each kind
_LONGEST = 24  # characters quoted of a string that is no id


def feedback(ontology: Ontology, results: Mapping[Aspect, AspectResult], gold: Gold) -> str:
    """Return one sentence an aspect: which ids are invented, obsolete, misplaced or wrong, and what was missed.

    It names labels, so it is for whoever may see the gold, and never for the model that answers. ASCII only
    where it quotes the answer.
    """
    labels = [term for part in gold.aspects.values() for term in part.terms]
    near = frozenset(ontology.closure(labels).tolist())
    return " ".join(
        _aspect(ontology, aspect, result, gold.aspects.get(aspect), near) for aspect, result in results.items()
    )


def _aspect(
    ontology: Ontology, aspect: Aspect, result: AspectResult, gold: GoldAspect | None, near: frozenset[int]
) -> str:
    parts = [_wrong(ontology, kind, result.wrong[kind]) for kind in sorted(result.wrong)]
    if gold is None:
        parts.append("no labels, not scored")
    elif not result.terms:
        parts.append(f"no term; missed {_terms(ontology, gold.terms)}")
    else:
        hit, far = result.terms & near, result.terms - near
        parts.append(f"{len(hit)} of {len(result.terms)} terms right")
        if far:
            parts.append(f"not among the labels {_terms(ontology, far)}")
        if missed := gold.terms - result.terms:
            parts.append(f"missed {_terms(ontology, missed)}")
    return f"{ASPECT_NAMES[aspect].replace('_', ' ')}: {'; '.join(parts)}."


def _wrong(ontology: Ontology, kind: str, entries: Sequence[str]) -> str:
    if kind == "malformed":
        return f"not of the form GO:0000000 {_some([ascii(entry[:_LONGEST]) for entry in entries])}"
    if kind == "unknown":
        return f"invented {_some(entries)}"
    if kind == "obsolete":
        return f"obsolete {_some([_replaced(ontology, entry) for entry in entries])}"
    places = [(entry, ontology.index_of(entry)) for entry in entries]
    return f"wrong list {_some([f'{e} (belongs to {ontology.aspect(i)})' for e, i in places if i is not None])}"


def _replaced(ontology: Ontology, entry: str) -> str:
    new = ontology.canonical(entry).replaced_by
    return f"{entry} (now {', '.join(new)})" if new else entry


def _terms(ontology: Ontology, terms: frozenset[int]) -> str:
    return _some([f"{ontology.id(index)} ({ontology.name(index)})" for index in sorted(terms)[:SHOWN]], len(terms))


def _some(shown: Sequence[str], total: int | None = None) -> str:
    rest = (len(shown) if total is None else total) - len(shown[:SHOWN])
    return ", ".join(shown[:SHOWN]) + (f" and {rest} more" if rest else "")
