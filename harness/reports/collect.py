"""From ledger, GOAL and the compact files to what a report says; the one place that knows their shapes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.canonical import canonical_json, decode_number, sha256_file
from harness.core.ids import check_name
from harness.core.types import Verdict
from harness.ledger.results import current_evals
from harness.reports.model import (
    AttemptRow,
    BaselineRow,
    ChangeRow,
    Estimate,
    Eval,
    GateRow,
    Gates,
    LabelRow,
    Metrics,
    PartRow,
    ReportData,
    Sample,
    metric_order,
)
from harness.reports.warn import damaged_files, find_warnings

if TYPE_CHECKING:
    from harness.ledger import Event, RunState
    from harness.program import Context, Goal

DEFAULT_BASELINE = "base_run_prompt"


def collect(
    root: Path,
    state: RunState,
    goal: Goal,
    context: Context,
    *,
    metrics: Metrics,
    samples: tuple[Sample, ...],
    summary: Mapping[str, Any],
) -> ReportData:
    """Return the view-model of one run.

    Args:
        root: the program's folder; committed item files are checked below it.
        state: the run's state from the ledger.
        goal: thresholds, for the gate table of a run nobody has gated yet.
        context: the frozen protocol; its confidence names the intervals.
        metrics: per-step table.
        samples: chosen rollouts.
        summary: what `harness.reports.summary` derived from the run directory.
    """
    evals = tuple(_eval(root, data) for data in _latest_evals(current_evals(state)))
    data = ReportData(
        **_origin(state),
        status=state.status,
        decision=str(state.decision or ""),
        reason=str(state.reason or ""),
        decided_by=_decided_by(state.events),
        confidence=float(context.eval.confidence),
        gate_baseline=str(goal.gate.baseline),
        changes=_changes(state.created.get("changes") or ()),
        evals=evals,
        gates=_gates(state, goal, evals),
        attempts=_attempts(state.events),
        metrics=metrics,
        samples=samples,
        labels=tuple(LabelRow(**row) for row in summary.get("labels", ())),
        baselines=tuple(BaselineRow(**row) for row in summary.get("baselines", ())),
        parts=tuple(PartRow(**row) for row in summary.get("parts", ())),
        capture=_capture(state.events, summary),
        packages={str(k): str(v) for k, v in sorted(summary.get("packages", {}).items())},
        notes=tuple(_note(note) for note in state.notes),
    )
    return find_warnings(
        data,
        launch_changes=_launch_changes(state.events),
        broken_lines=int(summary.get("broken_lines", 0)),
        damaged=damaged_files(summary),
    )


def _origin(state: RunState) -> dict[str, Any]:
    """Return what the run's first event says it is and comes from."""
    created = state.created
    return {
        "run": state.run,
        "kind": state.kind,
        "hypothesis": state.hypothesis,
        "parent": _string(created.get("parent")),
        "lever": _string(created.get("lever")),
        "replicate_of": _string(created.get("replicate_of")),
        "outside_plan": _listing(created.get("outside_plan")),
        "config": _string(created.get("config")),
        "provenance": _provenance(created),
    }


def _provenance(created: Mapping[str, Any]) -> str:
    """Return where an imported run comes from, in one sentence; empty for a run of this program."""
    if created.get("provenance") != "imported":
        return ""
    source = created.get("source") or {}
    told = f"imported as {created.get('format')} from {source.get('name')}"
    if created.get("started_at"):
        told += f", begun {created['started_at']}"
    if created.get("reason"):
        told += f"; {created['reason']}"
    if created.get("parent_by") == "inferred":
        told += "; the parent is a guess from the configs"
    left_out = [str(text) for text in created.get("not_read") or ()]
    return told + (f"; not read: {'; '.join(left_out)}" if left_out else "")


def _string(value: Any) -> str:
    return "" if value is None else str(value)


