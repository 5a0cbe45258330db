"""verifiers v1: `traces.jsonl`, one episode a line, read as the rows and the metadata of an older eval.

An episode holds the traces of its agents: message graph, weighted rewards, errors. Version 0 wrote one trace a line
without the episode around it; both are read. The settings are `configs/resolved/eval.json`, earlier `config.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.core.text import one_line
from harness.core.types import FailureClass
from harness.imports.source import Source, SourceError, lenient_json, number

TRACES = "traces.jsonl"
CONFIGS = ("configs/resolved/eval.json", "config.toml")
MAX_EPISODES = 200_000
MAX_LINE_BYTES = 16 << 20
MAX_NODES = 10_000
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""Stop conditions that mean the episode was cut, not ended."""
_CLASSES = {
    "TaskError": FailureClass.VERIFIER,
    "ToolsetError": FailureClass.TOOL,
    "UserError": FailureClass.TOOL,
}
"""Whose failure an error is, by the boundary it crossed; every other one is infrastructure."""
_UNTOLD = ("client", "output_dir", "resume", "uuid", "push", "rich", "verbose", "server", "dry_run", "serve")
"""Settings of the machine and the screen, not of the eval; `client` names servers and headers."""


class Results(NamedTuple):
    """An eval as rows in the shape of `results.jsonl`, its metadata, settings, files, and what was left out."""

    rows: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, Any]
    settings: Mapping[str, Any]
    files: list[str]
    not_read: tuple[str, ...] = ()


def read_traces(source: Source, name: str) -> Results:
    """Return the episodes of a `traces.jsonl`.

    Args:
        source: the source.
        name: of the file in it.

    Raises:
        SourceError: on a damaged line, naming it; a torn last line is left out and told.
    """
    folder = name.rpartition("/")[0]
    config, files = _config(source, folder)
    lines = source.read(name).split(b"\n")
    torn = lines.pop()
    episodes = [_episode(line, f"{name} line {number_}") for number_, line in enumerate(lines, 1) if line.strip()]
    not_read: tuple[str, ...] = ()
    if torn.strip():
        try:
            episodes.append(_episode(torn, f"{name} line {len(lines) + 1}"))
        except SourceError:
            not_read = (f"line {len(lines) + 1} of {name}, which is torn",)
    if len(episodes) > MAX_EPISODES:
        raise SourceError(f"{name} has more than {MAX_EPISODES} episodes")
    rows = [row for episode in episodes for row in _rows(episode)]
    metadata = {
        "env_id": _env(episodes, config),
        "model": config.get("model"),
        "num_examples": config.get("num_tasks"),
        "rollouts_per_example": config.get("num_rollouts"),
    }
    settings = {key: value for key, value in config.items() if key not in _UNTOLD}
    return Results(rows, {k: v for k, v in metadata.items() if v is not None}, settings, [name, *files], not_read)


def _config(source: Source, folder: str) -> tuple[Mapping[str, Any], list[str]]:
    for file in (f"{folder}/{path}".lstrip("/") for path in CONFIGS):
        if not source.has(file):
            continue
        text = source.text(file)
        try:
            found = tomllib.loads(text) if file.endswith(".toml") else lenient_json(text, file)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise SourceError(f"{file} is damaged: {str(error)[:200]}") from error
        if not isinstance(found, Mapping):
            raise SourceError(f"{file} is no JSON object")
        return found, [file]
    return {}, []


