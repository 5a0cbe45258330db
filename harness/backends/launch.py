"""What is checked again at launch: the world may have moved since the run was created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.backends.basis import basis_of, stored_basis
from harness.backends.planning import first_changes
from harness.backends.rules import (
    check_declared,
    check_frozen,
    check_no_change,
    check_no_secrets,
    check_one_change,
    check_search_space,
    find_duplicate,
)
from harness.config.changes import Basis, Change, ChangeSet, change_set, is_nuisance
from harness.config.load import META_KEYS, config_sha, load_config
from harness.config.schema import RunConfig
from harness.core.errors import NotFoundError, RefusedError
from harness.ledger import Ledger, RunState, State
from harness.program import Plan, Program, check_documents, protocol_hashes
from harness.program.amend import check_amended
from harness.program.prompts import run_prompts


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that every rule allows.

    Args:
        run: run id.
        config: as the file says now.
        changes: the change set to the parent as it is now; empty for a first run.
        basis: what this attempt stands on.
        protocol: hashes of GOAL, CONTEXT and PLAN now.
    """

    run: str
    config: RunConfig
    changes: ChangeSet
    basis: Basis
    protocol: dict[str, str]

    def event_data(self) -> dict[str, Any]:
        """Return what the `started` event says of config, basis, protocol and changes."""
        return {
            "config_sha": config_sha(self.config),
            "basis": self.basis.to_json(),
            "protocol": self.protocol,
            "changes_at_launch": self.changes.to_json(),
        }


def check_launch(program: Program, run: str) -> list[Change]:
    """Return the change set to the parent as it is now; see `prepare_launch` for what is refused."""
    return list(prepare_launch(program, run).changes)


def prepare_launch(program: Program, run: str, *, state: State | None = None) -> Launch:
    """Check a launch against the rules and the world as they are now.

    Args:
        program: the program.
        run: run id.
        state: the ledger's state; read when None.

    Raises:
        NotFoundError: when the ledger or `rl/` has no such run.
        RefusedError: when a page was edited without `amend`, a frozen key is touched, more moved than
            the run declared, or an attempt would differ from the attempts before it.
        ConfigError: when the config or a page does not parse.
    """
    known = Ledger(program.ledger).state() if state is None else state
    record = known.runs.get(run)
    if record is None:
        raise NotFoundError(f"there is no run {run[:80]!r} in {program.ledger.name}", "`harness list` shows the runs")
    if record.kind != "training" or not record.created.get("basis"):
        raise RefusedError(
            f"{run} is a run of type {record.kind}, which cannot be launched", "`harness list` shows the runs"
        )
    config = load_config(program.config_path(run))
    _check_identity(record, config)
    check_no_secrets(config, run_prompts(program, config))
    check_amended(program, known)
    _, context, plan = check_documents(program)
    basis = basis_of(program, config, context)
    check_frozen(basis, context)
    parent = known.runs.get(config.parent) if config.parent else None
    old = stored_basis(parent) if parent is not None else None
    changes = ChangeSet(()) if old is None else change_set(old, basis, plan.nuisance)
    if record.attempts:
        _check_same_attempt(record, basis, plan)
    elif config.parent is None:
        check_search_space(first_changes(config, context, plan), plan, record.created.get("outside_plan"))
    else:
        _check_first_attempt(known, record, config, basis, changes, plan)
    return Launch(run, config, changes, basis, protocol_hashes(program))


def _check_identity(record: RunState, config: RunConfig) -> None:
    """Refuse a run whose reason to exist was rewritten after it was recorded."""
    for key in META_KEYS:
        if getattr(config, key) != record.created.get(key):
            raise RefusedError(
                f"{key} in rl/{record.run}.toml is not what {record.run} was created with",
                f"restore it with git, or make a new run: a {key} is fixed before the result is known",
            )


def _check_first_attempt(
    state: State, record: RunState, config: RunConfig, basis: Basis, changes: ChangeSet, plan: Plan
) -> None:
    """Apply the rules of `new-run` once more; the values of declared keys may have been edited by hand."""
    parent = str(config.parent)
    if config.replicate_of:
        check_no_change(changes, parent)
        return
    declared = {item["key"]: item for item in record.created.get("changes", ()) if item["counts"]}
    check_declared(changes, declared.keys(), record.run)
    check_one_change(changes, parent, config.lever)
    edited = [change for change in changes.counting if declared[change.key]["new"] != change.new]
    check_search_space(edited, plan, None)
    if edited:
        others = ((r.run, b) for r in state.runs.values() if r is not record and (b := stored_basis(r)) is not None)
        twin = find_duplicate(basis, others, plan.nuisance)
        if twin is not None:
            raise RefusedError(
                f"after the edit {record.run} tests the same as {twin}", f"`harness show {twin}` shows that run"
            )


def _check_same_attempt(record: RunState, basis: Basis, plan: Plan) -> None:
    """Refuse an attempt that would mix two configs, two protocols or two versions under one run."""
    before = stored_basis(record)
    if before is None:
        return
    moved = [
        change
        for change in change_set(before, basis, plan.nuisance)
        if (change.counts or (change.kind != "code" and change.old is not None))
        and not (change.kind == "config" and change.key != "train.seed" and is_nuisance(change.key, plan.nuisance))
    ]
    if moved:
        listed = "; ".join(map(str, moved))
        raise RefusedError(
            f"{record.run} was started with something else: {listed}",
            "an attempt repeats its run; undo that, or make a new run with `harness new-run`",
        )
