"""What reinforcement learning added to a run's own warm start, and what answers that read nothing reach beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import HarnessError
from harness.evaluation.records import ItemRecord, read_items
from harness.evaluation.references import Reference, references
from harness.evaluation.statistics import paired_difference
from harness.evaluation.summary import interval_json, metric_names
from harness.ledger.results import current_evals
from harness.reports.blocks import Block, Heading, Paragraph, Table, text
from harness.reports.inline import estimate, number
from harness.reports.model import ReportData, WarmStart, metric_order, reward_parts
from harness.reports.summary import Evaluated, env_module

if TYPE_CHECKING:
    from harness.core.types import Task
    from harness.ledger import RunState


def warm_start_rows(
    root: Path, state: RunState, evaluated: Mapping[str, Evaluated], confidence: float
) -> list[dict[str, Any]]:
    """Return per environment how the last policy differs from the warm start of the run, as JSON values.

    Args:
        root: the program's folder.
        evaluated: environments and tasks, as `summary.evaluated_tasks` returns them.
        confidence: of the intervals.

    Returns:
        One row for each environment with a policy eval at step 0 and a later one; none for a run without a warm start.
    """
    rows = []
    evals = [data for data in current_evals(state) if data["subject"] == "policy" and data["prompt"] == "run"]
    for env in sorted({str(data["env"]) for data in evals}):
        by_step = {int(data["step"]): data for data in evals if data["env"] == env and data.get("file")}
        last = max(by_step, default=0)
        if 0 not in by_step or not last:
            continue
        try:
            warm, final = (read_items(root / str(by_step[step]["file"])) for step in (0, last))
        except (HarnessError, OSError):
            continue
        tasks = evaluated[env].tasks if env in evaluated else ()
        rows.append(
            {"env": env, "step": last, "gain": _gains(final, warm, confidence)}
            | _beside(env, tasks, final, _answers(by_step[0]), _answers(by_step[last]), confidence)
        )
    return rows


def _gains(final: Sequence[ItemRecord], warm: Sequence[ItemRecord], confidence: float) -> dict[str, Any]:
    shared = [name for name in metric_names(final) if name in metric_names(warm)]
    return {name: _rounded(interval_json(paired_difference(final, warm, name, confidence))) for name in shared}


def _answers(data: Mapping[str, Any]) -> dict[str, int]:
    found = (data.get("extra") or {}).get("answers") or {}
    return {str(answer): int(count) for answer, count in sorted(found.items())}


def _beside(
    env: str,
    tasks: Sequence[Task],
    final: Sequence[ItemRecord],
    warm_answers: Mapping[str, int],
    final_answers: Mapping[str, int],
    confidence: float,
) -> dict[str, Any]:
    """Return the references and the distributions of answers; both empty where the answers are not known."""
    counted = [item for item in final if item.counts]
    golds = {task.id: task.answer for task in tasks}
    known = all(item.task in golds and item.value("accuracy") is not None for item in counted)
    answer = getattr(env_module(env, "baselines"), "keyword_baseline", None)
    if not (counted and known and (answer or final_answers)):
        return {"references": [], "answers": []}
    keyword = {task.id: str(answer(task)) for task in tasks} if answer else None
    labels = {task.answer: task.label for task in tasks}
    gold = Counter(golds[item.task] for item in counted)
    shown = sorted({*gold, *warm_answers, *final_answers})
    return {
        "references": [_row(one) for one in references(counted, golds, final_answers, keyword, confidence, labels)],
        "answers": [
            {
                "answer": name,
                "label": labels.get(name, ""),
                "gold": gold[name],
                "warm": warm_answers.get(name, 0),
                "final": final_answers.get(name, 0),
            }
            for name in shown
        ],
    }


def _row(reference: Reference) -> dict[str, Any]:
    return {
        "name": reference.name,
        "accuracy": round(reference.accuracy, 6),
        "difference": _rounded(interval_json(reference.difference)),
    }


def _rounded(values: Mapping[str, float | int]) -> dict[str, float | int]:
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}


def warm_start_blocks(data: ReportData, env: str) -> list[Block]:
    """Return base, warm start and last policy side by side, and the references; nothing without a warm start."""
    told, warm = data.warm_start_told, data.warm(env)
    if warm is None:
        return []
    found = data.warm_start(env)
    shown = {"Base": data.base(env), "Warm start": warm} | ({f"Step {found.step}": data.final(env)} if found else {})
    judged = reward_parts(warm.means, data, env)
    rows = tuple(
        (
            text(name),
            *(estimate(entry.means.get(name) if entry else None) for entry in shown.values()),
            *((estimate(found.gain.get(name), signed=True, judged=name in judged),) if found else ()),
        )
        for name in metric_order(warm.means)
    )
    columns = ("Metric", *shown, *((f"Step {found.step} − warm start",) if found else ()))
    blocks: list[Block] = [
        Heading(4, "Against its own warm start"),
        Paragraph(text(told or "The policy was trained on demonstrations before step 1.")),
        Table(columns, rows, frozenset(range(1, len(columns)))),
    ]
    return blocks + (_reference_blocks(found) if found else [])


def _reference_blocks(warm: WarmStart) -> list[Block]:
    blocks: list[Block] = []
    if warm.references:
        note = (
            "Accuracy of answers that read nothing, or only cue words, on the same items; the constant answer is the "
            "best one on these very items, drawn answers count with their expected accuracy."
        )
        rows = tuple(
            (text(row.name), text(number(row.accuracy)), estimate(row.difference, signed=True))
            for row in warm.references
        )
        difference = f"Step {warm.step} − reference"
        blocks += [Paragraph(text(note)), Table(("Reference", "Accuracy", difference), rows, frozenset({1, 2}))]
    if warm.answers:
        names = ("gold", "warm", "final")
        totals = {name: sum(getattr(row, name) for row in warm.answers) for name in names}
        shares = tuple(
            (
                text(f"{row.answer} {row.label}".strip()),
                *(text(_share(getattr(row, name), totals[name])) for name in names),
            )
            for row in warm.answers
        )
        sides = ("Held-out labels", "Warm start", f"Step {warm.step}")
        blocks += [
            Paragraph(text("How often each answer is right, and how often it was given:")),
            Table(("Answer", *sides), shares, frozenset({1, 2, 3})),
        ]
    return blocks


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "—"
