"""One secret planted everywhere it could come from; after a launch that crashes, no file anywhere holds it."""

from __future__ import annotations

import json
import subprocess

import pytest

from harness.backends.capture import command_line, parse_gpus, remote_of
from harness.core.canonical import sha256_file
from harness.core.redact import MARK
from tests.launches import RUN, assert_verifies, attempts

CANARY = "canary-7f3a9c1e5b"
"""Known by the name of its variable only: it has no format that gives it away."""
KEY = "hf_" + "CanaryA1b2C3d4E5f6"
"""Known by its format, in places that no variable tells of."""


def git(root, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.example"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def every_file(*folders):
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]


def holding(paths, *secrets):
    return [str(path) for path in paths if any(secret.encode() in path.read_bytes() for secret in secrets)]


@pytest.fixture
def planted(toy_program):
    """A git checkout whose remote has a password and whose tracked file has an uncommitted one."""
    root = toy_program.root
    git(root, "init", "-q")
    git(root, "remote", "add", "origin", f"https://me:{CANARY}@git.example/us/program.git?token={CANARY}")
    (root / "notes.txt").write_text("notes\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "begin")
    (root / "notes.txt").write_text(f"notes\napi_key = '{KEY}'\nurl = https://x:{CANARY}@db.example/\n")
    return toy_program


@pytest.mark.torch
def test_a_planted_secret_is_nowhere(launch_server, planted):
    root = planted.root
    environment = {"TOY_SERVICE_TOKEN": CANARY, "TOY_PROMPT": f"word {CANARY} {KEY}", "OMP_NUM_THREADS": "1"}
    faults = [{"kind": "raise", "at": "step", "call": 5, "message": f"POST https://a:{CANARY}@api.example: {KEY}"}]
    ended = launch_server.start(
        *(root, "launch", RUN, "--json"), env=environment, faults=faults, argv0=f"/somewhere/{CANARY}/harness"
    ).wait()
    assert ended.code == 70, ended  # a bug of an environment, with a traceback
    written = [root, launch_server.folder]
    assert holding(every_file(*written), CANARY, KEY) == [str(root / "notes.txt")]
    # and the places where it would have stood were written
    (attempt,) = attempts(planted)
    assert attempt["outcome"] == "failed" and MARK in attempt["reason"]
    facts = attempt["environment"]
    assert facts["remote"] == "https://git.example/us/program.git"
    assert facts["command"] == ["harness", "launch", RUN, "--json"]
    assert set(facts["variables"]) <= {"OMP_NUM_THREADS", "HF_HUB_OFFLINE", "CUBLAS_WORKSPACE_CONFIG"}
    diff = planted.run_dir(RUN) / "dirty.diff"
    assert facts["dirty_sha"] == sha256_file(diff)
    assert f"+api_key = '{MARK}'" in diff.read_text() and f"+url = https://{MARK}@db.example/" in diff.read_text()
    marked = {path.relative_to(root).parts[0] + path.suffix for path in holding_paths(root)}
    assert {"outputs.jsonl", "outputs.log", "outputs.diff", "runs.jsonl.jsonl"} <= marked, marked
    assert MARK in ended.error["message"]
    assert_verifies(planted)
    assert launch_server.run(root, "report", RUN, env=environment).code == 0
    assert holding(every_file(*written), CANARY, KEY) == [str(root / "notes.txt")]


def holding_paths(root):
    return [path for path in every_file(root) if MARK.encode() in path.read_bytes()]


@pytest.mark.torch
def test_a_secret_in_a_searched_prompt_is_refused_before_anything_is_written(launch_server, toy_program):
    root = toy_program.root
    folder = root / "rl" / "prompts" / "toy"
    folder.mkdir(parents=True)
    (folder / "keyed.toml").write_text(f'[components]\nsystem = "Use the key {KEY}."\n')
    before = toy_program.ledger.read_bytes()
    argv = ["--from", RUN, "--set", "env.toy.prompt=keyed", "--hypothesis", "The prompt helps", "--outside-plan", "x"]
    ended = launch_server.run(root, "new-run", *argv, "--json")
    assert ended.code == 2
    assert "the prompt of toy (system) holds what looks like an access key" in ended.error["message"]
    assert KEY not in ended.out + ended.err
    assert toy_program.ledger.read_bytes() == before


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pw@host.example/a/b.git", "https://host.example/a/b.git"),
        ("https://token@host.example/a/b.git", "https://host.example/a/b.git"),
        ("https://host.example/a.git?private_token=abcdefgh1#x", "https://host.example/a.git"),
        ("git@host.example:a/b.git", "host.example:a/b.git"),
        ("ssh://git@host.example:22/a/b", "ssh://host.example:22/a/b"),
        ("/home/somebody/repository", None),
        ("file:///home/somebody/repository", None),
        ("../other", None),
        (None, None),
    ],
)
def test_of_a_remote_only_the_place_is_kept(url, shown):
    assert remote_of(url) == shown


def test_the_command_line_is_kept_without_paths_and_values_of_secrets():
    argv = ["/home/somebody/bin/harness", "launch", "run-001", "--token", "abc", "--api-key=abc", "KEY"]
    assert command_line(argv) == ["harness", "launch", "run-001", "--token", MARK, f"--api-key={MARK}", "KEY"]
    assert command_line(["/home/somebody/site-packages/harness/__main__.py", "launch"]) == ["harness", "launch"]


def test_gpus_as_the_driver_lists_them():
    text = "NVIDIA H200, 143771, 570.86.15, 9.0\nNVIDIA A100-SXM4-80GB, [N/A], 570.86.15, [N/A]\n\nbroken line\n"
    assert parse_gpus(text) == [
        {"name": "NVIDIA H200", "memory_mb": 143771, "driver": "570.86.15", "compute_capability": "9.0"},
        {"name": "NVIDIA A100-SXM4-80GB", "memory_mb": None, "driver": "570.86.15", "compute_capability": None},
    ]


@pytest.mark.torch
def test_a_diff_of_an_earlier_attempt_is_kept(tmp_path):
    from harness.backends.capture import capture_environment

    root, folder = tmp_path / "program", tmp_path / "out"
    root.mkdir()
    folder.mkdir()
    git(root, "init", "-q")
    (root / "a.txt").write_text("one\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "begin")
    assert capture_environment(root, folder, {})["dirty_sha"] is None
    (root / "a.txt").write_text("two\n")
    first = capture_environment(root, folder, {})["dirty_sha"]
    (root / "a.txt").write_text("three\n")
    second = capture_environment(root, folder, {})["dirty_sha"]
    assert second == sha256_file(folder / "dirty.diff")
    assert first == sha256_file(folder / f"dirty.{first[:12]}.diff")
    git(root, "checkout", "-q", "a.txt")
    assert capture_environment(root, folder, {})["dirty_sha"] is None
    assert not (folder / "dirty.diff").exists()
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["hardware"]["cores"] and isinstance(facts["hardware"]["gpus"], list)
