"""What `git diff` shows of a ledger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.ledger.textconv import main, render


def test_one_block_per_event(event) -> None:
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75}
    data = {
        "type": "training",
        "hypothesis": "Alpha 64\nlearns faster",
        "parent": None,
        "changes": [{"key": "lora.alpha", "old": 32, "new": 64, "kind": "config", "counts": True}],
        "config_sha": "0123456789abcdef" * 4,
        "means": {"reward": interval},
        "long": "y" * 500,
    }
    made = event(kind="created", data=data, second=1, critical=True)
    assert render(made.line + b"\n") == (
        f"run-001 created critical · 2026-01-01 00:00:01 UTC · person Ada · {made.sha[:12]}\n"
        "  type: training\n"
        "  hypothesis: Alpha 64 ⏎ learns faster\n"
        "  change lora.alpha: 32 → 64\n"
        "  config_sha: 0123456789ab…\n"
        "  means reward: 0.5 [0.25, 0.75]\n"
        f"  long: {'y' * 160}… (500 characters)\n"
        "\n"
    )


def test_control_characters_do_not_reach_the_terminal(event) -> None:
    made = event(data={"te\x1bxt": "a\x1b]52;c;eA==\x07b\x9b31m\u202ec\r\n"})
    text = render(made.line + b"\n")
    assert "  text: a]52;c;eA==b31mc ⏎ \n" in text
    assert not set(text) & set(map(chr, [*range(10), *range(11, 32), *range(127, 160), 0x202E]))


def test_damaged_lines_are_shown_and_marked(event) -> None:
    good = event()
    text = render(good.line + b"\n" + good.line.replace(b'"x"', b'"z"') + b"\n\xff\x1b\n<<<<<<< ours\ntorn")
    assert text.count("!! line ") == 4
    assert "!! line 2: its hash does not match its bytes" in text and '"text":"z"' in text
    assert "!! line 4: it is a git conflict marker" in text and "!! line 5" in text and "\x1b" not in text
    assert render(b"") == ""


def test_git_shows_only_the_new_events(event, tmp_path) -> None:
    birth = event(kind="created", number=1, data={"hypothesis": "first"})
    note = event(number=2, second=1, prev=[birth.sha], data={"text": "second"})

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / ".gitattributes").write_text("runs.jsonl diff=harness-ledger -text\n")
    (tmp_path / "runs.jsonl").write_bytes(birth.line + b"\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    (tmp_path / "runs.jsonl").write_bytes(birth.line + b"\n" + note.line + b"\n")
    root = Path(__file__).parents[2]
    git("config", "diff.harness-ledger.textconv", f"PYTHONPATH='{root}' '{sys.executable}' -m harness.ledger.textconv")
    added = [line for line in git("diff").splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added[0].startswith("+run-001 noted · 2026-01-01 00:00:01 UTC") and "+  text: second" in added
    assert "first" not in "".join(added)


def test_wrong_use_exits_2(tmp_path, capsys) -> None:
    assert main([]) == 2 and main([str(tmp_path / "absent")]) == 2
    assert "usage" in capsys.readouterr().err


def test_it_runs_on_the_standard_library_alone(script) -> None:
    source = "import sys, harness.ledger.textconv; print({'pydantic', 'typer', 'tomlkit', 'numpy'} & set(sys.modules))"
    assert script(source).communicate(timeout=30)[0].strip() == "set()"
