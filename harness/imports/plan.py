"""`harness import`: read, see what is new, give out numbers, write files and events; nothing twice."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError, InfraError, NotFoundError, UsageError
from harness.core.files import atomic_write, disk_hint, fsync_dir
from harness.core.ids import run_id, run_number
from harness.core.names import did_you_mean
from harness.imports.formats import FORMATS, choose
from harness.imports.parents import infer_parents
from harness.imports.record import Prepared, files_of, prepare
from harness.imports.settings import changes, settings_of
from harness.imports.source import Source, SourceError
from harness.ledger import Actor, Ledger, NewEvent, State
from harness.program import Program, read_context


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked of `import`.

    Args:
        source: file or folder.
        format: a key of `FORMATS`; found when empty.
        only: names of the runs to take; all when empty.
        reward: the source's name of the training reward; found when empty.
        parents: `CHILD=PARENT`, each a name in the source or, for the parent, a run id.
        infer_parents: take the nearest earlier config of the same source as parent.
    """

    source: Path
    format: str = ""
    only: tuple[str, ...] = ()
    reward: str = ""
    parents: tuple[str, ...] = ()
    infer_parents: bool = False


@dataclass(slots=True)
class Row:
    """One run of a plan.

    Args:
        prepared: files and data.
        run: the id it gets, or has.
        known: it was imported before, from the same bytes.
        parent: run id; None without one.
        parent_by: `declared` or `inferred`; None without one.
        earlier: a run with another state of the same source run.
    """

    prepared: Prepared
    run: str = ""
    known: bool = False
    parent: str | None = None
    parent_by: str | None = None
    earlier: str | None = None


@dataclass(slots=True)
class ImportPlan:
    """What an import would do, or did.

    Args:
        request: what was asked.
        format: the format it was read as.
        rows: one per run, in the order of the source.
        not_read: what was left out of the source as a whole.
    """

    request: Request
    format: str
    rows: list[Row] = field(default_factory=list)
    not_read: tuple[str, ...] = ()

    @property
    def new(self) -> list[Row]:
        """Runs that are not in the ledger yet."""
        return [row for row in self.rows if not row.known]


def plan_import(program: Program, request: Request) -> ImportPlan:
    """Read a source and say what an import would add; touches nothing.

    Raises:
        SourceError: when the source is damaged, too large or of no known format.
        UsageError, NotFoundError: for arguments that name nothing.
        MissingExtraError: when a package that reads the format is not installed.
    """
    source = Source(request.source)
    kind = choose(source, request.format)
    found = FORMATS[kind].read(source)
    if unknown := [name for name in request.only if name not in {run.name for run in found}]:
        raise NotFoundError(
            f"the source has no run {unknown[0][:80]!r}", did_you_mean(unknown[0], [r.name for r in found])
        )
    chosen = [run for run in found if not request.only or run.name in request.only]
    if not chosen:
        raise SourceError(f"{source.name} holds no run")
    confidence = read_context(program).eval.confidence
    rows = [Row(prepare(run, kind, source.name, reward=request.reward, confidence=confidence)) for run in chosen]
    plan = ImportPlan(request, kind, rows, tuple(source.notes))
    _number(plan, Ledger(program.ledger).state())
    return plan


def _number(plan: ImportPlan, state: State) -> None:
    """Give every run the id it has or would get, and its parent; called again under the ledger's lock."""
    known, earlier = _imported(state)
    free = max((run_number(name) for name in state.runs), default=0) + 1
    for row in plan.rows:
        source = row.prepared.data["source"]
        row.run = known.get((plan.format, source["sha"]), "")
        row.known = bool(row.run)
        row.earlier = None if row.known else earlier.get((plan.format, source["name"], source["id"]))
        if not row.known:
            row.run = run_id(free)
            known[(plan.format, source["sha"])] = row.run  # the same run twice in one source is one run
            free += 1
    _parents(plan, state)


def _imported(state: State) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str, str], str]]:
    """Return the imported runs by the hash of their source, and the newest by its name and id."""
    by_sha: dict[tuple[str, str], str] = {}
    by_id: dict[tuple[str, str, str], str] = {}
    for name, run in state.runs.items():
        for event in run.of_kind("imported"):
            source = event.data.get("source") or {}
            kind = str(event.data.get("format"))
            by_sha.setdefault((kind, str(source.get("sha"))), name)
            by_id[(kind, str(source.get("name")), str(source.get("id")))] = name
    return by_sha, by_id


