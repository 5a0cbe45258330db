"""verifiers evals: `results.jsonl` with `metadata.json` beside it, or the `traces.jsonl` of version 1.

Such a run is an eval, not a training: its items become one held-out result with intervals of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.text import one_line
from harness.core.types import FailureClass, FinishReason
from harness.evaluation.records import ItemRecord
from harness.imports.model import ImportedEval, ImportedRun
from harness.imports.settings import env_slug
from harness.imports.source import MAX_RUNS, Source, SourceError, lenient_json, number, step_or_none
from harness.imports.traces import TRACES, Results, read_traces

RESULTS, METADATA = "results.jsonl", "metadata.json"
MAX_ITEMS = 200_000
MAX_LINE_BYTES = 16 << 20
_OTHER_NUMBERS = {"example_id", "reward", "id", "is_completed", "is_truncated", "cluster"}
_KEPT = ("env_id", "env_args", "model", "num_examples", "rollouts_per_example", "sampling_args", "version_info", "date")
_CORRECT = 1.0


def looks_like(source: Source) -> bool:
    """Say whether a source holds results of the kind."""
    return any(name.rpartition("/")[2] in (RESULTS, TRACES) for name in source.files())


def read(source: Source) -> list[ImportedRun]:
    """Return one run per `results.jsonl` or `traces.jsonl`.

    Raises:
        SourceError: on a damaged line, naming it.
    """
    names = [name for name in source.files() if name.rpartition("/")[2] in (RESULTS, TRACES)]
    if len(names) > MAX_RUNS:
        raise SourceError(f"{source.name} has more than {MAX_RUNS} results")
    if not names:
        raise SourceError(f"{source.name} has no {RESULTS} and no {TRACES}", "name the output folder of the eval")
    return [_run(source, name) for name in names]


def _results(source: Source, name: str) -> Results:
    if name.rpartition("/")[2] == TRACES:
        return read_traces(source, name)
    beside = f"{name.rpartition('/')[0]}/{METADATA}".lstrip("/")
    metadata = lenient_json(source.text(beside), beside) if source.has(beside) else {}
    if not isinstance(metadata, Mapping):
        raise SourceError(f"{beside} is no JSON object")
    settings = {key: metadata[key] for key in _KEPT if key in metadata}
    return Results(_rows(source.read(name), name), metadata, settings, [name, beside] if metadata else [name])


def _run(source: Source, name: str) -> ImportedRun:
    folder = name.rpartition("/")[0]
    rows, metadata, settings, files, not_read = _results(source, name)
    env = env_slug(str(metadata.get("env_id") or folder.rpartition("/")[2].partition("--")[0] or "imported"))
    items = _items(rows)
    examples, samples = step_or_none(metadata.get("num_examples")), step_or_none(metadata.get("rollouts_per_example"))
    requested = max(len(items), examples * samples) if examples and samples else len(items)
    result = ImportedEval(
        env=env,
        step=0,
        subject="policy",
        means={},
        metric=name,
        requested=requested,
        samples=samples,
        items=items,
    )
    model = one_line(str(metadata.get("model") or ""), 100)
    title = f"{env} {model}".strip() if metadata else folder or source.name
    short = f"{len(items)} of {requested} results are in the file" if len(items) < requested else ""
    return ImportedRun(
        name=title,
        source_id=folder or source.root.name,
        source_sha=source.sha(files),
        metrics={},
        config=settings,
        env=env,
        outcome="stopped" if short else "completed",
        reason=short,
        evals=(result,),
        rollouts={0: [_rollout(row, item) for row, item in zip(rows, items, strict=True)]},
        not_read=not_read,
    )


def _rows(data: bytes, where: str) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number_, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE_BYTES:
            raise SourceError(f"{where} line {number_} is longer than {MAX_LINE_BYTES >> 20} MiB")
        row = lenient_json(line, f"{where} line {number_}")
        if not isinstance(row, Mapping) or "reward" not in row:
            raise SourceError(f"{where} line {number_} is no result (it has no reward)")
        rows.append(row)
        if len(rows) > MAX_ITEMS:
            raise SourceError(f"{where} has more than {MAX_ITEMS} results")
    return rows


def _items(rows: Sequence[Mapping[str, Any]]) -> list[ItemRecord]:
    """Return one record per row; samples of an example are numbered in file order."""
    seen: Counter[str] = Counter()
    items = []
    for index, row in enumerate(rows):
        task = one_line(str(row.get("example_id", row.get("id", index))), 200) or str(index)
        reward = number(row.get("reward"))
        failure = _failure(row, reward)
        items.append(
            ItemRecord(
                task=task,
                cluster=one_line(str(row.get("cluster", task)), 200) or task,
                sample=seen[task],
                reward=0.0 if reward is None else reward,
                components=_numbers(row),
                metrics={},
                failure=failure,
                finish=FinishReason.LENGTH if row.get("is_truncated") is True else None,
            )
        )
        seen[task] += 1
    return items


def _failure(row: Mapping[str, Any], reward: float | None) -> FailureClass | None:
    """Return where a failure belongs: an error of the rollout is infrastructure unless the row knows better, a
    missing reward the verifier's."""
    if row.get("error"):
        known = row.get("failure")
        return known if isinstance(known, FailureClass) else FailureClass.INFRA
    if reward is None:
        return FailureClass.VERIFIER
    return None if reward >= _CORRECT else FailureClass.MODEL


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row: the member of that name, else the numbers beside the reward."""
    named = row.get("metrics")
    found = named if isinstance(named, Mapping) else {k: v for k, v in row.items() if k not in _OTHER_NUMBERS}
    values = {one_line(str(key), 100): number(value) for key, value in list(found.items())[:200]}
    return {key: value for key, value in values.items() if value is not None and key and key != "reward"}


def _rollout(row: Mapping[str, Any], item: ItemRecord) -> dict[str, Any]:
    usage = row.get("token_usage")
    error = row.get("error")
    told = error.get("error_chain_str") or error.get("error") if isinstance(error, Mapping) else error
    return {
        "task": item.task,
        "group": item.task,
        "index": item.sample,
        "prompt": _messages(row.get("prompt")),
        "completion": _messages(row.get("completion")),
        "finish": str(row.get("stop_condition") or ""),
        "reward": item.reward,
        "components": dict(item.components),
        "diagnostics": {"error": str(told)} if told else {},
        "failure": item.failure,
        "advantage": None,
        "tokens": step_or_none(usage.get("output_tokens")) if isinstance(usage, Mapping) else None,
    }


def _messages(value: Any) -> str:
    """Return a prompt or completion as text: plain, or a list of messages."""
    if not isinstance(value, list):
        return "" if value is None else str(value)
    parts = []
    for item in value:
        if isinstance(item, Mapping):
            content = item.get("content")
            if isinstance(content, list):
                content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
            parts.append(f"[{item.get('role', '')}]\n{'' if content is None else content}")
        else:
            parts.append(str(item))
    return "\n".join(parts)
