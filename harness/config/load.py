"""Run configurations as files: sparse TOML in and out, single keys by dotted name, resolved form and hash."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, InlineTable, Table

from harness.config.schema import (
    BudgetSection,
    CheckpointSection,
    EnvSection,
    RunConfig,
    TrainSection,
    VllmSection,
    WarmupSection,
    WatchdogSection,
)
from harness.config.validate import parse_toml, validate
from harness.core.canonical import content_sha
from harness.core.errors import ConfigError, InfraError, NotFoundError, UsageError
from harness.core.files import atomic_write
from harness.core.names import did_you_mean

META_KEYS = ("parent", "hypothesis", "replicate_of", "lever")
"""Top-level keys that say why a run exists; they never change what it does."""
ADDED_LATER = ("warmup", "train.max_staleness", "backend.processes")
"""Dotted keys, or whole sections, that the schema got after checkpoints had been written; a new key belongs here."""


def read_text(path: Path, what: str, hint: str = "") -> str:
    """Return a UTF-8 file's text.

    Raises:
        NotFoundError: when there is no such file.
        ConfigError: when it is not UTF-8.
        InfraError: when it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"{what} {path} does not exist", hint) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except OSError as error:
        raise InfraError(f"cannot read {path}: {error.strerror}", "check the file's owner and mode") from None


def load_config(path: Path) -> RunConfig:
    """Read a run config; every key it does not set has its default.

    Raises:
        NotFoundError: when the file does not exist.
        ConfigError: naming file, line, key and, for a misspelt key, a suggestion.
    """
    text = read_text(path, "run config", "`harness list` shows the runs, `harness new-run` makes one")
    return parse_config(text, str(path))


def parse_config(text: str, source: str) -> RunConfig:
    """Read a run config from TOML text; `source` names it in messages."""
    return config_from(parse_toml(text, source), source, text)


def config_from(data: Mapping[str, Any], source: str, text: str = "") -> RunConfig:
    """Return a run config from parsed data, sparse or resolved.

    Raises:
        ConfigError: when a key or value is wrong, or the hypothesis is blank.
    """
    config = validate(RunConfig, data, source, text)
    if not config.hypothesis.strip():
        raise ConfigError(f"{source}: the hypothesis is empty", "write what the run should show, in one sentence")
    return config


def resolved(config: RunConfig) -> dict[str, Any]:
    """Return the config as JSON values with every default filled in."""
    return config.model_dump(mode="json")


def config_sha(config: RunConfig) -> str:
    """Return the SHA-256 of the resolved config's canonical JSON."""
    return content_sha(resolved(config))


def learning_sha(config: RunConfig) -> str:
    """Return the hash of what decides the weights a run learns.

    Budgets, checkpoint intervals, watchdogs, the preflight and how vLLM is started do not, so they may differ between
    the attempts of a run: it is the hash of the config with the defaults in their place. Keys of `ADDED_LATER` are left
    out where they stand at their default, so a checkpoint written before there was such a key still fits its run.
    """
    train = config.train.model_copy(update={"preflight_groups": TrainSection().preflight_groups})
    backend = config.backend.model_copy(update={"vllm": VllmSection()})
    defaults = {"budget": BudgetSection(), "checkpoint": CheckpointSection(), "watchdog": WatchdogSection()}
    warmup = config.warmup if config.warmup.steps else WarmupSection()
    values = resolved(config.model_copy(update={**defaults, "train": train, "backend": backend, "warmup": warmup}))
    usual = resolved(RunConfig(hypothesis=config.hypothesis))
    for key in ADDED_LATER:
        _drop_default(values, usual, key.split("."))
    return content_sha(values)


def _drop_default(values: dict[str, Any], defaults: Mapping[str, Any], path: Sequence[str]) -> None:
    """Remove the value at a path where it is the default's."""
    name, *rest = path
    if rest:
        _drop_default(values[name], defaults[name], rest)
    elif values[name] == defaults[name]:
        del values[name]


def sparse(config: RunConfig) -> dict[str, Any]:
    """Return only what differs from the defaults, as TOML values."""
    return config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)


def render_config(config: RunConfig, like: str | None = None) -> str:
    """Return a config as sparse TOML.

    Args:
        config: what to write.
        like: TOML to edit, a parent's as a rule, so that its comments stay; without comments the
            sections come in the schema's order.

    Raises:
        ConfigError: when `like` is not TOML.
    """
    values = sparse(config)
    wanted = {key: values[key] for key in (*META_KEYS, *values) if key in values}
    if like is not None and "#" in like:
        text = _edited(like, wanted)
        if tomllib.loads(text) == wanted:  # a comment is worth less than a right file
            return text
    document = tomlkit.document()
    _update(document, wanted)
    return tomlkit.dumps(document)


def _edited(like: str, wanted: dict[str, Any]) -> str:
    try:
        document = tomlkit.parse(like)
        if "parent" in wanted and "parent" not in document:
            document = tomlkit.parse(f'parent = ""\n{like}')
        _update(document, wanted)
    except TOMLKitError as error:
        raise ConfigError(f"cannot edit this TOML: {error}") from None
    return tomlkit.dumps(document)


