"""Two runs side by side: the means of their last held-out evals, and the paired difference on the same items.

A difference is given only when both item files are those the ledger recorded and hold the same items, scored
alike; otherwise the row says why there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.core.canonical import sha256_hex
from harness.core.errors import HarnessError
from harness.evaluation.records import ItemRecord, parse_items
from harness.evaluation.statistics import paired_difference
from harness.evaluation.summary import interval_json, metric_names
from harness.ledger import RunState
from harness.ledger.results import last_policy_evals
from harness.ledger.select import means

Data = Mapping[str, Any]
_BINDING = (
    ("items_sha", "the two were evaluated on other items"),
    ("verifier", "the two were scored by different verifiers"),
    ("protocol", "the two were sampled under different protocols"),
)


def compare_runs(root: Path, old: RunState, new: RunState, confidence: float = 0.95) -> list[dict[str, Any]]:
    """Return one row per environment and metric.

    Args:
        root: of the program; item files are relative to it.
        old: the run that is subtracted.
        new: the run it is subtracted from.
        confidence: two-sided coverage of the differences.

    Returns:
        `env`, `metric`, `old` and `new` (intervals of the events, None when a side has none), `old_step`, `new_step`,
        `difference` (new minus old; None when there is none) and `why` there is none.
    """
    first, second = last_policy_evals(old), last_policy_evals(new)
    rows: list[dict[str, Any]] = []
    for env in sorted({*first, *second}):
        rows += _environment(root, env, first.get(env), second.get(env), confidence)
    return rows


def _environment(root: Path, env: str, old: Data | None, new: Data | None, confidence: float) -> list[dict[str, Any]]:
    before, after = means(old or {}), means(new or {})
    differences, why = _differences(root, old, new, confidence)
    names = sorted({*before, *after}, key=lambda name: (name != "reward", name))
    return [
        {
            "env": env,
            "metric": name,
            "old": before.get(name),
            "new": after.get(name),
            "old_step": (old or {}).get("step"),
            "new_step": (new or {}).get("step"),
            "difference": differences.get(name),
            "why": None if name in differences else why or "not recorded for every item on both sides",
        }
        for name in names
    ]


def _differences(root: Path, old: Data | None, new: Data | None, confidence: float) -> tuple[dict[str, Any], str]:
    """Return the paired differences by metric, or why there are none."""
    if old is None or new is None:
        return {}, "only one of the two was evaluated on this environment"
    for key, reason in _BINDING:
        if key in old and key in new and old[key] != new[key]:
            return {}, reason
    try:
        a, b = _items(root, new), _items(root, old)
        shared = [name for name in metric_names(a) if name in metric_names(b)]
        return {name: interval_json(paired_difference(a, b, name, confidence)) for name in shared}, ""
    except HarnessError as error:
        return {}, error.message


def _items(root: Path, data: Data) -> Sequence[ItemRecord]:
    """Return the items of an eval from its committed file.

    Raises:
        HarnessError: saying why, when they are not on record or not as recorded.
    """
    name, sha = data.get("file"), data.get("file_sha")
    if not isinstance(name, str) or not isinstance(sha, str):
        raise HarnessError("the items of an eval are not on record")
    path = (root / name).resolve()
    if not path.is_relative_to((root / "analysis").resolve()):
        raise HarnessError(f"{name} lies outside analysis/")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HarnessError(f"{name} cannot be read ({error.strerror})") from error
    if sha256_hex(content) != sha:
        raise HarnessError(f"{name} was changed after it was recorded")
    return parse_items(content, name)
