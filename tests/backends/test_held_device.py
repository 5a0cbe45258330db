"""One run at a time has a device: trainings and searches wait for one another, and say so."""

import threading

import pytest

from harness.backends.attempt import held_device
from harness.core.errors import BusyError

CPU = "cpu"


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))


def test_who_does_not_wait_is_turned_away():
    told: list[dict[str, object]] = []
    with held_device(CPU, False, told.append), pytest.raises(BusyError), held_device(CPU, False, told.append):
        pass
    assert not told


def test_who_waits_is_told_once_and_comes_next():
    told: list[dict[str, object]] = []
    order: list[str] = []
    waits = threading.Event()

    def report(update):
        told.append(update)
        waits.set()

    def second():
        with held_device(CPU, True, report):
            order.append("second")

    thread = threading.Thread(target=second)
    with held_device(CPU, True, told.append):
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    assert [update["phase"] for update in told] == ["wait"]