def _parents(plan: ImportPlan, state: State) -> None:
    ids = {row.prepared.run.name: row.run for row in plan.rows}
    declared = _declared(plan.request.parents, ids, state)
    guessed: Mapping[int, int] = {}
    if plan.request.infer_parents:
        guessed = infer_parents([row.prepared.config for row in plan.rows])
    for index, row in enumerate(plan.rows):
        if row.run in declared:
            row.parent, row.parent_by = declared[row.run], "declared"
        elif index in guessed:
            row.parent, row.parent_by = plan.rows[guessed[index]].run, "inferred"
    _refuse_circles(plan)


def _declared(pairs: Sequence[str], ids: Mapping[str, str], state: State) -> dict[str, str]:
    found = {}
    for pair in pairs:
        child, separator, parent = pair.partition("=")
        if not separator:
            raise UsageError(f"--parent {pair[:80]!r} is no CHILD=PARENT", "--parent second-run=first-run")
        if child not in ids:
            raise NotFoundError(f"the source has no run {child[:80]!r}", did_you_mean(child, ids))
        if parent not in ids and parent not in state.runs:
            raise NotFoundError(f"there is no run {parent[:80]!r}", did_you_mean(parent, [*ids, *state.runs]))
        found[ids[child]] = ids.get(parent, parent)
    return found


def _refuse_circles(plan: ImportPlan) -> None:
    parents = {row.run: row.parent for row in plan.rows}
    for start in parents:
        seen, current = {start}, parents[start]
        while current in parents:
            if current in seen:
                raise UsageError(f"the parents of {start} go in a circle", "give each run an earlier parent")
            seen.add(current)
            current = parents[current]


def apply_import(program: Program, plan: ImportPlan, actor: Actor | None = None) -> None:
    """Record the plan's new runs: files first, then all events in one append.

    Files are written beside their place before the ledger is locked, and renamed into it under the lock,
    so a run in the ledger always has its files and other writers hardly wait.

    Raises:
        As `Ledger.append_locked`, and InfraError when the disk fails; the ledger is then as before.
    """
    if not plan.new:
        return
    stage = program.analysis / f".import-{os.getpid()}-{time.monotonic_ns()}"
    moved: list[Path] = []
    try:
        for index, row in enumerate(plan.rows):
            for name, data in row.prepared.files.items() if not row.known else ():
                atomic_write(stage / str(index) / name, data)

        def build(state: State) -> list[NewEvent]:
            _number(plan, state)
            events: list[NewEvent] = []
            for index, row in enumerate(plan.rows):
                if not row.known:
                    _place(program, stage / str(index), row.run, moved)
                    events += _events(program, row, plan, state, actor)
            if moved:
                fsync_dir(program.analysis)
            return events

        Ledger(program.ledger).append_locked(build)
    except BaseException:
        recorded = _recorded(program)
        for folder in moved:
            if recorded is not None and folder.name not in recorded:
                shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _recorded(program: Program) -> set[str] | None:
    """Return the runs in the ledger; None when it cannot be read, since then nothing is known to be left over."""
    try:
        return set(Ledger(program.ledger).state().runs)
    except (HarnessError, OSError):
        return None


def _place(program: Program, staged: Path, run: str, moved: list[Path]) -> None:
    """Move a run's files into analysis/; what a failed import or an unmerged branch left there goes to outputs/."""
    target = program.analysis_dir(run)
    try:
        if target.exists() or target.is_symlink():
            aside = program.outputs / "orphans" / f"{run}-{time.time_ns()}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(target, aside)
        staged.rename(target)
    except OSError as error:
        raise InfraError(f"cannot write {target}: {error.strerror}", disk_hint(error)) from error
    moved.append(target)


def _events(program: Program, row: Row, plan: ImportPlan, state: State, actor: Actor | None) -> list[NewEvent]:
    folder = program.relative(program.analysis_dir(row.run))
    data = {
        **row.prepared.data,
        "parent": row.parent,
        "parent_by": row.parent_by,
        "links": {row.parent: state.runs[row.parent].root} if row.parent in state.runs else {},
        "changes": change_rows(row, plan, state),
        "earlier": row.earlier,
        "files": files_of(row.prepared, folder),
    }
    events = [NewEvent(row.run, "imported", data, actor=actor)]
    for result in row.prepared.evals:
        placed = {**result, "file": f"{folder}/{result['file']}"} if result.get("file") else result
        events.append(NewEvent(row.run, "evaluated", placed, actor=actor))
    return events


def change_rows(row: Row, plan: ImportPlan, state: State) -> list[dict[str, Any]]:
    """Return what a run's config changes against its parent's; empty when either has none that can be compared."""
    if row.parent is None:
        return []
    beside = next((other.prepared.config for other in plan.rows if other.run == row.parent), None)
    parent = (
        beside
        if beside is not None
        else settings_of(state.runs[row.parent].created if row.parent in state.runs else {})
    )
    return changes(parent, row.prepared.config) if parent and row.prepared.config else []
