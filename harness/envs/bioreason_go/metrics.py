"""Measures over a whole set of proteins: Fmax and Smin as the CAFA evaluation defines them; pure.

Roots are left out of predictions and labels: they are right for every protein, and the reference implementation
counts them (docs/environments/bioreason-go.md). Source: Radivojac et al. 2013, Nature Methods 10(3), 221-227, for
Fmax; Clark and Radivojac 2013, Bioinformatics 29(13), i53-i61, equations 6 to 8, for remaining uncertainty,
misinformation and Smin; Jiang et al. 2016, Genome Biology 17, 184, for what both average over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, hypot

from harness.envs.bioreason_go.terms import ASPECTS

Prediction = Mapping[int, float]
"""Confidence in (0, 1] of each predicted term; a term's ancestors are at least as sure as the term."""


def consensus(samples: Sequence[Iterable[int]]) -> dict[int, float]:
    """Return as confidence the share of a protein's sampled answers whose closure holds a term.

    Args:
        samples: the closure of each answer, without roots; empty for an invalid answer.
    """
    counts = Counter(term for closure in samples for term in set(closure))
    return {term: count / len(samples) for term, count in counts.items()}


def fmax(predictions: Sequence[Prediction], labels: Sequence[frozenset[int]]) -> tuple[float, float]:
    """Return the best F over all thresholds, and the threshold.

    At threshold t, precision is the mean over the proteins with a term of confidence t or more, recall the mean
    over all proteins; F is their harmonic mean. Every confidence that occurs is a threshold, and 1, so the maximum is
    exact.

    Args:
        predictions: one of each protein, closed under ancestors, without roots.
        labels: in the same order, closures without roots; proteins without labels of the aspect are left out before.

    Raises:
        ValueError: when there are no proteins, or the two differ in number.
    """
    _check(predictions, labels)
    best = (0.0, 1.0)
    for threshold in _thresholds(predictions):
        precisions, recalls = [], []
        for prediction, truth in zip(predictions, labels, strict=True):
            chosen = {term for term, confidence in prediction.items() if confidence >= threshold}
            hits = len(chosen & truth)
            recalls.append(hits / len(truth))
            if chosen:
                precisions.append(hits / len(chosen))
        best = max(best, (_harmonic(_mean(precisions), _mean(recalls)), threshold))
    return best


def smin(
    predictions: Sequence[Prediction], labels: Sequence[frozenset[int]], ia: Sequence[float]
) -> tuple[float, float]:
    """Return the least distance sqrt(ru^2 + mi^2) over all thresholds in bits, and the threshold.

    Args:
        predictions, labels: as for `fmax`.
        ia: information accretion of every term in bits.

    Raises:
        ValueError: when there are no proteins, or the two differ in number.
    """
    _check(predictions, labels)
    found = []
    for threshold in _thresholds(predictions):
        missed, false = [], []
        for prediction, truth in zip(predictions, labels, strict=True):
            chosen = {term for term, confidence in prediction.items() if confidence >= threshold}
            missed.append(_bits(truth - chosen, ia))
            false.append(_bits(chosen - truth, ia))
        found.append((hypot(_mean(missed), _mean(false)), threshold))
    return min(found)


def corpus_metrics(items: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return F and S of each aspect from the metrics of scored answers, for answers without confidences.

    Terms without confidences have one threshold, so these are Fmax and Smin of the answers. With several samples of
    a protein each is a protein of its own; `fmax` over a `consensus` uses them together.

    Args:
        items: `metrics` of the verifier, of the answers that count.
    """
    rows = list(items)
    result: dict[str, float] = {}
    for aspect in ASPECTS:
        recalls = [row[f"{aspect}_recall"] for row in rows if f"{aspect}_recall" in row]
        if not recalls:
            continue
        precisions = [row[f"{aspect}_precision"] for row in rows if f"{aspect}_precision" in row]
        missed, false = (
            _mean([row[f"{aspect}_{kind}_bits"] for row in rows if f"{aspect}_{kind}_bits" in row])
            for kind in ("missed", "false")
        )
        result[f"{aspect}_fmax"] = _harmonic(_mean(precisions), _mean(recalls))
        result[f"{aspect}_smin_bits"] = hypot(missed, false)
    return result


def _check(predictions: Sequence[Prediction], labels: Sequence[frozenset[int]]) -> None:
    if len(predictions) != len(labels) or not labels:
        raise ValueError(f"{len(predictions)} predictions for {len(labels)} proteins")
    if not all(labels):
        raise ValueError("a protein without labels of the aspect is not scored in it")


def _thresholds(predictions: Iterable[Prediction]) -> list[float]:
    return sorted({1.0, *(confidence for prediction in predictions for confidence in prediction.values())})


def _bits(terms: Iterable[int], ia: Sequence[float]) -> float:
    return fsum(ia[term] for term in terms)


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values) if values else 0.0


def _harmonic(precision: float, recall: float) -> float:
    total = precision + recall
    return 2 * precision * recall / total if total > 0 else 0.0