def _listing(value: Any) -> str:
    """Return a flag's detail as text: nothing for false, the names for a list."""
    if not value:
        return ""
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _of(events: Iterable[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def _decided_by(events: Iterable[Event]) -> str:
    decided = _of(events, "decided")
    if not decided:
        return ""
    actor = decided[-1].actor
    return f"{actor.name} ({actor.kind})"


def _note(note: Any) -> str:
    return str(note["text"]) if isinstance(note, Mapping) and "text" in note else str(note)


def _changes(rows: Iterable[Mapping[str, Any]]) -> tuple[ChangeRow, ...]:
    changes = [
        ChangeRow(
            str(row["key"]), show_value(row["old"]), show_value(row["new"]), str(row["kind"]), bool(row["counts"])
        )
        for row in rows
    ]
    return tuple(sorted(changes, key=lambda change: (not change.counts, change.kind, change.key)))


def _launch_changes(events: Iterable[Event]) -> tuple[ChangeRow, ...]:
    rows = [change for event in _of(events, "started") for change in event.data.get("changes_at_launch") or ()]
    return _changes(rows)


def show_value(value: Any) -> str:
    """Return a config value as a person would write it; absent is an em dash."""
    if value is None:
        return "—"
    return value if isinstance(value, str) else canonical_json(value)


def _latest_evals(evals: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep the last eval of every (subject, step, environment, prompt), sorted by them."""
    latest: dict[tuple[str, str, int, str], Mapping[str, Any]] = {}
    for data in evals:
        latest[(str(data["env"]), str(data["subject"]), int(data.get("step") or 0), str(data["prompt"]))] = data
    return [latest[key] for key in sorted(latest)]


def _eval(root: Path, data: Mapping[str, Any]) -> Eval:
    file = _string(data.get("file"))
    return Eval(
        subject=str(data["subject"]),
        step=int(data.get("step") or 0),
        env=check_name(str(data["env"]), "environment"),  # becomes part of a plot's file name
        prompt=str(data["prompt"]),
        n=None if data["n"] is None else int(data["n"]),
        requested=None if data["requested"] is None else int(data["requested"]),
        failures={str(k): int(v) for k, v in sorted((data.get("failures") or {}).items())},
        means=_estimates(data.get("means")),
        gain=_estimates(data.get("gain")),
        gain_shipped=_estimates(data.get("gain_shipped")),
        extra=dict(data.get("extra") or {}),
        file=file,
        file_intact=_intact(root, file, _string(data.get("file_sha"))),
    )


def _intact(root: Path, file: str, sha: str) -> bool | None:
    if not file or not sha:
        return None
    path = Path(os.path.realpath(root / file))
    # the path comes from a ledger line: nothing outside the program is opened
    return path.is_relative_to(root.resolve()) and path.is_file() and sha256_file(path) == sha


def _estimates(means: Mapping[str, Any] | None) -> dict[str, Estimate]:
    return {name: Estimate.read(means[name]) for name in metric_order(means)} if means else {}


def _attempts(events: Iterable[Event]) -> tuple[AttemptRow, ...]:
    rows: dict[int, dict[str, Any]] = {}
    for event in _of(events, "started", "finished"):
        row = rows.setdefault(int(event.data["attempt"]), {})
        row.update({key: value for key, value in event.data.items() if value is not None})
    return tuple(_attempt(number, rows[number]) for number in sorted(rows))


def _attempt(number: int, row: Mapping[str, Any]) -> AttemptRow:
    wall, tokens, step = row.get("wall_s"), row.get("tokens"), row.get("step")
    return AttemptRow(
        attempt=number,
        outcome=str(row.get("outcome", "not finished")),
        failure=_string(row.get("failure")),
        reason=_string(row.get("reason")),
        host=_string(row.get("host")),
        resumed_from=_string(row.get("resumed_from")),
        wall_s=None if wall is None else decode_number(wall),
        tokens=None if tokens is None else int(tokens),
        step=None if step is None else int(step),
        marks=_marks(row.get("summary") or {}),
    )


def _marks(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the watchdogs' findings that did not stop an attempt; what did is its reason."""
    found = [item for item in summary.get("watchdog") or () if item.get("action") == "mark"]
    return tuple(f"{item.get('rule')} at step {item.get('step')}: {item.get('reason')}" for item in found)


def _capture(events: Iterable[Event], summary: Mapping[str, Any]) -> dict[str, str]:
    """Merge what the run directory captured over what the last `started` event recorded."""
    started = _of(events, "started")
    capture: dict[str, str] = {}
    if started:
        capture.update(flatten(started[-1].data.get("environment") or {}))
    capture.update({str(k): str(v) for k, v in summary.get("capture", {}).items()})
    return dict(sorted(capture.items()))


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested members as dotted keys with text values; empty and absent ones are left out."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(flatten(item, f"{prefix}{key}."))
        elif item not in (None, "", [], ()):
            flat[f"{prefix}{key}"] = item if isinstance(item, str) else canonical_json(item)
    return flat


def _gates(state: RunState, goal: Goal, evals: Sequence[Eval]) -> Gates:
    """Return what `promote` recorded last, else GOAL.md's bar beside the measured values."""
    recorded = _of(state.events, "gated", "promoted")
    if not recorded:
        if state.kind == "import":
            return Gates(str(Verdict.NOT_RUN), (), recorded=False)  # the bar of GOAL.md is not for it
        rows = tuple(row for entry in goal.env for row in _goal_rows(entry, evals, str(goal.gate.baseline)))
        return Gates(str(Verdict.NOT_RUN), rows, recorded=False)
    data = recorded[-1].data
    gate_rows = []
    for gate in data.get("gates") or ():
        checks = gate.get("checks") or ()
        if not checks:
            gate_rows.append(GateRow(str(gate["name"]), "", "", "", "", "", str(gate["verdict"])))
        gate_rows += [_gate_row(str(gate["name"]), check) for check in checks]
    promoted = recorded[-1].kind == "promoted"
    verdict = str(data.get("verdict") or (Verdict.PASS if promoted else Verdict.CANNOT_TELL))
    step = data.get("step")
    return Gates(
        verdict,
        tuple(gate_rows),
        recorded=True,
        promoted=promoted,
        step=None if step is None else int(step),
        post_hoc=bool(data.get("post_hoc")),
    )


def _gate_row(gate: str, check: Mapping[str, Any]) -> GateRow:
    return GateRow(
        gate=gate,
        env=_string(check.get("env")),
        check=_string(check.get("check")),
        metric=_string(check.get("metric")),
        value=_measured(check),
        bound=_measure(check.get("bound")),
        verdict=str(check["verdict"]),
        detail=_string(check.get("detail")),
    )


def _measured(check: Mapping[str, Any]) -> str:
    low, high = check.get("low"), check.get("high")
    value = _measure(check.get("value"))
    return value if low is None or high is None else f"{value} ({_measure(low)} to {_measure(high)})"


def _measure(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return _string(value)
    try:
        number = decode_number(value)
    except ValueError:
        return show_value(value)
    return f"{number:.0f}" if math.isfinite(number) and number.is_integer() else f"{number:.4f}"


def _goal_rows(entry: Any, evals: Sequence[Eval], baseline: str) -> list[GateRow]:
    finals = [e for e in evals if e.env == entry.id and e.subject == "policy" and e.prompt == "run"]
    final = max(finals, key=lambda e: e.step) if finals else None
    mean = final.means.get(entry.metric) if final else None
    gains = (final.gain if baseline == DEFAULT_BASELINE else final.gain_shipped) if final else {}
    gain = gains.get(entry.metric)
    metric, verdict = str(entry.metric), str(Verdict.NOT_RUN)
    measured = "—" if mean is None else f"{mean.mean:.4f}"
    lower = "—" if gain is None else f"{gain.low:.4f}"
    over = "the run's prompt" if baseline == DEFAULT_BASELINE else "the shipped prompt"
    detail = f"lower bound of the paired gain over the base under {over}"
    rows = [
        GateRow("heldout", entry.id, "threshold", metric, measured, f"≥ {entry.threshold:g}", verdict, "mean"),
        GateRow("heldout", entry.id, "gain", metric, lower, f"> {entry.min_gain:g}", verdict, detail),
    ]
    for name in entry.not_below:
        other = gains.get(name)
        upper = "—" if other is None else f"{other.high:.4f}"
        below = "upper bound of the paired difference"
        rows.append(GateRow("heldout", entry.id, "not_below", str(name), upper, "≥ 0", verdict, below))
    return rows
