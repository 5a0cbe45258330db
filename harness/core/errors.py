"""One error tree: what happened, a hint with the command that helps, and an exit code.

Every leaf also inherits the standard type it specialises, so callers may catch either.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command. A crash can never look like a verdict."""

    OK = 0
    """The command did what was asked; the answer, if there was a question, is yes."""
    NO = 1
    """The answer is no: a gate failed, verify found damage, a report is stale."""
    USAGE = 2
    """Bad arguments, a bad configuration file, an unknown name, a missing extra."""
    CANNOT_TELL = 3
    """Evidence is missing, so neither yes nor no can be said."""
    STOPPED = 4
    """A watchdog or a budget stopped the run."""
    LEDGER_CORRUPT = 6
    """The ledger holds damage that must not be read over."""
    INTERNAL = 70
    """A bug in harness."""
    INFRA = 71
    """The machine failed: disk full, corrupt adapter, engine lost."""
    BUSY = 75
    """Another process holds what is needed; try again."""
    INTERRUPTED = 130
    """Ctrl-C (SIGINT)."""
    TERMINATED = 143
    """SIGTERM."""


class HarnessError(Exception):
    """Base of every expected failure.

    Args:
        message: what happened, naming the thing and the place; self-contained.
        hint: the command or edit that helps; empty when there is none.
    """

    code = "error"
    exit_code = ExitCode.USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(HarnessError, ValueError):
    """Arguments that make no sense together."""

    code = "usage"


class ConfigError(HarnessError, ValueError):
    """A run config, GOAL, CONTEXT or PLAN that does not parse or breaks a rule."""

    code = "config"


class NotFoundError(HarnessError, LookupError):
    """A run, environment, model, file or program that does not exist."""

    code = "not_found"


class MissingExtraError(HarnessError, ImportError):
    """A command needs packages of an extra that is not installed."""

    code = "missing_extra"

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(
            f"this command needs the package {package!r}, which is not installed",
            f"pip install 'post-training-harness[{extra}]'",
        )
        self.args = (extra, package)  # exceptions are rebuilt from args when pickled


class RefusedError(HarnessError, ValueError):
    """A rule of the program says no (a frozen key, two changes at once, a rejected run)."""

    code = "refused"


class VerdictError(HarnessError):
    """The answer to the question asked is no."""

    code = "no"
    exit_code = ExitCode.NO


class CannotTellError(HarnessError):
    """Evidence is missing or incomplete, so there is no verdict."""

    code = "cannot_tell"
    exit_code = ExitCode.CANNOT_TELL


class StoppedError(HarnessError):
    """A watchdog or a budget ended the run."""

    code = "stopped"
    exit_code = ExitCode.STOPPED


class DivergedError(StoppedError):
    """A watchdog ended the run because the policy cannot learn any more; counts against the model."""


class LedgerCorruptError(HarnessError, ValueError):
    """The ledger is damaged somewhere else than in a torn last line."""

    code = "ledger_corrupt"
    exit_code = ExitCode.LEDGER_CORRUPT


class InfraError(HarnessError, OSError):
    """The machine, a disk or an engine failed."""

    code = "infra"
    exit_code = ExitCode.INFRA


class ToolError(HarnessError, OSError):
    """An upstream service that an environment calls failed: raised by environments, never by the machine."""

    code = "tool"
    exit_code = ExitCode.INFRA


class BusyError(HarnessError, BlockingIOError):
    """A lock is held by another process."""

    code = "busy"
    exit_code = ExitCode.BUSY


_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out: a MemoryError, or the RuntimeError that torch raises for processor and device."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_WORDS)
    return said or isinstance(error, MemoryError)
