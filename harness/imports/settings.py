"""Configs of other tools: cleaned for the ledger, secrets taken out, and compared key by key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.ids import NAME_PATTERN
from harness.imports.source import SourceError, number

MAX_LEAVES = 5_000
MAX_DEPTH = 12
MAX_TEXT = 2_000
REDACTED = "[redacted]"
NUISANCE = re.compile(
    r"(?i)name|run_name|entity|project|group|notes|tags|job_type|env_files|report_to|hub_model_id|wandb\..*|_.*"
    r"|(.*\.)?(seed|data_seed|output_dir|logging_dir|log_dir|_wandb.*)"
)
"""Keys that name or place a run, or repeat it; a difference in them is no change of the experiment."""

_SECRET_KEY = re.compile(
    r"(?i)(^|[_\-.])(api_?key|auth|authorization|token|secret|password|passwd|credentials?|private_?key|access_?key)s?$"
)
_SECRET_VALUE = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{12,}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|(?<=://)[^/@\s:]+:[^/@\s]+(?=@))"
)
_ENV_CHARS = re.compile(r"[^a-z0-9_-]+")


def redact(key: str, value: str) -> str:
    """Return a setting's text without secrets: whole where the key says so, else only what looks like one."""
    if _SECRET_KEY.search(key) and value:
        return REDACTED
    return _SECRET_VALUE.sub(REDACTED, value)


def clean_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return a config as the ledger can hold it, and how many values were taken out as secret.

    Raises:
        SourceError: on more than `MAX_LEAVES` values or nesting beyond `MAX_DEPTH`.
    """
    counts = {"leaves": 0, "secrets": 0}
    cleaned = _clean("", config, 1, counts)
    return cleaned, counts["secrets"]


def _clean(key: str, value: Any, depth: int, counts: dict[str, int]) -> Any:
    if depth > MAX_DEPTH:
        raise SourceError(f"the config is nested deeper than {MAX_DEPTH} levels at {key[:80]!r}")
    if isinstance(value, Mapping):
        return {_text(str(name)): _clean(str(name), item, depth + 1, counts) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_clean(key, item, depth + 1, counts) for item in value]
    counts["leaves"] += 1
    if counts["leaves"] > MAX_LEAVES:
        raise SourceError(f"the config has more than {MAX_LEAVES} values")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    shown = _text(str(value))
    safe = redact(key, shown)
    counts["secrets"] += safe != shown
    return safe


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()[:MAX_TEXT]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as dotted keys; a list of tables with ids is keyed by id, any other list is one value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) and item.get("id") for item in value):
            for item in value:
                flat |= flatten({k: v for k, v in item.items() if k != "id"}, f"{name}.{item['id']}.")
                flat[f"{name}.{item['id']}"] = True
        else:
            flat[name] = value
    return flat


def is_nuisance(key: str) -> bool:
    """Say whether a key may differ between two imported runs without being what they test."""
    return NUISANCE.fullmatch(key) is not None


def changes(parent: Mapping[str, Any], child: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the change set between two imported configs, in the shape of a `created` event's `changes`."""
    old, new = flatten(parent), flatten(child)
    rows = []
    for key in dict.fromkeys([*new, *old]):
        before, after = old.get(key), new.get(key)
        if not _same(before, after):
            counts = not is_nuisance(key)
            rows.append({"key": key, "old": before, "new": after, "kind": "config", "counts": counts})
    return sorted(rows, key=lambda row: (not row["counts"], row["key"]))


def _same(old: Any, new: Any) -> bool:
    first, second = number(old), number(new)
    if first is not None and second is not None:
        return first == second or (math.isnan(first) and math.isnan(second))
    return type(old) is type(new) and bool(old == new)


def settings_of(imported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the data of an `imported` event; empty when the run has none, or only as a file."""
    found = imported.get("settings")
    return dict(found) if isinstance(found, Mapping) else {}


def environment(config: Mapping[str, Any]) -> str:
    """Return a plain name for the environment a config trains on; `imported` when it names none or several."""
    entries = config.get("env")
    named: list[str] = []
    if isinstance(entries, list):
        named = [str(item["id"]) for item in entries if isinstance(item, Mapping) and item.get("id")]
    elif isinstance(entries, str):
        named = [entries]
    for key in ("env_id", "environment", "env_name"):
        if not named and isinstance(config.get(key), str):
            named = [str(config[key])]
    return env_slug(named[0]) if len(set(named)) == 1 else "imported"


def env_slug(name: str) -> str:
    """Return an environment's id as a plain name: `maziyar/OpenMed_DrugProt@0.3.0` becomes `openmed_drugprot`."""
    last = name.rpartition("/")[2].partition("@")[0].lower()
    slug = _ENV_CHARS.sub("-", last).strip("-_")[:64]
    return slug if NAME_PATTERN.fullmatch(slug) else "imported"
