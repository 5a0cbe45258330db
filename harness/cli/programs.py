"""Commands about the program itself: init, amend, thread and note."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.output import Line, Result, Styled, mutation_document
from harness.cli.shared import DryRun, command, complete_runs, new_app
from harness.cli.state import find_run, program, read_state, refresh_thread
from harness.core.errors import ExitCode, UsageError

APPS = {name: new_app() for name in ("init", "amend", "thread", "note")}


@command(
    APPS["init"],
    "init",
    "harness init my-program",
    "harness init my-program --model org/name --revision 0123456789abcdef0123456789abcdef01234567",
)
def init(
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the new program; made when absent.")],
    model: Annotated[
        str, typer.Option(help="Base checkpoint: an embedded name, a folder, or a Hub id.")
    ] = "smollm2-135m",
    revision: Annotated[str | None, typer.Option(help="Commit of a Hub id, 40 hex digits.")] = None,
    git: Annotated[bool, typer.Option("--git/--no-git", help="Set up git and the diff of the ledger.")] = True,
    dry_run: DryRun = False,
) -> Result:
    """Write a new research program into a folder.

    Writes GOAL.md, CONTEXT.md, PLAN.md, THREAD.md, rl/, analysis/, the git files and a CI workflow. A
    folder that already holds a program is refused; other files in it stay as they are.
    """
    from harness.program.init import init_program

    done = init_program(path, model, revision=revision, git=git, dry_run=dry_run)
    detail = {
        "written": list(done.written),
        "kept": list(done.kept),
        "commands": list(done.commands),
        "notes": list(done.notes),
        "model": model,
    }
    data = mutation_document(str(done.root), applied=not dry_run, dry_run=dry_run, detail=detail)
    would = "would write" if dry_run else "wrote"
    lines: list[Line] = [f"{would} {name}" for name in done.written]
    lines += [f"kept {name}" for name in done.kept]
    lines += [f"{'would run' if dry_run else 'ran'} {text}" for text in done.commands]
    lines += [(Styled("note:", "warn"), " ", note) for note in done.notes]
    if not dry_run:
        lines += ["", ("next: ", Styled(f'cd {path} && harness new-run --hypothesis "…"', "strong"))]
    return Result(data, lines)


@command(APPS["amend"], "amend", 'harness amend GOAL.md --reason "the threshold was a guess; the base scores 0.41"')
def amend(
    file: Annotated[str, typer.Argument(help="GOAL.md, CONTEXT.md or PLAN.md; edit it first.")],
    reason: Annotated[str, typer.Option(help="Why; recorded for good.")],
) -> Result:
    """Record a change of GOAL.md, CONTEXT.md or PLAN.md, with the reason.

    Until an edit is recorded, runs are neither created nor launched nor promoted.
    """
    from harness.program.amend import amend as record

    here = program()
    event = record(here, file, reason)
    refresh_thread(here)
    data = mutation_document(
        event.data["file"], applied=True, dry_run=False, detail=dict(event.data) | {"event": event.id}
    )
    return Result(data, [f"recorded the change of {event.data['file']}"])


@command(APPS["thread"], "thread", "harness thread", "harness thread --check")
def thread(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when the block is stale.")] = False,
) -> Result:
    """Rewrite the generated block of THREAD.md.

    launch, decide, promote and amend do it too; this is for after a merge. Text outside the block is
    never touched.
    """
    here = program()
    if check:
        from harness.program.thread import replace_block, thread_block

        old = here.thread.read_text(encoding="utf-8", errors="surrogateescape") if here.thread.exists() else ""
        current = bool(old) and replace_block(old, thread_block(read_state(here))) == old
        data = {"target": "THREAD.md", "current": current}
        words = "is current" if current else "is stale; `harness thread` writes it again"
        return Result(data, [f"THREAD.md {words}"], ExitCode.OK if current else ExitCode.NO)
    from harness.program.thread import render_thread

    changed = render_thread(here, read_state(here))
    data = mutation_document("THREAD.md", applied=changed, dry_run=False, detail={"changed": changed})
    return Result(data, ["THREAD.md rewritten" if changed else "THREAD.md is current"])


@command(
    APPS["note"], "note", 'harness note run-002 "loss spikes at step 12 come from one task"', 'harness note program "…"'
)
def note(
    target: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or `program`.", autocompletion=complete_runs)],
    text: Annotated[str, typer.Argument(help="What was observed.")],
) -> Result:
    """Add an observation to a run, or to the program, in the ledger."""
    from harness.ledger import PROGRAM, Ledger

    here = program()
    if not text.strip():
        raise UsageError("the note is empty", 'harness note run-002 "what was observed"')
    if target != PROGRAM:
        find_run(read_state(here), target)
    event = Ledger(here.ledger).append(target, "noted", {"text": text.strip()})
    data = mutation_document(target, applied=True, dry_run=False, detail={"text": text.strip(), "event": event.id})
    return Result(data, [f"noted on {target}"])
