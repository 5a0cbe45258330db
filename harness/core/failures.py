"""Where a failure belongs: one table of rules from exceptions and exit statuses to failure classes.

The table is what the code asks and what `docs/failures.md` shows. The first rule that matches wins.
Exceptions of packages that this layer must not import are known by name.
"""

from __future__ import annotations

import errno
import http.client
import signal
import socket
import urllib.error
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple

from harness.core.errors import (
    DivergedError,
    ExitCode,
    HarnessError,
    InfraError,
    StoppedError,
    ToolError,
    is_out_of_memory,
)
from harness.core.types import Decision, FailureClass, Outcome


class Stage(StrEnum):
    """What was going on when an exception was raised."""

    ATTEMPT = "attempt"
    """Anything of an attempt outside a verifier: loading, sampling, training, writing."""
    SCORE = "score"
    """A verifier was scoring one item."""


class ExceptionRule(NamedTuple):
    """From an exception to what it says about an attempt, or about one item.

    Args:
        what: the exceptions, in words.
        matches: whether a raised exception is one of them.
        failure: the class; None says that nothing outside the harness and its inputs is to blame.
        outcome: how an attempt that it ends is recorded.
        stages: where the rule holds.
    """

    what: str
    matches: Callable[[BaseException], bool]
    failure: FailureClass | None
    outcome: Outcome = Outcome.FAILED
    stages: tuple[Stage, ...] = (Stage.ATTEMPT, Stage.SCORE)


class ExitRule(NamedTuple):
    """From the exit status of a process that left no word to a failure class."""

    what: str
    statuses: frozenset[int]
    failure: FailureClass | None


def _is(*types: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, types)


_UPSTREAM = (
    ToolError,
    ConnectionRefusedError,
    ConnectionResetError,
    ConnectionAbortedError,
    socket.gaierror,
    http.client.HTTPException,
    urllib.error.URLError,
)
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NATIVE = ("SafetensorError", "AcceleratorError", "DistBackendError", "OutOfMemoryError")
"""Errors of torch and safetensors that tell of the machine: a full disk, a lost device."""

EXCEPTION_RULES = (
    ExceptionRule(
        "`KeyboardInterrupt`, `SystemExit`: Ctrl-C, SIGTERM, SIGHUP, `harness stop`",
        _is(KeyboardInterrupt, SystemExit),
        None,
        Outcome.INTERRUPTED,
        (Stage.ATTEMPT,),
    ),
    ExceptionRule(
        "`DivergedError`: a watchdog, a gradient that is not finite, or no group with spread any more",
        _is(DivergedError),
        FailureClass.MODEL,
        Outcome.STOPPED,
        (Stage.ATTEMPT,),
    ),
    ExceptionRule("`StoppedError`: a budget", _is(StoppedError), None, Outcome.STOPPED, (Stage.ATTEMPT,)),
    ExceptionRule("memory ran out: `MemoryError`, or torch says so", is_out_of_memory, FailureClass.INFRA),
    ExceptionRule(
        "`ToolError`, a refused or reset connection, an unknown host, an HTTP error", _is(*_UPSTREAM), FailureClass.TOOL
    ),
    ExceptionRule(
        "`InfraError`, `TimeoutError`, an `OSError` of a full or broken disk or too many open files",
        lambda error: isinstance(error, InfraError | TimeoutError) or getattr(error, "errno", None) in _MACHINE,
        FailureClass.INFRA,
    ),
    ExceptionRule("every other `OSError`", _is(OSError), FailureClass.INFRA, stages=(Stage.ATTEMPT,)),
    ExceptionRule(
        "errors by which torch and safetensors tell of the machine",
        lambda error: any(kind.__name__ in _NATIVE for kind in type(error).__mro__),
        FailureClass.INFRA,
    ),
    ExceptionRule("any other exception of a verifier", _is(Exception), FailureClass.VERIFIER, stages=(Stage.SCORE,)),
    ExceptionRule(
        "any other error of harness: a wrong config, a refusal", _is(HarnessError), None, stages=(Stage.ATTEMPT,)
    ),
    ExceptionRule("anything else: a bug", _is(BaseException), None, stages=(Stage.ATTEMPT,)),
)


