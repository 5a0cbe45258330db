"""Do one part of a long loop in a forked child, where there is a second core.

Reading a large ledger is the interpreter's own work on many small things, which threads would not share out. The
child sees everything as it was at the fork, and only its answers come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

WORTH_ITEMS = 2000
"""Items from which a fork pays; it costs some milliseconds."""


class Elsewhere(Generic[Item, Answer]):
    """A loop over items that runs in a child while the parent does something else.

    Whatever happens to the child, and where none can be had, the parent does the work itself.

    Args:
        work: gives the answer for one item, made of JSON's values; it changes nothing but its own process.
        items: in order.
        worth: items from which a child is started.
    """

    def __init__(self, work: Callable[[Item], Answer], items: Sequence[Item], worth: int | None = None) -> None:
        """Start the child."""
        self._work, self._items = work, items
        enough = len(items) >= (WORTH_ITEMS if worth is None else worth)
        self._pipe, self._child = self._fork() if enough and _may_fork() else (-1, 0)

    @property
    def started(self) -> bool:
        """Whether a child is at work."""
        return bool(self._child)

    def answers(self) -> list[Answer]:
        """Wait for the child and return the answer for each item; to be called once, however the parent's part went."""
        if self._child:
            try:
                with os.fdopen(
                    self._pipe, "r", encoding="utf-8"
                ) as pipe:  # a child that still writes when this ends is ended by that
                    data = pipe.read()
            finally:
                os.waitpid(self._child, 0)
            with contextlib.suppress(ValueError):  # it was killed, or failed; here it will say how
                found = json.loads(data)
                if isinstance(found, list) and len(found) == len(self._items):
                    return found
        return [self._work(item) for item in self._items]

    def _fork(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            return reading, child
        with contextlib.suppress(BaseException):  # the parent notices that too little came
            os.close(reading)
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps([self._work(item) for item in self._items]))
        os._exit(0)  # nothing of the parent's is flushed or run twice


def _may_fork() -> bool:
    """Tell whether a fork is safe, which it is not beside other threads, and of use."""
    alone = len(sys._current_frames()) == 1 and "torch" not in sys.modules  # torch's own threads have no frames
    return alone and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