def _episode(line: bytes, where: str) -> Mapping[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise SourceError(f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB")
    row = lenient_json(line, where)
    if not isinstance(row, Mapping) or not isinstance(row.get("task"), Mapping):
        raise SourceError(f"{where} is no episode (it has no task)")
    if "traces" not in row:
        return {"task": row["task"], "traces": [row]}
    if not isinstance(row["traces"], list) or not all(isinstance(trace, Mapping) for trace in row["traces"]):
        raise SourceError(f"{where} is no episode (its traces are no list of objects)")
    return row


def _env(episodes: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str | None:
    """Return the environment's name: as the episodes tell it, else as the settings do."""
    told = (_mapping(episode.get("env")).get("id") for episode in episodes)
    environment = _mapping(config.get("env"))
    taskset = _mapping(environment.get("taskset") or config.get("taskset"))
    found = next((name for name in (*told, environment.get("id"), taskset.get("id")) if name), None)
    return None if found is None else str(found)


def _rows(episode: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per trace of a trained agent; one for an episode that broke before its first trace."""
    traces = [trace for trace in episode["traces"] if _mapping(trace.get("agent")).get("trainable", True)]
    traces = traces or episode["traces"]
    task = _task(_mapping(episode["task"]))
    if not traces:
        yield {"example_id": task, "reward": None, **_error(episode, default="no trace")}
        return
    names = [one_line(str(_mapping(trace.get("agent")).get("name") or ""), 60) for trace in traces]
    for trace, agent in zip(traces, names, strict=True):
        item = f"{task} [{agent}]" if len(set(names)) > 1 else task
        yield {"example_id": item, "cluster": task, **_row(trace)}


def _task(task: Mapping[str, Any]) -> str:
    data = _mapping(task.get("data"))
    found = next((v for v in (task.get("key"), task.get("hash"), data.get("id"), data.get("idx")) if v is not None), "")
    return str(found)


def _row(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace as a row: weighted reward, scores by name, messages of its last branch."""
    rewards = _mapping(trace.get("rewards"))
    scores = {str(name): _mapping(reward) for name, reward in list(rewards.items())[:200]}
    values = [(number(r.get("score")), number(r.get("weight", 1.0))) for r in scores.values()]
    whole = bool(values) and all(score is not None and weight is not None for score, weight in values)
    path = _last_branch(trace.get("nodes"))
    begun = next((index for index, node in enumerate(path) if node.get("sampled")), len(path))
    calls = [call for call in _list(trace.get("calls")) if isinstance(call, Mapping)]
    return {
        "reward": sum((score or 0.0) * (weight or 0.0) for score, weight in values) if whole else None,
        "metrics": dict(_mapping(trace.get("metrics"))) | {name: r.get("score") for name, r in scores.items()},
        "prompt": [node.get("message") for node in path[:begun]],
        "completion": [node.get("message") for node in path[begun:]],
        "is_truncated": _is_truncated(trace, calls, path),
        "stop_condition": trace.get("stop_condition"),
        "token_usage": {"output_tokens": _output_tokens(calls)},
        **_error(trace),
    }


def _error(holder: Mapping[str, Any], default: str = "") -> dict[str, Any]:
    """Return the error that ended a trace or an episode and whose it is; an attempt that was repeated well had none."""
    errors = [_mapping(error) for error in (_list(holder.get("errors")) or [holder.get("error")]) if error]
    if holder.get("ok") is True or not (errors or default):
        return {"error": None}
    last = errors[-1] if errors else {}
    kind, message = one_line(str(last.get("type") or default), 80), one_line(str(last.get("message") or ""), 400)
    told = f"{kind}: {message}" if message else kind
    return {"error": {"error": kind, "error_chain_str": told}, "failure": _CLASSES.get(kind, FailureClass.INFRA)}


def _last_branch(nodes: Any) -> list[Mapping[str, Any]]:
    """Return the nodes from a root to the last one, by their parents; a broken or circular link ends the path."""
    found = [node if isinstance(node, Mapping) else {} for node in _list(nodes)[:MAX_NODES]]
    path: list[Mapping[str, Any]] = []
    index: Any = len(found) - 1
    while isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(found):
        node = found[index]
        path.append(node)
        parent = node.get("parent")
        index = parent if isinstance(parent, int) and parent < index else None  # a parent was written before its child
    return path[::-1]


def _is_truncated(trace: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], path: Sequence[Any]) -> bool:
    if trace.get("stop_condition") in _LIMITS or trace.get("is_truncated") is True:
        return True
    ends = [call.get("finish_reason") for call in calls if not call.get("error")]
    ends = ends or [node.get("finish_reason") for node in path if node.get("sampled")]
    return bool(ends) and ends[-1] == "length"


def _output_tokens(calls: Sequence[Mapping[str, Any]]) -> int | None:
    told = [number(_mapping(call.get("usage")).get("completion_tokens")) for call in calls]
    counted = [int(tokens) for tokens in told if tokens is not None and 0 <= tokens < 1e15]
    return sum(counted) if counted else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
