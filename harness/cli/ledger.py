"""`harness ledger`: verify the ledger, and render it for `git diff`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.output import Line, Result, Styled, rows_document
from harness.cli.shared import command, new_app
from harness.cli.state import program
from harness.core.errors import ExitCode, NotFoundError

app = new_app("harness ledger verify", no_args_is_help=True, help="Verify the ledger, or render it for `git diff`.")
APPS = {"ledger": app}


@command(app, "verify", "harness ledger verify", "harness ledger verify --json")
def verify() -> Result:
    """Check every line of the ledger, its links, and the committed files it names.

    Exit code 0 when it verifies, 1 with every damage otherwise.
    """
    from harness.ledger import Ledger
    from harness.ledger.verify import verify as check

    here = program()
    findings = check(here.ledger, here.root)
    errors = [finding for finding in findings if finding.severity == "error"]
    counts = {"errors": len(errors), "notes": len(findings) - len(errors)}
    data = rows_document([asdict(finding) for finding in findings], counts, False)
    data["verifies"] = not errors
    lines: list[Line] = [
        (
            Styled(finding.severity, "bad" if finding.severity == "error" else "warn"),
            f"  line {finding.line}: " if finding.line else "  ",
            finding.message,
        )
        for finding in findings
    ]
    if errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(f.kind for f in errors).items())
        return Result(data, [*lines, f"{here.ledger.name} does not verify: {kinds}"], ExitCode.NO)
    events = Ledger(here.ledger).events()
    data["counts"] |= {"events": len(events)}
    return Result(data, [*lines, f"{here.ledger.name} verifies: {len(events)} events"])


@command(app, "textconv", "harness ledger textconv runs.jsonl")
def textconv(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A ledger file, or a version of one that git names.")],
) -> Result:
    """Render a ledger as text, one block per event; git calls this for `git diff`."""
    from harness.ledger.textconv import render

    try:
        text = render(file.read_bytes())
    except OSError as error:
        raise NotFoundError(
            f"cannot read {file}: {error.strerror}", "name a ledger file, such as runs.jsonl"
        ) from error
    return Result({"file": str(file), "text": text}, text.splitlines(), multiline=True)
