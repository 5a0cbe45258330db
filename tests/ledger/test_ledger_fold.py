"""State: what runs, attempts and decisions the events add up to, in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.errors import LedgerCorruptError
from harness.ledger import UnknownEventError, fold
from harness.ledger.fold import grown, in_order
from harness.ledger.numbering import contests, heads


def started(attempt: int, **more: object) -> dict:
    return {"attempt": attempt, "host": "box", "pid": 100 + attempt, "pid_start": "t", "resumed_from": None, **more}


def snapshot(state) -> dict:
    """Everything the state says, as plain values."""
    return {
        "champion": state.champion,
        "amendments": state.amendments,
        "notes": state.notes,
        "runs": {
            name: [
                run.run, run.kind, run.hypothesis, run.parent, run.created, run.created_at, run.attempts, run.evals,
                run.decision, run.reason, run.decisions, run.promoted, run.gated, run.notes, run.status, run.config_sha,
                [event.sha for event in run.events],
            ]
            for name, run in state.runs.items()
        },
    }  # fmt: skip


def test_the_life_of_a_run(ledger) -> None:
    def status() -> str:
        return ledger.state().runs["run-001"].status

    created = {"type": "training", "hypothesis": "h", "parent": None, "config_sha": "c" * 64, "key": None}
    ledger.append("run-001", "created", created)
    assert status() == "created"
    ledger.append("run-001", "started", started(1))
    assert status() == "running"
    ledger.append("run-001", "evaluated", {"attempt": 1, "subject": "base", "step": 0, "env": "e"})
    ledger.append("run-001", "finished", {"attempt": 1, "outcome": "interrupted", "failure": None, "step": 3})
    assert status() == "interrupted"
    ledger.append("run-001", "started", started(2, resumed_from=3))
    assert status() == "running"
    ledger.append("run-001", "finished", {"attempt": 2, "outcome": "completed", "failure": None, "step": 30})
    ledger.append("run-001", "decided", {"decision": "rerun", "reason": "first"})
    ledger.append("run-001", "decided", {"decision": "keep", "reason": "second"})
    ledger.append("run-001", "gated", {"verdict": "pass", "gates": []})
    ledger.append("run-001", "promoted", {"verdict": "pass", "certificate": "c.json"})
    ledger.append("run-001", "noted", {"text": "a note"})
    ledger.append("program", "amended", {"file": "GOAL.md", "old_sha": "1", "new_sha": "2", "reason": "r"})
    state = ledger.state()
    run = state.runs["run-001"]
    assert (run.status, run.kind, run.hypothesis, run.parent, run.config_sha) == (
        "completed",
        "training",
        "h",
        None,
        "c" * 64,
    )
    assert run.created == created
    first, second = run.attempts
    assert (first["attempt"], first["outcome"], first["host"], first["pid"]) == (1, "interrupted", "box", 101)
    assert (second["attempt"], second["outcome"], second["resumed_from"], second["step"]) == (2, "completed", 3, 30)
    assert run.evals == [{"attempt": 1, "subject": "base", "step": 0, "env": "e"}]
    assert (run.decision, run.reason, [d["decision"] for d in run.decisions]) == ("keep", "second", ["rerun", "keep"])
    assert run.decisions[0]["actor"] == {"kind": "agent", "name": "tester"}
    assert run.promoted is not None and run.promoted["certificate"] == "c.json"
    assert [g["verdict"] for g in run.gated] == ["pass"]
    assert run.notes[0]["text"] == "a note"
    assert state.champion == "run-001"
    assert [a["file"] for a in state.amendments] == ["GOAL.md"]


@pytest.mark.parametrize("outcome", ["completed", "failed", "interrupted", "stopped"])
def test_status_is_the_outcome_of_the_last_attempt(event, outcome) -> None:
    chain = [event(kind="created", number=1), event(kind="started", number=2, second=1, data=started(1))]
    chain.append(event(kind="finished", number=3, second=2, data={"attempt": 1, "outcome": outcome}))
    assert fold(chain).runs["run-001"].status == outcome


def test_every_fact_of_a_run_is_told(event) -> None:
    birth = {"type": "prompt_search", "hypothesis": "h", "parent": "run-000", "config_sha": "c", "idea": "01J"}
    first = event(kind="created", data=birth, number=1, second=5)
    start = event(kind="started", data={"attempt": 1, "host": "box", "pid": 7}, number=2, second=6, prev=[first.sha])
    made = event(kind="decided", data={"decision": "keep", "reason": "r"}, number=3, second=8, prev=[start.sha])
    tags = [
        event(kind="tagged", data={"tag": tag}, number=n, second=7, prev=[start.sha]) for n, tag in ((4, "b"), (5, "a"))
    ]
    run = fold([made, start, *tags, first]).runs["run-001"]
    assert (run.kind, run.hypothesis, run.parent, run.config_sha, run.idea) == (
        "prompt_search",
        "h",
        "run-000",
        "c",
        "01J",
    )
    assert (run.root, run.created_at, run.tags) == (first.sha, first.at, ("a", "b"))
    assert (run.decision, run.reason, run.decided_at) == ("keep", "r", made.at)
    assert run.attempts == [
        {"attempt": 1, "host": "box", "pid": 7, "at": start.at, "outcome": None, "failure": None, "finished_at": None}
    ]
    bare = fold([event(kind="created", data={}, number=6)]).runs["run-001"]
    assert (bare.kind, bare.hypothesis, bare.parent, bare.idea, bare.tags) == ("training", "", None, None, ())
    assert (bare.decision, bare.reason, bare.decided_at, bare.promoted, bare.attempts) == (None, None, None, None, [])


@pytest.mark.parametrize(("outcome", "status"), [("failed", "failed"), (None, "completed"), ("odd", "completed")])
def test_an_imported_run_ended_as_its_source_says(event, outcome, status) -> None:
    data = {"source": "csv"} if outcome is None else {"source": "csv", "outcome": outcome}
    assert fold([event(kind="imported", data=data)]).runs["run-001"].status == status


def test_an_end_without_a_start_is_an_attempt_of_unknown_place(event) -> None:
    birth = event(kind="created", number=1)
    end = event(kind="finished", data={"attempt": 1, "outcome": "completed"}, number=2, second=1, prev=[birth.sha])
    assert fold([birth, end]).runs["run-001"].attempts == [
        {
            "attempt": 1,
            "host": None,
            "pid": None,
            "at": end.at,
            "outcome": "completed",
            "failure": None,
            "finished_at": end.at,
        }
    ]


def test_an_outcome_nobody_knows_is_no_success(event) -> None:
    chain = [event(kind="created", number=1), event(kind="started", number=2, second=1, data=started(1))]
    chain.append(event(kind="finished", number=3, second=2, data={"attempt": 1, "outcome": "glorious"}))
    assert fold(chain).runs["run-001"].status == "failed"


def test_success_comes_from_the_current_attempt_only(event) -> None:
    """Attempt 1 was thought dead and ends well after attempt 2 began: the run still runs."""
    chain = [
        event(kind="created", number=1),
        event(kind="started", number=2, second=1, data=started(1)),
        event(kind="started", number=3, second=2, data=started(2)),
        event(kind="finished", number=4, second=3, data={"attempt": 1, "outcome": "completed"}),
    ]
    run = fold(chain).runs["run-001"]
    assert run.status == "running"
    assert [attempt["outcome"] for attempt in run.attempts] == ["completed", None]


def test_a_second_start_under_one_number_forgets_the_first_outcome(event) -> None:
    chain = [
        event(kind="created", number=1),
        event(kind="started", number=2, second=1, data=started(1)),
        event(kind="finished", number=3, second=2, data={"attempt": 1, "outcome": "completed", "failure": None}),
        event(kind="started", number=4, second=3, data=started(1, pid=7)),
    ]
    run = fold(chain).runs["run-001"]
    assert (run.status, run.attempts[0]["outcome"], run.attempts[0]["pid"]) == ("running", None, 7)


def test_imports_are_a_kind_of_their_own(event) -> None:
    run = fold([event(kind="imported", data={"source": "csv"})]).runs["run-001"]
    assert (run.kind, run.status, run.created) == ("import", "completed", {"source": "csv"})


def test_the_champion_is_the_run_of_the_newest_promotion(event) -> None:
    events = [
        event("run-001", "created", number=1),
        event("run-002", "created", number=2),
        event("run-002", "promoted", number=3, second=5),
        event("run-001", "promoted", number=4, second=9),
    ]
    assert fold(events).champion == fold(reversed(events)).champion == "run-001"
    assert fold(events[:3]).champion == "run-002"
    assert fold(events[:2]).champion is None


def test_runs_come_in_the_order_of_their_numbers(event) -> None:
    names = ["run-1000", "run-002", "run-999", "run-010"]
    events = [event(name, "created", number=index, second=index) for index, name in enumerate(names)]
    assert list(fold(events).runs) == ["run-002", "run-010", "run-999", "run-1000"]


def test_links_beat_clocks(event) -> None:
    """A machine whose clock is an hour behind appends a child that looks older than its parent."""
    birth = event(kind="created", number=5, second=3600)
    child = event(kind="decided", number=1, second=10, prev=[birth.sha], data={"decision": "reject", "reason": "a"})
    grandchild = event(kind="decided", number=0, second=5, prev=[child.sha], data={"decision": "keep", "reason": "b"})
    other = event("run-002", "created", number=9, second=20)
    for seed in range(20):
        events = [birth, child, grandchild, other]
        random.Random(seed).shuffle(events)
        assert in_order(events) == [other, birth, child, grandchild]
        assert fold(events).runs["run-001"].decision == "keep"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_state_that_grew_is_the_fold_of_all_events(event, data) -> None:
    """Events appended one by one, most of them behind the last of their run, by machines whose clocks disagree."""
    events: list = []
    kinds = ["noted", "started", "decided", "noted", "finished", "promoted", "renumbered", "sparkled"]
    for number in range(data.draw(st.integers(1, 20))):
        run = data.draw(st.sampled_from(["run-001", "run-1000", "run-999", "program"]))
        mine = [e for e in events if e.run == run]
        prev = heads(mine)
        if mine and data.draw(st.integers(0, 9)) == 0:
            prev = [data.draw(st.sampled_from(events)).sha]
        kind = data.draw(st.sampled_from(kinds)) if mine or run == "program" else "created"
        body = {"attempt": 1, "outcome": "completed", "decision": f"d{number}", "to": "run-007"}
        events.append(event(run, kind, body, data.draw(st.integers(0, 9)), number, prev))
    contested = [n for n, e in enumerate(events) if contests(e, [o for o in events[:n] if o.run == e.run] or None)]
    known = min([data.draw(st.integers(0, len(events))), *contested])
    before = fold(events[:known])
    kept = snapshot(before)
    state = grown(before, events[known:])
    assert snapshot(before) == kept
    if state is not None:
        whole = fold(events)
        assert snapshot(state) == snapshot(whole) and list(state.runs) == list(whole.runs)
        assert state.program_events == whole.program_events
    else:
        assert known < len(events)


def test_what_cannot_simply_be_added_is_folded_anew(event) -> None:
    birth = event(kind="created", number=1)
    state = fold([birth])
    note = event(number=2, second=1, prev=[birth.sha])
    added = grown(state, [note, event("run-002", "created", number=3), event("program", number=4)])
    assert added is not None and list(added.runs) == ["run-001", "run-002"] and len(added.program_events) == 1
    assert list(state.runs) == ["run-001"] and len(state.runs["run-001"].events) == 1 and state.program_events == []
    for kind, prev in (("promoted", birth), ("renumbered", birth), ("sparkled", birth), ("created", None)):
        late = event(kind=kind, number=9, second=5, prev=[] if prev is None else [prev.sha])
        assert grown(state, [late]) is None
    assert grown(fold([birth, note]), [event(number=5, second=2, prev=[birth.sha])]) is None  # a fork


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shuffled_and_repeated_lines_fold_to_the_same_state(event, data) -> None:
    """A random DAG of runs with clocks that disagree, as branches and merges leave it."""
    events: list = []
    kinds = ["noted", "started", "finished", "decided", "promoted", "evaluated", "celebrated"]
    for number in range(data.draw(st.integers(1, 25))):
        run = data.draw(st.sampled_from(["run-001", "run-002", "run-003", "program"]))
        mine = [e for e in events if e.run == run]
        kind = data.draw(st.sampled_from(kinds)) if mine else "created"
        prev = [e.sha for e in data.draw(st.lists(st.sampled_from(mine), max_size=2, unique_by=id))] if mine else []
        body = {"attempt": data.draw(st.integers(1, 2)), "outcome": "completed", "decision": f"d{number}"}
        events.append(event(run, kind, body, data.draw(st.integers(0, 9)), number, prev))
    expected = snapshot(fold(events))
    mixed = data.draw(st.permutations(events + data.draw(st.lists(st.sampled_from(events), max_size=5))))
    assert snapshot(fold(mixed)) == expected
    order = {e.sha: position for position, e in enumerate(in_order(events))}
    assert all(order[sha] < order[e.sha] for e in events for sha in e.prev)


def test_a_missing_predecessor_does_not_stop_the_fold(event) -> None:
    late = event(number=2, second=2, prev=["f" * 64])
    assert fold([late, event(kind="created", number=1)]).runs["run-001"].events[-1] == late


def test_two_bodies_with_one_id_are_refused(event) -> None:
    with pytest.raises(LedgerCorruptError, match="share the id"):
        fold([event(number=1, data={"text": "a"}), event(number=1, data={"text": "b"})])


def test_unknown_critical_kinds_are_refused(event) -> None:
    assert fold([event(kind="sparkled")]).runs["run-001"].status == "created"
    with pytest.raises(UnknownEventError, match="sparkled"):
        fold([event(kind="sparkled", critical=True)])
    assert fold([event(kind="decided", critical=True, data={"decision": "keep"})]).runs["run-001"].decision == "keep"
