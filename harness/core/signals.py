"""Hold SIGINT, SIGHUP and SIGTERM back while something must not be torn: they act when it is done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_HELD = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Hold signals back inside the block; yields a function that lets them through earlier.

    A signal that came meanwhile acts when it is let through, at the latest at the end of the block.
    The handlers are exchanged, and the signals not blocked: the kernel would hand a blocked one to a
    thread of some library, and Python would run the handler all the same. Ignored signals stay
    ignored. Only the main thread runs handlers, so elsewhere nothing is held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in _HELD}
    came: list[int] = []
    held = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in held:
        signal.signal(number, lambda arrived, _frame: came.append(arrived))

    def release() -> None:
        for number in held:
            signal.signal(number, before[number])
        held.clear()
        if came:
            first = came[0]
            came.clear()
            handler = before[signal.Signals(first)]
            if callable(handler):
                handler(first, None)
            else:
                os.kill(os.getpid(), first)

    try:
        yield release
    finally:
        release()
