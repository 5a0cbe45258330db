"""TRL and transformers: `trainer_state.json`, the adapter's config, and completion tables in parquet.

`training_args.bin` is a pickle and is never read.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from harness.core.errors import MissingExtraError
from harness.imports.model import Collector, ImportedRun
from harness.imports.names import held_out
from harness.imports.settings import environment
from harness.imports.source import MAX_RUNS, MIB, Source, SourceError, lenient_json, number, step_or_none

STATE = "trainer_state.json"
MAX_STATE_BYTES = 128 * MIB
MAX_TABLE_ROWS = 2_000
"""Rows read of one completion table: a report shows a handful of the first and the last step."""
MAX_TABLES = 2_000
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
_TABLE = re.compile(r"(?:.*/)?completions/(?:[^/]+/)?completions_(\d{1,12})\.parquet")
_PLAIN_COLUMNS = {"step", "prompt", "completion", "advantage", "mode"}
_SETTINGS = ("adapter_config.json", "training_args.json")
_STATE_KEYS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")


def looks_like(source: Source) -> bool:
    """Say whether a source holds a trainer's state or completion tables."""
    return any(name.rpartition("/")[2] == STATE or _TABLE.fullmatch(name) for name in source.files())


def read(source: Source) -> list[ImportedRun]:
    """Return one run per output folder: its latest state, its adapter's config, its completions.

    Raises:
        SourceError: on a damaged state or table.
        MissingExtraError: when there are completions and DuckDB is not installed.
    """
    folders: dict[str, list[tuple[int, str]]] = {}
    for name in source.files():
        folder, _, file = name.rpartition("/")
        if file == STATE:
            match = _CHECKPOINT.fullmatch(folder.rpartition("/")[2])
            owner = folder.rpartition("/")[0] if match else folder
            folders.setdefault(owner, []).append((int(match[1]) if match else 1 << 60, name))
        elif _TABLE.fullmatch(name):
            folders.setdefault(name.partition("completions/")[0].rstrip("/"), [])
    if len(folders) > MAX_RUNS:
        raise SourceError(f"{source.name} has more than {MAX_RUNS} output folders")
    if not folders:
        raise SourceError(f"{source.name} has no {STATE}", "name the trainer's output folder or a checkpoint in it")
    return [_run(source, folder, states) for folder, states in sorted(folders.items())]


def _run(source: Source, folder: str, states: list[tuple[int, str]]) -> ImportedRun:
    name = folder or (source.root.name if source.only else source.name)
    log, chosen = _state(source, name, states)
    prefix = f"{folder}/" if folder else ""
    config = {key: log[key] for key in _STATE_KEYS if log.get(key) is not None}
    used = [chosen] if chosen else []
    where = chosen.rpartition("/")[0] if chosen else folder
    for file in dict.fromkeys(f"{base}/{file}".lstrip("/") for base in (folder, where) for file in _SETTINGS):
        if source.has(file):
            found = lenient_json(source.text(file), file)
            config |= {file.rpartition("/")[2].removesuffix(".json"): found}
            used.append(file)
    tables = {int(match[1]): file for file in source.below(folder) if (match := _TABLE.fullmatch(file))}
    if len(tables) > MAX_TABLES:
        raise SourceError(f"{name} has more than {MAX_TABLES} completion tables")
    collector = Collector(name)
    _history(log.get("log_history"), chosen, collector)
    last, planned = step_or_none(log.get("global_step")), step_or_none(log.get("max_steps"))
    early = bool(planned) and last is not None and last < (planned or 0)
    pickles = [file for file in source.below(folder) if file.endswith((".bin", ".pt", ".pth", ".pkl"))]
    env = environment(config)
    return ImportedRun(
        name=name,
        source_id=prefix or name,
        source_sha=source.sha([*used, *tables.values()]),
        metrics=collector.series,
        config=config,
        env=env,
        outcome="stopped" if early else "completed",
        reason=f"its last state is of step {last} of {planned}" if early else "",
        evals=held_out(collector.series, env, {}, base_first=False, requested=None, samples=None),
        rollouts={step: _completions(source, tables[step], step) for step in {*tables} & _ends(tables)},
        not_read=(f"{len(pickles)} pickled file(s), which could run code",) if pickles else (),
    )


