"""Small marks in the ledger: tags on runs, and ideas for the next run."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.output import Line, Result, Styled, mutation_document, rows_document
from harness.cli.shared import RunArg, command, new_app
from harness.cli.state import find_run, program, read_state, refresh_thread
from harness.core.errors import UsageError

APPS = {name: new_app() for name in ("tag", "next")}


@command(APPS["tag"], "tag", "harness tag run-002 baseline", "harness tag run-002 baseline --remove")
def tag(
    run: RunArg,
    name: Annotated[str, typer.Argument(help="Letters, digits, '.', '_' and '-'.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away.")] = False,
) -> Result:
    """Give a run a name to find it by, or take it away.

    `harness list --tag NAME` shows the runs that carry it. Doing it twice changes nothing.
    """
    from harness.ledger import Ledger
    from harness.ledger.ideas import tag_run

    here = program()
    find_run(read_state(here), run)
    events = Ledger(here.ledger).append_locked(lambda state: tag_run(state, run, name, remove))
    tags = list(read_state(here).runs[run].tags)
    data = mutation_document(run, applied=bool(events), dry_run=False, detail={"tag": name, "tags": tags})
    return Result(data, [f"{run}: {', '.join(tags) or 'no tags'}"])


@command(
    APPS["next"],
    "next",
    "harness next",
    'harness next --hypothesis "A lower rate keeps the gain" --because "run-003 fell into one letter"',
    'harness next --drop 01K3Z --reason "run-004 answered it"',
)
def next_run(
    hypothesis: Annotated[str, typer.Option(help="One sentence that a result can refute.")] = "",
    because: Annotated[str, typer.Option(help="What made you think of it.")] = "",
    drop: Annotated[str, typer.Option(metavar="ID", help="Close an idea without a run; the start of its id.")] = "",
    reason: Annotated[str, typer.Option(help="Why it is dropped; recorded for good.")] = "",
) -> Result:
    """Leave an idea for the next run, or show the open ones.

    An idea stands in THREAD.md and in `harness status` until a run takes it up: `harness new-run --next`
    takes the one left last, and a new run with the same words takes that one.
    """
    here = program()
    if hypothesis and drop:
        raise UsageError("--hypothesis leaves an idea, --drop closes one", "use one of them")
    if not (hypothesis or drop):
        if because or reason:
            raise UsageError("there is no idea that this explains", 'harness next --hypothesis "…" --because "…"')
        return _open_ideas()
    from harness.ledger import Ledger
    from harness.ledger.ideas import drop_idea, leave_idea

    events = Ledger(here.ledger).append_locked(
        lambda state: leave_idea(state, hypothesis, because) if hypothesis else drop_idea(state, drop, reason)
    )
    if events:
        refresh_thread(here)
    ideas = read_state(here).ideas
    data = mutation_document("program", applied=bool(events), dry_run=False, detail={"ideas": ideas})
    done = "idea dropped" if drop else "left for the next run" if events else "that idea is open already"
    lines: list[Line] = [done]
    if hypothesis:
        lines.append(("next: ", Styled("harness new-run --next", "strong")))
    return Result(data, lines)


def _open_ideas() -> Result:
    ideas = read_state(program()).ideas
    data = rows_document(ideas, {"total": len(ideas)}, False)
    lines: list[Line] = []
    for idea in ideas:
        lines.append((Styled(str(idea["id"]), "dim"), f"  {idea['hypothesis']}"))
        lines.append(f"  left by {idea['actor']['name']} on {idea['at'][:10]}")
        lines += [f"  because {idea['because']}"] if idea.get("because") else []
    return Result(data, lines or ['no idea is open; `harness next --hypothesis "…"` leaves one'])
