"""The rules a run must keep, at creation and again at launch. Pure: values in, an error or nothing out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from harness.config.changes import Basis, Change, ChangeSet, change_set, effective, flatten, is_nuisance, same
from harness.config.load import resolved
from harness.config.schema import RunConfig
from harness.core.errors import RefusedError
from harness.core.redact import find_secrets
from harness.program import Context, Plan


def check_frozen(basis: Basis, context: Context) -> None:
    """Check that a run leaves every frozen key alone.

    Raises:
        RefusedError: naming the key, the frozen value and the run's.
    """
    flat = flatten(effective(basis))
    for pattern, wanted in context.frozen_values().items():
        for key, value in flat.items():
            if fnmatchcase(key, pattern) and not same(value, wanted):
                raise RefusedError(
                    f"{key} is frozen by CONTEXT.md at {_show(wanted)}; this run sets {_show(value)}",
                    "take the key out of the run, or change CONTEXT.md and record it: "
                    '`harness amend CONTEXT.md --reason "…"`',
                )


def check_no_secrets(config: RunConfig, prompts: Mapping[str, Mapping[str, str] | None]) -> None:
    """Check that a run writes no secret into files that are committed.

    Args:
        config: the run's config, with its hypothesis.
        prompts: per environment the texts its prompt replaces; None for the shipped prompt.

    Raises:
        RefusedError: naming the place and never the value.
    """
    values = {"hypothesis": config.hypothesis, "lever": config.lever or "", **flatten(resolved(config))}
    texts = {key: " ".join(map(str, value)) for key, value in values.items() if isinstance(value, list | tuple)}
    texts |= {key: value for key, value in values.items() if isinstance(value, str)}
    for env, components in prompts.items():
        texts |= {f"the prompt of {env} ({name})": text for name, text in (components or {}).items()}
    found = find_secrets(texts)
    if found:
        raise RefusedError(
            f"{found[0]}, which would stand in git for good",
            "take it out and change that secret; environments read keys from environment variables",
        )


def outside_plan(changes: Iterable[Change], plan: Plan) -> list[str]:
    """Return a sentence for every counting config change that PLAN.md's search space does not cover."""
    found = []
    for change in changes:
        if change.kind != "config" or not change.counts:
            continue
        allowed = plan.range_of(change.key)
        if allowed is None:
            found.append(f"{change.key} is not in the search space of PLAN.md")
        elif not allowed.holds(change.new):
            found.append(f"{change.key} = {_show(change.new)} is outside PLAN.md's search space ({allowed})")
    return found


def check_search_space(changes: Iterable[Change], plan: Plan, reason: str | None) -> None:
    """Check that a run stays inside the search space, or says why not.

    Raises:
        RefusedError: naming the first key and what is allowed.
    """
    found = outside_plan(changes, plan)
    if found and not (reason or "").strip():
        raise RefusedError(found[0], 'say why with --outside-plan "…", or amend PLAN.md')


def check_one_change(changes: ChangeSet, parent: str, lever: str | None) -> None:
    """Check that a run tests one thing.

    Raises:
        RefusedError: with no counting change, or with several that no lever holds together.
    """
    counting = changes.counting
    if not counting:
        nuisance = ", ".join(change.key for change in changes if change.kind == "config")
        what = (
            f"only {nuisance} differs from {parent}, which tests nothing"
            if nuisance
            else f"nothing differs from {parent}"
        )
        raise RefusedError(what, "change one key with --set, or repeat the run with another seed: --replicate")
    if len(counting) > 1 and not lever:
        listed = "; ".join(map(str, counting))
        raise RefusedError(
            f"{len(counting)} changes to {parent} at once, so no result could be explained: {listed}",
            "make one run for each, or declare them one lever with --group NAME",
        )


def check_no_change(changes: ChangeSet, parent: str) -> None:
    """Check that a replicate repeats its run.

    Raises:
        RefusedError: naming what differs.
    """
    if changes.counting:
        listed = "; ".join(map(str, changes.counting))
        raise RefusedError(
            f"this is no replicate of {parent}: {listed}", "leave out --replicate, or check out the code it ran with"
        )


def check_declared(changes: ChangeSet, declared: Collection[str], run: str) -> None:
    """Check at launch that nothing else moved since the run was created.

    Args:
        changes: the change set to the parent, as it is now.
        declared: keys that counted when the run was created.
        run: its id, for the message.

    Raises:
        RefusedError: naming what moved.
    """
    moved = [change for change in changes.counting if change.key not in declared]
    if moved:
        listed = "; ".join(map(str, moved))
        raise RefusedError(
            f"{run} no longer tests only its hypothesis; since it was created this moved: {listed}",
            "undo that, or make a new run with `harness new-run`",
        )


def find_duplicate(basis: Basis, earlier: Iterable[tuple[str, Basis]], nuisance: Collection[str]) -> str | None:
    """Return the first earlier run that differs from this one in nuisance only; None when there is none."""
    plain = {
        key: value
        for key, value in flatten(basis.config).items()
        if ".args." not in key and not is_nuisance(key, nuisance)
    }
    for run, other in earlier:
        # Reading a stored config in full is slow, and most runs differ in a plain value anyway.
        if any(key in plain and not same(value, plain[key]) for key, value in flatten(other.config).items()):
            continue
        if not change_set(other, basis, tuple(nuisance)).counting:
            return run
    return None


def _show(value: object) -> str:
    return "none" if value is None else repr(value) if isinstance(value, str) else str(value)
