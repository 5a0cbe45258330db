"""Entry point: run a command, turn every way it can end into one exit code and one clear message.

A crash can never look like a verdict: unexpected exceptions exit 70, output that could not be
written is never exit 0, and interrupts have codes of their own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.cli import output
from harness.cli.root import COMMANDS, root_help
from harness.core.errors import ExitCode, HarnessError, InfraError, MissingExtraError, UsageError, is_out_of_memory

if TYPE_CHECKING:
    import signal
    from pathlib import Path
    from types import FrameType

BROKEN_PIPE = 141
"""The reader of standard output went away (128 + SIGPIPE), as in `harness list | head -1`."""

_terminated = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments after the program name; the process's own when None, which also
            installs the signal handlers.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        output.narrate("error: standard output is closed, so the answer would be lost")
        return ExitCode.INFRA
    output.settings = output.Settings(json="--json" in _before_dashes(args))
    try:
        code = _run(args, signals=argv is None)
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as error:  # the answer, or the error message itself, could not be written
        code = _output_lost(error)
    code = _finish(code)
    if argv is None:
        _leave(code)
    return code


def _before_dashes(args: list[str]) -> list[str]:
    return args[: args.index("--")] if "--" in args else args


def _install_signals() -> None:
    """Let SIGINT, SIGHUP and SIGTERM raise KeyboardInterrupt once; the second one kills."""
    import signal

    def stop(number: int, _frame: FrameType | None) -> None:
        global _terminated
        _terminated = number != signal.SIGINT  # a terminal that hangs up asks to stop as SIGTERM does
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    for name in ("SIGINT", "SIGHUP", "SIGTERM"):
        number: signal.Signals = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs keep ignoring
            signal.signal(number, stop)


def _run(args: list[str], *, signals: bool) -> int:
    """Run one command and map every expected ending to its code."""
    try:
        if signals:
            _install_signals()  # here, so that no signal finds a handler and nobody who catches what it raises
        return _dispatch(args)
    except HarnessError as error:
        return output.write_error(error)
    except KeyboardInterrupt:
        code = ExitCode.TERMINATED if _terminated else ExitCode.INTERRUPTED
        stopped = HarnessError("stopped by a signal" if _terminated else "interrupted", _resume_hint(args))
        stopped.code, stopped.exit_code = "interrupted", code
        return output.write_error(stopped)
    except (BrokenPipeError, output.OutputLostError):
        raise
    except Exception as error:
        return _unexpected(error)


def _resume_hint(args: list[str]) -> str:
    run = next((arg for arg in args[1:] if not arg.startswith("-")), "RUN")
    return f"`harness launch {run} --resume` continues" if args[:1] == ["launch"] else ""


def _dispatch(args: list[str]) -> int:
    """Answer the root's own options without typer; import the module of a command only when it is called."""
    first = args[0] if args else "--help"
    if "_HARNESS_COMPLETE" in os.environ and (text := _completion()) is not None:
        if text:
            output.echo(text, multiline=True)
        return ExitCode.OK
    completing = "_HARNESS_COMPLETE" in os.environ or first in ("--install-completion", "--show-completion")
    if not completing and (first in ("--help", "-h") or args == ["help"]):
        output.echo(root_help(), multiline=True)
        return ExitCode.OK
    if first == "--version":
        from harness import __version__

        return output.write_result(output.Result({"version": __version__}, [f"harness {__version__}"]))
    if first not in COMMANDS and not completing:
        raise _no_command(first)
    if not completing and COMMANDS[first].plain and all(arg == "--json" for arg in args[1:]):
        from harness.cli import views

        return output.write_result(getattr(views, COMMANDS[first].plain)())
    from typer.exceptions import TyperException

    from harness.cli.root import completion_group, load_command

    try:
        if completing:
            code: Any = completion_group().main(args=args, prog_name="harness", standalone_mode=False)
        else:
            code = load_command(first).main(args=args[1:], prog_name=f"harness {first}", standalone_mode=False)
    except TyperException as error:
        return _usage(error)
    except SystemExit as ended:  # typer turns a broken pipe into exit code 1, which here would be a verdict
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        raise
    if code == ExitCode.INTERRUPTED:  # typer swallows Ctrl-C and returns its code
        raise KeyboardInterrupt
    return int(code or 0)


def _completion() -> str | None:
    from harness.cli.complete import answer

    return answer(os.environ)


def _no_command(first: str) -> UsageError:
    from harness.core.names import did_you_mean

    if first.startswith("-"):
        options = ("--help", "--version", "--install-completion", "--show-completion")
        hint = did_you_mean(first, options, "options of a command stand after its name; `harness --help` lists both")
        return UsageError(f"no option {first!r}", hint)
    return UsageError(f"no command {first!r}", did_you_mean(first, COMMANDS, "`harness --help` lists the commands"))


