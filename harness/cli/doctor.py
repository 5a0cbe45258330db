"""`harness doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

from harness.cli.doctor_checks import Finding, run_checks
from harness.cli.output import Line, Result, Styled, table
from harness.cli.shared import command, new_app
from harness.cli.state import program, read_state
from harness.core.errors import ExitCode, HarnessError

app = new_app()
APPS = {"doctor": app}
_STYLE = {"ok": "good", "warn": "warn", "fail": "bad"}


@command(app, "doctor", "harness doctor", "harness doctor --json")
def doctor() -> Result:
    """Check this machine and this program, and say what to do.

    Looks at Python, the installed extras, the device and what the processor computes natively, memory,
    disk, git, the model cache, file locks, and inside a program at its files and its ledger. Exit code
    0 when nothing failed, 1 otherwise; warnings do not fail.
    """
    try:
        root = program().root
        findings = [Finding("program", "ok", str(root))]
    except HarnessError as error:
        root = None
        findings = [Finding("program", "warn", error.message, error.hint)]
    findings += run_checks(root)
    if root is not None:
        findings += check_program()
    counts = {status: sum(f.status == status for f in findings) for status in ("ok", "warn", "fail")}
    code = ExitCode.NO if counts["fail"] else ExitCode.OK
    data = {"findings": [f._asdict() for f in findings], "counts": counts, "healthy": not counts["fail"]}
    return Result(data, lambda: _lines(findings, counts), code)


def check_program() -> list[Finding]:
    """Parse the program's files and verify its ledger."""
    from harness.program.documents import READERS

    found = []
    here = program()
    for name, read in READERS.items():
        try:
            read(here)
            found.append(Finding(name, "ok", "parses"))
        except HarnessError as error:
            found.append(Finding(name, "fail", error.message, error.hint))
    try:
        state = read_state(here)
        found.append(Finding("ledger", "ok", f"{len(state.runs)} runs"))
    except HarnessError as error:
        found.append(Finding("ledger", "fail", error.message, error.hint))
    return found


def _lines(findings: list[Finding], counts: dict[str, int]) -> list[Line]:
    rows = [(Styled(f.status, _STYLE[f.status]), f.check, f.found) for f in findings]
    lines = table(["status", "check", "found"], rows)
    todo = [f for f in findings if f.advice]
    if todo:
        lines += ["", Styled("What to do", "strong")]
        lines += [(Styled(f.status, _STYLE[f.status]), f"  {f.check}: {f.advice}") for f in todo]
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    return [*lines, "", summary]
