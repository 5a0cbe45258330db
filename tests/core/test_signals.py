"""Held signals arrive when they are let through: once, by the handler that was there."""

import os
import signal
import threading

import pytest

from harness.core.signals import held_signals


@pytest.fixture
def handled():
    """Count SIGTERM as a process does that raises on it."""
    seen = []

    def stop(number, _frame):
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_signal_waits_for_the_end_of_the_block(handled):
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with held_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(len(handled))
        reached.append(-1)  # not reached
    assert (reached, handled) == ([0], [signal.SIGTERM])


def test_a_signal_may_be_let_through_earlier(handled):
    reached = []
    with pytest.raises(KeyboardInterrupt), held_signals() as release:
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("held")
        release()
        reached.append("not here")
    assert reached == ["held"]
    with held_signals() as release:
        release()
        release()
    assert handled == [signal.SIGTERM]


def test_blocks_nest(handled):
    with pytest.raises(KeyboardInterrupt), held_signals():
        with held_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert handled == []
    assert handled == [signal.SIGTERM]


def test_an_exception_of_the_block_is_not_lost(handled):
    with pytest.raises(KeyboardInterrupt) as caught, held_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("first")
    assert isinstance(caught.value.__context__, ValueError)


def test_ignored_signals_stay_ignored_and_handlers_come_back():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with held_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_hold_nothing():
    done = []

    def work():
        with held_signals() as release:
            release()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
