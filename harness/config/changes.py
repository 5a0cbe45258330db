"""The semantic difference between two runs: what counts as the change a hypothesis is about.

Everything here is pure. A basis is a run's resolved config and what it stands on; a change set says
what moved between two of them. A change counts unless it is nuisance, only shown (the commit of the
code), or follows from another change (a new environment version brings its own task hashes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from harness.config.load import META_KEYS, config_from, resolved
from harness.config.schema import RunConfig
from harness.core.canonical import canonical_json, encode_non_finite
from harness.core.errors import ConfigError

ChangeKind = Literal["config", "environment", "verifier", "tasks", "prompt", "code"]

NUISANCE = (
    "train.seed",
    "train.preflight_groups",
    "checkpoint.*",
    "backend.processes",
    "backend.threads",
    "backend.vllm.*",
    "budget.*",
    "watchdog.*",
)
"""Keys that may always differ without being a hypothesis; PLAN.md adds to them."""

_FACTS: tuple[tuple[str, ChangeKind], ...] = (
    ("version", "environment"),
    ("verifier", "verifier"),
    ("tasks_sha", "tasks"),
    ("eval_protocol", "environment"),
    ("eval_verifier", "verifier"),
    ("eval_tasks_sha", "tasks"),
)


@dataclass(frozen=True, slots=True)
class Basis:
    """What a run is made of.

    Args:
        config: the resolved config.
        environments: by id, `args` (every default filled in), `version`, `verifier` and `tasks_sha` under
            the run's own arguments; for an environment of CONTEXT.md also `eval_protocol`,
            `eval_verifier` and `eval_tasks_sha`.
        prompts: by environment id, the hash of the prompt texts the run uses.
        code: `commit` and `harness_sha` (shown), `training_version` (counts).
    """

    config: Mapping[str, Any]
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the basis as it stands in the ledger."""
        return {key: dict(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Basis:
        """Read a basis from the ledger; parts an older writer did not know are empty."""
        return cls(data.get("config", {}), data.get("environments", {}), data.get("prompts", {}), data.get("code", {}))


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that moved; `counts` says whether it is (part of) the hypothesis."""

    key: str
    old: Any
    new: Any
    kind: ChangeKind
    counts: bool

    def to_json(self) -> dict[str, Any]:
        """Return the change as it stands in the ledger."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Change:
        """Read a change from the ledger."""
        return cls(data["key"], data.get("old"), data.get("new"), data["kind"], bool(data["counts"]))

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.old)} → {_short(self.new)}"


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """All changes from a parent to a child, in a fixed order."""

    changes: tuple[Change, ...]

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    @property
    def counting(self) -> tuple[Change, ...]:
        """The changes that make up the hypothesis."""
        return tuple(change for change in self.changes if change.counts)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the changes as they stand in the ledger."""
        return [change.to_json() for change in self.changes]


class Difference(NamedTuple):
    """A dotted key whose value differs; None where a side has no such key."""

    key: str
    old: Any
    new: Any


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else canonical_json(encode_non_finite(value))
    return text if len(text) <= 60 else text[:57] + "…"


def is_nuisance(key: str, extra: Iterable[str] = ()) -> bool:
    """Say whether a dotted key may differ without being a hypothesis; patterns may hold `*`."""
    return any(fnmatchcase(key, pattern) for pattern in (*NUISANCE, *extra))


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved config as dotted keys, environments by id, without the keys that say why it exists."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in META_KEYS:
            continue
        if key == "env":
            for table in value:
                flat.update(_flat({k: v for k, v in table.items() if k != "id"}, f"env.{table['id']}."))
        else:
            flat.update(_flat({key: value}, ""))
    return flat


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _normal(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill keys that were added to the schema since the config was stored; keep it raw when keys were removed."""
    try:
        return resolved(config_from(config, "stored config"))
    except ConfigError:
        return dict(config)


def effective(basis: Basis) -> dict[str, Any]:
    """Return a basis' resolved config with every default argument of its environments filled in."""
    config = _normal(basis.config)
    facts = basis.environments
    tables = [
        {**table, "args": facts[table["id"]]["args"]} if "args" in facts.get(table["id"], {}) else table
        for table in config.get("env", ())
    ]
    return {**config, "env": tables}


