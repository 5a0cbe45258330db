"""What `harness ledger verify` looks at beyond the ledger itself: other commits, pages and reports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.output import Line, Styled
from harness.core.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from harness.ledger.verify import Check, Finding
    from harness.program.model import Program

_SHA = re.compile(r"[0-9a-f]{64}")


def check_program(here: Program, base: str | None, head: Sequence[str], reports: bool) -> Check:
    """Verify a program's ledger and everything committed with it.

    Args:
        here: the program.
        base: name of a commit whose ledger must be contained in this one.
        head: hashes of events that must be here, or files with an earlier answer of `verify --json`.
        reports: build every report again and compare.

    Raises:
        UsageError, NotFoundError: for a head that is neither.
        CannotTellError: when git does not know the base.
        MissingExtraError: when reports cannot be built here.
    """
    from harness.core.git import git_line
    from harness.core.memory import exempt_from_collection, no_collection
    from harness.ledger.artefacts import report_findings
    from harness.ledger.history import commit_of, file_at, files_at
    from harness.ledger.lost import shas
    from harness.ledger.verify import check
    from harness.program.amend import page_findings

    commit = commit_of(here.root, base) if base else git_line(here.root, "rev-parse", "--verify", "--quiet", "HEAD")
    name = here.relative(here.ledger)
    data = file_at(here.root, commit, name) if commit else None
    against = _base(here, base, commit, data) if base and commit else None
    with no_collection():
        done = check(here.ledger, here.root, base=against, recorded=_recorded(head))
        exempt_from_collection(len(done.events))
    done.findings += page_findings(here, done.state)
    if commit:
        # Only runs that the commit knows as they are now: a renumbered run has left its old folder on purpose.
        files = files_at(here.root, commit, "analysis")
        known = shas(data) if files else frozenset()
        tracked = [path for path in files if _root_of(done, path) in known]
        done.findings += report_findings(done.state, here.root, tracked, base or "HEAD")
    if reports:
        done.findings += _stale_reports(here, done)
    return done


def _root_of(done: Check, path: str) -> str:
    run = done.state.runs.get(path.split("/")[1])
    return run.root if run is not None else ""


def _base(here: Program, name: str, commit: str, data: bytes | None) -> Any:
    from harness.ledger.history import file_at, merge_base
    from harness.ledger.lost import Base, shas

    own = shas(file_at(here.root, "HEAD", here.relative(here.ledger)))
    common = merge_base(here.root, "HEAD", commit)
    if common is not None:
        own |= shas(file_at(here.root, common, here.relative(here.ledger)))
    return Base(name, data, own)


def _recorded(heads: Sequence[str]) -> dict[str, list[str]]:
    """Return the recorded last events by run; hashes given alone stand under an empty name."""
    found: dict[str, list[str]] = {}
    for head in heads:
        if _SHA.fullmatch(head):
            found.setdefault("", []).append(head)
            continue
        try:
            document = json.loads(Path(head).read_bytes())
            runs = {str(run): [str(sha) for sha in shas] for run, shas in document["heads"].items()}
        except OSError as error:
            raise NotFoundError(
                f"cannot read {head[:200]}: {error.strerror}", "--head takes a hash of 64 digits, or such a file"
            ) from error
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{head[:200]} holds no recorded heads", "`harness ledger verify --json > heads.json` writes them"
            ) from error
        for run, shas in runs.items():
            found.setdefault(run, []).extend(shas)
    return found


def _stale_reports(here: Program, done: Check) -> Iterator[Finding]:
    from harness.ledger.verify import Finding
    from harness.reports.write import check_report

    for run in done.state.runs:
        if (here.analysis_dir(run) / "report.md").is_file():
            for problem in check_report(here, run):
                text = f"the report of {run} is not what its run gives: {problem}; `harness report {run}` writes it"
                yield Finding("stale_report", "error", text, run=run)


def finding_lines(findings: Sequence[Finding]) -> list[Line]:
    """Return one line a finding, errors last, where a reader looks first."""
    ordered = sorted(findings, key=lambda finding: finding.severity == "error")
    return [
        (
            Styled(f"{finding.severity:<5}", "bad" if finding.severity == "error" else "warn"),
            Styled(f"  {finding.kind}  ", "dim"),
            f"line {finding.line}: " if finding.line else "",
            finding.message,
        )
        for finding in ordered
    ]


def count_words(counts: Mapping[str, int]) -> str:
    """Return counts by kind as words."""
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
