"""MLflow file stores: `mlruns/<experiment>/<run>/` with meta.yaml, params/, metrics/ and tags/."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from harness.imports.model import Collector, ImportedRun
from harness.imports.names import eval_names, held_out
from harness.imports.settings import env_slug, environment
from harness.imports.source import MAX_RUNS, Source, SourceError, number, step_or_none
from harness.imports.yaml_text import load_yaml

_STATUS = {
    1: ("interrupted", "MLflow has no end of it (RUNNING)"),
    2: ("interrupted", "MLflow has no end of it (SCHEDULED)"),
    3: ("completed", ""),
    4: ("failed", "MLflow says FAILED"),
    5: ("stopped", "MLflow says KILLED"),
}
_PLACES = ("params", "metrics", "tags")
_META = "meta.yaml"


def looks_like(source: Source) -> bool:
    """Say whether a source holds a run of a file store."""
    return bool(_folders(source))


def read(source: Source) -> list[ImportedRun]:
    """Return every run of a file store, an experiment or a run folder, oldest first; deleted ones are left out.

    Raises:
        SourceError: on damaged metadata or metrics.
        MissingExtraError: when PyYAML is not installed.
    """
    folders = _folders(source)
    if not folders:
        raise SourceError(f"{source.name} holds no MLflow run", "name the folder mlruns, or one of its runs")
    if len(folders) > MAX_RUNS:
        raise SourceError(f"{source.name} has more than {MAX_RUNS} runs", "name one experiment")
    runs = []
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        meta = load_yaml(source.text(prefix + _META), prefix + _META)
        if not isinstance(meta, Mapping):
            raise SourceError(f"{prefix}{_META} is no mapping")
        if meta.get("lifecycle_stage", "active") == "deleted" or ".trash" in folder.split("/"):
            source.notes.append(f"run {str(meta.get('run_id'))[:64]}, which is deleted")
            continue
        runs.append((number(meta.get("start_time")) or 0, _run(source, prefix, meta)))
    return [run for _, run in sorted(runs, key=lambda pair: (pair[0], pair[1].source_id))]


def _folders(source: Source) -> list[str]:
    """Return the run folders: those with meta.yaml beside params, metrics or tags."""
    metas = {name.rpartition("/")[0] for name in source.files() if name.rpartition("/")[2] == _META}
    found = set()
    for name in source.files():
        parts = name.split("/")
        for index, part in enumerate(parts[:-1]):
            if part in _PLACES and "/".join(parts[:index]) in metas:
                found.add("/".join(parts[:index]))
    return sorted(found)


def _run(source: Source, prefix: str, meta: Mapping[str, Any]) -> ImportedRun:
    run = str(meta.get("run_id") or meta.get("run_uuid") or prefix.rstrip("/").rpartition("/")[2] or source.name)
    names = [name for name in source.below(prefix.rstrip("/")) if name.removeprefix(prefix).split("/")[0] in _PLACES]
    collector, params, tags = Collector(run), {}, {}
    for name in names:
        place, _, key = name.removeprefix(prefix).partition("/")
        if place == "metrics":
            _metric(source.text(name), key, name, collector)
        elif place == "params":
            params[key] = _typed(source.text(name))
        else:
            tags[key] = source.text(name)[:500]
    artifacts = [name for name in source.below(prefix.rstrip("/")) if name.startswith(f"{prefix}artifacts/")]
    outcome, reason = _STATUS.get(step_or_none(meta.get("status")) or 0, ("completed", ""))
    env = environment(params)
    slugs = {named: env_slug(named) for named in eval_names(collector.series)}
    return ImportedRun(
        name=str(meta.get("run_name") or tags.get("mlflow.runName") or run),
        source_id=run,
        source_sha=source.sha([*names, prefix + _META]),
        metrics=collector.series,
        config=params,
        env=env,
        outcome=outcome,
        reason=reason,
        started_at=_time(meta.get("start_time")),
        evals=held_out(collector.series, env, slugs, base_first=False, requested=None, samples=None),
        tags={key: value for key, value in tags.items() if not key.startswith("mlflow.")},
        not_read=(f"{len(artifacts)} artifact(s)",) if artifacts else (),
    )


def _metric(text: str, key: str, where: str, collector: Collector) -> None:
    """Take the lines `timestamp value step` of one metric, in the order of their timestamps."""
    rows = []
    for line, row in enumerate(text.splitlines(), 1):
        parts = row.split()
        if not parts:
            continue
        try:
            at, value = int(parts[0]), float(parts[1])
            step = int(parts[2]) if len(parts) > 2 else 0
        except (IndexError, ValueError) as error:
            raise SourceError(f"{where} line {line} is no `timestamp value step`") from error
        if step_or_none(step) is None:
            raise SourceError(f"{where} line {line} has the step {step}")
        rows.append((at, step, value))
    for _, step, value in sorted(rows, key=lambda item: item[0]):
        collector.add(key, step, value)


def _typed(text: str) -> Any:
    """Return a parameter as the number or truth value it spells, else as text: MLflow stores all as text."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text


def _time(milliseconds: Any) -> str:
    found = number(milliseconds)
    if found is None or not 0 < found < 1e15:
        return ""
    return datetime.fromtimestamp(found / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
