"""The output boundary: nothing dangerous reaches a terminal, JSON stays exact."""

import ast
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import output
from harness.cli.output import Styled, clean, echo, fields, table, write_json

ROOT = Path(__file__).resolve().parents[2]
EVIL = [
    "\x1b[2J\x1b[H",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\x1bP1$r0m\x1b\\",
    "\x9b31m",
    "\x9d0;title\x9c",
    "\r overwritten",
    "\x07\x08\x7f",
    "\u202e\u2066txt\u2069",
    "\u200b\u200f\ufeff",
    "\x1b\x1b[31m[31m",
    "\x1b",
    "\x1b[",
    "\x1b]0;never closed",
]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def dangerous(text):
    return [
        c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c in "\u202e\u2066\u200f\ufeff"
    ]


@pytest.mark.parametrize("text", EVIL)
def test_clean_removes_control_sequences(text):
    cleaned = clean(f"before {text} after")
    assert not dangerous(cleaned)
    assert "\n" not in cleaned
    assert cleaned.startswith("before")


def test_clean_keeps_ordinary_text():
    text = "Größe 3 µM → 中文 \\boxed{E} [31m"
    assert clean(text) == text


def test_clean_flattens_lines_unless_asked():
    assert clean("a\nb\tc\u2028d") == "a b c d"
    assert clean("a\nb\tc", multiline=True) == "a\nb\tc"


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\x1b[]\x07\x9b;m\\0P"))))
def test_clean_is_idempotent_and_safe(text):
    once = clean(text)
    assert clean(once) == once
    assert not dangerous(once)


def test_echo_colours_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream, colored in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stdout", stream)
        echo(("state: ", Styled("failed\x1b[0m", "bad")))
        assert ("\x1b[31mfailed\x1b[0m" in stream.getvalue()) is colored
        assert stream.getvalue().count("\x1b") == (2 if colored else 0)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_turned_off(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", Terminal())
    echo(Styled("x", "good"))
    import sys

    assert sys.stdout.getvalue() == "x\n"


@pytest.mark.parametrize("name", ["FORCE_COLOR", "GITHUB_ACTIONS"])
def test_nothing_forces_colour_into_a_pipe(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "true")
    echo(Styled("x", "good"))
    assert capsys.readouterr().out == "x\n"


def test_echo_survives_a_narrow_encoding(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    echo("µ → ok")
    assert raw.getvalue() == b"\\xb5 \\u2192 ok\n"


def test_json_is_ascii_and_exact(capsys):
    write_json({"text": "\x1b[31m\u202e µ", "nan": math.nan})
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out) == {"text": "\x1b[31m\u202e µ", "nan": {"$non_finite": "nan"}}


def test_table_aligns_and_cleans():
    lines = table(["run", "score"], [("run-001", 0.5), ("\x1b[2Jrun-1000", None)], right="score")
    text = ["".join(part if isinstance(part, str) else part.text for part in line) for line in lines]
    assert text == ["run       score", "run-001     0.5", "run-1000      -"]


def test_table_is_cut_to_the_terminal_and_nowhere_else(monkeypatch):
    row = [("run-001", "x" * 300)]
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    width = len("".join(p if isinstance(p, str) else p.text for p in table(["run", "hypothesis"], row)[1]))
    assert width == 40
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert "x" * 300 in table(["run", "hypothesis"], row)[1]


def test_fields_leave_out_what_is_absent():
    assert fields([("a", "1"), ("long", None)]) == [(Styled("a", "dim"), "  ", "1")]


def test_page_says_what_is_left_out():
    assert output.page([1, 2, 3], 2, False) == ([1, 2], True)
    assert output.page([1, 2, 3], 2, True) == ([1, 2, 3], False)


def test_prompts_need_two_terminals_and_no_veto(monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr(output, "settings", output.Settings())
    assert output.can_prompt()
    monkeypatch.setenv("HARNESS_NO_INPUT", "1")
    assert not output.can_prompt()
    monkeypatch.delenv("HARNESS_NO_INPUT")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert not output.can_prompt()


def writers(source):
    """Return the calls that write to the terminal without passing the boundary."""
    bad = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("print", "typer.echo", "typer.secho", "typer.confirm", "typer.prompt", "rich.print", "input"):
                bad.append(name)
    return bad


def test_only_the_boundary_writes():
    files = [path for path in (ROOT / "harness/cli").glob("*.py") if path.name != "output.py"]
    assert len(files) > 10
    assert {path.name: found for path in files if (found := writers(path.read_text(encoding="utf-8")))} == {}
    direct = [p.name for p in files if "sys.stdout.write" in p.read_text(encoding="utf-8")]
    assert direct == []


def test_the_boundary_check_catches_a_planted_print():
    assert writers("print(1)\ntyper.echo(2)") == ["print", "typer.echo"]
