"""What a reviewer must not overlook: signs of collapse, form sold as knowledge, spoiled evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.core.numbers import number_or_none
from harness.core.types import FailureClass
from harness.reports.model import ChangeRow, Eval, ReportData

TOP_ANSWER_SHARE = 0.60
"""Share of one answer among the held-out answers above which a policy counts as collapsed."""
ZERO_SPREAD_SHARE = 0.80
"""Share of groups without spread over the last steps from which training has stalled."""
TRUNCATED_SHARE = 0.50
LAST_STEPS = 5
_KNOWLEDGE = ("accuracy", "similarity")  # metrics in which a policy should be ahead of answers without a model


def find_warnings(
    data: ReportData,
    *,
    launch_changes: tuple[ChangeRow, ...] = (),
    broken_lines: int = 0,
    damaged: Mapping[str, Sequence[int]] | None = None,
) -> ReportData:
    """Return the report data with its warnings, gravest first.

    Args:
        data: the view-model so far.
        launch_changes: changes found again at launch; those not in the change set are new.
        broken_lines: lines of the metrics file that could not be read, where nothing says which.
        damaged: files of the run, each with the numbers of its unreadable lines.
    """
    found = [
        *_evidence(data),
        *(warning for env in data.eval_environments() for warning in _policy(data, env)),
        *_training(data),
        *_change(data, launch_changes),
    ]
    told = damaged or {}
    if broken_lines and "metrics.jsonl" not in told:
        found.append(f"{broken_lines} line(s) of metrics.jsonl could not be read and are left out.")
    found += [f"{damage_text(name, lines)}." for name, lines in told.items()]
    return replace(data, warnings=tuple(dict.fromkeys(found)))


def damage_text(name: str, lines: Sequence[int]) -> str:
    """Return which lines of a file were left out of a report, as the beginning of a sentence.

    Args:
        name: of the file.
        lines: numbers, from 1.
    """
    shown = ", ".join(map(str, lines[:10])) + (f" and {len(lines) - 10} more" if len(lines) > 10 else "")
    if len(lines) == 1:
        return f"{name} line {shown} could not be read and is left out"
    return f"{name} lines {shown} could not be read and are left out"


def damaged_files(summary: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the files of the run that had unreadable lines when the summary was made, with the numbers of those lines.

    A member that has another form is left out: a summary may have been edited.
    """
    entries = summary.get("damaged")
    return {
        str(entry["file"]): tuple(line for line in entry["lines"] if isinstance(line, int))
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, Mapping) and "file" in entry and isinstance(entry.get("lines"), list)
    }


def _evidence(data: ReportData) -> list[str]:
    found = []
    if data.kind == "training" and data.attempts and not any(e.subject == "policy" for e in data.evals):
        found.append("There is no held-out eval of the trained policy.")
    for entry in data.evals:
        name = f"{entry.env}, {entry.subject} step {entry.step}, {entry.prompt} prompt"
        if not entry.complete:
            found.append(f"Incomplete eval ({name}): {entry.n} of {entry.requested} items counted.")
        if entry.file_intact is False:
            found.append(f"The items of an eval ({name}) are missing or differ from their hash in the ledger.")
    if data.attempts and data.attempts[-1].outcome not in ("completed", "not finished"):
        last = data.attempts[-1]
        found.append(f"The last attempt ended as {last.outcome}{': ' + last.reason if last.reason else ''}.")
    found += [f"A watchdog marked the run: {text}." for text in (data.attempts[-1].marks if data.attempts else ())]
    return found


def _policy(data: ReportData, env: str) -> list[str]:
    final = data.final(env)
    if final is None:
        return []
    found = []
    share = top_answer_share(final)
    if share is not None and share > TOP_ANSWER_SHARE:
        found.append(
            f"Collapse sign in {env}: one answer is {share:.0%} of the held-out answers (limit {TOP_ANSWER_SHARE:.0%})."
        )
    reward, accuracy = final.gain.get("reward"), final.gain.get("accuracy")
    if accuracy is not None and accuracy.high < 0:
        found.append(f"Accuracy in {env} fell: the paired difference to the base lies below zero.")
    elif reward is not None and accuracy is not None and reward.low > 0 >= accuracy.low:
        found.append(
            f"In {env} the reward rises but accuracy is not shown to: the gain may be one in form, not in knowledge."
        )
    warm = data.warm_start(env)
    beyond = warm.gain.get("accuracy") if warm else None
    if beyond is not None and beyond.low <= 0:
        found.append(f"In {env} accuracy is not shown to rise over the run's own warm start: the gain is that one's.")
    for row in data.baselines:
        score = final.means.get(row.metric) if row.env == env and row.metric in _KNOWLEDGE else None
        if score is not None and row.value >= score.mean:
            reached = f"{row.metric} {row.value:.3f} without a model; the policy {score.mean:.3f}"
            found.append(f"In {env}, {row.name!r} reaches {reached}.")
    return found


def top_answer_share(entry: Eval) -> float | None:
    """Return the share of the most frequent answer of an eval, when the eval recorded it."""
    return number_or_none(entry.extra.get("top_answer_share"))


def _training(data: ReportData) -> list[str]:
    found = []
    spread = data.metrics.last("train/zero_spread_share", LAST_STEPS)
    if spread and sum(spread) / len(spread) >= ZERO_SPREAD_SHARE:
        found.append(
            f"Collapse sign: {sum(spread) / len(spread):.0%} of the groups of the last {len(spread)} steps have "
            f"no spread (limit {ZERO_SPREAD_SHARE:.0%}), so they carry no gradient."
        )
    cut = data.metrics.last("train/truncated_share", LAST_STEPS)
    if cut and sum(cut) / len(cut) > TRUNCATED_SHARE:
        found.append(f"{sum(cut) / len(cut):.0%} of the rollouts of the last {len(cut)} steps were cut by max_tokens.")
    for name in (FailureClass.INFRA, FailureClass.TOOL, FailureClass.VERIFIER):
        count = int(sum(data.metrics.series(f"train/failures/{name}")[1]))
        if count:
            found.append(f"{count} training rollout(s) failed with class {name} and are left out of every baseline.")
    return found


def _change(data: ReportData, launch_changes: tuple[ChangeRow, ...]) -> list[str]:
    found = []
    if data.outside_plan:
        found.append(f"Outside the search space of PLAN.md: {data.outside_plan}.")
    known = {(change.key, change.new) for change in data.changes}
    for change in launch_changes:
        if (change.key, change.new) not in known:
            found.append(f"Changed between creation and launch: {change.key} from {change.old} to {change.new}.")
    if data.capture.get("dirty_sha"):
        found.append(f"The working tree was dirty at launch (hash {data.capture['dirty_sha'][:12]}).")
    return found