def _signalled(*names: str) -> frozenset[int]:
    """Return both spellings of a death by signal: `-9` as Python reports it, `137` as shells do."""
    numbers = [int(getattr(signal, name)) for name in names]
    return frozenset([*(-number for number in numbers), *(128 + number for number in numbers)])


EXIT_RULES = (
    ExitRule("0: it ended well, and its last event is missing", frozenset([0]), FailureClass.INFRA),
    ExitRule("71: the machine failed", frozenset([int(ExitCode.INFRA)]), FailureClass.INFRA),
    ExitRule("124: `timeout` ended it", frozenset([124]), FailureClass.INFRA),
    ExitRule("SIGKILL: memory ran out, or someone killed it", _signalled("SIGKILL"), FailureClass.INFRA),
    ExitRule(
        "SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV: native code died",
        _signalled("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"),
        FailureClass.INFRA,
    ),
    ExitRule("SIGXCPU, SIGXFSZ: a limit of the machine", _signalled("SIGXCPU", "SIGXFSZ"), FailureClass.INFRA),
    ExitRule("SIGHUP, SIGINT, SIGTERM: told to stop", _signalled("SIGHUP", "SIGINT", "SIGTERM"), None),
    ExitRule("1, 2, 3, 4, 6, 70, 75: harness said why on standard error", frozenset([1, 2, 3, 4, 6, 70, 75]), None),
)
UNKNOWN_EXIT = FailureClass.INFRA
"""Class of an attempt whose process is gone and whose exit status nobody saw."""

DECISIONS: Mapping[FailureClass | None, tuple[Decision, ...]] = {
    FailureClass.INFRA: (Decision.RERUN, Decision.INCONCLUSIVE),
    FailureClass.TOOL: (Decision.RERUN, Decision.INCONCLUSIVE),
    FailureClass.VERIFIER: (Decision.RERUN, Decision.INCONCLUSIVE),
    FailureClass.MODEL: tuple(Decision),
    None: tuple(Decision),
}
"""What may be decided on a run whose last attempt failed with a class, as far as the class is concerned."""

SPOILED = tuple(failure for failure in FailureClass if Decision.REJECT not in DECISIONS[failure])
"""Failures that say nothing about the hypothesis."""


def rule_for(error: BaseException, stage: Stage = Stage.ATTEMPT) -> ExceptionRule:
    """Return the first rule that an exception matches."""
    return next(rule for rule in EXCEPTION_RULES if stage in rule.stages and rule.matches(error))


def failure_of(error: BaseException, stage: Stage = Stage.ATTEMPT) -> FailureClass | None:
    """Return the failure class of an exception; None for a stop, a wrong config or a bug."""
    return rule_for(error, stage).failure


def failure_of_exit(status: int | None) -> FailureClass | None:
    """Return the failure class of a process that left no `finished` event.

    Args:
        status: its exit status as a shell (137) or Python (-9) reports it; None when nobody saw it.
    """
    if status is None:
        return UNKNOWN_EXIT
    return next((rule.failure for rule in EXIT_RULES if status in rule.statuses), None)


def failure_tables() -> list[str]:
    """Return the rules as Markdown tables, one line each, for `docs/failures.md`."""
    lines = ["| exception | while | attempt ends as | class |", "|---|---|---|---|"]
    for rule in EXCEPTION_RULES:
        stages = ", ".join(rule.stages)
        outcome = str(rule.outcome) if Stage.ATTEMPT in rule.stages else "goes on"
        lines.append(f"| {rule.what} | {stages} | {outcome} | {_class(rule.failure)} |")
    lines += ["", "| exit status | class |", "|---|---|"]
    lines += [f"| {rule.what} | {_class(rule.failure)} |" for rule in EXIT_RULES]
    lines += ["| nobody saw it | " + _class(UNKNOWN_EXIT) + " |", "| any other | none |"]
    lines += ["", "| class of the last attempt | decisions it leaves |", "|---|---|"]
    for failure, decisions in DECISIONS.items():
        allowed = "all" if decisions == tuple(Decision) else ", ".join(f"`{decision}`" for decision in decisions)
        lines.append(f"| {_class(failure)} | {allowed} |")
    return lines


def _class(failure: FailureClass | None) -> str:
    return f"`{failure}`" if failure else "none"
