"""The only place that writes to the terminal: sanitised text, plain tables, one JSON document.

Standard output carries data, standard error carries narration and progress. Text from models, files
and users passes `clean`, so that it cannot move the cursor, recolour or reorder what is shown; JSON
is pure ASCII with escapes, so it is exact and safe at once. Named tuples instead of dataclasses, and
`json` imported late, keep `harness --help` fast.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from harness.core.errors import ExitCode
from harness.core.text import clean_text

if TYPE_CHECKING:
    from harness.core.errors import HarnessError

# CSI, OSC/DCS/SOS/PM/APC strings with their terminator, and two-byte escapes, 7-bit and 8-bit.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
_BREAKS = re.compile("[\n\t]+")
_STYLES = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "strong": "1"}


class Styled(NamedTuple):
    """Text with a style that shows on a terminal only: good, bad, warn, dim or strong."""

    text: str
    style: str


Part = str | Styled
Line = Part | tuple[Part, ...]
Cell = Part | float | None


class Result(NamedTuple):
    """What a command answers.

    Args:
        data: the JSON document of `--json`.
        lines: what people read; a callable is asked only when it is shown.
        exit_code: 0 unless the answer is something else than yes.
        multiline: whether line breaks inside a dynamic string are kept (prompts, rollouts).
    """

    data: Mapping[str, Any]
    lines: Iterable[Line] | Callable[[], Iterable[Line]] = ()
    exit_code: int = ExitCode.OK
    multiline: bool = False


class Settings:
    """How this process talks; set once by the command line."""

    def __init__(self, json: bool = False) -> None:
        self.json = json


settings = Settings()


def clean(text: str, *, multiline: bool = False) -> str:
    """Remove escape sequences, then what `core.text.clean_text` removes.

    Args:
        text: anything, also attacker-controlled model output.
        multiline: keep line feeds and tabs; otherwise they become one space.

    Idempotent: cleaning twice equals cleaning once.
    """
    text = clean_text(_ESCAPES.sub("", text))
    return text if multiline else _BREAKS.sub(" ", text)


def _colored(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())


def _render(part: Part, color: bool, multiline: bool) -> str:
    if isinstance(part, str):
        return clean(part, multiline=multiline)
    text = clean(part.text, multiline=multiline)
    return f"\x1b[{_STYLES[part.style]}m{text}\x1b[0m" if color and part.style in _STYLES and text else text


def echo(line: Line = "", *, err: bool = False, multiline: bool = False) -> None:
    """Write one line: data to standard output, or narration to standard error.

    Args:
        line: text, styled text, or a tuple of both.
        err: write to standard error; a closed standard error is ignored.
        multiline: keep line breaks inside the text.
    """
    stream = sys.stderr if err else sys.stdout
    if stream is None:
        return
    color = _colored(stream)
    parts = (line,) if isinstance(line, str | Styled) else line
    text = "".join(_render(part, color, multiline) for part in parts)
    encoding = stream.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding) + "\n"
    if err:
        stream.write(text)
        stream.flush()
    else:
        _answer(text)


class OutputLostError(OSError):
    """Standard output cannot be written: a full disk behind a redirection, say."""


def _answer(text: str) -> None:
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLostError(error.errno, error.strerror) from error


def narrate(line: Line) -> None:
    """Tell people what is going on, on standard error."""
    echo(line, err=True)


def write_json(data: Mapping[str, Any]) -> None:
    """Write one JSON document to standard output, ASCII only, non-finite numbers typed."""
    import json

    from harness.core.canonical import encode_non_finite

    indent = 2 if sys.stdout.isatty() else None
    _answer(json.dumps(encode_non_finite(data), indent=indent, allow_nan=False) + "\n")


def write_result(result: Result) -> int:
    """Show a result in the form asked for and return its exit code."""
    if settings.json:
        write_json(result.data)
    else:
        lines = result.lines() if callable(result.lines) else result.lines
        for line in lines:
            echo(line, multiline=result.multiline)
    return int(result.exit_code)


def write_error(error: HarnessError) -> int:
    """Show an expected failure (one message, one hint), without secrets, and return its exit code."""
    from harness.core.redact import redact

    code = int(error.exit_code)
    message, hint = _short(redact(error.message)), _short(redact(error.hint))
    if settings.json:
        envelope = {"kind": error.code, "message": message, "hint": hint, "exit_code": code}
        write_json({"error": envelope})
    else:
        narrate((Styled("error:", "bad"), " ", message))
        if hint:
            narrate(("  ", Styled("hint:", "strong"), " ", hint))
    return code


def _short(text: str) -> str:
    """Cut the middle out of a message that quotes something huge."""
    return text if len(text) <= 1200 else f"{text[:800]} … ({len(text) - 1200} characters omitted) … {text[-400:]}"


def _text_of(cell: Cell) -> Part:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return cell if isinstance(cell, str | Styled) else str(cell)


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]], right: str = "") -> list[Line]:
    """Lay out rows in aligned columns of plain text.

    Args:
        header: column titles.
        rows: one cell per column; None shows as `-`.
        right: titles of the columns aligned to the right, separated by spaces.

    On a terminal the last column is cut to the width; in a pipe nothing is cut.
    """
    grid = [[Styled(title, "dim") for title in header]]
    for row in rows:
        cells = [_text_of(cell) for cell in row]
        grid.append([c if isinstance(c, Styled) else Styled(c, "") for c in cells])
    grid = [[Styled(clean(cell.text), cell.style) for cell in row] for row in grid]
    widths = [max(len(row[i].text) for row in grid) for i in range(len(header))]
    if sys.stdout.isatty():
        import shutil

        room = shutil.get_terminal_size().columns - sum(widths[:-1]) - 2 * (len(widths) - 1)
        widths[-1] = max(min(widths[-1], room), 12)
    to_right = [title in right.split() for title in header]
    return [_table_line(row, widths, to_right) for row in grid]


def _table_line(row: Sequence[Styled], widths: Sequence[int], to_right: Sequence[bool]) -> Line:
    parts: list[Part] = []
    for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
        text = cell.text if len(cell.text) <= width else cell.text[: width - 1] + "…"
        pad = " " * (width - len(text))
        last = index == len(row) - 1
        styled: Part = Styled(text, cell.style) if cell.style else text
        parts += [pad, styled] if to_right[index] else [styled, "" if last else pad]
        if not last:
            parts.append("  ")
    return tuple(parts)


def fields(pairs: Iterable[tuple[str, Cell]]) -> list[Line]:
    """Lay out `name  value` pairs, values aligned; pairs with value None are left out."""
    shown = [(name, _text_of(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return [(Styled(name, "dim"), " " * (width - len(name) + 2), value) for name, value in shown]


def can_prompt() -> bool:
    """Whether a question may be asked: both ends are terminals and HARNESS_NO_INPUT is unset."""
    if os.environ.get("HARNESS_NO_INPUT") or settings.json:
        return False
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def page(rows: Sequence[Any], limit: int, everything: bool) -> tuple[list[Any], bool]:
    """Return the first `limit` rows (all when `everything`) and whether some were left out."""
    shown = list(rows) if everything else list(rows[:limit])
    return shown, len(shown) < len(rows)


def rows_document(rows: Sequence[Any], counts: Mapping[str, int], truncated: bool) -> dict[str, Any]:
    """Return the envelope of every list: when it was read, the rows, complete counts, whether rows are missing."""
    from datetime import UTC, datetime

    as_of = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"as_of": as_of, "rows": list(rows), "counts": dict(counts), "truncated": truncated}


def mutation_document(target: str, *, applied: bool, dry_run: bool, detail: Mapping[str, Any]) -> dict[str, Any]:
    """Return the envelope of every command that changes something."""
    return {"target": target, "applied": applied, "dry_run": dry_run, "detail": dict(detail)}
