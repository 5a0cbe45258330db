"""TensorBoard event files: scalars and hyperparameters; a folder with event files is one run.

Source of the messages: tensorflow/core/util/event.proto, framework/summary.proto, framework/tensor.proto and
tensorboard/plugins/hparams/plugin_data.proto.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Any

from harness.imports.model import Collector, ImportedRun
from harness.imports.names import eval_names, held_out
from harness.imports.settings import env_slug, environment
from harness.imports.source import MAX_RUNS, Source, SourceError, step_or_none
from harness.imports.wire import Field, blob, fields, integer, real, text, tf_records

_MARK = "tfevents"
_FLOAT, _DOUBLE, _INT32, _INT64 = 1, 2, 3, 9
_FORMATS = {_FLOAT: ("<f", 4), _DOUBLE: ("<d", 8), _INT32: ("<i", 4), _INT64: ("<q", 8)}
_MAX_TIME = 1 << 40


class _Reading:
    """What the event files of one folder held."""

    def __init__(self, where: str) -> None:
        self.scalars = Collector(where)
        self.config: dict[str, Any] = {}
        self.started: float | None = None
        self.other: dict[str, int] = {}

    def skip(self, what: str) -> None:
        self.other[what] = self.other.get(what, 0) + 1


def looks_like(source: Source) -> bool:
    """Say whether a source holds event files."""
    return any(_MARK in name.rpartition("/")[2] for name in source.files())


def read(source: Source) -> list[ImportedRun]:
    """Return one run per folder that holds event files, named by the folder.

    Raises:
        SourceError: on a damaged event file, naming file and byte.
    """
    folders: dict[str, list[str]] = {}
    for name in source.files():
        folder, _, file = name.rpartition("/")
        if _MARK in file and (not source.only or name == source.only):
            folders.setdefault(folder, []).append(name)
    if len(folders) > MAX_RUNS:
        raise SourceError(f"{source.name} has more than {MAX_RUNS} folders with event files")
    if not folders:
        raise SourceError(f"{source.name} has no event file", "name the folder that TensorBoard reads")
    return [_run(source, folder, names) for folder, names in sorted(folders.items())]


def _run(source: Source, folder: str, names: list[str]) -> ImportedRun:
    reading = _Reading(folder or source.name)
    for name in sorted(names):
        for record in tf_records(source.read(name), name):
            if record is None:
                reading.skip("record(s) too large for scalars")
            else:
                _event(record, reading)
    env = environment(reading.config)
    series = reading.scalars.series
    slugs = {named: env_slug(named) for named in eval_names(series)}
    return ImportedRun(
        name=folder or source.name,
        source_id=folder or source.name,
        source_sha=source.sha(names),
        metrics=series,
        config=reading.config,
        env=env,
        started_at=_time(reading.started),
        evals=held_out(series, env, slugs, base_first=False, requested=None, samples=None),
        not_read=tuple(f"{count} {what}" for what, count in sorted(reading.other.items())),
    )


def _time(seconds: float | None) -> str:
    if seconds is None or not 0 < seconds < _MAX_TIME:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event(record: bytes, reading: _Reading) -> None:
    step, values = 0, []
    for item in fields(record):
        if item[0] == 1:
            wall = real(item)
            if wall is not None and (reading.started is None or wall < reading.started):
                reading.started = wall
        elif item[0] == 2:
            step = integer(item)
        elif item[0] == 5:
            values += [blob(value) for value in fields(blob(item)) if value[0] == 1]
    for value in values:
        _value(value, step, reading)


def _value(data: bytes, step: int, reading: _Reading) -> None:
    tag, plugin, content, number, tensor = "", "", b"", None, b""
    kind = "value(s) that are no scalars"
    for item in fields(data):
        if item[0] == 1:
            tag = text(item)
        elif item[0] == 2:
            number = real(item)
        elif item[0] == 8:
            tensor = blob(item)
        elif item[0] == 9:
            plugin, content = _plugin(blob(item))
        elif item[0] in (4, 5, 6):
            kind = {4: "image(s)", 5: "histogram(s)", 6: "audio clip(s)"}[item[0]]
    if plugin == "hparams":
        reading.config |= _hparams(content)
        return
    if number is None and tensor and plugin in ("", "scalars"):
        number = _scalar(tensor)
    place = step_or_none(step)
    if number is None or place is None or not tag:
        reading.skip(f"{plugin} value(s)" if plugin and plugin != "scalars" else kind)
        return
    reading.scalars.add(tag, place, number)


def _plugin(metadata: bytes) -> tuple[str, bytes]:
    """Return name and content of a value's plugin."""
    name, content = "", b""
    for item in fields(metadata):
        if item[0] == 1:
            for part in fields(blob(item)):
                if part[0] == 1:
                    name = text(part)[:64]
                elif part[0] == 2:
                    content = blob(part)
    return name, content


def _scalar(tensor: bytes) -> float | None:
    """Return the one number of a tensor; None for any other tensor."""
    kind, content, found = 0, b"", []
    lists: dict[int, Field] = {}
    for item in fields(tensor):
        if item[0] == 1:
            kind = integer(item)
        elif item[0] == 4:
            content = blob(item)
        elif item[0] in (5, 6, 7, 10):
            lists[item[0]] = item
    layout, size = _FORMATS.get(kind, ("", 0))
    if size and len(content) == size:
        return float(struct.unpack(layout, content)[0])
    for field, item in lists.items():
        packed = blob(item)
        if field in (5, 6):
            width = 4 if field == 5 else 8
            found += [real((field, 5 if width == 4 else 1, packed))] if len(packed) == width else [real(item)]
        elif item[1] == 0:
            found.append(float(integer(item)))
    return found[0] if len(found) == 1 else None


def _hparams(content: bytes) -> dict[str, Any]:
    """Return the hyperparameters of a session start."""
    found: dict[str, Any] = {}
    for item in fields(content):
        if item[0] != 3:  # session_start_info
            continue
        for entry in fields(blob(item)):
            if entry[0] == 1:
                key, value = "", None
                for part in fields(blob(entry)):
                    if part[0] == 1:
                        key = text(part)
                    elif part[0] == 2:
                        value = _plain_value(blob(part))
                if key:
                    found[key] = value
    return found


def _plain_value(data: bytes) -> Any:
    """Return a google.protobuf.Value that is a number, text or truth value; None for any other."""
    for item in fields(data):
        if item[0] == 2:
            return real(item)
        if item[0] == 3:
            return text(item)
        if item[0] == 4:
            return bool(integer(item))
    return None
