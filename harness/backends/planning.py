"""`harness new-run`: from a hypothesis to a numbered config and an event, or to the reason why not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.basis import BasisReader, stored_basis
from harness.backends.rules import (
    check_frozen,
    check_no_change,
    check_no_secrets,
    check_one_change,
    check_search_space,
    find_duplicate,
)
from harness.config.changes import Basis, Change, ChangeSet, change_set, diff, is_nuisance
from harness.config.load import config_from, config_sha, load_config, render_config, set_key
from harness.config.schema import EnvSampling, EnvSection, ModelSection, RunConfig
from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError, HarnessError, NotFoundError, RefusedError, UsageError
from harness.core.files import atomic_write
from harness.core.ids import check_name, run_id, run_number
from harness.core.names import did_you_mean
from harness.ledger import Actor, Ledger, NewEvent, RunState, State
from harness.ledger.ideas import same_idea
from harness.program import Context, Plan, Program, check_documents, protocol_hashes
from harness.program.amend import check_amended
from harness.program.prompts import run_prompts


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked of `new-run`.

    Args:
        hypothesis: what the run should show.
        from_run: the parent; None for the champion, else the last kept run.
        sets: assignments such as `lora.alpha=64`.
        group: name that declares several changes one lever.
        replicate: repeat the parent with another seed.
        outside_plan: why the run leaves PLAN.md's search space.
        key: idempotency key; a second request with it returns the first one's run.
    """

    hypothesis: str
    from_run: str | None = None
    sets: tuple[str, ...] = ()
    group: str | None = None
    replicate: bool = False
    outside_plan: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run that could be made; nothing is written yet.

    Args:
        request: what was asked.
        run: the id it would get, or has when `existing`.
        existing: an earlier request with the same key already made it.
        config: the run's config.
        text: its sparse TOML.
        changes: the change set to the parent; empty for a first run.
        basis: what it stands on.
        protocol: hashes of GOAL, CONTEXT and PLAN.
        warnings: what the user should know, such as a parent that has not finished.
        reader: what read the basis; a second decision need not read everything again.
        idea: id of the idea left by `harness next` that the run takes up; None when its words are new.
    """

    request: Request
    run: str
    existing: bool
    config: RunConfig
    text: str
    changes: ChangeSet
    basis: Basis
    protocol: dict[str, str]
    warnings: tuple[str, ...]
    reader: BasisReader
    idea: str | None = None


def plan_run(
    program: Program,
    *,
    hypothesis: str,
    from_run: str | None = None,
    sets: Sequence[str] = (),
    group: str | None = None,
    replicate: bool = False,
    outside_plan: str | None = None,
    key: str | None = None,
    ledger: Ledger | None = None,
) -> RunPlan:
    """Plan a run and touch nothing.

    Args: as the members of `Request`; `ledger` is the program's, opened when None.

    Raises:
        RefusedError: when a rule of the program says no; the hint names the way on.
        UsageError: for arguments that make no sense together.
        ConfigError: for a wrong key, value or page.
        NotFoundError: for an unknown run, environment or prompt.
    """
    request = Request(hypothesis.strip(), from_run, tuple(sets), group, replicate, outside_plan, key)
    _check_request(request)
    state = (ledger or Ledger(program.ledger)).state()
    return _decide(program, state, request, BasisReader(program))


def create_run(program: Program, plan: RunPlan, actor: Actor | None = None, *, ledger: Ledger | None = None) -> str:
    """Make the planned run and return its id.

    Everything is decided again under the ledger's lock, since another process may have made a run
    meanwhile; the config is written before the event, so a run in the ledger always has its config.

    Raises:
        As `plan_run`, and InfraError when the disk fails; the ledger is then as before.
    """
    if plan.existing:
        return plan.run
    book = ledger or Ledger(program.ledger)
    made: list[RunPlan] = []

    def build(state: State) -> list[NewEvent]:
        fresh = _decide(program, state, plan.request, plan.reader)
        made.append(fresh)
        if fresh.existing:
            return []
        path = program.config_path(fresh.run)
        _set_orphan_aside(program, path, fresh.text)
        atomic_write(path, fresh.text)
        data = created_data(program, fresh) | {"links": _links(state, fresh.config)}
        return [NewEvent(fresh.run, "created", data, actor=actor)]

    try:
        book.append_locked(build)
    except BaseException:  # also a text the ledger cannot hold, or Ctrl-C: no run without its event
        with contextlib.suppress(HarnessError, OSError):
            path = program.config_path(made[0].run) if made else None
            if path and made[0].run not in Ledger(program.ledger).state().runs and path.read_text() == made[0].text:
                path.unlink()
        raise
    return made[0].run


def created_data(program: Program, plan: RunPlan) -> dict[str, Any]:
    """Return the data of the plan's `created` event."""
    config = plan.config
    return {
        "type": "training",
        "hypothesis": config.hypothesis,
        "parent": config.parent,
        "changes": plan.changes.to_json(),
        "lever": config.lever,
        "replicate_of": config.replicate_of,
        "config": program.relative(program.config_path(plan.run)),
        "config_sha": config_sha(config),
        "basis": plan.basis.to_json(),
        "protocol": plan.protocol,
        "key": plan.request.key,
        "outside_plan": plan.request.outside_plan,
        "idea": plan.idea,
    }


