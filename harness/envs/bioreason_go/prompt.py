"""The shipped prompt and how a protein becomes chat messages.

As in drugprot, what all tasks share stands first, so that an engine computes it once, and three texts can be
replaced by prompt search:

- `system`: instructions and the form of the answer.
- `demonstrations`: records of `key: text` lines separated by empty lines; each becomes a user turn in the layout
  of the question and an assistant turn. `name`, `mf`, `bp`, `cc` (candidates) and `answer` (a valid answer on one
  line) are needed, `gene`, `organism`, `domains`, `partners` and `notes` are not. May be empty.
- `question`: the layout of a question. `[[NAME]]`, `[[MF]]`, `[[BP]]` and `[[CC]]` are needed, `[[GENE]]`,
  `[[ORGANISM]]`, `[[DOMAINS]]`, `[[PARTNERS]]` and `[[NOTES]]` are not. A line with slots is left out when nothing
  is known for any of them.

The demonstrations are textbook facts about proteins of yeast and bacteria, which occur in no shipped task. All
is short: the embedded model of 135M parameters loses the thread of a longer form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files

from harness.core.errors import ConfigError
from harness.core.types import Message
from harness.envs.bioreason_go.answer import read_answer
from harness.envs.bioreason_go.records import NOTHING
from harness.envs.bioreason_go.terms import ASPECTS, Aspect

COMPONENTS = ("system", "demonstrations", "question")
_NEEDED = ("name", *ASPECTS)
_SLOTS = (*_NEEDED, "gene", "organism", "domains", "partners", "notes")
_SLOT = re.compile(rf"\[\[({'|'.join(_SLOTS).upper()})\]\]")


@lru_cache(maxsize=1)
def _shipped() -> tuple[tuple[str, str], ...]:
    folder = files("harness.envs.bioreason_go") / "data" / "prompt"
    return tuple((name, (folder / f"{name}.txt").read_text(encoding="utf-8").strip()) for name in COMPONENTS)


def shipped_components() -> dict[str, str]:
    """Return the texts of the shipped prompt, by component name."""
    return dict(_shipped())


def parse_demonstrations(text: str) -> list[dict[str, str]]:
    """Return the records of a demonstrations text.

    Raises:
        ConfigError: when a line or a key is not as the module describes, or an answer is no valid one.
    """
    records = []
    for number, block in enumerate(re.split(r"\n[ \t]*\n", text.strip()), 1):
        if not block.strip():
            continue
        record: dict[str, str] = {}
        for line in block.strip().split("\n"):
            key, colon, value = (part.strip() for part in line.partition(":"))
            if not colon or key not in (*_SLOTS, "answer") or key in record or not value:
                raise ConfigError(
                    f"demonstration {number}: line {line[:60]!r} is not one of {', '.join((*_SLOTS, 'answer'))}",
                    "write each as `key: text` on one line, each key once, an empty line between records",
                )
            record[key] = value
        missing = [key for key in (*_NEEDED, "answer") if key not in record]
        if missing:
            raise ConfigError(
                f"demonstration {number} lacks {', '.join(missing)}", "name, mf, bp, cc, answer are needed"
            )
        problem = read_answer(record["answer"]).problem
        if problem:
            raise ConfigError(f"demonstration {number}, answer: {problem}", answer_text("…", {}))
        records.append(record)
    return records


def answer_text(summary: str, ids: Mapping[Aspect, list[str]]) -> str:
    """Return an answer in the required form, on one line."""
    lists: dict[str, list[str]] = {aspect: list(ids.get(aspect, ())) for aspect in ASPECTS}
    return json.dumps({"summary": summary, **lists}, ensure_ascii=False, separators=(",", ":"))


def _question(template: str, fields: Mapping[str, str]) -> str:
    """Fill in a layout, line by line in one pass: a slot that occurs inside a text is text."""
    lines = []
    for line in template.split("\n"):
        slots = [slot.lower() for slot in _SLOT.findall(line)]
        if slots and all(fields.get(slot, NOTHING) == NOTHING for slot in slots):
            continue
        lines.append(_SLOT.sub(lambda slot: _inline(fields.get(slot[1].lower(), NOTHING)), line))
    return "\n".join(lines)


def _inline(text: str) -> str:
    return "; ".join(text.split("\n"))


@lru_cache(maxsize=64)
def _prefix(system: str, demonstrations: str, question: str) -> tuple[Message, ...]:
    for slot in _NEEDED:
        if f"[[{slot.upper()}]]" not in question:
            raise ConfigError(f"the component `question` lacks [[{slot.upper()}]]", "put it where that text belongs")
    messages = [Message("system", system)]
    for record in parse_demonstrations(demonstrations):
        messages.append(Message("user", _question(question, record)))
        messages.append(Message("assistant", record["answer"]))
    return tuple(messages)


def render(components: Mapping[str, str], fields: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the chat messages of a task.

    Args:
        components: all three texts.
        fields: of the task; see `records.task_of`.

    Raises:
        ConfigError: when a text lacks a slot or the demonstrations do not parse.
    """
    prefix = _prefix(components["system"], components["demonstrations"], components["question"])
    return (*prefix, Message("user", _question(components["question"], fields)))
