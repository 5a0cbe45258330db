"""CSV that spreadsheets open safely: what a model or a person wrote can never become a formula."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from harness.cli.output import clean

# What starts a formula in a spreadsheet, also after spaces or quotes, at the start of any line of a cell. The wide
# forms of the same signs count in some locales.
_FORMULA = re.compile(r"^(?=[^\S\n]*[\"']*[^\S\n]*[=+\-@\uff1d\uff0b\uff0d\uff20]|\t)", re.MULTILINE)


def cell_text(value: Any, *, raw: bool = False) -> str:
    """Return the text of one cell.

    Args:
        value: a number stays one, None is empty, a truth value is true or false, everything else is text.
        raw: keep text that a spreadsheet would run as a formula; otherwise an apostrophe goes before it.

    Control, bidirectional and invisible characters are removed either way; JSON and Parquet keep the exact text.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    shown = clean(str(value), multiline=True)
    if raw:
        return shown
    return ("'" if shown.startswith("\n") else "") + _FORMULA.sub("'", shown)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]], *, raw: bool = False) -> str:
    """Return rows as CSV (RFC 4180, lines ended by LF).

    Args:
        header: column titles.
        rows: one value per column.
        raw: as in `cell_text`.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([cell_text(title, raw=raw) for title in header])
    writer.writerows([[cell_text(value, raw=raw) for value in row] for row in rows])
    return buffer.getvalue()