def _usage(error: Any) -> int:
    """Show a parse error of typer in the house form: one message, a suggestion, the command's help."""
    from harness.core.names import did_you_mean

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "harness"
    hint = f"`{path} --help` shows the arguments"
    if type(error).__name__ == "NoArgsIsHelpError":
        known = ", ".join(context.command.commands) if context is not None else ""
        return output.write_error(UsageError(f"`{path}` needs a command", f"one of {known}; {hint}"))
    message = error.message if getattr(error, "possibilities", None) is not None else error.format_message()
    message, _, near = message.partition(" Did you mean ")
    wrong = getattr(error, "option_name", "")
    if wrong and context is not None:
        options = [name for param in context.command.get_params(context) for name in param.opts]
        hint = did_you_mean(wrong, options, hint)
    elif near:
        hint = f"did you mean {near} {hint}"
    return output.write_error(UsageError(_lower_first(message.rstrip(".")), hint))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _unexpected(error: Exception) -> int:
    """Turn a missing extra or a machine failure into its error; report everything else as a bug."""
    import errno

    from harness.core.files import disk_hint

    if missing := _missing_extra(error):
        return output.write_error(missing)
    if is_out_of_memory(error):
        return output.write_error(InfraError("out of memory", "`harness launch RUN --estimate` shows what a run needs"))
    machine = "ENOSPC EDQUOT EFBIG EROFS EACCES EPERM EIO EMFILE ENFILE EISDIR ENOTDIR ENAMETOOLONG ELOOP ESTALE ENXIO"
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in machine.split():
        place = f" {error.filename}" if error.filename else ""
        return output.write_error(InfraError(f"{error.strerror}{place}", disk_hint(error)))
    return _bug(error)


def _missing_extra(error: BaseException) -> MissingExtraError | None:
    """Return the extra whose absence an import error tells of; libraries wrap the one that names the module."""
    from harness.cli.extras import extra_of

    found: BaseException | None = error
    while isinstance(found, ImportError):
        if isinstance(found, ModuleNotFoundError) and (extra := extra_of(found.name)):
            return MissingExtraError(extra, str(found.name).partition(".")[0])
        found = found.__cause__ or found.__context__
    return None


def _bug(error: Exception) -> int:
    """Write the traceback to a file, without secrets, and say in one line how to report it."""
    import traceback

    from harness.core.redact import redact

    text = redact("".join(traceback.format_exception(error)))
    if os.environ.get("HARNESS_DEBUG"):
        output.echo(text, err=True, multiline=True)
    name = type(error).__name__
    report = HarnessError(f"unexpected {name}: {error}", "")
    report.code, report.exit_code = "internal", ExitCode.INTERNAL
    try:
        path = _crash_file(text)
        report.hint = f"this is a bug in harness; please report it with the traceback in {path}"
    except OSError as failure:
        report.hint = f"this is a bug in harness (its traceback could not be written: {failure.strerror}); "
        report.hint += "set HARNESS_DEBUG=1 and run it again to see the traceback"
    return output.write_error(report)


def _crash_file(text: str) -> Path:
    """Write a traceback, readable by its owner only, into outputs/ of the program or the temporary folder."""
    import tempfile
    from pathlib import Path

    folder = None
    for candidate in (Path.cwd(), *Path.cwd().parents):
        if (candidate / "GOAL.md").is_file() and (candidate / "outputs").is_dir():
            folder = candidate / "outputs"
            break
    descriptor, name = tempfile.mkstemp(prefix="harness-crash-", suffix=".log", dir=folder)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return Path(name)


def _finish(code: int) -> int:
    """Flush standard output; lost output is never a success."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as error:
        code = _output_lost(error)
    if code == BROKEN_PIPE:
        _discard_stdout()
    return code


def _leave(code: int) -> None:
    """End the process at once when nothing waits for its end.

    Freeing 100,000 events one after the other takes a second, for memory that goes back with the process anyway.
    """
    import atexit

    if atexit._ncallbacks() or len(sys._current_frames()) > 1:  # torch, logging, coverage, a thread: the usual way out
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or lost
        sys.stderr.flush()  # standard output was flushed by `_finish`
    os._exit(code)


def _output_lost(error: OSError) -> int:
    _discard_stdout()
    try:
        output.settings.json = False
        output.write_error(InfraError(f"cannot write to standard output: {error.strerror}", "the answer was lost"))
    except OSError:
        return ExitCode.INFRA
    return ExitCode.INFRA


def _discard_stdout() -> None:
    """Point standard output at /dev/null, so that the interpreter's last flush cannot fail."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # no descriptor behind it, as in tests that capture
        return
