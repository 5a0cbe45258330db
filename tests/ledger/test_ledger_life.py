"""Stale attempts and how they are closed, superseded work, tags and ideas."""

from __future__ import annotations

import json

import pytest

from harness.core.errors import CannotTellError, NotFoundError, RefusedError, UsageError
from harness.ledger import this_process
from harness.ledger.ideas import drop_idea, leave_idea, next_idea, same_idea, tag_run
from harness.ledger.life import live_status, stale
from harness.ledger.process import look
from harness.ledger.recover import Told, check_known, close, stale_runs
from harness.ledger.results import last_policy_evals, own_prompt_evals
from harness.ledger.superseded import current_rows, is_superseded, read_rows, superseded_rows

RUN = "run-001"


def dead():
    """A process of this machine and boot that is gone: our pid, another start time."""
    mine = this_process()
    head, _, ticks = mine["pid_start"].rpartition(":")
    return mine | {"pid_start": f"{head}:{int(ticks) - 1}"}


def elsewhere():
    return this_process() | {"host": "node-7"}


def begin(ledger, process, attempt=1, **more):
    if RUN not in ledger.state().runs:
        ledger.append(RUN, "created", {"type": "training", "hypothesis": "h"})
    ledger.append(RUN, "started", {"attempt": attempt, **process, "resumed_from": None, **more})
    return ledger.state().runs[RUN]


def shut(ledger, tmp_path, told=None):
    return close(ledger, [RUN], lambda run: tmp_path / run, told)


def test_a_dead_process_makes_a_run_stale_and_nothing_is_written(ledger, path):
    run = begin(ledger, dead())
    before = path.read_bytes()
    assert live_status(run) == "stale"
    found = stale(run)
    assert found.since == run.events[-1].at
    assert "another process" in found.why
    assert stale_runs(ledger.state()) == [RUN]
    assert (run.status, path.read_bytes()) == ("running", before)


@pytest.mark.parametrize("process", [this_process, elsewhere, dict])
def test_what_lives_or_cannot_be_seen_is_not_stale(ledger, process):
    run = begin(ledger, process())
    assert (live_status(run), stale(run), stale_runs(ledger.state())) == ("running", None, [])


def test_an_ended_attempt_is_not_stale_whatever_became_of_its_process(ledger):
    begin(ledger, dead())
    ledger.append(RUN, "finished", {"attempt": 1, "outcome": "completed"})
    run = ledger.state().runs[RUN]
    assert (live_status(run), stale(run)) == ("completed", None)


def test_the_last_sign_of_life_is_the_newest_trace(ledger, tmp_path):
    run = begin(ledger, dead())
    folder = tmp_path / RUN
    folder.mkdir()
    rows = [{"step": 1, "time": 4_000_000_000.25, "attempt": 1}, {"step": 2, "time": 4_100_000_000.0, "attempt": 2}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "ti')
    assert stale(run, folder).since == "2096-10-02T07:06:40.250Z"
    assert stale(run, tmp_path / "absent").since == run.events[-1].at


def test_recovery_writes_the_crash_with_its_reason(ledger, tmp_path):
    begin(ledger, dead(), resumed_from=4)
    folder = tmp_path / RUN
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 6, "time": 1.5, "attempt": 1}\n{"step": 9, "attempt": 7}\n')
    (event,) = shut(ledger, tmp_path, Told(reason="seen in the kernel log", exit_status=-9))
    data = event.data
    assert (event.kind, data["attempt"], data["outcome"], data["failure"], data["step"]) == (
        *("finished", 1, "crashed", "infra"),
        6,
    )
    assert "another process by now; seen in the kernel log; exit status -9; last sign of life 20" in data["reason"]
    run = ledger.state().runs[RUN]
    assert (run.status, live_status(run)) == ("crashed", "crashed")
    assert shut(ledger, tmp_path) == []  # a second time there is nothing to close


def test_a_crash_before_the_first_row_stands_at_the_step_it_resumed_from(ledger, tmp_path):
    begin(ledger, dead(), resumed_from=4)
    assert shut(ledger, tmp_path)[0].data["step"] is None  # its folder is not here, so nobody knows
    begin(ledger, dead(), attempt=2, resumed_from=4)
    (tmp_path / RUN).mkdir()
    assert shut(ledger, tmp_path)[0].data["step"] == 4


def test_an_exit_status_that_means_told_to_stop_is_no_infra_failure(ledger, tmp_path):
    begin(ledger, dead())
    assert shut(ledger, tmp_path, Told(exit_status=143))[0].data["failure"] is None


def test_a_live_run_is_refused_even_when_forced(ledger, path, tmp_path):
    begin(ledger, this_process())
    before = path.read_bytes()
    told = Told(host=this_process()["host"], reason="I want it gone")
    for known in (None, told):
        with pytest.raises(RefusedError, match="is running") as caught:
            shut(ledger, tmp_path, known)
        assert f"harness stop {RUN}" in caught.value.hint
    assert path.read_bytes() == before


