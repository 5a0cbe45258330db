"""W&B chart exports: one CSV per metric with a column per run, and the configs of those runs beside them."""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from harness.core.canonical import content_sha
from harness.imports.model import Collector, ImportedRun
from harness.imports.names import eval_names, held_out
from harness.imports.settings import env_slug, environment
from harness.imports.source import MAX_RUNS, MIB, Source, SourceError, lenient_json, number, step_or_none

MAX_CSV_BYTES = 64 * MIB
MAX_COLUMNS = 20_000
STEP_COLUMNS = ("Step", "step", "_step", "global_step", "train/global_step", "trainer/global_step")
_BOUNDS = ("__MIN", "__MAX")
_SEPARATOR = " - "
_ROOM = re.compile(r"[^a-z0-9]+")

Cells = dict[str, list[tuple[int, str]]]
"""Metric -> (step, cell as it stands), the raw content of one run."""


def looks_like(source: Source) -> bool:
    """Say whether a source holds at least one W&B chart export."""
    for name in source.files():
        if name.endswith(".csv") and "/" not in name:
            with source.locate(name).open("rb") as file:
                header = file.readline(MIB).decode("utf-8", "replace")
            titles = next(iter(csv.reader(io.StringIO(header))), [])
            if titles and titles[0] in STEP_COLUMNS and any(_SEPARATOR in title for title in titles[1:]):
                return True
    return False


def read(source: Source) -> list[ImportedRun]:
    """Return one run per run name in the exports, in the order of their columns.

    Raises:
        SourceError: on a damaged export, or one that is not by step.
    """
    configs = _configs(source)
    names = sorted((_name_of(config) for _, config, _ in configs if _name_of(config)), key=len, reverse=True)
    runs: dict[str, Cells] = {}
    for name in (name for name in source.files() if name.endswith(".csv") and "/" not in name):
        _export(name, source.text(name, MAX_CSV_BYTES), names, runs)
    if not runs:
        raise SourceError(
            f"{source.name} has no W&B chart export",
            "export a chart by Step as CSV; its columns are `Step` and `run - metric`",
        )
    return [_run(name, cells, configs) for name, cells in runs.items()]


def _export(where: str, text: str, names: list[str], runs: dict[str, Cells]) -> None:
    """Add the cells of one export to the runs they belong to."""
    try:
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        titles = next(rows, [])
        if not titles or titles[0] not in STEP_COLUMNS:
            first = titles[0][:40] if titles else ""
            raise SourceError(f"the first column of {where} is {first!r}, not Step", "export the chart by Step")
        if len(titles) > MAX_COLUMNS:
            raise SourceError(f"{where} has more than {MAX_COLUMNS} columns")
        columns = [(index, *_split(title, names, where)) for index, title in enumerate(titles[1:], 1)]
        for _, run, _ in columns:
            runs.setdefault(run, {})
        if len(runs) > MAX_RUNS:
            raise SourceError(f"{where} has more than {MAX_RUNS} runs")
        for line, row in enumerate(rows, 2):
            if len(row) != len(titles):
                raise SourceError(f"{where} line {line} has {len(row)} cells, its header {len(titles)}")
            step = step_or_none(_float(row[0]))
            if step is None:
                raise SourceError(f"{where} line {line} has no step: {row[0][:40]!r}")
            for index, run, metric in columns:
                if row[index] != "":
                    runs[run].setdefault(metric, []).append((step, row[index]))
    except csv.Error as error:
        raise SourceError(f"{where} is damaged: {error}") from error


def _split(title: str, names: list[str], where: str) -> tuple[str, str]:
    """Return run and metric of a column title; a run name may hold the separator, so known names come first."""
    for name in names:
        if title.startswith(name + _SEPARATOR):
            return name, title[len(name) + len(_SEPARATOR) :]
    run, separator, metric = title.rpartition(_SEPARATOR)
    if not separator or not run.strip() or not metric.strip():
        raise SourceError(f"{where} has the column {title[:80]!r}, which is no `run - metric`")
    return run, metric


def _float(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _configs(source: Source) -> list[tuple[str, dict[str, Any], str]]:
    """Return the configs beside the exports: file, content, text."""
    found = []
    for name in source.files():
        if name.count("/") > 2 or not name.endswith((".toml", ".json")):
            continue
        text = source.text(name)
        try:
            config = tomllib.loads(text) if name.endswith(".toml") else lenient_json(text, name)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise SourceError(f"{name} is damaged: {error}") from error
        if isinstance(config, dict):
            found.append((name, config, text))
    return found


def _name_of(config: Mapping[str, Any]) -> str:
    """Return the run name a config gives to W&B."""
    section = config.get("wandb")
    named = section.get("name") if isinstance(section, Mapping) else None
    return str(named or config.get("run_name") or config.get("name") or "")


def _config_for(run: str, configs: list[tuple[str, dict[str, Any], str]]) -> tuple[dict[str, Any], str]:
    """Return the config of a run by the name in it, else by its file's name; empty when there is none or several."""
    exact = [(config, text) for _, config, text in configs if _name_of(config) == run]
    wanted = _ROOM.sub("", run.lower())
    by_file = [
        (config, text)
        for name, config, text in configs
        if _ROOM.sub("", name.rpartition("/")[2].rpartition(".")[0].lower()) == wanted
    ]
    for matches in (exact, by_file):
        if len(matches) == 1:
            return matches[0]
    return {}, ""


def _run(name: str, cells: Cells, configs: list[tuple[str, dict[str, Any], str]]) -> ImportedRun:
    config, text = _config_for(name, configs)
    collector = Collector(name)
    unread = 0
    for metric, pairs in cells.items():
        base = next((metric.removesuffix(end) for end in _BOUNDS if metric.endswith(end)), None)
        if base is not None and cells.get(base) == pairs:
            continue  # a column per run has equal bounds; those of a group say something
        for step, cell in pairs:
            value = _float(cell)
            if value is None:
                unread += 1
            else:
                collector.add(metric, step, value)
    env = environment(config)
    interval, requested, samples = _protocol(config)
    slugs = {named: env_slug(named) for named in eval_names(collector.series)}
    evals = held_out(
        collector.series, env, slugs, base_first=interval is not None, requested=requested, samples=samples
    )
    last = max((max(points) for points in collector.series.values()), default=0)
    planned = step_or_none(config.get("max_steps"))
    early = planned is not None and last < planned
    return ImportedRun(
        name=name,
        source_id=name,
        source_sha=content_sha([name, {metric: [list(pair) for pair in cells[metric]] for metric in cells}, text]),
        metrics=collector.series,
        config=config,
        env=env,
        outcome="stopped" if early else "completed",
        reason=f"its last value is of step {last}, its config has {planned} steps" if early else "",
        evals=evals,
        not_read=(f"{unread} cell(s) that are no number",) if unread else (),
    )


def _protocol(config: Mapping[str, Any]) -> tuple[float | None, int | None, int | None]:
    """Return interval, scored samples and samples per task of the hosted format's [eval]."""
    section = config.get("eval")
    if not isinstance(section, Mapping):
        return None, None, None
    examples, samples = step_or_none(section.get("num_examples")), step_or_none(section.get("rollouts_per_example"))
    requested = examples * samples if examples and samples else None
    return number(section.get("interval")), requested, samples
