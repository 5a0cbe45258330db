"""W&B offline folders: the `.wandb` log of a run, or, where that is missing, the files beside it.

Source of the messages: wandb/proto/wandb_internal.proto (Record and what it holds).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from harness.imports.model import Collector, ImportedRun
from harness.imports.names import eval_names, held_out
from harness.imports.settings import env_slug, environment
from harness.imports.source import MAX_RUNS, Source, SourceError, lenient_json, number, step_or_none
from harness.imports.wire import Field, blob, fields, integer, real, text, wandb_records
from harness.imports.yaml_text import load_yaml

_HISTORY, _OUTPUT, _CONFIG, _OUTPUT_RAW, _RUN, _EXIT = 2, 4, 5, 13, 17, 18
_KEY, _NESTED = 1, 2
_BOOLEAN, _INTEGER, _NUMBER, _TEXT, _JSON, _VALUE_JSON = 4, 5, 6, 7, 8, 16
_VALUES = frozenset([_BOOLEAN, _INTEGER, _NUMBER, _TEXT, _JSON, _VALUE_JSON])
_SUMMARY_FILE, _CONFIG_FILE = "files/wandb-summary.json", "files/config.yaml"


class _Log:
    """What a `.wandb` log says of its run."""

    def __init__(self, where: str) -> None:
        self.metrics = Collector(where)
        self.config: dict[str, Any] = {}
        self.run_id = ""
        self.name = ""
        self.started: float | None = None
        self.exit_code: int | None = None
        self.other: dict[str, int] = {}
        self.next_step = 0


def looks_like(source: Source) -> bool:
    """Say whether a source holds W&B run folders or logs."""
    return bool(_folders(source))


def read(source: Source) -> list[ImportedRun]:
    """Return every run of a `wandb/` folder, a run folder or a `.wandb` file.

    Raises:
        SourceError: on a damaged log, naming file and byte.
    """
    folders = _folders(source)
    if not folders:
        raise SourceError(f"{source.name} holds no W&B run", "name the folder wandb, or an offline-run folder in it")
    if len(folders) > MAX_RUNS:
        raise SourceError(f"{source.name} has more than {MAX_RUNS} runs")
    return [_run(source, folder, log) for folder, log in sorted(folders.items())]


def _folders(source: Source) -> dict[str, str]:
    """Map each run folder to its log; to nothing when only the files beside it are there."""
    found: dict[str, str] = {}
    for name in source.files():
        folder, _, file = name.rpartition("/")
        if file.startswith("run-") and file.endswith(".wandb"):
            found[folder] = name
        elif name.endswith(_SUMMARY_FILE):
            found.setdefault(name.removesuffix(_SUMMARY_FILE).rstrip("/"), "")
    return found


def _run(source: Source, folder: str, name: str) -> ImportedRun:
    prefix = f"{folder}/" if folder else ""
    log = _Log(name or folder or source.name)
    not_read = []
    used = []
    if name:
        used.append(name)
        for record in wandb_records(source.read(name), name):
            _record(record, log)
        not_read += [f"{count} {what}" for what, count in sorted(log.other.items())]
    else:
        not_read.append("the history, since the .wandb log is missing: only the summary's last values")
        used += _from_files(source, prefix, log)
    outcome, reason = _ending(log, bool(name))
    env = environment(log.config)
    series = log.metrics.series
    slugs = {named: env_slug(named) for named in eval_names(series)}
    shown = log.run_id or (folder or source.name).rpartition("/")[2]
    return ImportedRun(
        name=log.name or shown,
        source_id=shown,
        source_sha=source.sha(used),
        metrics=series,
        config=log.config,
        env=env,
        outcome=outcome,
        reason=reason,
        started_at=_time(log.started),
        evals=held_out(series, env, slugs, base_first=False, requested=None, samples=None),
        not_read=tuple(not_read),
    )


def _ending(log: _Log, has_log: bool) -> tuple[str, str]:
    if log.exit_code == 0 or not has_log:
        return "completed", ""
    if log.exit_code is None:
        return "interrupted", "its W&B log has no end"
    return "failed", f"it ended with exit code {log.exit_code}"


def _from_files(source: Source, prefix: str, log: _Log) -> list[str]:
    """Read the summary and the config that W&B keeps as files; return their names."""
    used = [prefix + _SUMMARY_FILE]
    summary = lenient_json(source.text(used[0]), used[0])
    if not isinstance(summary, Mapping):
        raise SourceError(f"{used[0]} is no JSON object")
    step = step_or_none(summary.get("_step")) or 0
    for key, value in summary.items():
        _take(log, str(key), value, step)
    if source.has(prefix + _CONFIG_FILE):
        used.append(prefix + _CONFIG_FILE)
        config = load_yaml(source.text(used[1]), used[1])
        for key, value in config.items() if isinstance(config, Mapping) else ():
            if not str(key).startswith(("_", "wandb_version")):
                log.config[str(key)] = value.get("value") if isinstance(value, Mapping) and "value" in value else value
    return used


def _record(record: bytes, log: _Log) -> None:
    for item in fields(record):
        if item[0] == _HISTORY:
            _history(blob(item), log)
        elif item[0] == _CONFIG:
            _settings(blob(item), log)
        elif item[0] == _RUN:
            _header(blob(item), log)
        elif item[0] == _EXIT:
            codes = [integer(part) for part in fields(blob(item)) if part[0] == 1]
            log.exit_code = codes[-1] if codes else 0
        elif item[0] in (_OUTPUT, _OUTPUT_RAW):
            log.other["line(s) of console output"] = log.other.get("line(s) of console output", 0) + 1


def _pairs(data: bytes, field: int) -> list[tuple[str, Any]]:
    """Return the key and value of every item of a history, summary or config record."""
    found = []
    for item in fields(data):
        if item[0] != field:
            continue
        keys: list[str] = []
        value: Any = None
        for part in fields(blob(item)):
            if part[0] in (_KEY, _NESTED):
                keys.append(text(part))
            elif part[0] in _VALUES:
                value = _decode(part)
        if keys:
            found.append((".".join(keys), value))
    return found


def _decode(part: Field) -> Any:
    """Return a value: JSON in older logs, typed in newer ones."""
    if part[0] == _BOOLEAN:
        return bool(integer(part))
    if part[0] == _INTEGER:  # sint64: zigzag
        raw = integer(part) & 0xFFFFFFFFFFFFFFFF
        return (raw >> 1) ^ -(raw & 1)
    if part[0] == _NUMBER:
        return real(part)
    return text(part) if part[0] == _TEXT else lenient_json(text(part), "a value of the W&B log")


def _history(data: bytes, log: _Log) -> None:
    pairs = _pairs(data, 1)
    named = dict(pairs).get("_step")
    own = [integer(part) for item in fields(data) if item[0] == 2 for part in fields(blob(item)) if part[0] == 1]
    step = step_or_none(named if named is not None else own[-1] if own else log.next_step)
    if step is None:
        raise SourceError("the W&B log has a row without a step")
    log.next_step = step + 1
    for key, value in pairs:
        _take(log, key, value, step)


def _take(log: _Log, key: str, value: Any, step: int) -> None:
    """Keep a number; nested values are walked, media are counted."""
    if key.startswith("_"):
        return
    found = float(value) if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") else number(value)
    if found is not None:
        log.metrics.add(key, step, found)
    elif isinstance(value, Mapping) and "_type" not in value and len(value) <= 1000:
        for name, item in value.items():
            if not isinstance(item, Mapping | list):
                _take(log, f"{key}.{name}", item, step)
    else:
        log.other["value(s) that are no numbers"] = log.other.get("value(s) that are no numbers", 0) + 1


def _settings(data: bytes, log: _Log) -> None:
    for key, value in _pairs(data, 1):
        if not key.startswith("_"):
            log.config[key] = value


def _header(data: bytes, log: _Log) -> None:
    """Take id, display name, config and start time of the run record."""
    for item in fields(data):
        if item[0] == 1:
            log.run_id = text(item)[:128]
        elif item[0] == 8:
            log.name = text(item)[:200]
        elif item[0] == 4:
            _settings(blob(item), log)
        elif item[0] == 17:
            seconds = [integer(part) for part in fields(blob(item)) if part[0] == 1]
            log.started = float(seconds[-1]) if seconds else None


def _time(seconds: float | None) -> str:
    if seconds is None or not 0 < seconds < 1 << 40:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