def _update(target: MutableMapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Make a tomlkit container equal to `wanted`, touching only what differs."""
    for key in [key for key in target if key not in wanted]:
        del target[key]
    for key, value in wanted.items():
        current = target.get(key)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            _update_tables(target, key, value)
        elif isinstance(value, dict):
            if not isinstance(current, MutableMapping):
                target[key] = tomlkit.inline_table() if isinstance(target, InlineTable) else tomlkit.table()
            _update(target[key], value)
        elif current is None or type(current.unwrap()) is not type(value) or current.unwrap() != value:
            target[key] = value


def _update_tables(target: MutableMapping[str, Any], key: str, wanted: list[dict[str, Any]]) -> None:
    """Make an array of tables equal to `wanted`, matching tables by their `id`."""
    current = target.get(key)
    existing = {item.get("id"): item for item in current} if isinstance(current, AoT) else {}
    if [item.get("id") for item in existing.values()] == [item.get("id") for item in wanted]:
        for item in wanted:
            _update(existing[item.get("id")], item)
        return
    tables = tomlkit.aot()
    for item in wanted:
        table: Table = tomlkit.table()
        _update(table, item)
        tables.append(table)
    target.pop(key, None)
    target[key] = tables


def dump_config(config: RunConfig, path: Path, like: str | None = None) -> None:
    """Write a config as sparse TOML, whole or not at all; see `render_config`."""
    atomic_write(path, render_config(config, like))


def known_keys() -> list[str]:
    """Return every dotted config key; environment keys as `env.*.weight`."""
    return list(_leaves(RunConfig, ""))


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if not prefix and name in META_KEYS:
            continue
        if not prefix and name == "env":
            yield from (key for key in _leaves(EnvSection, "env.*.") if key != "env.*.id")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def check_key(key: str) -> str:
    """Return a dotted key when a config has it; `*` stands for any environment or all keys of a section.

    Raises:
        ConfigError: with a suggestion.
    """
    known = known_keys()
    parts = key.split(".")
    general = ".".join(["env", "*", *parts[2:]]) if parts[0] == "env" and len(parts) > 2 else key
    if general in known or (len(parts) > 3 and general.startswith("env.*.args.")):
        return key
    if parts[0] == "env" and len(parts) == 2 and parts[1]:
        return key
    if key.endswith(".*") and any(name.startswith(key[:-1]) for name in known):
        return key
    raise ConfigError(f"unknown config key {key[:200]!r}", did_you_mean(general, known))


def set_key(config: RunConfig, assignment: str) -> RunConfig:
    """Return a config with one key changed.

    Args:
        config: the config to start from.
        assignment: `a.b=VALUE`; the value in TOML syntax, bare words allowed for text. An empty value
            returns the key to its default. `env.NAME.weight=2` addresses an environment by id,
            `env.NAME.id=NAME` adds one and `env.NAME=` removes one.

    Raises:
        UsageError: when the assignment has no `=` or addresses `parent`, `hypothesis` and the like.
        ConfigError: on an unknown key (with a suggestion) or a value that does not fit.
    """
    key, equals, raw = (part.strip() for part in assignment.partition("="))
    if not equals or not key:
        raise UsageError(f"{assignment[:200]!r} sets nothing", "write --set KEY=VALUE, as in --set lora.alpha=64")
    if key in META_KEYS:
        raise UsageError(f"{key} is not a setting", "`harness new-run --help` lists the options for it")
    source = f"--set {assignment if len(assignment) <= 200 else assignment[:200] + '…'}"
    if not raw:
        return config_from(_with(config, key, None, source), source)
    try:
        return config_from(_with(config, key, _toml_value(raw), source), source)
    except ConfigError:
        if isinstance(_toml_value(raw), str):
            raise
        try:  # a bare word that happens to be TOML, such as a revision of digits only
            return config_from(_with(config, key, raw, source), source)
        except ConfigError:
            pass
        raise


def _toml_value(raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):  # no TOML, or more digits or levels than it is read with
        return raw
    return parsed["value"] if set(parsed) == {"value"} else raw


def _with(config: RunConfig, key: str, value: Any, source: str) -> dict[str, Any]:
    """Return the sparse config with one dotted key set; None removes the key."""
    data = sparse(config)
    parts = key.split(".")
    table: Any = data
    if parts[0] == "env" and len(parts) > 1:
        table, parts = _env_table(data, parts, value, source)
        if not parts:
            return data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {part!r} holds a value, not a table", did_you_mean(key, known_keys()))
    if value is None:
        check_key(key)
        table.pop(parts[-1], None)
    else:
        table[parts[-1]] = value
    return data


def _env_table(data: dict[str, Any], parts: list[str], value: Any, source: str) -> tuple[Any, list[str]]:
    """Find, add or remove an environment; return its table and the keys left to walk."""
    tables: list[dict[str, Any]] = data.setdefault("env", [])
    name, rest = parts[1], parts[2:]
    found = next((table for table in tables if table["id"] == name), None)
    if found is None and rest == ["id"] and value == name:
        tables.append({"id": name})
        return None, []
    if found is None:
        hint = did_you_mean(name, [table["id"] for table in tables])
        raise ConfigError(
            f"{source}: the run has no environment {name!r}", f"{hint} (--set env.{name}.id={name} adds it)".strip()
        )
    if rest == ["id"] and value != name:
        raise ConfigError(f"{source}: an environment cannot be renamed", "remove it and add the other one")
    if not rest:
        if value is not None:
            raise ConfigError(f"{source}: env.{name} is a table", f"set its keys, as in env.{name}.weight=2")
        tables.remove(found)
        return None, []
    return found, rest
