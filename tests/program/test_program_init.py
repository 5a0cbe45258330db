"""`harness init`."""

import re
import subprocess
from pathlib import Path

import pytest

from harness.core.errors import ConfigError, InfraError, RefusedError, UsageError
from harness.program import Program, check_documents, init, init_program
from harness.program.gitsetup import template


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def files(root):
    return sorted(
        p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and ".git/" not in p.as_posix()
    )


def test_a_new_program_is_whole(tmp_path):
    result = init_program(tmp_path / "new" / "prog")
    root = tmp_path / "new" / "prog"
    assert result.root == root
    assert files(root) == sorted(
        [
            ".gitattributes",
            ".github/workflows/harness.yml",
            ".gitignore",
            "CONTEXT.md",
            "GOAL.md",
            "PLAN.md",
            "README.md",
            "THREAD.md",
            "analysis/.gitkeep",
            "rl/.gitkeep",
        ]
    )
    assert sorted(result.written) == files(root)
    check_documents(Program.find(root, {}))
    assert (root / ".git").is_dir()
    assert git(root, "config", "diff.harness-ledger.textconv").stdout.strip() == "harness ledger textconv"
    assert git(root, "config", "merge.harness-ledger.driver").stdout.strip() == "harness ledger merge %O %A %B"
    for name in ("diff", "merge"):
        assert git(root, "check-attr", name, "runs.jsonl").stdout.strip() == f"runs.jsonl: {name}: harness-ledger"
    assert git(root, "check-ignore", "outputs/run-001/metrics.jsonl").returncode == 0
    assert "@" not in re.sub(r"uses: \S+@[0-9a-f]{40}", "", (root / ".github/workflows/harness.yml").read_text())
    assert "# prog" in (root / "README.md").read_text()


def test_the_workflow_is_pinned_and_read_only():
    text = template("workflow.yml")
    assert "permissions:\n  contents: read" in text
    uses = re.findall(r"uses: (\S+)", text)
    assert uses and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in uses)
    assert not any("${{" in line for line in text.splitlines() if line.strip().startswith("- run:"))
    assert "pull_request_target" not in text


def test_the_workflow_verifies_every_pull_request_against_its_base():
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the workflow")
    workflow = yaml.safe_load(template("workflow.yml"))
    assert "pull_request" in workflow[True]  # YAML 1.1 reads `on` as true
    (job,) = workflow["jobs"].values()
    steps = job["steps"]
    checkout = next(step for step in steps if step.get("uses", "").startswith("actions/checkout@"))
    assert checkout["with"] == {"fetch-depth": 0, "persist-credentials": False}
    commands = {step["run"]: step for step in steps if "run" in step}
    assert not any("${{" in command for command in commands)
    verify = commands['harness ledger verify --base "origin/$BASE_REF"']
    assert verify["if"] == "github.event_name == 'pull_request'"
    assert verify["env"] == {"BASE_REF": "${{ github.base_ref }}"}
    assert {"harness thread --check", "harness report --check"} <= commands.keys()


def test_dry_run_touches_nothing(tmp_path):
    result = init_program(tmp_path / "prog", dry_run=True)
    assert "GOAL.md" in result.written and any(command.startswith("git init") for command in result.commands)
    assert not (tmp_path / "prog").exists()


def test_a_program_is_never_overwritten(tmp_path):
    init_program(tmp_path, git=False)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with pytest.raises(RefusedError, match=r"already holds GOAL\.md"):
        init_program(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_half_a_program_is_refused_too(tmp_path):
    (tmp_path / "runs.jsonl").touch()
    with pytest.raises(RefusedError, match=r"runs\.jsonl"):
        init_program(tmp_path)
    assert files(tmp_path) == ["runs.jsonl"]


def test_an_existing_repository_keeps_what_it_has(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "README.md").write_text("mine\n")
    (tmp_path / ".gitignore").write_text("secret\noutputs/")
    result = init_program(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine\n" and result.kept == ("README.md",)
    ignored = (tmp_path / ".gitignore").read_text().splitlines()
    assert ignored[:2] == ["secret", "outputs/"] and ignored.count("outputs/") == 1 and ".venv/" in ignored
    assert not any(command.startswith("git init") for command in result.commands)


def test_a_folder_of_a_repository_joins_it_unless_it_is_ignored(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("scratch/\n")
    init_program(tmp_path / "inside")
    init_program(tmp_path / "scratch" / "prog")
    assert not (tmp_path / "inside" / ".git").exists()
    assert (tmp_path / "scratch" / "prog" / ".git").is_dir()
    assert git(tmp_path / "scratch" / "prog", "config", "--local", "diff.harness-ledger.textconv").stdout


def test_without_git_the_steps_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = init_program(tmp_path / "prog")
    assert result.commands == () and "git init" in result.notes[0]
    assert (tmp_path / "prog" / "GOAL.md").exists()


def test_model_and_revision_reach_the_context(tmp_path):
    init_program(tmp_path / "a", 'org/odd "name"', revision="a" * 40, git=False)
    _, context, _ = check_documents(Program(tmp_path / "a"))
    assert context.model.name == context.frozen["model.name"] == 'org/odd "name"'
    assert context.frozen_values()["model.revision"] == "a" * 40
    with pytest.raises(UsageError):
        init_program(tmp_path / "b", " ")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "prog").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        init_program(tmp_path / "prog")


def test_a_model_name_cannot_close_the_block(tmp_path):
    name = "x\n```\n```toml\n[frozen]"
    try:
        init_program(tmp_path / "prog", name, git=False)
    except ConfigError:
        return
    _, context, _ = check_documents(Program(tmp_path / "prog"))
    assert context.model.name == name


@pytest.mark.parametrize("name", ["y" * 300, "~no-such-user/x"])
def test_a_name_no_folder_can_have(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name.startswith("~"):  # nobody's home is a name like any other
        assert init_program(Path(name), git=False).root == tmp_path / name
        return
    with pytest.raises(UsageError, match="cannot be a folder"):
        init_program(Path(name), git=False)


def test_a_disk_that_fills_up_leaves_nothing_and_the_same_command_works_later(tmp_path, monkeypatch):
    (tmp_path / "prog").mkdir()
    (tmp_path / "prog" / ".gitignore").write_text("mine\n")

    def fail(path, text):
        if path.name == "THREAD.md":
            raise InfraError("cannot write THREAD.md: No space left on device")
        write(path, text)

    write = init.atomic_write
    monkeypatch.setattr(init, "atomic_write", fail)
    with pytest.raises(InfraError):
        init_program(tmp_path / "prog", git=False)
    assert [path.name for path in (tmp_path / "prog").iterdir()] == [".gitignore"]
    monkeypatch.undo()
    init_program(tmp_path / "prog", git=False)
    assert check_documents(Program(tmp_path / "prog"))
