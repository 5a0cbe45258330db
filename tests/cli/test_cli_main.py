"""Every way a command can end has its code, and one clear message."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import main as entry
from harness.cli.help import EXIT_CODES
from harness.core.errors import BusyError, CannotTellError, ExitCode, InfraError, LedgerCorruptError, VerdictError
from harness.ledger import Ledger
from harness.ledger.process import this_process


def harness(*argv, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "harness", *argv], capture_output=True, text=True, timeout=60, **kwargs
    )


def fail_with(monkeypatch, error):
    def dispatch(_args):
        raise error

    monkeypatch.setattr(entry, "_dispatch", dispatch)


@pytest.mark.parametrize("error", [VerdictError, CannotTellError, InfraError, BusyError, LedgerCorruptError])
def test_expected_errors_become_message_hint_and_code(cli, monkeypatch, error):
    fail_with(monkeypatch, error("what happened", "harness doctor"))
    plain = cli("list")
    assert plain == (error.exit_code, "", "error: what happened\n  hint: harness doctor\n")
    wrapped = cli("list", "--json")
    assert wrapped.code == error.exit_code
    assert wrapped.err == ""
    assert wrapped.document == {
        "error": {
            "kind": error.code,
            "message": "what happened",
            "hint": "harness doctor",
            "exit_code": int(error.exit_code),
        }
    }


def test_a_bug_is_70_with_its_traceback_in_a_private_file(cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fail_with(monkeypatch, RuntimeError("boom \x1b[31m"))
    answer = cli("list")
    assert answer.code == ExitCode.INTERNAL
    assert "error: unexpected RuntimeError: boom" in answer.err
    assert "\x1b" not in answer.err
    (path,) = tmp_path.glob("harness-crash-*.log")
    assert str(path) in answer.err
    assert "Traceback" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert "Traceback" not in answer.err


def test_a_bug_inside_a_program_is_reported_under_outputs(cli, monkeypatch, program):
    fail_with(monkeypatch, KeyError("x"))
    assert cli("list", "--json").document["error"]["kind"] == "internal"
    assert list(program.outputs.glob("harness-crash-*.log"))


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 71, "free some disk space"),
        (PermissionError(errno.EACCES, "Permission denied", "runs.jsonl"), 71, "runs.jsonl"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "GOAL.md"), 71, "look at what stands at that path"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000), 71, "characters omitted"),
        (MemoryError(), 71, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), 71, "out of memory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "post-training-harness[train]"),
        (ModuleNotFoundError("No module named 'scipy'", name="scipy.stats"), 2, "post-training-harness[analysis]"),
        (ModuleNotFoundError("No module named 'nonsense'", name="nonsense"), 70, "bug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_machine_failures_missing_extras_and_interrupts(cli, monkeypatch, tmp_path, error, code, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fail_with(monkeypatch, error)
    answer = cli("list")
    assert answer.code == code
    assert text in answer.err


def test_interrupted_launch_says_how_to_go_on(cli, monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert "harness launch run-007 --resume" in cli("launch", "run-007").err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lst"], ["no command 'lst'", "did you mean 'list'"]),
        (["zzzz"], ["no command", "harness --help"]),
        (["--vresion"], ["no option", "--version"]),
        (["list", "--jsn"], ["no such option: --jsn", "'--json'"]),
        (["list", "--limit", "many"], ["'many' is not a whole number"]),
        (["list", "--limit", "0"], ["below 1"]),
        (["list", "--limit", "9" * 30], ["does not fit into 64 bits"]),
        (["wait", "run-001", "--timeout", "nan"], ["nan is below 0"]),
        (["note", "run-001", "\udcff"], ["not UTF-8 text"]),
        (["list", "--status", "complete"], ["no status 'complete'", "'completed'"]),
        (["show"], ["missing argument", "RUN"]),
        (["show", "run-001", "extra"], ["unexpected extra argument"]),
        (["env", "lst"], ["no such command 'lst'", "'list'"]),
        (["env"], ["needs a command", "list, show, try"]),
        (["help", "exitcodes"], ["no help on", "'exit-codes'"]),
    ],
)
def test_usage_errors_are_2_with_a_suggestion(cli, program, argv, words):
    answer = cli(*argv)
    assert answer.code == ExitCode.USAGE
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    for word in words:
        assert word in answer.err
    wrapped = cli(*argv, "--json")
    assert wrapped.code == ExitCode.USAGE
    assert wrapped.document["error"]["exit_code"] == 2
    assert wrapped.err == ""


def test_outside_a_program(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = cli("list")
    assert answer.code == ExitCode.USAGE
    assert "harness init" in answer.err


def test_version_and_help(cli):
    assert cli("--version").out.startswith("harness 0.")
    assert set(cli("--version", "--json").document) == {"version"}
    for argv in ([], ["--help"], ["-h"], ["help"]):
        answer = cli(*argv)
        assert answer.code == 0
        assert "new-run" in answer.out


def test_exit_codes_are_documented_and_complete(cli):
    assert {int(code) for code in EXIT_CODES} == {int(code) for code in ExitCode} | {entry.BROKEN_PIPE}
    entries = cli("help", "exit-codes", "--json").document["entries"]
    assert entries == {str(int(code)): text for code, text in EXIT_CODES.items()}


def test_help_of_a_group_holds_its_commands(cli):
    text = cli("help", "env").out
    assert "harness env show" in text
    assert "harness env try" in text


# The rest needs real processes: descriptors, pipes and signals.


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize("argv", [["--help"], ["list", "--json"], ["help", "exit-codes"]], ids=" ".join)
def test_full_output_is_never_success(program, argv):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "harness", *argv], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == ExitCode.INFRA
    assert "cannot write to standard output" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_output_is_never_success(program):
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m harness --help >&-'], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == ExitCode.INFRA
    assert "standard output is closed" in done.stderr


def test_broken_pipe_is_141(program):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert done.returncode == entry.BROKEN_PIPE
    assert done.stderr == ""


def test_streams_of_an_ascii_locale_and_a_closed_stdin(program):
    done = harness(
        "show",
        "run-001",
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "20"},
    )
    assert done.returncode == 0
    assert done.stdout.isascii()
    closed = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m harness env try drugprot <&-'], capture_output=True, text=True, timeout=60
    )
    assert closed.returncode == ExitCode.USAGE
    assert "--answer" in closed.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_signals_have_codes_of_their_own(program, number, code):
    (program.run_dir("run-001") / "detached.json").write_text(json.dumps(this_process()))
    child = subprocess.Popen(
        [sys.executable, "-m", "harness", "wait", "run-001", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where nohup runs the tests
    )
    try:
        wait_for_handler(child)
        child.send_signal(number)
        out, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == code
    assert json.loads(out)["error"]["kind"] == "interrupted"


def wait_for_handler(child, timeout_s=30):
    """Wait until the child handles a signal itself: proc(5), SigCgt; a fixed time where there is no /proc."""
    deadline = time.monotonic() + timeout_s
    status = Path(f"/proc/{child.pid}/status")
    if not status.exists():
        time.sleep(5)
        return
    while time.monotonic() < deadline:
        caught = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:  # the last one; Python itself catches SIGINT from the start
            return
        time.sleep(0.05)
    raise AssertionError("the command never installed its signal handlers")


def test_completion_knows_commands_and_runs(program):
    def complete(words, index):
        environment = {"_HARNESS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        return harness(env=os.environ | environment).stdout.split()

    assert "promote" in complete("harness pro", 1)
    assert complete("harness show run-", 2) == ["run-001"]


def test_a_reader_that_leaves_in_the_middle_is_no_verdict(program):
    text = "x" * 300_000
    Ledger(program.ledger).append("run-001", "noted", {"text": text})
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "harness", "show", "run-001"], stdout=gone, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (141, b"")
