"""Score a reply to a Gene Ontology question, aspect by aspect, on closures, weighted by information.

Form is in `answer`: without exactly one valid JSON object every component is 0. Then each listed string is
resolved where it was listed:

- a current or alternative id of the list's aspect is that term; repeats and aliases are one term;
- a root is neither hit nor miss: it says nothing, and an aspect with nothing else counts as not answered;
- everything else is wrong: an id that is unknown, obsolete (also with a replacement), of another aspect, or
  misspelt (`go:0004672`, `GO:00046721`, digits or letters outside ASCII). It weighs as much as the most
  informative term of the aspect, since it has no closure of its own.

With P the closure of the listed terms and T that of the labels, both without the root, w the sum of IC, u the
number of distinct wrong strings and m the largest IC of the aspect, over the aspects that have labels:

- `mf_f1`, `bp_f1`, `cc_f1` = 2|P and T| / (|P| + u + |T|), and `f1`, their mean;
- `similarity`, the mean of 2w(P and T) / (w(P) + u m + w(T)): near misses earn a part, spam next to nothing;
- `coverage`, the share of aspects answered with at least one term other than the root;
- `cardinality`, the mean of min(1, limit / listed), limit = max(3, number of labels), listed = distinct strings
  after resolving; 0 for an aspect without an overlap, so that brevity alone is worth nothing;
- `valid`, 1.

An aspect without labels is not scored: annotation is incomplete, and its absence no evidence. The reward is the
weighted mean of the components a task has, in [0, 1].

Source of the parts: the closure rules of the CAFA evaluation (Radivojac et al. 2013) without the roots, and Pesquita
et al. 2008 for the weights; `similarity` is the Dice form of simGIC. Weights and limit are our own, chosen against the
table in docs/environments/bioreason-go.md.
"""

from __future__ import annotations

import itertools
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.core.canonical import content_sha
from harness.core.types import Episode, FailureClass, FinishReason, Score
from harness.envs.bioreason_go.answer import Lists, read_answer
from harness.envs.bioreason_go.closures import Closures, Places
from harness.envs.bioreason_go.feedback import feedback
from harness.envs.bioreason_go.information import Information
from harness.envs.bioreason_go.ontology import Ontology
from harness.envs.bioreason_go.terms import ASPECTS, Aspect

RULES_VERSION = "1"
ASPECT_F1: dict[Aspect, str] = {aspect: f"{aspect}_f1" for aspect in ASPECTS}
COMPONENTS = ("similarity", "coverage", "cardinality", "valid", "f1", *ASPECT_F1.values())
FREE_IDS = 3
RIGHT = 0.5  # similarity from which a reply counts as right

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_ID = re.compile(r"GO:[0-9]{7}")
WRONG = ("unknown", "obsolete", "misplaced", "malformed")
_OF_KIND = tuple(f"{kind}_ids" for kind in WRONG)
_OF_ASPECT: dict[Aspect, tuple[str, str, str, str]] = {
    a: (f"{a}_precision", f"{a}_recall", f"{a}_missed_bits", f"{a}_false_bits") for a in ASPECTS
}
_NONE_WRONG: Mapping[str, tuple[str, ...]] = MappingProxyType({})
_NO_IDS: Lists = {aspect: [] for aspect in ASPECTS}


