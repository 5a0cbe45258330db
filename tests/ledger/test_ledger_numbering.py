"""Two branches that took one number: which events belong to which run, before and after renumbering."""

from __future__ import annotations

import random

import pytest

from harness.core.errors import NotFoundError, RefusedError
from harness.ledger import Ledger, fold


def write(path, *events) -> None:
    path.write_bytes(b"".join(event.line + b"\n" for event in events))


@pytest.fixture
def branches(event):
    """Return the events of two branches that both created run-001, with a child on the younger one."""
    old = event(kind="created", number=1, data={"hypothesis": "old", "config": "rl/run-001.toml"})
    old_note = event(number=2, second=5, prev=[old.sha], data={"text": "old note"})
    young = event(kind="created", number=3, second=1, data={"hypothesis": "young", "config": "rl/run-001.toml"})
    file = {"file": "analysis/run-001/evals/a.jsonl", "text": "about run-001"}
    young_eval = event(kind="evaluated", number=4, second=2, prev=[young.sha], data=file)
    child = event("run-002", "created", number=5, second=3, data={"parent": "run-001", "links": {"run-001": young.sha}})
    return old, old_note, young, young_eval, child


def renumbered(event, last, start="run-001", to="run-009", number=6, **data):
    return event(start, "renumbered", number=number, second=6, prev=[last.sha], critical=True, data={"to": to} | data)


def test_two_runs_of_one_number_are_kept_apart(branches) -> None:
    state = fold(branches)
    assert list(state.runs) == ["run-001", "run-002"]
    assert state.runs["run-001"].hypothesis == "old"
    assert [run.hypothesis for run in state.collisions["run-001"]] == ["young"]
    assert [e.kind for e in state.collisions["run-001"][0].events] == ["created", "evaluated"]


def test_a_renumbered_run_has_its_events_paths_and_children(event, branches) -> None:
    moved = renumbered(event, branches[3])
    later = event("run-009", number=7, second=7, prev=[moved.sha], data={"text": "later"})
    unaware = event("run-001", number=8, second=8, prev=[branches[3].sha], data={"text": "from a third branch"})
    events = [*branches, moved, later, unaware]
    for seed in range(5):
        random.Random(seed).shuffle(events)
        state = fold(events)
        run = state.runs["run-009"]
        assert not state.collisions and state.former == {"run-001": "run-009"}
        assert [e.kind for e in run.events] == ["created", "evaluated", "renumbered", "noted", "noted"]
        assert {e.run for e in run.events} == {"run-009"}
        assert run.created["config"] == "rl/run-009.toml"
        assert run.evals[0] == {"file": "analysis/run-009/evals/a.jsonl", "text": "about run-001"}
        assert [note["text"] for note in run.notes] == ["later", "from a third branch"]
        assert state.runs["run-002"].parent == "run-009"
        assert state.runs["run-001"].created["config"] == "rl/run-001.toml"
        assert [note["text"] for note in state.runs["run-001"].notes] == ["old note"]


def test_children_from_before_links_are_listed(event, branches) -> None:
    child = event("run-002", "created", number=5, second=3, data={"parent": "run-001"})
    stranger = event("run-003", "created", number=9, second=3, data={"parent": "run-001"})
    moved = renumbered(event, branches[3], references=[child.sha])
    state = fold([*branches[:4], child, stranger, moved])
    assert (state.runs["run-002"].parent, state.runs["run-003"].parent) == ("run-009", "run-001")


def test_a_run_can_be_renumbered_twice_and_the_last_number_counts(event, branches) -> None:
    first = renumbered(event, branches[3])
    taken = event("run-009", "created", number=10, second=4)
    assert list(fold([*branches, first, taken]).collisions) == ["run-009"]
    second = renumbered(event, first, start="run-009", to="run-011", number=11)
    state = fold([*branches, first, taken, second])
    assert not state.collisions and list(state.runs) == ["run-001", "run-002", "run-009", "run-011"]
    assert state.runs["run-009"].root == taken.sha
    assert state.runs["run-011"].created["config"] == "rl/run-011.toml"
    assert state.runs["run-011"].evals[0]["file"] == "analysis/run-011/evals/a.jsonl"
    assert state.runs["run-002"].parent == "run-011"


def test_an_event_that_follows_both_runs_stays_with_the_older(event, branches) -> None:
    both = event(number=12, second=9, prev=[branches[1].sha, branches[3].sha], data={"text": "both"})
    state = fold([*branches, both, renumbered(event, branches[3])])
    assert state.runs["run-001"].notes[-1]["text"] == "both"
    assert not state.runs["run-009"].notes


def test_a_promotion_moves_with_its_run_and_a_hidden_one_does_not_count(event, branches) -> None:
    promoted = event(kind="promoted", number=13, second=4, prev=[branches[3].sha])
    assert fold([*branches, promoted]).champion is None
    state = fold([*branches, promoted, renumbered(event, promoted)])
    assert state.champion == "run-009" and state.runs["run-009"].promoted


def test_a_malformed_number_is_not_followed(event, branches) -> None:
    state = fold([*branches, renumbered(event, branches[3], to="../../etc")])
    assert list(state.collisions) == ["run-001"] and list(state.runs) == ["run-001", "run-002"]


@pytest.mark.parametrize("fresh", [True, False])
def test_appends_follow_the_number(event, branches, path, fresh) -> None:
    write(path, *branches)
    ledger = Ledger(path)
    with pytest.raises(RefusedError, match="two branches") as caught:
        ledger.append("run-001", "noted", {"text": "which?"})
    assert "harness ledger renumber run-001" in caught.value.hint
    moved = renumbered(event, branches[3])
    with path.open("ab") as file:
        file.write(moved.line + b"\n")
    if fresh:
        ledger = Ledger(path)
    assert ledger.append("run-009", "noted", {"text": "n"}).prev == (moved.sha,)
    assert ledger.append("run-001", "noted", {"text": "n"}).prev == (branches[1].sha,)
    assert ledger.append("run-002", "noted", {"text": "n"}).prev == (branches[4].sha,)
    assert [len(run.events) for run in ledger.state().runs.values()] == [3, 2, 4]


def test_a_number_that_was_given_up_names_the_new_one(event, branches, path) -> None:
    write(path, *branches[2:4], renumbered(event, branches[3]))
    with pytest.raises(NotFoundError, match="run-009"):
        Ledger(path).append("run-001", "noted", {"text": "n"})


def test_a_contested_number_stands_in_the_way_of_nothing_else(event, branches, path) -> None:
    note = event("program", number=20, second=8, data={"text": "about the program"})
    write(path, *branches, note)
    ledger = Ledger(path)
    assert ledger.append("program", "noted", {"text": "n"}).prev == (note.sha,)
    assert ledger.append("run-002", "noted", {"text": "n"}).prev == (branches[4].sha,)
    with pytest.raises(NotFoundError, match="run-777 is not in"):
        ledger.append("run-777", "noted", {"text": "n"})
    assert ledger.append("run-777", "created", {"hypothesis": "h"}).prev == ()


def test_paths_in_every_folder_of_a_run_follow_its_number(event, branches) -> None:
    paths = ["outputs/run-001/m", "analysis/run-001/x", "rl/run-001.toml", "other/run-001/x", "outputs/run-0011/x"]
    later = event(number=21, second=4, prev=[branches[3].sha], data={"paths": paths})
    run = fold([*branches, later, renumbered(event, later)]).runs["run-009"]
    moved = next(found for found in run.events if found.sha == later.sha)
    assert moved.data["paths"] == ["outputs/run-009/m", "analysis/run-009/x", "rl/run-009.toml", *paths[3:]]
