"""The union of two ledgers: nothing is lost, nothing is invented, and the order of the sides does not matter."""

from __future__ import annotations

import random

import pytest

from harness.ledger import fold
from harness.ledger.events import parse_line
from harness.ledger.merge import merge
from harness.ledger.verify import verify


def text(*events) -> bytes:
    return b"".join(event.line + b"\n" for event in events)


@pytest.fixture
def base(event):
    first = event(kind="created", number=1)
    return [first, event(number=2, second=1, prev=[first.sha])]


@pytest.fixture
def ours(event, base):
    born = event("run-002", "created", number=3, second=5)
    return [*base, event(number=4, second=3, prev=[base[1].sha]), born]


@pytest.fixture
def theirs(event, base):
    born = event("run-003", "created", number=5, second=4)
    return [*base, born, event("run-003", number=6, second=6, prev=[born.sha])]


def test_both_sides_are_kept_once_and_in_order_of_time(base, ours, theirs, path) -> None:
    done = merge(text(*base), text(*ours), text(*theirs))
    assert (done.problems, done.notes, done.events) == ((), (), 6)
    assert done.data == text(*base, ours[2], theirs[2], ours[3], theirs[3])
    path.write_bytes(done.data)
    assert verify(path) == []


def test_the_sides_may_be_swapped_and_merged_again(base, ours, theirs) -> None:
    done = merge(text(*base), text(*ours), text(*theirs))
    assert done == merge(text(*base), text(*theirs), text(*ours)) and done.data is not None
    assert merge(text(*ours), done.data, text(*ours)).data == text(*ours, theirs[2], theirs[3])
    assert merge(text(*base), done.data, done.data).data == done.data
    assert merge(b"", text(*ours), text(*theirs)).data == merge(b"", text(*theirs), text(*ours)).data


def test_any_order_and_any_repetition_fold_to_the_same_state(base, ours, theirs) -> None:
    expected = fold({e.sha: e for e in [*ours, *theirs]}.values())
    for seed in range(20):
        chance = random.Random(seed)
        sides = [chance.sample(side, len(side)) + chance.choices(side, k=2) for side in (ours, theirs)]
        done = merge(text(*base), *(text(*side) for side in sides))
        assert not done.problems and done.data is not None
        state = fold(map(parse_line, done.data.splitlines()))
        assert {name: [e.sha for e in run.events] for name, run in state.runs.items()} == {
            name: [e.sha for e in run.events] for name, run in expected.runs.items()
        }


def test_a_dropped_event_is_kept_and_told(base, ours) -> None:
    done = merge(text(*base), text(*ours), text(base[0]))
    assert done.data == text(*base, ours[2], ours[3]) and not done.problems
    assert done.notes == ("events that theirs had dropped are kept: 1",)


def test_a_last_line_without_its_newline_is_whole(base, ours, theirs) -> None:
    assert (
        merge(text(*base), text(*ours)[:-1], text(*theirs)).data == merge(text(*base), text(*ours), text(*theirs)).data
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[:-30], "line 4 is torn"),
        (lambda data: data.replace(b'"x"', b'"y"', 1), "line 1 is damaged: its hash"),
        (lambda data: b"<<<<<<< HEAD\n" + data, "line 1 is damaged: it is a git conflict marker"),
        (lambda data: data.replace(b"\n", b"\r\n"), "line 1 is damaged: it ends in CR LF"),
        (lambda data: data + b"\n", "line 5 is damaged: the line is empty"),
    ],
)
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_damage_on_a_side_is_refused(base, ours, theirs, spoil, says, side) -> None:
    sides = {"ours": text(*ours), "theirs": text(*theirs)}
    sides[side] = spoil(sides[side])
    done = merge(text(*base), sides["ours"], sides["theirs"])
    assert done.data is None and f"{side}, {says}" in done.problems[0]


def test_a_newer_format_is_refused(base, ours) -> None:
    from hashlib import sha256

    body = base[0].line[:-74].replace(b'"v":1', b'"v":2') + b"}"
    line = body[:-1] + b',"sha":"' + sha256(body).hexdigest().encode() + b'"}\n'
    done = merge(text(*base), text(*ours), text(*base) + line)
    assert done.data is None and "version 2" in done.problems[0]


def test_damage_in_the_ancestor_does_not_matter(base, ours, theirs) -> None:
    spoilt = text(base[0]) + b"<<<<<<< Temporary merge branch 1\n" + text(base[1])[:-20]
    done = merge(spoilt, text(*ours), text(*theirs))
    assert done.data == text(base[0], base[1], ours[2], theirs[2], ours[3], theirs[3])


def test_an_edited_event_is_refused_and_named(event, base, ours) -> None:
    edited = event(number=2, second=1, prev=[base[0].sha], data={"text": "edited"})
    done = merge(text(*base), text(*ours), text(base[0], edited))
    assert done.data is None
    (problem,) = done.problems
    assert base[1].id in problem and "two versions in ours and theirs" in problem


def test_a_new_collision_is_merged_and_named_once(event, base, path) -> None:
    ours = event("run-002", "created", number=3, second=5, data={"hypothesis": "a"})
    theirs = event("run-002", "created", number=4, second=6, data={"hypothesis": "b"})
    done = merge(text(*base), text(*base, ours), text(*base, theirs))
    assert done.data == text(*base, ours, theirs)
    assert len(done.problems) == 1 and "harness ledger renumber run-002" in done.problems[0]
    note = event(number=5, second=7, prev=[base[1].sha])
    again = merge(text(*base), done.data, text(*base, note))
    assert not again.problems and again.data == text(*base, ours, theirs, note)