class Weights(BaseModel):
    """Weights of the components in the reward; only their proportions matter.

    The weight of an aspect's F1 is left out of the mean for a protein without labels of the aspect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    similarity: Weight = 0.7
    coverage: Weight = 0.1
    cardinality: Weight = 0.1
    valid: Weight = 0.1
    f1: Weight = 0.0
    mf_f1: Weight = 0.0
    bp_f1: Weight = 0.0
    cc_f1: Weight = 0.0

    @model_validator(mode="after")
    def _some_weight(self) -> Weights:
        if not self.similarity + self.coverage + self.cardinality + self.valid + self.f1 > 0:
            raise ValueError("one of similarity, coverage, cardinality, valid and f1 must be above 0")
        return self


class GoldAspect(NamedTuple):
    """The labels of one aspect: terms, the size of their closure without the root, and what that closure says."""

    terms: frozenset[int]
    size: int
    ic_nats: float
    ia_bits: float


@dataclass(frozen=True, slots=True, eq=False)
class Gold:
    """The labels of one protein.

    Args:
        aspects: those that have labels other than the root.
        closure: the closures of all of them, roots included, as `Closures` numbers terms.
    """

    aspects: Mapping[Aspect, GoldAspect]
    closure: Places


class AspectResult(NamedTuple):
    """What one list is worth against the labels of its aspect; see the module for P, T, u.

    Args:
        terms: distinct listed terms, the root left out.
        wrong: distinct wrong strings by kind: unknown, obsolete, misplaced, malformed.
        listed: distinct strings after resolving, roots and wrong ones included.
        repeated: strings that say again what the list already says.
        roots: 1 when the root is listed.
        shared: |P and T|.
        predicted: |P| + u.
        shared_ic, predicted_ic: the same in nats.
        shared_bits, false_bits: IA of P and T, and of P without T; wrong strings have none.
    """

    terms: frozenset[int]
    wrong: Mapping[str, tuple[str, ...]]
    listed: int
    repeated: int
    roots: int
    shared: int
    predicted: int
    shared_ic: float
    predicted_ic: float
    shared_bits: float
    false_bits: float


class AspectScore(NamedTuple):
    """The parts of an aspect's score, each in [0, 1]; a component or metric is their mean over the aspects."""

    similarity: float
    coverage: float
    cardinality: float
    f1: float
    precision: float
    recall: float
    simgic: float


