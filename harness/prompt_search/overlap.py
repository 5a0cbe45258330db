"""Find instruction text that copies training text: a prompt that quotes tasks has memorised, not instructed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from harness.core.types import Task

N = 8
"""Words in a row that no instruction may share with a task."""
_WORD = re.compile(r"\w+")


def ngrams(text: str, n: int = N) -> set[tuple[str, ...]]:
    """Return all runs of `n` words of a text, without case and punctuation."""
    words = _WORD.findall(text.casefold())
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


class TrainingText:
    """The word runs of training tasks, less those of texts that were there before any search.

    Args:
        tasks: whose fields nothing may quote.
        known: the shipped texts; what they say is no copy.
        n: words in a row that count as a copy.
    """

    def __init__(self, tasks: Iterable[Task], known: Mapping[str, str], n: int = N) -> None:
        self._n = n
        self._source: dict[tuple[str, ...], str] = {}
        for task in tasks:
            for text in task.fields.values():
                for gram in ngrams(text, n):
                    self._source.setdefault(gram, task.id)
        for text in known.values():
            for gram in ngrams(text, n):
                self._source.pop(gram, None)

    def copied(self, text: str) -> tuple[str, str] | None:
        """Return (the copied words, a task that has them), or None when the text copies nothing."""
        words = _WORD.findall(text.casefold())
        for start in range(len(words) - self._n + 1):
            gram = tuple(words[start : start + self._n])
            if gram in self._source:
                return " ".join(gram), self._source[gram]
        return None
