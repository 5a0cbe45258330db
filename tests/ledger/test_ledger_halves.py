"""A part of a long loop done by a child: the same answers, whatever becomes of the child."""

import os
import signal

import pytest

from harness.ledger import halves
from harness.ledger.halves import WORTH_ITEMS, Elsewhere

ITEMS = list(range(WORTH_ITEMS))


@pytest.fixture(autouse=True)
def _may_fork(monkeypatch):
    monkeypatch.setattr(halves, "_may_fork", lambda: True)  # whatever the tests before have imported


def test_a_child_answers_for_long_loops_and_the_parent_for_short_ones():
    here = os.getpid()
    assert set(Elsewhere(lambda _: os.getpid(), ITEMS[:10]).answers()) == {here}
    assert here not in Elsewhere(lambda _: os.getpid(), ITEMS).answers()


def test_answers_stand_in_the_order_of_the_items():
    assert Elsewhere(lambda item: [item, None, f"é{item}"], ITEMS).answers() == [[i, None, f"é{i}"] for i in ITEMS]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_is_killed_leaves_its_work_to_the_parent(number):
    here = os.getpid()

    def work(item):
        if os.getpid() != here and item == 700:
            os.kill(os.getpid(), number)
        return item

    assert Elsewhere(work, ITEMS).answers() == ITEMS


def test_what_fails_in_the_child_fails_in_the_parent_with_its_reason():
    with pytest.raises(ZeroDivisionError):
        Elsewhere(lambda item: 1 // (item - 700), ITEMS).answers()


def test_no_child_is_left_behind(monkeypatch):
    children = []
    fork = os.fork

    def seen():
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", seen)
    Elsewhere(lambda item: item, ITEMS).answers()
    with pytest.raises(ChildProcessError):  # it was waited for
        os.waitpid(children[0], os.WNOHANG)