def _links(state: State, config: RunConfig) -> dict[str, str]:
    """Return the hashes that identify the runs a config names, also when one of them gets another number.

    Raises:
        RefusedError: when two branches took the number of one, so that nobody knows which is meant.
    """
    named = [name for name in (config.parent, config.replicate_of) if name in state.runs]
    for name in named:
        if name in state.collisions:
            raise RefusedError(
                f"{name} was created on two branches, and both of its runs are here", f"harness ledger renumber {name}"
            )
    return {name: state.runs[name].root for name in named}


def _check_request(request: Request) -> None:
    if not request.hypothesis:
        raise RefusedError(
            "a run needs a hypothesis",
            '--hypothesis "Alpha 64 learns faster than 32": one sentence a result can refute',
        )
    if request.group is not None:
        check_name(request.group, "lever")
    if request.replicate and request.group:
        raise UsageError("--replicate changes nothing, so it has no lever", "leave out --group")
    if request.key is not None and not request.key.strip():
        raise UsageError("the idempotency key is empty", "give --key a name of your own, or leave it out")


def _decide(program: Program, state: State, request: Request, reader: BasisReader) -> RunPlan:
    """Apply every rule to a request, given the ledger's state."""
    made = _made_before(state, request)
    if made is not None:
        return _existing(program, made, request, reader)
    check_amended(program, state)
    _, context, plan = check_documents(program)
    parent = _base(state, request)
    config = _configure(program, state, request, parent, context)
    if not config.env:
        raise ConfigError("the run trains on no environment", "--set env.drugprot.id=drugprot adds one")
    check_no_secrets(config, run_prompts(program, config))
    basis = reader.read(config, context)
    check_frozen(basis, context)
    old = None if parent is None else stored_basis(parent)
    changes = ChangeSet(()) if old is None else change_set(old, basis, plan.nuisance)
    if parent is None:
        check_search_space(first_changes(config, context, plan), plan, request.outside_plan)
    elif request.replicate:
        check_no_change(changes, parent.run)
    else:
        check_one_change(changes, parent.run, request.group)
        check_search_space(changes, plan, request.outside_plan)
    _check_duplicate(state, basis, config, plan.nuisance, request)
    run = run_id(max((run_number(name) for name in state.runs), default=0) + 1)
    text = render_config(config, _parent_text(program, parent))
    protocol = protocol_hashes(program)
    idea = same_idea(state, config.hypothesis)
    return RunPlan(
        *(request, run, False, config, text, changes, basis, protocol, _warnings(parent), reader),
        idea=None if idea is None else str(idea["id"]),
    )


def _made_before(state: State, request: Request) -> RunState | None:
    if request.key is None:
        return None
    made = next((run for run in state.runs.values() if run.created.get("key") == request.key), None)
    if made is not None and made.hypothesis != request.hypothesis:
        raise UsageError(
            f"the idempotency key {request.key[:80]!r} already made {made.run}, which has another hypothesis",
            "use a new key for a new run",
        )
    return made


def _existing(program: Program, run: RunState, request: Request, reader: BasisReader) -> RunPlan:
    basis = stored_basis(run)
    config = config_from(run.created["basis"]["config"], run.run)
    changes = ChangeSet(tuple(Change.from_json(item) for item in run.created.get("changes", ())))
    protocol = dict(run.created.get("protocol", {}))
    text = render_config(config)
    return RunPlan(request, run.run, True, config, text, changes, basis or Basis({}), protocol, (), reader)


def _base(state: State, request: Request) -> RunState | None:
    """Return the parent; None for the first run of a program."""
    if request.from_run is not None:
        run = state.runs.get(request.from_run)
        if run is None:
            raise NotFoundError(
                f"there is no run {request.from_run[:80]!r}", did_you_mean(request.from_run, list(state.runs)[-20:])
            )
        if stored_basis(run) is None:
            raise RefusedError(f"{run.run} has no config to start from ({run.kind})", "name a training run with --from")
        return run
    training = [run for run in state.runs.values() if run.kind == "training" and run.created]
    if not training:
        if request.replicate:
            raise RefusedError("there is no run to replicate yet", "leave out --replicate to make the first run")
        return None
    if state.champion in state.runs and stored_basis(state.runs[state.champion]) is not None:
        return state.runs[state.champion]
    kept = [run for run in training if run.decision == "keep"]
    if not kept:
        raise RefusedError(
            "no run has been promoted or kept, so there is none to start from",
            f"name one with --from {training[-1].run}, or close one with `harness decide {training[-1].run} keep`",
        )
    return max(kept, key=lambda run: (run.decisions[-1]["at"], run_number(run.run)))