_NO_SCORE = AspectScore(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Resolved(NamedTuple):
    """The strings of one list, sorted out; fields as in `AspectResult`."""

    terms: frozenset[int]
    wrong: Mapping[str, tuple[str, ...]]
    roots: int


class Scorer:
    """Scores replies against one ontology and its information; holds no state that a score depends on."""

    def __init__(self, ontology: Ontology, information: Information, weights: Weights | None = None) -> None:
        self.ontology = ontology
        self.weights = weights or Weights()
        self.version = f"{RULES_VERSION}/{information.sha[:12]}/{content_sha(self.weights.model_dump())[:8]}"
        self._closures = Closures(ontology, information)
        self._roots = frozenset(ontology.roots.values())
        self._known: dict[Aspect, dict[str, int]] = {aspect: {} for aspect in ASPECTS}
        for name, index in ontology.lookup.items():
            self._known[ontology.aspects[index]][name] = index
        self._paid = [(name, weight) for name, weight in self.weights.model_dump().items() if weight > 0]

    def gold(self, labels: Mapping[str, Sequence[str]]) -> Gold:
        """Return the labels of a protein, ready to be scored against; aspects with only the root are left out.

        Args:
            labels: ids of each aspect; ids that are not current, and ids of another aspect, are left out.
        """
        terms = {aspect: self._resolve(labels.get(aspect, ()), aspect).terms for aspect in ASPECTS}
        named = frozenset().union(*terms.values())
        closure = self._closures.union(named)
        sizes, ic, ia = self._closures.sums(named, closure)
        aspects = {
            aspect: GoldAspect(terms[aspect], sizes[2 * number + 1], ic[2 * number + 1], ia[2 * number + 1])
            for number, aspect in enumerate(ASPECTS)
            if terms[aspect]
        }
        return Gold(aspects, closure)

    def score_reply(self, text: str, gold: Gold, finish: FinishReason = FinishReason.STOP) -> Score:
        """Score one reply; pure and total over all strings.

        Args:
            text: the model's reply alone; no prompt, no tool output.
            gold: the labels, from `gold`.
            finish: why the reply ended.
        """
        answer = read_answer(text, finish)
        if answer.lists is None:
            return self._invalid(answer.problem, answer.recovered, gold, finish)
        results = self.compare(answer.lists, gold)
        scores = _aspect_scores(results, gold)
        means = _means(scores)
        components = _components(means, scores)
        metrics = _metrics(results, means, gold, finish, means.similarity)
        return Score(
            reward=self._reward(components),
            components=components,
            metrics=metrics,
            diagnostics={"answer": self._answer_key(results)},
            failure=None if components["similarity"] >= RIGHT else FailureClass.MODEL,
        )

    def score_episode(self, episode: Episode, gold: Gold) -> Score:
        """Score an episode by its last message, which counts only when the assistant wrote it."""
        return self.score_reply(_last_reply(episode), gold, episode.finish_reason)

    def feedback(self, episode: Episode, gold: Gold) -> str:
        """Say in words what was wrong with an episode's answer; it names labels, so never show it to the policy."""
        answer = read_answer(_last_reply(episode), episode.finish_reason)
        if answer.lists is None:
            return f"The answer is no valid object: {answer.problem}."
        return feedback(self.ontology, self.compare(answer.lists, gold), gold)

    def compare(self, lists: Lists, gold: Gold) -> dict[Aspect, AspectResult]:
        """Return what each list is worth against the labels, also of an aspect that has none."""
        found = {aspect: self._resolve(lists[aspect], aspect) for aspect in ASPECTS}
        named = frozenset().union(*[part.terms for part in found.values()])
        sizes, ic, ia = self._closures.sums(named, gold.closure)
        results = {}
        for number, (aspect, part) in enumerate(found.items()):
            false, shared = 2 * number, 2 * number + 1
            bad = sum(map(len, part.wrong.values())) if part.wrong else 0
            listed = len(part.terms) + part.roots + bad
            results[aspect] = AspectResult(
                terms=part.terms,
                wrong=part.wrong,
                listed=listed,
                repeated=len(lists[aspect]) - listed,
                roots=part.roots,
                shared=sizes[shared],
                predicted=sizes[shared] + sizes[false] + bad,
                shared_ic=ic[shared],
                predicted_ic=ic[shared] + ic[false] + bad * self._closures.worst[aspect],
                shared_bits=ia[shared],
                false_bits=ia[false],
            )
        return results

    def _resolve(self, entries: Sequence[str], aspect: Aspect) -> Resolved:
        """Sort out a list: terms, roots and wrong strings, each once, in the order of their first occurrence."""
        found = [*map(self._known[aspect].get, entries, itertools.repeat(-1))]
        terms = set(found)
        wrong: dict[str, dict[str, None]] = {}
        if -1 in terms:
            terms.remove(-1)
            for entry in (entry for entry, known in zip(entries, found, strict=True) if known < 0):
                index = self.ontology.index_of(entry)
                name = entry if index is None else self.ontology.terms[index]  # aliases are one string
                wrong.setdefault(self._kind(entry, index), {})[name] = None
        roots = terms & self._roots
        kinds = {kind: tuple(names) for kind, names in wrong.items()} if wrong else _NONE_WRONG
        return Resolved(frozenset(terms - roots if roots else terms), kinds, len(roots))

    def _kind(self, entry: str, index: int | None) -> str:
        if index is not None:
            return "misplaced"
        if not _ID.fullmatch(entry):
            return "malformed"
        return self.ontology.canonical(entry).status

    def _reward(self, components: Mapping[str, float]) -> float:
        total = paid = 0.0
        for name, weight in self._paid:
            value = components.get(name)
            if value is not None:  # the F1 of an aspect without labels takes no part
                total += weight
                paid += weight * value
        return round(paid / total, 6)

    def _invalid(self, problem: str, recovered: Lists | None, gold: Gold, finish: FinishReason) -> Score:
        """Return the score of a reply without a valid object: nothing is paid, the recovered lists are a metric."""
        empty = self.compare(_NO_IDS, gold)
        scores = _aspect_scores(empty, gold)
        means = _means(scores)
        components = dict.fromkeys(_components(means, scores), 0.0)
        lenient = _means(_aspect_scores(self.compare(recovered, gold), gold)).similarity if recovered else 0.0
        metrics = _metrics(empty, means, gold, finish, lenient)
        return Score(0.0, components, metrics, {"problem": problem}, FailureClass.MODEL)

    def _answer_key(self, results: Mapping[Aspect, AspectResult]) -> str:
        """Return how many ids the answer lists and a checksum of which: the same for equal answers, and short."""
        every = results.values()
        terms = array("i", sorted(frozenset().union(*[result.terms for result in every]))).tobytes()
        for aspect, result in results.items():
            if result.wrong:
                terms += ascii((aspect, sorted(itertools.chain(*result.wrong.values())))).encode()
        counts = ", ".join([f"{result.listed} {aspect}" for aspect, result in results.items()])
        return f"{counts} ids, {zlib.crc32(terms):08x}"


def _last_reply(episode: Episode) -> str:
    last = episode.messages[-1] if episode.messages else None
    return last.content if last is not None and last.role == "assistant" else ""


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _aspect_scores(results: Mapping[Aspect, AspectResult], gold: Gold) -> dict[Aspect, AspectScore]:
    return {aspect: _aspect_score(results[aspect], part) for aspect, part in gold.aspects.items()}


def _aspect_score(result: AspectResult, gold: GoldAspect) -> AspectScore:
    f1 = 2 * result.shared / (result.predicted + gold.size)
    both = result.predicted_ic + gold.ic_nats
    return AspectScore(
        similarity=2 * result.shared_ic / both if both > 0 else f1,  # labels that say nothing: count them
        coverage=1.0 if result.terms else 0.0,
        cardinality=min(1.0, max(FREE_IDS, len(gold.terms)) / result.listed) if result.shared else 0.0,
        f1=f1,
        precision=_ratio(result.shared_ic, result.predicted_ic),
        recall=_ratio(result.shared_ic, gold.ic_nats),
        simgic=_ratio(result.shared_ic, both - result.shared_ic),
    )


def _means(scores: Mapping[Aspect, AspectScore]) -> AspectScore:
    """Return the mean of each part over the aspects; all 0 where no aspect has labels."""
    count = len(scores)
    return AspectScore(*[sum(part) / count for part in zip(*scores.values(), strict=True)]) if count else _NO_SCORE


def _components(means: AspectScore, scores: Mapping[Aspect, AspectScore]) -> dict[str, float]:
    components = {
        "similarity": means.similarity,
        "coverage": means.coverage,
        "cardinality": means.cardinality,
        "valid": 1.0,
        "f1": means.f1,
    }
    for aspect, part in scores.items():
        components[ASPECT_F1[aspect]] = part.f1
    return components


def _metrics(
    results: Mapping[Aspect, AspectResult], means: AspectScore, gold: Gold, finish: FinishReason, lenient: float
) -> dict[str, float]:
    """Return the numbers of weight zero; those of one aspect are what `metrics.corpus_metrics` needs."""
    exact = claimed = labels = ids = repeated = roots = 0
    wrong = dict.fromkeys(WRONG, 0)
    values: dict[str, float] = {}
    for aspect, result in results.items():
        ids += result.listed
        repeated += result.repeated
        roots += result.roots
        for kind, entries in result.wrong.items():
            wrong[kind] += len(entries)
        part = gold.aspects.get(aspect)
        if part is not None:
            exact += len(result.terms & part.terms)
            claimed += result.listed - result.roots
            labels += len(part.terms)
            precision, recall, missed, false = _OF_ASPECT[aspect]
            if result.predicted:  # without a prediction there is no precision
                values[precision] = result.shared / result.predicted
            values[recall] = result.shared / part.size
            values[missed] = part.ia_bits - result.shared_bits
            values[false] = result.false_bits
    for name, number in zip(_OF_KIND, wrong.values(), strict=True):
        values[name] = float(number)
    values["answered"] = float(any(result.terms for result in results.values()))
    values["precision"], values["recall"], values["simgic"] = means.precision, means.recall, means.simgic
    values["exact_precision"], values["exact_recall"] = _ratio(exact, claimed), _ratio(exact, labels)
    values["ids"], values["repeated_ids"], values["root_ids"] = float(ids), float(repeated), float(roots)
    values["lenient_similarity"], values["truncated"] = lenient, float(finish is FinishReason.LENGTH)
    return values
