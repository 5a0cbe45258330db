"""The table of failure classes: every rule is met by something, and the page shows the table."""

import errno
import socket
import urllib.error
from pathlib import Path

import pytest

from harness.core.errors import (
    BusyError,
    ConfigError,
    DivergedError,
    InfraError,
    RefusedError,
    StoppedError,
    ToolError,
)
from harness.core.failures import (
    DECISIONS,
    EXCEPTION_RULES,
    EXIT_RULES,
    SPOILED,
    Stage,
    failure_of,
    failure_of_exit,
    failure_tables,
    rule_for,
)
from harness.core.types import Decision, FailureClass

ROOT = Path(__file__).parents[2]
SafetensorError = type("SafetensorError", (Exception,), {})
OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})

EXAMPLES = [
    (KeyboardInterrupt(), None, "interrupted"),
    (SystemExit(143), None, "interrupted"),
    (DivergedError("the gradient is not finite"), "model", "stopped"),
    (StoppedError("the budget is spent"), None, "stopped"),
    (MemoryError(), "infra", "failed"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "infra", "failed"),
    (ToolError("the search service answered 503"), "tool", "failed"),
    (ConnectionRefusedError(), "tool", "failed"),
    (socket.gaierror(-2, "Name or service not known"), "tool", "failed"),
    (urllib.error.URLError("unreachable"), "tool", "failed"),
    (InfraError("cannot write"), "infra", "failed"),
    (TimeoutError(), "infra", "failed"),
    (OSError(errno.ENOSPC, "No space left on device"), "infra", "failed"),
    (BrokenPipeError(), "infra", "failed"),
    (FileNotFoundError("weights"), "infra", "failed"),
    (BusyError("locked"), "infra", "failed"),
    (SafetensorError("header"), "infra", "failed"),
    (OutOfMemoryError("device"), "infra", "failed"),
    (ConfigError("no such key"), None, "failed"),
    (RefusedError("a held-out item is trained on"), None, "failed"),
    (ZeroDivisionError(), None, "failed"),
]


@pytest.mark.parametrize(("error", "failure", "outcome"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_what_ends_an_attempt(error, failure, outcome):
    rule = rule_for(error)
    assert (rule.failure, rule.outcome) == (failure, outcome)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("bug"), "verifier"),
        (FileNotFoundError("a file of the verifier"), "verifier"),
        (RecursionError(), "verifier"),
        (ConfigError("x"), "verifier"),
        (MemoryError(), "infra"),
        (OSError(errno.EMFILE, "Too many open files"), "infra"),
        (TimeoutError(), "infra"),
        (ToolError("503"), "tool"),
        (ConnectionResetError(), "tool"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_verifier_raises(error, failure):
    assert failure_of(error, Stage.SCORE) == failure


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        *((None, "infra"), (0, "infra"), (71, "infra"), (124, "infra"), (137, "infra"), (-9, "infra")),
        *((139, "infra"), (-11, "infra"), (134, "infra"), (153, "infra")),
        *((130, None), (143, None), (-15, None), (129, None), (1, None), (2, None), (70, None), (42, None)),
    ],
)
def test_exit_statuses(status, failure):
    assert failure_of_exit(status) == failure


def test_no_rule_is_without_an_example():
    met = {rule_for(error).what for error, _, _ in EXAMPLES} | {rule_for(ValueError(), Stage.SCORE).what}
    assert met == {rule.what for rule in EXCEPTION_RULES}
    statuses = [status for rule in EXIT_RULES for status in rule.statuses]
    assert len(statuses) == len(set(statuses)), "a status has two classes"


def test_only_the_models_own_failures_may_lead_to_reject():
    assert set(DECISIONS) == {*FailureClass, None}
    assert set(SPOILED) == {FailureClass.INFRA, FailureClass.TOOL, FailureClass.VERIFIER}
    for failure in SPOILED:
        assert Decision.RERUN in DECISIONS[failure]
        assert Decision.REJECT not in DECISIONS[failure]


def test_the_page_shows_the_table_of_the_code():
    page = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()
    start = page.index(failure_tables()[0])
    assert page[start : start + len(failure_tables())] == failure_tables()
