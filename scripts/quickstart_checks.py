"""What a quickstart must show before it may call itself a success: pure functions over the ledger's own numbers.

A reward can rise while the policy collapses: one letter for every question, no spread left to learn from, or a
gain in form bought with knowledge. So the gain in reward is only one of the checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MIN_ITEMS = 100
MIN_STEPS = 25
MAX_LETTER_SHARE = 0.6
MAX_ZERO_SPREAD = 0.8
SHOWN = ("reward", "accuracy", "format", "reasoning")


class Interval(NamedTuple):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


class Evidence(NamedTuple):
    """What the checks look at.

    Args:
        steps: optimizer steps of the finished attempt.
        step: step of the last held-out eval of the policy.
        items: held-out items that count in its mean.
        base: metric -> interval of the base model under the run's prompt.
        policy: metric -> interval of the trained model under the same prompt.
        gain: metric -> paired difference policy - base on the same items.
        letters: letter -> number of the sampled held-out answers with that letter.
        zero_spread: mean share of groups without spread in the last 5 steps, in [0, 1].
    """

    steps: int
    step: int
    items: int
    base: Mapping[str, Interval]
    policy: Mapping[str, Interval]
    gain: Mapping[str, Interval]
    letters: Mapping[str, float]
    zero_spread: float


class Check(NamedTuple):
    """One line of the verdict."""

    name: str
    ok: bool
    detail: str


def number(value: Any) -> float:
    """Return a number of the ledger; NaN for anything that is none, so that no check passes on it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


def intervals(value: Any) -> dict[str, Interval]:
    """Return metric -> interval from `{metric: {"mean", "low", "high"}}`."""
    rows = value if isinstance(value, Mapping) else {}
    return {
        name: Interval(*(number(row.get(key)) for key in ("mean", "low", "high")))
        for name, row in rows.items()
        if isinstance(row, Mapping)
    }


def run_prompt_evals(evals: Sequence[Mapping[str, Any]], env: str, subject: str) -> list[Mapping[str, Any]]:
    """Return the evals of one subject under the run's own prompt, in the order of their steps."""
    found = [e for e in evals if (e.get("env"), e.get("subject"), e.get("prompt")) == (env, subject, "run")]
    return sorted(found, key=lambda e: number(e.get("step")))


def gather(shown: Mapping[str, Any], env: str = "drugprot") -> Evidence:
    """Read the evidence out of the document of `harness show RUN --json`.

    Args:
        shown: the parsed document, with `evals` and `attempts`.
        env: environment id.

    Raises:
        LookupError: when the policy or the base was never evaluated, or no attempt finished.
    """
    evals = shown.get("evals") or []
    policy, base = (run_prompt_evals(evals, env, subject) for subject in ("policy", "base"))
    attempts = [a for a in shown.get("attempts") or [] if a.get("outcome") == "completed"]
    if not policy or not base or not attempts:
        raise LookupError("the run has no completed attempt with a held-out eval of the base and of the policy")
    last, finished = policy[-1], attempts[-1]
    return Evidence(
        steps=int(number(finished.get("step"))),
        step=int(number(last.get("step"))),
        items=int(number(last.get("n"))),
        base=intervals(base[-1].get("means")),
        policy=intervals(last.get("means")),
        gain=intervals(last.get("gain")),
        letters=letter_counts(last.get("extra")),
        zero_spread=number((finished.get("summary") or {}).get("zero_spread_last5")),
    )


def letter_counts(extra: Any) -> dict[str, float]:
    """Return letter -> number of counted held-out items that answered it, from an eval's `extra.answers`."""
    answers = extra.get("answers") if isinstance(extra, Mapping) else None
    return {str(letter): number(count) for letter, count in answers.items()} if isinstance(answers, Mapping) else {}


def top_letter(letters: Mapping[str, float]) -> tuple[str, float]:
    """Return the most frequent letter and its share of all answers that chose one; NaN when none did."""
    total = sum(letters.values())
    if not letters or not total > 0:
        return "-", math.nan
    top = max(letters, key=lambda letter: letters[letter])
    return top, letters[top] / total


def checks(evidence: Evidence) -> list[Check]:
    """Return every check with its verdict; a number that is missing or not finite never passes."""
    nothing = Interval(math.nan, math.nan, math.nan)
    reward, accuracy = (evidence.gain.get(name, nothing) for name in ("reward", "accuracy"))
    letter, share = top_letter(evidence.letters)
    answered = (
        f"{share:.0%} of the sampled held-out answers are {letter}" if evidence.letters else "no answer was counted"
    )
    return [
        Check("steps", evidence.steps >= MIN_STEPS, f"{evidence.steps} GRPO steps, at least {MIN_STEPS}"),
        Check("items", evidence.items >= MIN_ITEMS, f"{evidence.items} held-out items, at least {MIN_ITEMS}"),
        Check("evaluated", evidence.step >= evidence.steps, f"last held-out eval at step {evidence.step}"),
        Check("reward", reward.low > 0, f"paired reward gain {span(reward)}, the whole interval above 0"),
        Check("accuracy", accuracy.high >= 0, f"paired accuracy gain {span(accuracy)}, not wholly below 0"),
        Check(
            "letters",
            share <= MAX_LETTER_SHARE,
            f"{answered}, at most {MAX_LETTER_SHARE:.0%}",
        ),
        Check(
            "spread",
            evidence.zero_spread < MAX_ZERO_SPREAD,
            f"{evidence.zero_spread:.0%} groups without spread in the last 5 steps, below {MAX_ZERO_SPREAD:.0%}",
        ),
    ]


def span(interval: Interval) -> str:
    """Write a difference with its interval."""
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def table(evidence: Evidence) -> list[str]:
    """Return the rows that show reward, accuracy, format and reasoning apart."""
    rows = [f"{'held-out':<10} {'base':>22} {'trained':>22} {'paired difference':>26}"]
    for name in SHOWN:
        base, policy, gain = (part.get(name) for part in (evidence.base, evidence.policy, evidence.gain))
        cells = [
            "-" if part is None else f"{part.mean:.3f} [{part.low:.3f}, {part.high:.3f}]" for part in (base, policy)
        ]
        rows.append(f"{name:<10} {cells[0]:>22} {cells[1]:>22} {span(gain) if gain else '-':>26}")
    return rows
