"""Changes to GOAL, CONTEXT and PLAN are recorded acts: who, when, from what, to what, and why.

`harness.program.documents` is imported late: it brings pydantic, and importing this package must stay cheap.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.core.canonical import sha256_hex
from harness.core.errors import RefusedError, UsageError
from harness.ledger import PROGRAM, Actor, Event, Ledger, NewEvent, State
from harness.ledger.findings import Finding
from harness.program.model import DOCUMENTS, Program


def recorded_hashes(state: State) -> dict[str, str]:
    """Return the last recorded hash of each page by key (`goal`, `context`, `plan`); empty before the first run.

    The last amendment holds; before any, the first run pinned the page. Later runs cannot move it,
    since a run is refused while a page differs from its record.
    """
    from harness.program.documents import document_key

    recorded: dict[str, str] = {}
    pages = {document_key(name) for name in DOCUMENTS}
    for run in sorted(state.runs.values(), key=lambda run: (run.created_at, run.run)):
        for key, sha in (run.created.get("protocol") or {}).items():
            recorded.setdefault(key, sha)
        if pages <= recorded.keys():  # usually after the first run; the others need not be parsed
            break
    for amendment in state.amendments:
        recorded[document_key(str(amendment["file"]))] = amendment["new_sha"]
    return recorded


def unamended(program: Program, state: State) -> list[str]:
    """Return the pages whose bytes differ from their last recorded hash, as file names."""
    from harness.program.documents import document_key, protocol_hashes

    recorded, current = recorded_hashes(state), protocol_hashes(program)
    return [name for name in DOCUMENTS if recorded.get(key := document_key(name), current[key]) != current[key]]


def page_findings(program: Program, state: State) -> Iterator[Finding]:
    """Tell which pages were edited without a recorded reason.

    It is an error once results were seen and the page is one they are judged by.
    """
    seen = any(run.of_kind("evaluated") for run in state.runs.values())
    for name in unamended(program, state):
        judged = seen and name in ("GOAL.md", "CONTEXT.md")
        when = " after results were seen" if judged else ""
        text = f'{name} was edited{when} and not recorded: `harness amend {name} --reason "…"`, or restore it with git'
        yield Finding("edited_page", "error" if judged else "note", text)


def check_amended(program: Program, state: State) -> None:
    """Check that no page was edited without a recorded reason.

    Raises:
        RefusedError: naming the pages.
    """
    edited = unamended(program, state)
    if edited:
        raise RefusedError(
            f"{' and '.join(edited)} changed since it was last recorded",
            f'record it with `harness amend {edited[0]} --reason "…"`, or undo it with `git checkout -- {edited[0]}`',
        )


def amend(
    program: Program, file: str, reason: str, *, ledger: Ledger | None = None, actor: Actor | None = None
) -> Event:
    """Record an edit of GOAL.md, CONTEXT.md or PLAN.md.

    Args:
        program: the program.
        file: the page; `goal`, `GOAL` and `GOAL.md` are the same.
        reason: why the page changed; not blank.
        ledger: the program's ledger; opened when None.
        actor: who; told from the environment when None.

    Raises:
        UsageError: for another file, a blank reason, or a page that did not change.
        ConfigError: when the edited page cannot be read, or the pages no longer fit each other.
    """
    from harness.program.documents import READERS, check_documents, document_key

    name = file.removesuffix(".md").upper() + ".md"
    if name not in READERS:
        raise UsageError(f"{file[:80]!r} is not amended", f"amend one of {', '.join(DOCUMENTS)}")
    if not reason.strip():
        raise UsageError("an amendment needs a reason", f'harness amend {name} --reason "…"')
    READERS[name](program)
    check_documents(program)
    new_sha = sha256_hex((program.root / name).read_bytes())

    def build(state: State) -> list[NewEvent]:
        old_sha = recorded_hashes(state).get(document_key(name))
        if old_sha == new_sha:
            raise UsageError(f"{name} has not changed since it was last recorded", "edit it first, then record why")
        data = {"file": name, "old_sha": old_sha, "new_sha": new_sha, "reason": reason.strip()}
        return [NewEvent(PROGRAM, "amended", data, actor=actor)]

    return (ledger or Ledger(program.ledger)).append_locked(build)[0]
