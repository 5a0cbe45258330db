"""Shell completion of commands and run ids without typer, which alone would take longer than people wait.

The scripts of `--install-completion` call `harness` with the words typed so far in the environment. What this
module does not know (options, subcommands, other arguments) is left to typer. Nothing here may fail loudly: a
shell shows what a completion prints in the middle of the line that is being typed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from harness.cli.root import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

RUN_ARGUMENTS = {
    "launch": 1,
    "eval": 1,
    "report": 1,
    "decide": 1,
    "promote": 1,
    "show": 1,
    "diff": 2,
    "log": 1,
    "lineage": 1,
    "curves": 1,
    "rollouts": 1,
    "watch": 1,
    "prune": 1,
    "wait": 1,
    "stop": 1,
    "recover": 1,
    "note": 1,
    "tag": 1,
}
"""How many arguments of a command are run ids, from its first one on."""
SWITCH = "_HARNESS_COMPLETE"
"""Environment variable in which a shell says that, and how, it wants a completion."""
_PLACE = slice(39, 62)  # of the run in a line as this writer spells it: {"v":1,"id":"<26>","run":"run-…"
_RUN = re.compile(rb'","run":"(run-[0-9]{3,9})"')


class Line(NamedTuple):
    """What was typed: the words before the cursor after `harness`, and the beginning of the word at it."""

    words: list[str]
    beginning: str


def answer(environ: Mapping[str, str]) -> str | None:
    """Return what the shell wants to read, or None to leave the completion to typer.

    Args:
        environ: of the process: `_HARNESS_COMPLETE` and the variables that go with it.
    """
    shell = environ.get(SWITCH, "").removeprefix("complete_")
    line = _bash_line(environ) if shell == "bash" else _other_line(environ) if shell in ("zsh", "fish") else None
    if line is None:
        return None
    found = candidates(line)
    if not found:
        return None
    if shell == "fish":
        shown = [f"{name}\t{summary}" if summary else name for name, summary in found]
        return "\n".join(shown) if environ.get("_TYPER_COMPLETE_FISH_ACTION") == "get-args" else ""
    if shell == "zsh":
        shown = [f'"{name}":"{_zsh(summary)}"' if summary else f'"{name}"' for name, summary in found]
        return "_arguments '*: :(({}))'".format("\n".join(shown))
    return "\n".join(name for name, _ in found)


def _zsh(text: str) -> str:
    """Escape a description as typer's script for zsh expects it."""
    for char, escaped in (('"', '""'), ("'", "''"), ("$", "\\$"), ("`", "\\`"), (":", "\\\\:")):
        text = text.replace(char, escaped)
    return text


def candidates(line: Line) -> list[tuple[str, str]]:
    """Return the commands or run ids that fit where the cursor is, each with a summary or none.

    Empty when something else belongs there.
    """
    words, beginning = line
    if beginning.startswith("-") or any(word.startswith("-") for word in words):
        return []
    if not words:
        return [(name, entry.summary) for name, entry in COMMANDS.items() if name.startswith(beginning)]
    if len(words) > RUN_ARGUMENTS.get(words[0], 0):
        return []
    return [(run, "") for run in known_runs() if run.startswith(beginning)]


def known_runs() -> list[str]:
    """Return the run ids of the program at hand, in order; empty outside of one, whatever the reason."""
    from harness.cli.state import program
    from harness.core.errors import HarnessError

    try:
        return run_ids(program().ledger)
    except (HarnessError, OSError):
        return []


def run_ids(path: Path) -> list[str]:
    """Return the run ids that a ledger's lines begin with, in order, without reading their data.

    A damaged or torn line is passed over: only what reads the ledger for good has to refuse it.
    """
    places = {line[_PLACE] for line in path.read_bytes().split(b"\n")}
    found = {match[1].decode() for place in places if (match := _RUN.match(place))}
    return sorted(found, key=lambda name: (len(name), name))


def _bash_line(environ: Mapping[str, str]) -> Line | None:
    words = _split(environ.get("COMP_WORDS", ""))
    try:
        index = int(environ.get("COMP_CWORD", ""))
    except ValueError:
        return None
    return None if words is None else Line(words[1:index], words[index] if index < len(words) else "")


def _other_line(environ: Mapping[str, str]) -> Line | None:
    text = environ.get("_TYPER_COMPLETE_ARGS", "")
    words = _split(text)
    if words is None:
        return None
    if len(words) > 1 and not text.endswith(" "):
        return Line(words[1:-1], words[-1])
    return Line(words[1:], "")


def _split(text: str) -> list[str] | None:
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return None
