"""A walk over all commands: help, example, documentation, JSON, suggestions, dry runs, clean pipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.core

from harness.cli.help import help_of
from harness.cli.root import COMMANDS, load_command

ROOT = Path(__file__).resolve().parents[2]


def every_command():
    """Return the click command of each command and subcommand by its path, groups included."""
    found = {}
    for name in COMMANDS:
        command = load_command(name)
        found[name] = command
        if isinstance(command, typer.core.TyperGroup):
            found |= {f"{name} {sub}": loaded for sub, loaded in command.commands.items()}
    return found


ALL = every_command()
LEAVES = {path: command for path, command in ALL.items() if not isinstance(command, typer.core.TyperGroup)}
# One call of each command in the program of conftest.py, and the codes it may end with.
CALLS = {
    "init": (["init", "new-program", "--no-git"], {0}),
    "new-run": (["new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis", "64 learns faster"], {0}),
    "launch": (["launch", "run-001", "--dry-run"], {0}),
    "report": (["report", "--check"], {0, 1}),
    "decide": (["decide", "run-001", "keep", "--reason", "the gain holds"], {0}),
    "promote": (["promote", "run-001", "--gates", "heldout"], {3}),
    "status": (["status"], {0}),
    "list": (["list"], {0}),
    "show": (["show", "run-001"], {0}),
    "diff": (["diff", "run-001", "run-001"], {0}),
    "log": (["log", "run-001"], {0}),
    "lineage": (["lineage", "run-001"], {0}),
    "curves": (["curves"], {0, 2}),
    "query": (["query", "SELECT run, status FROM runs"], {0, 2}),
    "export": (["export", "--table", "evals"], {0}),
    "rollouts": (["rollouts", "run-001"], {0}),
    "env list": (["env", "list"], {0}),
    "env show": (["env", "show", "drugprot"], {0}),
    "env try": (["env", "try", "drugprot", "--answer", "\\boxed{E}"], {0}),
    "env score": (["env", "score", "runs.jsonl", "--env", "drugprot"], {2}),
    "wait": (["wait", "run-001"], {0}),
    "stop": (["stop", "run-001"], {0}),
    "amend": (["amend", "GOAL.md", "--reason", "a better threshold"], {2}),
    "thread": (["thread"], {0}),
    "note": (["note", "run-001", "loss spikes at step 12"], {0}),
    "tag": (["tag", "run-001", "baseline"], {0}),
    "next": (["next", "--hypothesis", "a smaller rank learns as much"], {0}),
    "recover": (["recover"], {0}),
    "import": (["import", "no-such-folder"], {2}),
    "ledger verify": (["ledger", "verify"], {0, 1}),
    "ledger merge": (["ledger", "merge", "runs.jsonl", "runs.jsonl", "runs.jsonl"], {0}),
    "ledger install": (["ledger", "install"], {0, 2}),
    "ledger renumber": (["ledger", "renumber", "run-001"], {2}),
    "ledger textconv": (["ledger", "textconv", "runs.jsonl"], {0}),
    "watch": (["watch", "run-001"], {0, 2}),
    "prune": (["prune", "--dry-run"], {0}),
    "model show": (["model", "show", "no-such-model"], {2}),
    "model check": (["model", "check", "no-such-model"], {2}),
    "help": (["help", "exit-codes"], {0}),
}
HEAVY = {"doctor", "eval", "model check", "model show", "search-prompt"}  # tested on their own: they take long


def test_every_command_is_called_below():
    assert set(CALLS) | HEAVY == set(LEAVES)


@pytest.mark.parametrize("path", ALL)
def test_help_has_text_and_an_example(path):
    command = ALL[path]
    assert command.help and command.help.strip()[0].isupper()
    assert "Examples:\n" in command.epilog
    assert f"harness {path}" in command.epilog
    for param in command.params:
        assert param.help, f"{path}: {param.name} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_the_first_line_of_the_help(name):
    assert ALL[name].help.splitlines()[0] == COMMANDS[name].summary
    assert len(COMMANDS[name].summary) <= 80


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_takes_json(path):
    assert any("--json" in param.opts for param in LEAVES[path].params)


def test_what_changes_files_takes_dry_run():
    for name in ("init", "new-run", "launch", "promote"):
        assert any("--dry-run" in param.opts for param in LEAVES[name].params)


def test_docs_are_generated_from_the_commands():
    done = subprocess.run(
        [sys.executable, "scripts/cli_docs.py", "--check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ALL)
def test_every_command_is_documented(path):
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert f"Usage: harness {path} " in page


def test_help_does_not_depend_on_the_terminal(monkeypatch):
    wide = help_of("launch")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert help_of("launch") == wide


@pytest.mark.parametrize("path", CALLS)
def test_call_with_json_and_without(cli, program, path):
    argv, codes = CALLS[path]
    before = cli(*argv, "--json")
    assert before.code in codes
    assert isinstance(before.document, dict)
    if before.code == 2:
        assert before.document["error"]["exit_code"] == 2
    if path in ("init", "new-run"):
        argv = ["init", "other", "--no-git"] if path == "init" else [*argv[:-1], "again", "--set", "lora.alpha=16"]
    plain = cli(*argv)
    assert plain.code in codes
    assert plain.out or plain.err
    for text in (plain.out, plain.err, before.out, before.err):
        assert "\x1b" not in text
        assert "\u202e" not in text


LISTS = ["list", "diff", "log", "lineage", "export", "rollouts", "env list", "ledger verify", "report"]
MUTATIONS = ["init", "new-run", "launch", "decide", "promote", "stop", "thread", "note"]


@pytest.mark.parametrize("path", LISTS)
def test_lists_answer_in_one_envelope(cli, program, path):
    document = cli(*CALLS[path][0], "--json").document
    assert {"as_of", "rows", "counts", "truncated"} <= set(document)
    assert isinstance(document["rows"], list)


@pytest.mark.parametrize("path", MUTATIONS)
def test_mutations_answer_in_one_envelope(cli, program, path):
    document = cli(*CALLS[path][0], "--json").document
    assert set(document) == {"target", "applied", "dry_run", "detail"}


@pytest.mark.parametrize("path", [path for path, (argv, _) in CALLS.items() if "run-001" in argv])
def test_unknown_run_is_named_with_the_nearest_one(cli, program, path):
    argv = ["run-0001" if part == "run-001" else part for part in CALLS[path][0]]
    answer = cli(*argv, "--json")
    assert answer.code == 2
    assert answer.document["error"]["kind"] == "usage"  # not the canonical spelling of a run id
    argv = ["run-002" if part == "run-001" else part for part in CALLS[path][0]]
    answer = cli(*argv, "--json")
    assert answer.code == 2
    assert answer.document["error"]["kind"] == "not_found"
    assert "run-001" in answer.document["error"]["hint"]


@pytest.mark.parametrize(
    "argv",
    [
        ["init", "sub", "--dry-run"],
        ["new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis", "h", "--dry-run"],
        ["launch", "run-001", "--dry-run"],
        ["promote", "run-001", "--dry-run"],
        ["report", "--check"],
        ["thread", "--check"],
        ["status"],
        ["show", "run-001"],
        ["log"],
        ["lineage"],
        ["show", "run-001", "--config"],
        ["query", "FROM runs"],
        ["export"],
    ],
    ids=" ".join,
)
def test_looking_and_dry_runs_touch_nothing(cli, program, tree, argv):
    before = tree(program.root)
    answer = cli(*argv)
    assert answer.code in (0, 1, 3) or "duckdb" in answer.err, answer.err
    assert tree(program.root) == before


def test_a_dry_run_prints_the_plan_that_is_then_executed(cli, program):
    argv = ["new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis", "64 learns faster", "--json"]
    planned = cli(*argv, "--dry-run").document
    done = cli(*argv).document
    assert planned["detail"] == done["detail"]
    assert (planned["applied"], done["applied"]) == (False, True)
    assert program.config_path(done["target"]).read_text() == planned["detail"]["toml"]


def test_the_summary_table_loads_no_command(monkeypatch):
    code = (
        "import sys; from harness.cli.main import main; main(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stderr.split())
    assert not loaded & {"typer", "pydantic", "rich", "numpy", "torch", "tomlkit", "json", "subprocess", "dataclasses"}


def test_list_loads_neither_typer_nor_pydantic(program):
    for argv, banned in (
        (["list"], {"typer", "pydantic", "rich", "numpy", "torch", "tomlkit"}),
        (["list", "--limit", "5"], {"pydantic", "rich", "numpy", "torch", "tomlkit"}),
    ):
        code = "import sys; from harness.cli.main import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert "run-001" in done.stdout
        assert not set(done.stderr.split()) & banned


def test_list_answers_the_same_with_and_without_typer(cli, program):
    assert cli("list").out == cli("list", "--limit", "100").out
    plain, parsed = cli("list", "--json").document, cli("list", "--limit", "100", "--json").document
    assert plain | {"as_of": 0} == parsed | {"as_of": 0}
