"""The shipped prompt and how a task becomes chat messages.

Everything the tasks of a split have in common stands first (instructions, options, demonstrations),
so that an engine can compute it once for a whole batch; the last message is the question. The
demonstrations and the question are short because the embedded model of 135M parameters loses the
thread of a longer form; docs/environments/drugprot.md has the published layout.
Three texts can be replaced by prompt search:

- `system`: instructions; `[[OPTIONS]]` becomes the list of lettered options.
- `demonstrations`: records of `abstract`, `chemical`, `protein`, `label` and `think` lines,
  separated by empty lines; each becomes a user turn and an assistant turn, the letter taken from
  the label, so that demonstrations follow a permuted letter map too. May be empty.
- `question`: the layout of a question; `[[ABSTRACT]]`, `[[CHEMICAL]]` and `[[PROTEIN]]` are filled in.

The demonstrations state textbook facts about pairs that occur in no task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files

from harness.core.errors import ConfigError
from harness.core.names import did_you_mean
from harness.core.types import Message
from harness.envs.drugprot.labels import LABELS, letter_of

COMPONENTS = ("system", "demonstrations", "question")
_RECORD_KEYS = ("abstract", "chemical", "protein", "label", "think")
_SLOT = re.compile(r"\[\[(ABSTRACT|CHEMICAL|PROTEIN)\]\]")


@lru_cache(maxsize=1)
def _shipped() -> tuple[tuple[str, str], ...]:
    folder = files("harness.envs.drugprot") / "data" / "prompt"
    return tuple((name, (folder / f"{name}.txt").read_text(encoding="utf-8").strip()) for name in COMPONENTS)


def shipped_components() -> dict[str, str]:
    """Return the texts of the shipped prompt, by component name."""
    return dict(_shipped())


def options_text(letters: str) -> str:
    """Return the lettered options, one a line, in the order of the letters."""
    return "\n".join(sorted(f"{letter}. {label}" for letter, label in zip(letters, LABELS, strict=True)))


def parse_demonstrations(text: str) -> list[dict[str, str]]:
    """Return the records of a demonstrations text.

    Raises:
        ConfigError: when a line, a key or a label is not as the module describes.
    """
    records = []
    for number, block in enumerate(re.split(r"\n[ \t]*\n", text.strip()), 1):
        if not block.strip():
            continue
        record: dict[str, str] = {}
        for line in block.strip().split("\n"):
            key, colon, value = line.partition(":")
            if not colon or key.strip() not in _RECORD_KEYS or key.strip() in record or not value.strip():
                raise ConfigError(
                    f"demonstration {number}: line {line[:60]!r} is not one of {', '.join(_RECORD_KEYS)}",
                    "write each as `key: text` on one line, each key once, an empty line between records",
                )
            record[key.strip()] = value.strip()
        missing = [key for key in _RECORD_KEYS if key not in record]
        if missing:
            raise ConfigError(f"demonstration {number} lacks {', '.join(missing)}", "every record needs all five keys")
        if record["label"] not in LABELS:
            raise ConfigError(
                f"demonstration {number}: unknown label {record['label'][:40]!r}",
                did_you_mean(record["label"], LABELS),
            )
        records.append(record)
    return records


def _question(template: str, fields: Mapping[str, str]) -> str:
    # One pass: a slot that occurs inside an abstract is text, not a slot.
    return _SLOT.sub(lambda slot: fields[slot[1].lower()], template)


def answer_text(think: str, letter: str) -> str:
    """Return a reply in the required form."""
    return f"<think>{think}</think>\\boxed{{{letter}}}"


@lru_cache(maxsize=1)
def _thoughts() -> dict[str, str]:
    return {record["label"]: record["think"] for record in parse_demonstrations(shipped_components()["demonstrations"])}


def demonstration(label: str, letter: str) -> str | None:
    """Return a right reply: what the shipped demonstration of the label thinks, and the letter.

    The names of the pair are left out: with them replies take up to 68 tokens of the embedded model, without them at
    most 28.

    Args:
        label: of the task; one without a shipped demonstration gives None.
        letter: that stands for the label under the task's own letter map.
    """
    think = _thoughts().get(label)
    return None if think is None else answer_text(think, letter)


@lru_cache(maxsize=64)
def _prefix(system: str, demonstrations: str, question: str, letters: str) -> tuple[Message, ...]:
    if "[[OPTIONS]]" not in system:
        raise ConfigError("the component `system` lacks [[OPTIONS]]", "put [[OPTIONS]] where the options belong")
    for slot in ("[[ABSTRACT]]", "[[CHEMICAL]]", "[[PROTEIN]]"):
        if slot not in question:
            raise ConfigError(f"the component `question` lacks {slot}", f"put {slot} where that text belongs")
    messages = [Message("system", system.replace("[[OPTIONS]]", options_text(letters)))]
    for record in parse_demonstrations(demonstrations):
        messages.append(Message("user", _question(question, record)))
        messages.append(Message("assistant", answer_text(record["think"], letter_of(record["label"], letters))))
    return tuple(messages)


def render(components: Mapping[str, str], fields: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the chat messages of a task.

    Args:
        components: all three texts.
        fields: `abstract`, `chemical`, `protein`, and `letters` (the letter map of the options).

    Raises:
        ConfigError: when a text lacks a slot or the demonstrations do not parse.
    """
    prefix = _prefix(components["system"], components["demonstrations"], components["question"], fields["letters"])
    return (*prefix, Message("user", _question(components["question"], fields)))