def test_a_run_on_another_host_is_never_called_dead_by_itself(ledger, path, tmp_path):
    run = begin(ledger, elsewhere())
    before = path.read_bytes()
    with pytest.raises(CannotTellError, match="runs on node-7") as caught:
        shut(ledger, tmp_path)
    assert "--force-host node-7 --reason" in caught.value.hint
    with pytest.raises(CannotTellError):
        check_known(run)
    for told, words in (
        (Told(host="node-8", reason="gone"), "runs on node-7, not on node-8"),
        (Told(host="node-7"), "takes a reason"),
        (Told(host="node-7", reason="  "), "takes a reason"),
    ):
        with pytest.raises(UsageError, match=words):
            shut(ledger, tmp_path, told)
    assert path.read_bytes() == before
    (event,) = shut(ledger, tmp_path, Told("node-7", "out of the cluster since Monday"))
    assert "declared dead: out of the cluster since Monday" in event.data["reason"]


def test_closing_decides_under_the_lock(ledger, path, tmp_path):
    """The process may write its own end between the look and the append."""
    begin(ledger, dead())
    ledger.append(RUN, "finished", {"attempt": 1, "outcome": "interrupted"})
    assert shut(ledger, tmp_path) == []


def test_the_reason_names_what_is_known():
    mine = this_process()
    machine, boot, namespace, ticks = mine["pid_start"].split(":")
    assert look(mine | {"pid_start": f"{machine}:00000000:{namespace}:{ticks}"}).why.endswith("was started again since")
    assert "another container" in look(mine | {"pid_start": f"{machine}:{boot}:00000000:{ticks}"}).why
    assert "another machine" in look(mine | {"pid_start": f"00000000:{boot}:{namespace}:{ticks}"}).why
    assert look(mine | {"pid": 2**22 + 1}).why == f"pid {2**22 + 1} of {mine['host']} is gone"
    assert look({}).why == "its event names no host"


# Superseded work


def evaluated(ledger, attempt, step, mean=0.5):
    data = {"attempt": attempt, "subject": "policy" if step else "base", "step": step, "env": "toy", "prompt": "run"}
    ledger.append(RUN, "evaluated", data | {"means": {"reward": {"mean": mean}}})


def finish(ledger, attempt, outcome):
    ledger.append(RUN, "finished", {"attempt": attempt, "outcome": outcome})


def test_evals_after_the_step_of_the_resume_are_superseded(ledger):
    begin(ledger, dead())
    for step in (0, 4, 8):
        evaluated(ledger, 1, step, step / 10)
    finish(ledger, 1, "crashed")
    begin(ledger, dead(), attempt=2, resumed_from=4)
    run = ledger.state().runs[RUN]
    assert [is_superseded(data, run.attempts) for data in run.evals] == [False, False, True]
    assert last_policy_evals(run)["toy"]["step"] == 4
    evaluated(ledger, 2, 8, 0.1)
    run = ledger.state().runs[RUN]
    assert last_policy_evals(run)["toy"]["means"]["reward"]["mean"] == 0.1


def test_a_run_that_starts_over_has_no_result_of_its_older_attempts(ledger):
    begin(ledger, dead())
    evaluated(ledger, 1, 0)
    evaluated(ledger, 1, 8)
    finish(ledger, 1, "completed")
    begin(ledger, dead(), attempt=2)
    run = ledger.state().runs[RUN]
    assert last_policy_evals(run) == {}
    assert [is_superseded(data, run.attempts) for data in run.evals] == [False, True]


def test_evals_under_another_prompt_or_of_other_weights_are_none_of_the_run_s_own(ledger):
    begin(ledger, this_process())
    for step, prompt in ((0, "run"), (0, "shipped"), (4, "run"), (4, "shipped"), (8, "run")):
        data = {"attempt": 1, "subject": "policy", "step": step, "env": "toy", "prompt": prompt}
        ledger.append(RUN, "evaluated", data | {"means": {}})
    found = own_prompt_evals(ledger.state().runs[RUN])
    assert [(data["step"], data["prompt"]) for data in found] == [(0, "run"), (4, "run"), (8, "run")]
    ledger.append(RUN, "finished", {"attempt": 1, "outcome": "interrupted", "step": 8})
    found = own_prompt_evals(begin(ledger, this_process(), 2, resumed_from=4))
    assert [data["step"] for data in found] == [0, 4]


