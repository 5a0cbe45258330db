"""Shell completion: the fast way answers as typer does, loads next to nothing, and never disturbs the line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.core

from harness.cli import complete
from harness.cli.complete import RUN_ARGUMENTS, run_ids
from harness.cli.root import COMMANDS, completion_group, load_command
from harness.cli.shared import complete_runs
from harness.ledger import Ledger

LINES = ["harness show run-", "harness diff run-001 ", "harness show ", "harness lo", "harness log run-00"]


def environment(shell, line, action="get-args"):
    """Return the variables that typer's completion scripts set."""
    words = line.split(" ")
    found = {"_HARNESS_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        return found | {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return found | {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": action}


def by_typer(monkeypatch, capsys, variables):
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        capsys.readouterr()
        with pytest.raises(SystemExit):
            completion_group().main(args=[], prog_name="harness", standalone_mode=False)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_fast_answer_is_typers(program, monkeypatch, capsys, shell, line):
    Ledger(program.ledger).append("run-002", "created", {"type": "training"})
    variables = environment(shell, line)
    answer = complete.answer(variables)
    assert answer
    assert answer == by_typer(monkeypatch, capsys, variables)


@pytest.mark.parametrize(
    "line",
    [
        "harness list --st",
        "harness launch --estimate ",
        "harness env s",
        "harness show run-001 ",
        "harness decide run-001 k",
        'harness note "open',
    ],
)
def test_everything_else_is_left_to_typer(program, line):
    for shell in ("bash", "zsh", "fish"):
        assert complete.answer(environment(shell, line)) is None
    assert complete.answer({"_HARNESS_COMPLETE": "source_bash"}) is None
    assert complete.answer({"_HARNESS_COMPLETE": "complete_bash"}) is None


def test_commands_come_with_their_whole_summary(program):
    """typer would import every module for them, and cut them at 45 characters."""
    lines = complete.answer(environment("fish", "harness ")).splitlines()
    assert lines == [f"{name}\t{entry.summary}" for name, entry in COMMANDS.items()]


def test_fish_asks_whether_there_is_anything_first(program):
    assert complete.answer(environment("fish", "harness show ", action="is-args")) == ""


def test_every_argument_that_is_a_run_completes():
    found = {}
    for name in COMMANDS:
        loaded = load_command(name)
        if not isinstance(loaded, typer.core.TyperGroup):
            arguments = [param for param in loaded.params if param.param_type_name == "argument"]
            runs = [param for param in arguments if completes_runs(param)]
            assert arguments[: len(runs)] == runs, f"{name}: run ids stand first"
            found |= {name: len(runs)} if runs else {}
    assert found == RUN_ARGUMENTS


def completes_runs(param):
    own = getattr(param, "_custom_shell_complete", None)
    cells = [cell.cell_contents for cell in getattr(own, "__closure__", None) or ()]
    return any(cell is complete_runs or getattr(cell, "__wrapped__", None) is complete_runs for cell in cells)


def test_damaged_lines_and_missing_programs_are_no_noise(cli, program, monkeypatch, tmp_path):
    with program.ledger.open("ab") as file:
        file.write(b'garbage\n{"v":1,"id":"torn')
    assert run_ids(program.ledger) == ["run-001"]
    monkeypatch.setenv("_HARNESS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "harness show run")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert cli() == (0, "run-001\n", "")
    monkeypatch.chdir(tmp_path.parent)
    assert complete.known_runs() == []


def test_completing_a_run_loads_neither_typer_nor_anything_heavy(program):
    code = "import sys; from harness.cli.main import main; main(); print(*sys.modules, file=sys.stderr)"
    variables = os.environ | environment("bash", "harness show run-")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=variables)
    assert done.stdout == "run-001\n"
    banned = {"typer", "pydantic", "rich", "numpy", "torch", "tomlkit", "duckdb", "json", "harness.ledger"}
    assert not set(done.stderr.split()) & banned


INSTALLED = {
    "bash": (".bash_completions/harness.sh", ".bashrc", "source "),
    "zsh": (".zfunc/_harness", ".zshrc", "fpath+="),
    "fish": (".config/fish/completions/harness.fish", None, ""),
}


def install(shell, home):
    """Run `--install-completion` in a home of its own; the shell is named instead of guessed from the parents."""
    environ = os.environ | {"HOME": str(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    line = [sys.executable, "-c", "import sys; from harness.cli.main import main; sys.exit(main())"]
    return subprocess.run(
        [*line, "--install-completion", shell], capture_output=True, text=True, timeout=60, env=environ, cwd=home
    )


@pytest.mark.parametrize("shell", INSTALLED)
def test_completion_installs_itself_once_for_every_shell(tmp_path, shell):
    script, startup, line = INSTALLED[shell]
    done = install(shell, tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / script).read_text()
    assert "_HARNESS_COMPLETE" in text and "harness" in text
    if startup:
        assert line in (tmp_path / startup).read_text()
    assert install(shell, tmp_path).returncode == 0
    assert (tmp_path / script).read_text() == text
    if startup:
        assert (tmp_path / startup).read_text().count(line) == 1


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash on this system")
def test_the_installed_script_completes_run_ids_in_the_shell_itself(program, tmp_path):
    assert install("bash", tmp_path).returncode == 0
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "harness").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m harness "$@"\n')
    (folder / "harness").chmod(0o755)
    asked = (
        f"source {tmp_path / INSTALLED['bash'][0]}; COMP_WORDS=(harness show run-); COMP_CWORD=2; "
        "_harness_completion harness; echo ${COMPREPLY[@]}"
    )
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout == "run-001\n", done.stderr
