"""Where the values of a run's config come from, and what goes over what."""

import re


def plan(cli, *argv):
    answer = cli("new-run", "--hypothesis", " ".join(argv), *argv, "--json")
    assert answer.code == 0, answer.out
    return answer.document


def test_show_config_tells_where_every_value_comes_from(cli, program):
    plan(cli, "--from", "run-001", "--set", "train.steps=30")
    plan(cli, "--from", "run-002", "--set", "lora.alpha=64")
    document = cli("show", "run-003", "--config", "--json").document
    rows = {row["key"]: (row["value"], row["origin"], row["frozen"]) for row in document["rows"]}
    assert rows["lora.alpha"] == (64.0, "run-003", False)
    assert rows["train.steps"] == (30, "run-002", False)
    assert rows["lora.dropout"] == (0.0, "default", False)
    assert rows["model.name"][2] is True
    text = cli("show", "run-003", "--config").out
    assert re.search(r"^lora\.alpha +64\.0 +run-003$", text, re.MULTILINE)
    program.config_path("run-002").unlink()  # the ledger still knows what it was
    assert {row["key"]: row["origin"] for row in cli("show", "run-003", "--config", "--json").document["rows"]}[
        "train.steps"
    ] == "run-002"


# What goes over what, pairwise: the command line, the parent's file, the environment, the default.


def test_set_goes_over_the_parent_and_the_parent_over_the_default(cli, program):
    plan(cli, "--from", "run-001", "--set", "lora.alpha=64")

    def alpha(run):
        rows = cli("show", run, "--config", "--json").document["rows"]
        return next((row["value"], row["origin"]) for row in rows if row["key"] == "lora.alpha")

    assert alpha("run-001") == (32.0, "default")
    assert alpha("run-002") == (64.0, "run-002")  # the command line over the default
    plan(cli, "--from", "run-002", "--set", "train.steps=30")
    assert alpha("run-003") == (64.0, "run-002")  # the parent over the default
    plan(cli, "--from", "run-003", "--set", "lora.alpha=16")
    assert alpha("run-004") == (16.0, "run-004")  # the command line over the parent
    last = cli("new-run", "--from", "run-001", "--set", "lora.alpha=8", "--set", "lora.alpha=128", "--hypothesis", "h")
    assert last.code == 0 and alpha("run-005") == (128.0, "run-005")  # of two on one line the later


def test_what_context_freezes_goes_over_the_command_line(cli, program):
    answer = cli("new-run", "--from", "run-001", "--set", 'model.name="other"', "--hypothesis", "h", "--json")
    assert answer.code == 2 and "frozen by CONTEXT.md" in answer.document["error"]["message"]


def test_the_program_variable_goes_over_the_current_folder(cli, program, empty_program, monkeypatch):
    assert cli("list", "--json").document["counts"]["total"] == 0  # the current folder
    monkeypatch.setenv("HARNESS_PROGRAM", str(program.root))
    assert cli("list", "--json").document["counts"]["total"] == 1


def test_the_argument_of_an_environment_goes_over_its_variable(cli, program, monkeypatch, tmp_path):
    monkeypatch.setenv("HARNESS_DRUGPROT", str(tmp_path / "named-by-the-variable"))

    def refusal(*arguments):
        answer = cli("env", "show", "drugprot", "--arg", "source=official", *arguments, "--json")
        assert answer.code == 2
        return answer.document["error"]["message"]

    assert "named-by-the-variable" in refusal()
    assert "named-by-the-argument" in refusal("--arg", f"path={tmp_path / 'named-by-the-argument'}")