def test_events_without_an_attempt_are_never_superseded():
    assert not is_superseded({"step": 4}, [{"attempt": 2}])
    assert not is_superseded({"attempt": 1, "step": 4}, [{"attempt": None}, {}])


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([(1, 1), (1, 2), (1, 3)], [1, 2, 3]),
        # a crash at step 15 and a resume at step 10: 100 steps, not 105
        ([(1, step) for step in range(1, 16)] + [(2, step) for step in range(11, 101)], list(range(1, 101))),
        # the second attempt died earlier than the first: what the first left beyond is not current
        ([(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)], [1, 2]),
        ([(1, 1), (1, 2), (2, 2), (3, 1)], [1]),
        ([(1, 1), (2, 2), (3, 3), (3, 4), (4, 4)], [1, 2, 3, 4]),
        ([(None, 1), (None, 2), (2, 2)], [1, 2, 2]),  # rows that do not say whose they are are left alone
        ([], []),
    ],
)
def test_superseded_rows_leave_one_line(rows, kept):
    rows = [{"attempt": attempt, "step": step} for attempt, step in rows]
    assert [row["step"] for row in current_rows(rows)] == kept
    assert len(superseded_rows(rows)) == len(rows)


def test_rows_are_read_past_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"x":{"$non_finite":"nan"}}\n{"step":2,"x"\n[1]\n{"x":1}\n{"step":3,"x":0.5}\n{"st')
    first, second = read_rows(path)
    assert first["x"] != first["x"]
    assert second == {"step": 3, "x": 0.5}
    assert read_rows(tmp_path / "absent") == []


# Tags and ideas


def test_tags_come_and_go_and_say_nothing_twice(ledger):
    ledger.append(RUN, "created", {"type": "training"})

    def tag(name, remove=False):
        return len(ledger.append_locked(lambda state: tag_run(state, RUN, name, remove)))

    assert (tag("b.1"), tag("a"), tag("a"), tag("c", remove=True)) == (1, 1, 0, 0)
    assert ledger.state().runs[RUN].tags == ("a", "b.1")
    assert (tag("a", remove=True), tag("a", remove=True), tag("a"), tag("a", remove=True)) == (1, 0, 1, 1)
    assert ledger.state().runs[RUN].tags == ("b.1",)
    for evil in ("", "..", "a/b", "-x", "con", "x\u202e", "a" * 129):
        with pytest.raises(UsageError, match="tag"):
            tag(evil)


def test_an_idea_is_open_until_a_run_takes_it_up_or_it_is_dropped(ledger):
    def leave(text, because=""):
        return ledger.append_locked(lambda state: leave_idea(state, text, because))

    with pytest.raises(NotFoundError, match="nobody has left"):
        next_idea(ledger.state())
    (first,) = leave("  Alpha 64  learns faster ", "the loss was flat")
    assert leave("Alpha 64 learns faster") == []  # the same words, however spaced
    (second,) = leave("Rank 32 helps")
    state = ledger.state()
    assert [idea["id"] for idea in state.ideas] == [first.id, second.id]
    assert state.ideas[0]["because"] == "the loss was flat"
    assert state.ideas[0]["actor"]["name"] == "tester"
    assert next_idea(state)["id"] == second.id
    same = same_idea(state, "Alpha 64 learns\nfaster")
    assert same is not None and same["id"] == first.id
    ledger.append(RUN, "created", {"type": "training", "hypothesis": "Rank 32 helps", "idea": second.id})
    assert [idea["id"] for idea in ledger.state().ideas] == [first.id]
    for idea, reason, error in (("ZZ", "x", NotFoundError), ("", "x", NotFoundError), (first.id, " ", UsageError)):
        with pytest.raises(error):
            ledger.append_locked(lambda state, idea=idea, reason=reason: drop_idea(state, idea, reason))
    ledger.append_locked(lambda state: drop_idea(state, first.id[:12].lower(), "answered by run-001"))
    assert ledger.state().ideas == []
    (again,) = leave("Alpha 64 learns faster")  # what was dropped may be thought of again
    assert [idea["id"] for idea in ledger.state().ideas] == [again.id]


@pytest.mark.parametrize("text", ["", "  \n", "x" * 2001])
def test_an_idea_is_a_sentence(ledger, path, text):
    with pytest.raises(UsageError, match="hypothesis"):
        ledger.append_locked(lambda state: leave_idea(state, text))
    assert not path.exists() or path.read_bytes() == b""


def test_a_secret_never_enters_the_ledger(ledger, path, monkeypatch):
    from harness.core import redact

    monkeypatch.setenv("SOME_SERVICE_TOKEN", "correct-horse-7")
    redact.redactor.cache_clear()
    try:
        ledger.append(RUN, "created", {"type": "training", "hypothesis": "correct-horse-7 helps"})
        ledger.append(RUN, "noted", {"text": ["see https://me:pa55@host.example/x", {"k": "hf_" + "a1" * 10}]})
    finally:
        monkeypatch.undo()
        redact.redactor.cache_clear()
    text = path.read_text()
    assert text.count("[redacted]") == 3
    assert "correct-horse" not in text and "pa55" not in text and "a1a1" not in text
