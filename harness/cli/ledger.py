"""`harness ledger`: verify it, and everything git needs: show it, merge it, tell colliding runs apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.output import Line, Result, Styled, mutation_document, rows_document, settings
from harness.cli.shared import DryRun, RunArg, command, new_app
from harness.cli.state import program, refresh_thread
from harness.core.errors import ExitCode, HarnessError, NotFoundError

if TYPE_CHECKING:
    from harness.program.model import Program

app = new_app("harness ledger verify", no_args_is_help=True, help="Verify the ledger, and merge it in git.")
APPS = {"ledger": app}


@command(
    app,
    "verify",
    "harness ledger verify",
    "harness ledger verify --base origin/main",
    "harness ledger verify --json > heads.json",
    "harness ledger verify --head heads.json",
)
def verify(
    base: Annotated[
        str | None, typer.Option(metavar="REF", help="A commit; every event of its ledger must be here.")
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="SHA|FILE", help="An event that must be here, or an earlier answer of --json."),
    ] = None,
    reports: Annotated[bool, typer.Option("--reports", help="Build every report again and compare.")] = False,
) -> Result:
    """Check every line of the ledger, its links, and the committed files it names.

    Events removed from the end of a run, and whole runs, leave no trace in the file: --base and --head compare
    with an earlier copy. Exit code 0 when it verifies, 1 with every damage otherwise, 3 when REF is not here.
    """
    from harness.cli.checking import check_program, count_words, finding_lines

    here = program()
    done = check_program(here, base, head or [], reports)
    errors = [finding for finding in done.findings if finding.severity == "error"]
    counts = {"errors": len(errors), "notes": len(done.findings) - len(errors), "events": len(done.events)}
    data = rows_document([asdict(finding) for finding in done.findings], counts, False)
    data |= {"verifies": not errors, "base": base, "heads": done.heads() if settings.json else {}}
    lines = finding_lines(done.findings)
    if errors:
        kinds = count_words(Counter(finding.kind for finding in errors))
        return Result(data, [*lines, f"{here.ledger.name} does not verify: {kinds}"], ExitCode.NO)
    against = f", and everything of {base} is here" if base else ""
    return Result(data, [*lines, f"{here.ledger.name} verifies: {len(done.events)} events{against}"])


@command(app, "textconv", "harness ledger textconv runs.jsonl")
def textconv(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A ledger file, or a version of one that git names.")],
) -> Result:
    """Render a ledger as text, one block per event; git calls this for `git diff`."""
    from harness.ledger.textconv import render

    text = render(_bytes(file))
    return Result({"file": str(file), "text": text}, text.splitlines(), multiline=True)


_Side = Annotated[Path, typer.Argument(help="A version of the ledger.")]


@command(app, "merge", "harness ledger merge %O %A %B", "git config merge.harness-ledger.driver")
def merge(base: _Side, ours: _Side, theirs: _Side) -> Result:
    """Merge two versions of the ledger: the union of their events, in the file OURS.

    This is git's merge driver; `harness init` and `harness ledger install` tell git about it. Exit code 0 when
    the merge is clean. 1 when a person has to look: a damaged or edited event is on one side, and OURS stays as
    it is; or both sides created a run of the same number, and OURS has all events.
    """
    from harness.core.files import atomic_write
    from harness.ledger.merge import merge as union

    done = union(*(_bytes(path) for path in (base, ours, theirs)))
    if done.data is not None:
        atomic_write(ours, done.data)
    detail = {"events": done.events, "problems": list(done.problems), "notes": list(done.notes)}
    data = mutation_document(str(ours), applied=done.data is not None, dry_run=False, detail=detail)
    lines: list[Line] = [(Styled("conflict:", "bad"), f" {problem}") for problem in done.problems]
    lines += [(Styled("note:", "warn"), f" {note}") for note in done.notes]
    if done.data is not None:
        lines.append(f"{done.events} events of both sides are in the ledger")
    else:
        lines.append("the ledger was not merged: repair that side, or restore the file with git, and merge again")
    return Result(data, lines, ExitCode.NO if done.problems else ExitCode.OK)


@command(app, "install", "harness ledger install", "harness ledger install --dry-run")
def install(dry_run: DryRun = False) -> Result:
    """Tell git in this clone how to show and how to merge the ledger.

    `harness init` does it for a new program. Git takes no commands from a repository, so a fresh clone of a
    program needs this once. Lines missing from .gitattributes are added.
    """
    from harness.program.gitsetup import install as set_up
    from harness.program.gitsetup import on_path, spell

    here = program()
    done = set_up(here.root, dry_run=dry_run)
    commands = [spell(command) for command in done.commands]
    applied = not (dry_run or done.complete)
    detail = {"commands": commands, "attributes": list(done.attributes), "on_path": on_path()}
    data = mutation_document(str(here.root), applied=applied, dry_run=dry_run, detail=detail)
    lines: list[Line] = [f"{'would run' if dry_run else 'ran'} {text}" for text in commands]
    lines += [f"{'would add' if dry_run else 'added'} to .gitattributes: {line}" for line in done.attributes]
    if done.complete:
        lines.append("git is set up for the ledger already")
    if not on_path():
        lines.append((Styled("warning:", "warn"), " git does not find `harness` on PATH, so it cannot merge with it"))
    return Result(data, lines)


@command(
    app,
    "renumber",
    "harness ledger renumber run-005",
    "harness ledger renumber run-005 --to run-009 --base origin/main",
    "harness ledger renumber run-005 --dry-run",
)
def renumber(
    run: RunArg,
    to: Annotated[
        str | None, typer.Option(metavar="RUN", help="The new number; the next free one if left out.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="REF", help="Whose events keep their numbers; origin's main branch if left out."),
    ] = None,
    dry_run: DryRun = False,
) -> Result:
    """Give one of two runs that took the same number on two branches another number.

    The run that REF has keeps the number, else the older one. An event records the new number; config, report
    and outputs of the run move along, and its children name it anew. No event is rewritten, and events that REF
    has are refused. It works before a merge, in the middle of one and after it; run again, it finishes what was
    interrupted.
    """
    from harness.program.renumber import renumber as solve

    here = program()
    done = solve(here, run, to=to, base=base, dry_run=dry_run)
    if done.settled:
        refresh_thread(here)
        _write_reports(here, [new for _, new in done.settled], done.files, done.notes)
    detail = {
        "base": done.base,
        "moves": [{"from": old, "to": new} for old, new in done.moves],
        "files": done.files,
        "notes": done.notes,
    }
    applied = not dry_run and bool(done.moves or done.files)
    data = mutation_document(run, applied=applied, dry_run=dry_run, detail=detail)
    would = "would get" if dry_run else "has"
    lines: list[Line] = [f"{old} {would} the number {new}" for old, new in done.moves]
    lines += list(done.files)
    lines += [(Styled("note:", "warn"), f" {note}") for note in done.notes]
    if not applied and not dry_run:
        lines.append(f"nothing to do: {', '.join(f'{old} is {new}' for old, new in done.settled)}")
    elif not dry_run:
        lines += [
            "",
            ("next: ", Styled("harness ledger verify && git add -A rl analysis runs.jsonl THREAD.md", "strong")),
        ]
    return Result(data, lines)


def _write_reports(here: Program, runs: list[str], files: list[str], notes: list[str]) -> None:
    """Write the reports of renumbered runs again, as they name the run; what cannot be written is noted."""
    for run in runs:
        if not (here.analysis_dir(run) / "report.md").is_file():
            continue
        try:
            from harness.reports.write import write_report

            changed = write_report(here, run).changed
            if changed:
                files.append(f"wrote the report of {run} again")
        except (HarnessError, ImportError) as error:
            notes.append(f"the report of {run} still has its old number: {error}; `harness report {run}` writes it")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NotFoundError(
            f"cannot read {path}: {error.strerror}", "name a ledger file, such as runs.jsonl"
        ) from error
