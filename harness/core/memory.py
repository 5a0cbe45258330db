"""Making many objects that all stay, and giving back what stood for a moment."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector while a large file is parsed.

    Every object made there stays, so each pass over them is for nothing; it doubles the time that
    60,000 events take.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def exempt_from_collection(objects: int) -> None:
    """Spare everything that lives now from every later collection, where there is much of it that stays.

    Args:
        objects: how many large objects were just made; below a thousand nothing is done.
    """
    if objects > 1000:
        gc.freeze()


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim if sys.platform == "linux" else None
    except (AttributeError, OSError):  # another C library than glibc
        return None


def give_back() -> None:
    """Give free pages of the C heap back to the system, where the C library can.

    After a large computation most of the heap is free but in pieces; the next one, of other sizes, would come on
    top of it. On the embedded model this halves the peak of a training step.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
