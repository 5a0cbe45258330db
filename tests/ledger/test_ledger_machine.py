"""A ledger that lives through anything, against a list: append, reopen, kill, truncate, merge, verify."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.ledger import Actor, Ledger, NewEvent, cache, index, store
from harness.ledger.events import parse_line
from harness.ledger.verify import verify

ADA = Actor("person", "Ada")
RUNS = [f"run-{number:03d}" for number in range(1, 5)]
TEXTS = st.text(max_size=20)


class LedgerMachine(RuleBasedStateMachine):
    """The model is the list of lines that must be there; the ledger may hold them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "runs.jsonl"
        self.now = 1_767_225_600_000_000_000
        self.model: list[bytes] = []
        self.torn = b""
        self.branch: list[bytes] | None = None
        self.open()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def tick(self) -> int:
        self.now += 1_000_000_000
        return self.now

    def open(self) -> None:
        self.ledger = Ledger(self.path, clock=self.tick)

    def known(self) -> set[str]:
        return {run for run in RUNS if any(f'"run":"{run}"'.encode() in line for line in self.model)}

    def added(self, events) -> None:
        self.model += [event.line for event in events]
        self.torn = b""

    @rule(run=st.sampled_from([*RUNS, "program"]), text=TEXTS)
    def append(self, run: str, text: str) -> None:
        if run == "program" or run in self.known():
            self.added([self.ledger.append(run, "noted", {"text": text}, actor=ADA)])

    @rule(run=st.sampled_from(RUNS))
    def create(self, run: str) -> None:
        # Branches take different numbers here; two runs with one number have tests of their own.
        taken = self.known() | {run for run in RUNS if any(run.encode() in line for line in self.branch or ())}
        if run not in taken:
            self.added([self.ledger.append(run, "created", {"hypothesis": run}, actor=ADA)])

    @rule(count=st.integers(1, 3))
    def append_batch(self, count: int) -> None:
        def build(state) -> list[NewEvent]:
            assert set(state.runs) == self.known()
            return [NewEvent(run, "decided", {"decision": "keep", "reason": "r"}, actor=ADA) for run in state.runs][
                :count
            ]

        events = self.ledger.append_locked(build)
        if events:
            self.added(events)

    @rule()
    def reopen(self) -> None:
        self.open()

    @rule()
    def read_through_the_index(self) -> None:
        if self.path.exists():
            index.read_state(self.path)

    @rule(share=st.floats(0, 1, exclude_max=True))
    def kill(self, share: float) -> None:
        """Die while an event is written: any part of its bytes may be in the file, and it was not acknowledged."""
        before = self.path.read_bytes() if self.path.exists() else b""
        event = self.ledger.append("program", "noted", {"text": "never acknowledged"}, actor=ADA)
        whole = self.path.read_bytes()
        start = len(whole) - len(event.line) - 1
        cut = start + int(share * len(event.line))
        self.path.write_bytes(whole[:cut])
        self.torn = whole[start:cut]
        if not self.torn and not before:
            self.path.unlink()
        self.open()

    @rule(count=st.integers(1, 2))
    @precondition(lambda self: len(self.model) > 3 and not self.torn and self.branch is None)
    def truncate(self, count: int) -> None:
        """Lose whole lines at the end, as an older copy of the file does."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        self.path.write_bytes(b"".join(lines[:-count]))
        lost = {line.rstrip(b"\n") for line in lines[-count:]}
        self.model = [line for line in self.model if line not in lost]

    @rule()
    @precondition(lambda self: self.branch is None and self.path.exists() and not self.torn)
    def leave_branch(self) -> None:
        """Another clone appends to the program from here on."""
        self.branch = list(self.model)

    @rule(run=st.sampled_from(RUNS), text=TEXTS)
    @precondition(lambda self: self.branch is not None)
    def append_on_branch(self, run: str, text: str) -> None:
        other = self.folder / "branch.jsonl"
        other.write_bytes(b"".join(line + b"\n" for line in self.branch or ()))
        there = {name for name in RUNS if any(f'"run":"{name}"'.encode() in line for line in self.branch or ())}
        target = run if run in there else "program"
        event = Ledger(other, clock=self.tick).append(target, "noted", {"text": text}, actor=ADA)
        self.branch = [*(self.branch or ()), event.line]

    @rule(order=st.randoms(use_true_random=False))
    @precondition(lambda self: self.branch is not None and not self.torn)
    def merge(self, order) -> None:
        """Git's union of lines: each once, in an order of git's own choice."""
        union = list(dict.fromkeys([*self.model, *(self.branch or ())]))
        order.shuffle(union)
        replacement = self.folder / "merged"
        replacement.write_bytes(b"".join(line + b"\n" for line in union))
        replacement.replace(self.path)
        self.model, self.branch = union, None

    @invariant()
    def everything_acknowledged_is_there(self) -> None:
        for ledger in (self.ledger, Ledger(self.path)):
            assert sorted(event.line for event in ledger.events()) == sorted(self.model)
            assert ledger.torn() == self.torn

    @invariant()
    def it_verifies(self) -> None:
        # a run that went on in two branches has a fork after the merge, which is a note
        errors = [finding.kind for finding in verify(self.path) if finding.severity == "error"]
        assert sorted(errors) == sorted((["torn"] if self.torn else []) + self.orphans())

    def orphans(self) -> list[str]:
        """Return the errors in the lines of the model: after a merge, a loss at the end can take only a parent."""
        events = [parse_line(line) for line in self.model]
        shas = {event.sha for event in events}
        created = {event.run for event in events if event.kind == "created"}
        return ["missing_event" for event in events for sha in event.prev if sha not in shas] + [
            "no_creation" for _ in self.known() - created
        ]

    @invariant()
    def the_index_says_what_the_fold_says(self) -> None:
        fresh, folded = index.read_state(self.path).state, Ledger(self.path).state()
        assert {name: run.decision for name, run in fresh.runs.items()} == {
            name: run.decision for name, run in folded.runs.items()
        }
        assert [run.events for run in fresh.runs.values()] == [run.events for run in folded.runs.values()]
        assert fresh.program_events == folded.program_events


def run_machine(monkeypatch, examples: int, steps: int) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    monkeypatch.setattr(store, "LAG_BYTES", 700)
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_ledger_against_a_list(monkeypatch) -> None:
    run_machine(monkeypatch, 5, 25)


@pytest.mark.slow
def test_ten_thousand_steps_of_a_ledger_against_a_list(monkeypatch) -> None:
    run_machine(monkeypatch, 200, 60)
