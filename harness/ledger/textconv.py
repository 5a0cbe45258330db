"""Readable text of a ledger for `git diff`: one short block per event, in file order.

Git calls it with a file (`diff.<driver>.textconv`), once per side of a diff. Every block shows
the start of the event's hash, so that an edit anywhere in a line shows in the diff.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.core.text import clean_text
from harness.ledger.events import Event, UnknownEventError, parse_line

_MAX_VALUE = 160
_LONG_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b")


def render(data: bytes) -> str:
    """Return the text of a ledger's bytes; damaged lines are shown and marked, never left out."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return "".join(_block(number, line) for number, line in enumerate(lines, 1))


def _block(number: int, line: bytes) -> str:
    try:
        event = parse_line(line)
        rows = list(_rows(event))
    except (ValueError, UnknownEventError) as error:
        raw = _clean(line.decode("utf-8", "replace"))
        return f"!! line {number}: {_clean(str(error))}\n   {raw}\n\n"
    when = event.at[:19].replace("T", " ")
    mark = " critical" if event.critical else ""
    who = f"{event.actor.kind} {_clean(event.actor.name)}"
    head = f"{event.run} {event.kind}{mark} · {when} UTC · {who} · {event.sha[:12]}"
    return "\n".join([head, *(f"  {row}" for row in rows), "", ""])


def _rows(event: Event) -> Iterator[str]:
    for key, value in event.data.items():
        if value in (None, "", [], {}):
            continue
        name = _clean(key)
        if key == "changes" and isinstance(value, list):
            for change in value:
                yield f"change {_change(change)}"
        elif isinstance(value, Mapping) and value and all(_is_interval(item) for item in value.values()):
            for metric, item in value.items():
                yield f"{name} {_clean(metric)}: {_short(item['mean'])} [{_short(item['low'])}, {_short(item['high'])}]"
        else:
            yield f"{name}: {_short(value)}"


def _change(change: Any) -> str:
    if not isinstance(change, Mapping) or not {"key", "old", "new"} <= change.keys():
        return _short(change)
    return f"{_clean(str(change['key']))}: {_short(change['old'])} → {_short(change['new'])}"


def _is_interval(value: Any) -> bool:
    return isinstance(value, Mapping) and {"mean", "low", "high"} <= value.keys()


def _short(value: Any) -> str:
    text = _clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(", ", ": ")))
    text = _LONG_HASH.sub(r"\1…", text)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}… ({len(text)} characters)"


def _clean(text: str) -> str:
    return clean_text(text).replace("\n", " ⏎ ").replace("\t", " ")


def main(arguments: list[str] | None = None) -> int:
    """Print the text of the file named by the only argument; 2 when it cannot be read."""
    names = sys.argv[1:] if arguments is None else arguments
    if len(names) != 1:
        print("usage: python -m harness.ledger.textconv FILE", file=sys.stderr)
        return 2
    try:
        data = Path(names[0]).read_bytes()
    except OSError as error:
        print(f"error: cannot read {names[0]}: {error.strerror}", file=sys.stderr)
        return 2
    sys.stdout.buffer.write(render(data).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
