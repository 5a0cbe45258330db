r"""Score a reply to a DrugProt question: 0.70 accuracy + 0.20 reasoning + 0.10 format.

A reply is `<think>reasoning</think>\boxed{X}`. The answer is what stands after the last
`</think>` (the whole reply without one), so a box inside the reasoning is no answer; a missing
opening tag is tolerated, since chat templates may have written it into the prompt.

Accuracy and format need exactly one distinct boxed letter A-M; equal repeats are fine, several
letters or a box with anything else are not. `\boxed{\text{A}}` and lower case count,
characters outside ASCII (Cyrillic, fullwidth, the Kelvin sign) do not.

Reasoning looks at the closed think block: 0.1, 0.2 or 0.4 for more than 100, 200 or 400
characters, min(0.3, 0.025 x distinct keywords), 0.1 for a mention of a chemical or drug, 0.1 for
a mention of a protein or gene. It tops out at 0.9, so the largest total is 0.98.

Two variants:

- `published`: reasoning pays whatever the answer, as in the published environment.
- `hardened`: reasoning and format pay only with a valid single answer, and runs of white space
  count as one character, so neither empty structure nor padding earns anything.

Source: the formula of the published environment maziyar/OpenMed_DrugProt 0.3.1; it reproduces
the logged rewards of its twelve published runs. Matching rules beyond it are our own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from harness.core.types import Episode, FailureClass, FinishReason, Score
from harness.envs.drugprot.keywords import KEYWORDS_VERSION, distinct_keywords, words
from harness.envs.replies import split_think

Variant = Literal["hardened", "published"]
VARIANTS: tuple[str, ...] = get_args(Variant)
RULES_VERSION = "1"
COMPONENTS = ("accuracy", "reasoning", "format")
WEIGHTS = {"accuracy": 0.70, "reasoning": 0.20, "format": 0.10}

_BRACES = re.compile(r"\\boxed\{|\\[{}]|[{}]")  # an escaped brace is text
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_LETTER = re.compile(r"[A-Ma-m]")
_BLANK = " \t\r\n"
_LONGEST_ANSWER = 64  # characters inside a box that can still be one letter in wrappers
_JUNK = "?"


def verifier_version(variant: str) -> str:
    """Return the version recorded with every score: rules, keywords and variant."""
    return f"{RULES_VERSION}/{KEYWORDS_VERSION}/{variant}"


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply taken apart.

    Args:
        think: text of the closed think block; None when there is none.
        answer: text the answer is looked for in; empty when the think block never closes.
        boxes: content of each box of the answer in order: a letter A-M, or `?`.
    """

    think: str | None
    answer: str
    boxes: tuple[str, ...]

    @property
    def letter(self) -> str | None:
        """The single answered letter, or None."""
        distinct = set(self.boxes)
        return self.boxes[0] if len(distinct) == 1 and _JUNK not in distinct else None

    def problem(self, finish: FinishReason) -> str:
        """Return why there is no valid answer, as a fixed phrase; empty when there is one."""
        if self.letter is not None:
            return ""
        if finish is FinishReason.LENGTH:
            return "truncated before a valid answer"
        if not self.boxes:
            return "no boxed answer after the reasoning"
        return "box without a letter A-M" if set(self.boxes) == {_JUNK} else "several different boxes"


def _box_letter(content: str) -> str:
    content = content.strip(_BLANK)
    wrapped = _WRAPPER.fullmatch(content)
    content = wrapped[1].strip(_BLANK) if wrapped else content
    return content.upper() if _LETTER.fullmatch(content) else _JUNK


def find_boxes(text: str) -> tuple[str, ...]:
    r"""Return the content of each outermost `\boxed{...}`: a letter, or `?` for anything else.

    One pass over the braces, so time is linear whatever the nesting. A box that never closes
    is `?`: a cut-off second answer does not leave the first one standing alone.
    """
    boxes: list[str] = []
    open_at: list[int] = []  # end of the opening of each open brace; -1 for a plain one
    open_boxes = 0
    for token in _BRACES.finditer(text):
        match token[0]:
            case "\\boxed{":
                open_at.append(token.end())
                open_boxes += 1
            case "{":
                open_at.append(-1)
            case "}" if open_at:
                start = open_at.pop()
                if start < 0:
                    continue
                open_boxes -= 1
                if open_boxes == 0:
                    short = token.start() - start <= _LONGEST_ANSWER
                    boxes.append(_box_letter(text[start : token.start()]) if short else _JUNK)
    return (*boxes, _JUNK) if open_boxes else tuple(boxes)


def parse_reply(text: str) -> Reply:
    """Take a reply apart; total over all strings."""
    think, answer = split_think(text)
    return Reply(think, answer, find_boxes(answer))


def reasoning_score(think: str | None, variant: Variant) -> tuple[float, int, int]:
    """Return (score in [0, 0.9], characters counted, distinct keywords) of a think block."""
    if think is None:
        return 0.0, 0, 0
    length = len(" ".join(think.split())) if variant == "hardened" else len(think)
    found = words(think)
    keywords = distinct_keywords(found)
    # In units of 0.025, so that the sum is exact and equal texts get equal floats.
    units = 16 * (length > 400) or 8 * (length > 200) or 4 * (length > 100)
    units += min(12, keywords)
    units += 4 * bool(found & {"chemical", "chemicals", "drug", "drugs"})
    units += 4 * bool(found & {"protein", "proteins", "gene", "genes"})
    return units / 40, length, keywords


def score_reply(text: str, gold: str, finish: FinishReason, variant: Variant) -> Score:
    """Score one reply.

    Args:
        text: the model's reply alone; no prompt, no tool output.
        gold: the right letter, A-M.
        finish: why the reply ended.
        variant: see the module.
    """
    reply = parse_reply(text)
    letter = reply.letter
    valid = letter is not None
    reasoning, think_chars, keywords = reasoning_score(reply.think, variant)
    if variant == "hardened" and not valid:
        reasoning = 0.0
    components = {"accuracy": float(letter == gold), "reasoning": reasoning, "format": float(valid)}
    problem = reply.problem(finish)
    diagnostics = {"gold": gold} | ({"answer": letter} if letter else {})
    return Score(
        reward=round(sum(WEIGHTS[name] * value for name, value in components.items()), 6),
        components=components,
        metrics={
            "valid": float(valid),
            "think_chars": float(think_chars),
            "keywords": float(keywords),
            "truncated": float(finish is FinishReason.LENGTH),
        },
        diagnostics={**diagnostics, "problem": problem} if problem else diagnostics,
        failure=None if letter == gold else FailureClass.MODEL,
    )


def score_episode(episode: Episode, gold: str, variant: Variant) -> Score:
    """Score an episode by its last message, which counts only when the assistant wrote it.

    Demonstrations are assistant messages too: without this, a missing reply would be scored as
    the last demonstration.
    """
    last = episode.messages[-1] if episode.messages else None
    text = last.content if last is not None and last.role == "assistant" else ""
    return score_reply(text, gold, episode.finish_reason, variant)