def first_config(context: Context, hypothesis: str) -> RunConfig:
    """Return the config a program's first run starts from: defaults, every evaluated environment, frozen values.

    Rollouts are sampled as the protocol samples, so that what is trained is what is evaluated.

    Args:
        context: the program's protocol.
        hypothesis: what the run should show.

    Raises:
        ConfigError: when a frozen value does not fit its key.
    """
    model = ModelSection(name=context.model.name, revision=context.model.revision)
    env = tuple(
        EnvSection(
            id=item.id,
            args=item.args,
            sampling=EnvSampling(
                max_tokens=item.max_tokens,
                temperature=item.temperature or None,
                max_turns=item.max_turns if item.max_turns > 1 else None,
            ),
        )
        for item in context.eval.env
    )
    config = RunConfig(hypothesis=hypothesis, model=model, env=env)
    trained = {section.id for section in env}
    for key, value in context.frozen.items():
        parts = key.split(".")
        if "*" not in key and value is not None and (parts[0] != "env" or parts[1] in trained):
            try:
                config = set_key(config, f"{key}={json.dumps(value, ensure_ascii=False)}")
            except ConfigError as error:
                message = f"CONTEXT.md freezes {key} at a value it cannot have: {error.message}"
                raise ConfigError(message, error.hint) from None
    return config


def first_changes(config: RunConfig, context: Context, plan: Plan) -> list[Change]:
    """Return what a first run sets besides the defaults, which PLAN.md's search space bounds too."""
    differences = diff(first_config(context, config.hypothesis), config)
    return [Change(key, old, new, "config", not is_nuisance(key, plan.nuisance)) for key, old, new in differences]


def _configure(
    program: Program, state: State, request: Request, parent: RunState | None, context: Context
) -> RunConfig:
    """Return the run's config: the parent's with the assignments, and why it exists."""
    if parent is None:
        config = first_config(context, request.hypothesis)
    else:
        basis = stored_basis(parent)
        assert basis is not None  # noqa: S101 - _base returns only runs that have one
        config = config_from(basis.config, f"the config of {parent.run} in {program.ledger.name}")
    for assignment in request.sets:
        config = set_key(config, assignment)
    original = _original(state, parent) if request.replicate and parent is not None else None
    if original is not None:
        config = _with_seed(config, _used_seeds(state, original), request)
    why = {
        "parent": parent.run if parent else None,
        "hypothesis": request.hypothesis,
        "replicate_of": original,
        "lever": request.group,
    }
    return config.model_copy(update=why)


def _original(state: State, run: RunState) -> str:
    """Return the run whose config a chain of replicates repeats."""
    name, seen = run.run, set()
    while (source := state.runs[name].created.get("replicate_of")) in state.runs and name not in seen:
        seen.add(name)
        name = source
    return name


def _used_seeds(state: State, original: str) -> dict[int, str]:
    seeds: dict[int, str] = {}
    for name, run in state.runs.items():
        basis = stored_basis(run)
        if basis is not None and original in (name, run.created.get("replicate_of")):
            seeds.setdefault(int(basis.config.get("train", {}).get("seed", 0)), name)
    return seeds


def _with_seed(config: RunConfig, used: dict[int, str], request: Request) -> RunConfig:
    if any(assignment.partition("=")[0].strip() == "train.seed" for assignment in request.sets):
        if config.train.seed in used:
            run = used[config.train.seed]
            raise RefusedError(
                f"{run} already ran with seed {config.train.seed}",
                f"leave the seed out for the next unused one, or `harness launch {run}` to run it again",
            )
        return config
    seed = next(number for number in range(len(used) + 1) if number not in used)
    return config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})


def _check_duplicate(state: State, basis: Basis, config: RunConfig, nuisance: Sequence[str], request: Request) -> None:
    if request.replicate:
        return
    earlier = ((run.run, found) for run in state.runs.values() if (found := stored_basis(run)) is not None)
    twin = find_duplicate(basis, earlier, nuisance)
    if twin is not None:
        raise RefusedError(
            f"{twin} already tests this: same config and same basis, apart from nuisance keys",
            f"`harness show {twin}` shows it; --from {twin} --replicate repeats it with another seed",
        )


def _parent_text(program: Program, parent: RunState | None) -> str | None:
    """Return the parent's TOML to edit, when it still says what the parent ran with."""
    if parent is None:
        return None
    path = program.config_path(parent.run)
    basis = stored_basis(parent)
    try:
        if basis is not None and not diff(basis.config, load_config(path)):
            return path.read_text(encoding="utf-8")
    except (HarnessError, OSError):
        pass
    return None


def _warnings(parent: RunState | None) -> tuple[str, ...]:
    if parent is None:
        return ()
    if parent.status != "completed":
        return (f"{parent.run} is {parent.status}, so there may be no result to compare with",)
    return (f"{parent.run} was rejected",) if parent.decision == "reject" else ()


def _set_orphan_aside(program: Program, path: Path, text: str) -> None:
    """Move a config that no event names to outputs/, so that it neither blocks a number nor is lost.

    Such a file is left by a process that died between config and event, or written by hand.
    """
    try:
        old = path.read_bytes()
    except FileNotFoundError:
        return
    if old != text.encode():
        atomic_write(program.outputs / "orphans" / f"{path.stem}-{sha256_hex(old)[:12]}.toml", old)