def _ends(tables: Mapping[int, str]) -> set[int]:
    return {min(tables), max(tables)} if tables else set()


def _state(source: Source, name: str, states: list[tuple[int, str]]) -> tuple[Mapping[str, Any], str]:
    """Return the state with the most steps, and its file."""
    if not states:
        return {}, ""
    found = []
    for order, file in states:
        state = lenient_json(source.read(file, MAX_STATE_BYTES), file)
        if not isinstance(state, Mapping) or not isinstance(state.get("log_history"), list):
            raise SourceError(f"{file} is no trainer state (it has no log_history)")
        found.append((step_or_none(state.get("global_step")) or 0, order, file, state))
    best = max(found, key=lambda item: item[:3])
    return best[3], best[2]


def _history(rows: Any, where: str, collector: Collector) -> None:
    for index, row in enumerate(rows or ()):
        step = step_or_none(row.get("step")) if isinstance(row, Mapping) else None
        if step is None:
            raise SourceError(f"{where}: entry {index} of log_history has no step")
        for key, value in row.items():
            found = number(value)
            if key != "step" and found is not None:
                collector.add(str(key), step, found)


def _completions(source: Source, name: str, step: int) -> list[dict[str, Any]]:
    """Return the rows of one completion table as rollouts.

    The reward is the sum of the reward columns; TRL does not store their weights beside them.
    """
    columns, rows = read_parquet(source, name, MAX_TABLE_ROWS)
    if "completion" not in columns:
        raise SourceError(f"{name} has no column `completion`")
    rollouts = []
    for index, row in enumerate(rows):
        values = {key: number(value) for key, value in row.items() if key not in _PLAIN_COLUMNS}
        components = {str(key): value for key, value in values.items() if value is not None}
        rollouts.append(
            {
                "task": f"row-{index}",
                "group": f"step-{step}",
                "index": index,
                "prompt": _spell(row.get("prompt")),
                "completion": _spell(row.get("completion")),
                "finish": "",
                "reward": sum(components.values()) if components else None,
                "components": components,
                "diagnostics": {},
                "failure": None,
                "advantage": number(row.get("advantage")),
                "tokens": None,
            }
        )
    return rollouts


def _spell(value: Any) -> str:
    """Return a prompt or completion as text: plain, or a list of messages."""
    if isinstance(value, list):
        parts = [
            f"[{item.get('role', '')}]\n{item.get('content', '')}" if isinstance(item, Mapping) else str(item)
            for item in value
        ]
        return "\n".join(parts)
    return "" if value is None else str(value)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def read_parquet(source: Source, name: str, limit: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Return columns and the first rows of a parquet file; nothing but that file can be opened.

    Raises:
        SourceError: when it is no parquet file, or needs more memory than allowed.
        MissingExtraError: when DuckDB is not installed.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise MissingExtraError("query", "duckdb") from None
    # A copy under a plain name: DuckDB would expand a name with `*`, and the file may change while it is read.
    with (
        tempfile.TemporaryDirectory() as folder,
        duckdb.connect(":memory:", config={"threads": 1, "memory_limit": "512MB"}) as connection,
    ):
        path = f"{folder}/table.parquet"
        Path(path).write_bytes(source.read(name))
        try:
            connection.execute("SET allowed_paths = [$path]", {"path": path})
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            cursor = connection.execute(
                "SELECT * FROM read_parquet([$path]) LIMIT $limit", {"path": path, "limit": limit}
            )
            columns = [column[0] for column in cursor.description or ()]
            return columns, [dict(zip(columns, map(_plain, row), strict=True)) for row in cursor.fetchall()]
        except duckdb.Error as error:
            raise SourceError(f"{name} is no readable parquet file: {str(error).splitlines()[0][:160]}") from error
