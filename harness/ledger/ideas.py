"""Ideas for the next run, and tags: small marks that people and agents leave in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.errors import NotFoundError, UsageError
from harness.core.ids import check_name
from harness.ledger.events import PROGRAM, NewEvent
from harness.ledger.fold import State

MAX_CHARS = 2000


def same_idea(state: State, hypothesis: str) -> Mapping[str, Any] | None:
    """Return the open idea with these words, however spaced; None when there is none."""
    wanted = " ".join(hypothesis.split())
    return next((idea for idea in state.ideas if " ".join(str(idea["hypothesis"]).split()) == wanted), None)


def next_idea(state: State) -> Mapping[str, Any]:
    """Return the idea that `new-run --next` takes up: the one that was left last.

    Raises:
        NotFoundError: when none is open.
    """
    if not state.ideas:
        raise NotFoundError("nobody has left an idea for the next run", 'harness next --hypothesis "…" leaves one')
    return state.ideas[-1]


def leave_idea(state: State, hypothesis: str, because: str = "") -> list[NewEvent]:
    """Return the event that leaves a hypothesis for the next run; nothing when it is open already.

    Raises:
        UsageError: when it is blank or longer than a hypothesis should be.
    """
    text = hypothesis.strip()
    if not text or len(text) > MAX_CHARS:
        what = "is empty" if not text else f"has {len(text)} characters, more than {MAX_CHARS}"
        raise UsageError(f"the hypothesis {what}", 'harness next --hypothesis "one sentence that a result can refute"')
    if same_idea(state, text) is not None:
        return []
    data = {"hypothesis": text} | ({"because": because.strip()} if because.strip() else {})
    return [NewEvent(PROGRAM, "proposed", data)]


def drop_idea(state: State, idea: str, reason: str) -> list[NewEvent]:
    """Return the event that closes an open idea without a run.

    Args:
        state: of the ledger.
        idea: its id, or the beginning of it.
        reason: why it is not worth a run.

    Raises:
        NotFoundError: when no open idea, or more than one, has this id.
        UsageError: when the reason is blank.
    """
    found = [known for known in state.ideas if idea and str(known["id"]).startswith(idea.upper())]
    if len(found) != 1:
        many = "several open ideas begin" if found else "no open idea begins"
        raise NotFoundError(f"{many} with {idea[:40]!r}", "`harness next` lists them with their ids")
    if not reason.strip():
        raise UsageError("an idea is dropped for a reason", f'harness next --drop {idea} --reason "…"')
    return [NewEvent(PROGRAM, "proposed", {"dropped": found[0]["id"], "reason": reason.strip()})]


def tag_run(state: State, run: str, tag: str, remove: bool) -> list[NewEvent]:
    """Return the event that gives a run a tag or takes it away; nothing when it is so already.

    Raises:
        UsageError: when the tag is no allowed name.
    """
    check_name(tag, "tag")
    if (tag in state.runs[run].tags) is not remove:
        return []
    return [NewEvent(run, "tagged", {"tag": tag, "removed": remove})]
