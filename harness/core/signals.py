"""Hold SIGINT and SIGTERM back while something must not be torn: they arrive when it is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Hold signals back inside the block; yields a function that lets them through earlier.

    A signal that came meanwhile acts (as KeyboardInterrupt) when it is let through, at the latest at
    the end of the block. Only the main thread runs signal handlers, so elsewhere nothing is held.
    Processes that are started inside the block inherit what is held: start none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield release
    finally:
        release()