def same(old: Any, new: Any) -> bool:
    """Compare two config values as people read TOML: 2 and 2.0 are one number, 1 and true are not one value."""
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(same(value, new[key]) for key, value in old.items())
    return bool(old == new)


def diff(old: RunConfig | Mapping[str, Any], new: RunConfig | Mapping[str, Any]) -> list[Difference]:
    """Return the keys in which two configs differ, in the schema's order.

    An environment that only one side trains on is one difference, `env.<id>`, with its whole table.
    """
    first, second = (resolved(side) if isinstance(side, RunConfig) else _normal(side) for side in (old, new))
    return _differences(first, second)


def _differences(*sides: dict[str, Any]) -> list[Difference]:
    tables = [{table["id"]: table for table in side.get("env", ())} for side in sides]
    result: list[Difference] = []
    flats = [flatten(side) for side in sides]
    for key in dict.fromkeys([*flats[1], *flats[0]]):
        name = key.split(".")[1] if key.startswith("env.") else None
        if name is not None and (name not in tables[0] or name not in tables[1]):
            whole = Difference(f"env.{name}", tables[0].get(name), tables[1].get(name))
            if whole not in result:
                result.append(whole)
        elif (key in flats[0]) != (key in flats[1]) or not same(flats[0].get(key), flats[1].get(key)):
            result.append(Difference(key, flats[0].get(key), flats[1].get(key)))
    return result


def change_set(parent: Basis, child: Basis, nuisance: Sequence[str] = ()) -> ChangeSet:
    """Return what differs between two bases and which of it counts.

    Args:
        parent: what the parent ran with.
        child: what the child would run with.
        nuisance: dotted keys of PLAN.md that do not count, besides `NUISANCE`; may hold `*`.
    """
    changes = [
        Change(key, old, new, "config", not is_nuisance(key, nuisance))
        for key, old, new in _differences(effective(parent), effective(child))
    ]
    moved = {change.key for change in changes if change.counts}
    for name in sorted({*parent.environments, *child.environments}):
        changes += _environment_changes(
            name, parent.environments.get(name, {}), child.environments.get(name, {}), moved
        )
    versions = {change.key for change in changes if change.counts and change.kind == "environment"}
    for name in sorted({*parent.prompts, *child.prompts}):
        old, new = parent.prompts.get(name), child.prompts.get(name)
        if old != new:
            known = old is not None and new is not None
            follows = f"env.{name}.version" in versions or _moved(name, moved)
            changes.append(Change(f"env.{name}.prompt_sha", old, new, "prompt", known and not follows))
    for key in ("training_version", "commit", "harness_sha"):
        old, new = parent.code.get(key), child.code.get(key)
        if old != new:
            counts = key == "training_version" and old is not None and new is not None
            changes.append(Change(f"code.{key}", old, new, "code", counts))
    return ChangeSet(tuple(changes))


def _moved(name: str, config_keys: Iterable[str]) -> bool:
    """Say whether the config itself changed what environment `name` is: added, removed, new arguments or prompt."""
    own = (f"env.{name}", f"env.{name}.prompt")
    return any(key in own or key.startswith(f"env.{name}.args.") for key in config_keys)


def _environment_changes(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], config_keys: Iterable[str]
) -> list[Change]:
    """Compare one environment's facts; only the cause counts, not what follows from it.

    New arguments bring new tasks, a new version brings a new verifier and new tasks, and an amended
    protocol brings a new held-out set. An amendment is recorded on its own and is no hypothesis.
    """
    changes: list[Change] = []
    own = _moved(name, config_keys)
    explained = {"": own, "eval_": False}
    for fact, kind in _FACTS:
        before, after = old.get(fact), new.get(fact)
        if before == after:
            continue
        group = "eval_" if fact.startswith("eval_") else ""
        known = before is not None and after is not None
        counts = known and fact != "eval_protocol" and not explained[group]
        changes.append(Change(f"env.{name}.{fact}", before, after, kind, counts))
        if fact == "version" and known:
            explained = {"": True, "eval_": True}
        elif fact == "eval_protocol" or (group == "" and known and not own):
            explained["eval_"] = True
    return changes
