"""Per-item evaluation records: one JSON line per (task, sample), in a full and a compact form.

The compact form is committed beside a run's report, so that every mean, interval and gate can be
recomputed without the run directory. Equal records always give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.core.canonical import canonical_json, decode_number, encode_non_finite, sha256_hex, strict_loads
from harness.core.errors import CannotTellError, NotFoundError, UsageError
from harness.core.files import atomic_write
from harness.core.types import FailureClass, FinishReason

_REQUIRED = ("task", "cluster", "sample", "reward", "components", "metrics", "failure")
_OPTIONAL = ("prompt", "completion", "finish", "diagnostics")
_DAMAGED_HINT = "restore the committed file with git, or evaluate again with `harness eval`"


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """The result of one sample of one held-out task.

    Args:
        task: task id, stable across releases.
        cluster: unit of independent variation; intervals cluster by it.
        sample: number of the sample of this task, from 0.
        reward: composite reward; meaningless unless the item counts.
        components: named parts of the reward, each in [0, 1].
        metrics: further numbers, weight zero.
        failure: None when right; `model` counts as wrong; other classes leave every mean.
        prompt: text the model saw (full form only, as are the next three).
        completion: text it wrote.
        finish: why the completion ended.
        diagnostics: short texts about what was wrong; `answer` is the answer that was read.
    """

    task: str
    cluster: str
    sample: int
    reward: float
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    failure: FailureClass | None
    prompt: str | None = None
    completion: str | None = None
    finish: FinishReason | None = None
    diagnostics: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """What two evals of the same items are joined by."""
        return (self.task, self.sample)

    @property
    def counts(self) -> bool:
        """Whether this item belongs in a mean's denominator."""
        return self.failure in (None, FailureClass.MODEL)

    def value(self, metric: str) -> float | None:
        """Return `reward`, a component or a metric by name; None when it is not recorded."""
        if metric == "reward":
            return self.reward
        return self.components.get(metric, self.metrics.get(metric))


def dump_items(items: Iterable[ItemRecord], *, compact: bool = True) -> bytes:
    """Return the bytes of an item file: sorted by task and sample, numbers by their shortest repr.

    Args:
        items: records of one eval.
        compact: leave out prompt, completion, finish and diagnostics.

    Raises:
        UsageError: when two records share task and sample.
    """
    ordered = sorted(items, key=lambda item: item.key)
    for first, second in pairwise(ordered):
        if first.key == second.key:
            raise UsageError(f"task {first.task!r} has sample {first.sample} twice", "number the samples of a task")
    return "".join(canonical_json(_to_json(item, compact), sort=False) + "\n" for item in ordered).encode()


def write_items(path: Path, items: Iterable[ItemRecord], compact: bool = True) -> str:
    """Write an item file atomically and return the SHA-256 of its bytes.

    Raises:
        UsageError: when two records share task and sample.
        InfraError: when the file cannot be written; an old file is untouched.
    """
    data = dump_items(items, compact=compact)
    atomic_write(path, data)
    return sha256_hex(data)


def read_items(path: Path) -> list[ItemRecord]:
    """Read an item file of either form.

    Raises:
        NotFoundError: when there is no such file.
        CannotTellError: naming file and line, when it is damaged: evidence that cannot be read
            is no evidence.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"there is no item file {path}", "`harness eval RUN` writes it") from None
    return parse_items(data, str(path))


def parse_items(data: bytes, source: str) -> list[ItemRecord]:
    """Parse the bytes of an item file; `source` names it in errors.

    Raises:
        CannotTellError: naming source and line, on anything `write_items` would not have written:
            broken JSON, unknown or missing members, wrong types, a repeated item, a torn last line.
    """
    lines = data.split(b"\n")
    if lines.pop() != b"":
        raise CannotTellError(f"{source}: the last line is torn (no newline at its end)", _DAMAGED_HINT)
    items: list[ItemRecord] = []
    seen: set[tuple[str, int]] = set()
    for number, line in enumerate(lines, 1):
        try:
            item = _from_json(strict_loads(line))
            if item.key in seen:
                raise ValueError(f"task {item.task!r} has sample {item.sample} twice")
        except (ValueError, RecursionError) as error:
            raise CannotTellError(f"{source}, line {number}: {error}", _DAMAGED_HINT) from error
        seen.add(item.key)
        items.append(item)
    return items


def _to_json(item: ItemRecord, compact: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "task": item.task,
        "cluster": item.cluster,
        "sample": item.sample,
        "reward": float(item.reward),
        "components": _sorted_numbers(item.components),
        "metrics": _sorted_numbers(item.metrics),
        "failure": item.failure,
    }
    if not compact:
        row |= {
            "prompt": _text(item.prompt),
            "completion": _text(item.completion),
            "finish": item.finish,
            "diagnostics": {key: _text(item.diagnostics[key]) for key in sorted(item.diagnostics)},
        }
    return dict(encode_non_finite(row))


def _sorted_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(numbers[name]) for name in sorted(numbers)}


def _text(text: str | None) -> str | None:
    """Replace lone surrogates: model output must never stop an eval from being written."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _from_json(row: Any) -> ItemRecord:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if missing := [name for name in _REQUIRED if name not in row]:
        raise ValueError(f"member {missing[0]!r} is missing")
    if unknown := sorted(set(row) - {*_REQUIRED, *_OPTIONAL}):
        raise ValueError(f"unknown member {unknown[0]!r}")
    sample = row["sample"]
    if isinstance(sample, bool) or not isinstance(sample, int) or sample < 0:
        raise ValueError(f"sample must be an integer from 0, not {sample!r}")
    finish = row.get("finish")
    return ItemRecord(
        task=_string(row, "task"),
        cluster=_string(row, "cluster"),
        sample=sample,
        reward=decode_number(row["reward"]),
        components=_numbers(row, "components"),
        metrics=_numbers(row, "metrics"),
        failure=None if row["failure"] is None else FailureClass(row["failure"]),
        prompt=_optional_string(row, "prompt"),
        completion=_optional_string(row, "completion"),
        finish=None if finish is None else FinishReason(finish),
        diagnostics=_strings(row.get("diagnostics", {})),
    )


def _string(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string, not {value!r}")
    return value


def _optional_string(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a string or null, not {type(value).__name__}")
    return value


def _numbers(row: Mapping[str, Any], name: str) -> dict[str, float]:
    value = row[name]
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object of numbers")
    return {key: decode_number(number) for key, number in value.items()}


def _strings(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("diagnostics must be an object of strings")
    return value
