"""Read the answer of a reply: exactly one JSON object with a summary and three lists of GO ids, and nothing else.

    {"summary": "one sentence", "mf": ["GO:0004672"], "bp": ["GO:0006468"], "cc": []}

The answer is what stands after the last `</think>` (the whole reply without one). Blanks around the object are
fine, anything else beside it is not: the text is parsed once and never repaired. The keys are these four in any
order, all of them; `summary` has a visible character; a list holds strings only and may be empty.

What a listed string is worth is no matter of form: see `verifier`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.canonical import strict_loads
from harness.core.types import FinishReason
from harness.envs.bioreason_go.terms import ASPECTS, Aspect
from harness.envs.replies import split_think

KEYS = ("summary", *ASPECTS)
Lists = Mapping[Aspect, list[str]]

_BLANK = " \t\r\n"  # what JSON calls white space
_FENCE = "```"


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply taken apart.

    Args:
        lists: the listed strings of each aspect as they were written; None without a valid object.
        problem: why there is no valid object, as a fixed phrase; empty when there is one.
        recovered: where there is no valid object, the lists of the one between the first `{` and the last `}`,
            if that is valid. A metric of its own; never paid.
    """

    lists: Lists | None
    problem: str = ""
    recovered: Lists | None = None


def read_answer(text: str, finish: FinishReason = FinishReason.STOP) -> Answer:
    """Read the answer of a reply; total over all strings."""
    after = split_think(text)[1].strip(_BLANK)
    lists, problem = _read(after)
    if lists is not None:
        return Answer(lists)
    if finish is FinishReason.LENGTH:
        problem = "truncated before a valid answer"
    start, end = after.find("{"), after.rfind("}") + 1
    inside = 0 <= start < end and (start, end) != (0, len(after))
    return Answer(None, problem, _read(after[start:end])[0] if inside else None)


def _read(text: str) -> tuple[Lists | None, str]:
    value, problem = _load(text)
    if problem:
        return None, problem
    problem = _shape_problem(value)
    return (None, problem) if problem else ({aspect: value[aspect] for aspect in ASPECTS}, "")


def _load(text: str) -> tuple[Any, str]:
    """Return the one JSON value of a text, or why there is none."""
    if not text.startswith("{"):
        return None, _start_problem(text)
    try:
        return strict_loads(text), ""
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            return None, "not JSON"
        rest = text[error.pos :].lstrip(_BLANK)
        if rest.startswith("{"):
            return None, "more than one object"
        return None, "code fence around the object" if rest.startswith(_FENCE) else "text after the object"
    except ValueError as error:  # from the strict hooks: their wording is our own
        return None, "duplicate key" if str(error).startswith("duplicate key") else "a number or depth JSON has not"


def _start_problem(text: str) -> str:
    if not text:
        return "no answer after the reasoning"
    if text.startswith("\ufeff"):
        return "byte order mark before the object"
    if text.startswith(_FENCE):
        return "code fence around the object"
    return "text before the object" if "{" in text else "no object"


def _shape_problem(value: dict[str, Any]) -> str:
    """Return what is wrong with the object, as a fixed phrase that names at most a key of the format."""
    for key in KEYS:
        if key not in value:
            return f"key {key} is missing"
    if len(value) != len(KEYS):
        return "a key too many"
    if not isinstance(value["summary"], str):
        return "summary is no text"
    if not value["summary"].strip():
        return "summary is empty"
    for aspect in ASPECTS:
        entries = value[aspect]
        if not isinstance(entries, list):
            return f"{aspect} is no list"
        if not {str}.issuperset(map(type, entries)):
            return f"{aspect} holds something that is no text"
    return ""
