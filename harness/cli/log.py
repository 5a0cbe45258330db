"""`harness log`: the events of the ledger, newest first, one line each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, page, rows_document, table
from harness.cli.shared import All, Limit, RunChoice, command, new_app
from harness.cli.state import find_run, program, read_state
from harness.core.numbers import spell_duration, spell_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.ledger import Event, State

APPS = {"log": new_app()}
_CUT = 200


@command(
    APPS["log"],
    "log",
    "harness log",
    "harness log run-002 --kind decided",
    "harness log --limit 20 --json",
    "harness log --all --jsonl",
)
def log(
    run: RunChoice = "",
    kind: Annotated[str, typer.Option(help="Only events of this kind, such as decided.")] = "",
    limit: Limit = 100,
    everything: All = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print each event as one line of JSON.")] = False,
) -> Result:
    """Show the events of the ledger, newest first.

    Every event is a row with its id, time, actor and data; with a run only those of that run. The text
    says the most important of the data, --json and --jsonl have all of it.
    """
    state = read_state(program())
    found = _events(state, run, kind)
    shown, truncated = page(found, limit, everything)
    rows = [event_row(event) for event in shown]
    counts = {"matching": len(found), "shown": len(rows)}
    data = rows_document(rows, counts, truncated)
    if jsonl:
        return Result(data, lambda: [json.dumps(row) for row in rows])
    return Result(data, lambda: _lines(rows, counts))


def _events(state: State, run: str, kind: str) -> list[Event]:
    """Return the events asked for, newest first.

    Raises:
        UsageError: for a kind that no event of the ledger has.
        NotFoundError: when there is no such run.
    """
    from harness.core.errors import UsageError
    from harness.core.names import did_you_mean
    from harness.ledger.events import KINDS

    if run:
        events = list(find_run(state, run).events)
    else:
        events = [event for found in state.runs.values() for event in found.events] + state.program_events
    if kind:
        known = sorted({*KINDS, *(event.kind for event in events)})
        if kind not in known:
            raise UsageError(f"no kind {kind[:80]!r}", did_you_mean(kind, known, f"one of {', '.join(known)}"))
        events = [event for event in events if event.kind == kind]
    position = {event.id: number for number, event in enumerate(events)}
    return sorted(events, key=lambda event: (event.at, position[event.id]), reverse=True)


def event_row(event: Event) -> dict[str, Any]:
    """Return an event as one row: its own members, without the hashes of its neighbours."""
    actor = {"kind": event.actor.kind, "name": event.actor.name}
    row = {"id": event.id, "run": event.run, "kind": event.kind, "at": event.at, "actor": actor}
    return row | {"data": event.data, "sha": event.sha}


def _lines(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> list[Line]:
    if not rows:
        return ["no event matches"]
    cells = [
        (
            f"{row['at'][:10]} {row['at'][11:19]}",
            row["run"],
            row["kind"],
            row["actor"]["name"],
            summary(row["kind"], row["data"]),
        )
        for row in rows
    ]
    lines = table(["at (UTC)", "run", "kind", "actor", "what"], cells)
    if counts["shown"] < counts["matching"]:
        lines.append(Styled(f"{counts['shown']} of {counts['matching']} shown; --limit N or --all shows more", "dim"))
    return lines


def summary(kind: str, data: Mapping[str, Any]) -> str:
    """Say what an event is about in one line; unknown kinds show their data."""
    teller = _TELLERS.get(kind)
    try:
        text = teller(data) if teller else ""
    except (AttributeError, TypeError, ValueError, KeyError):  # data of another writer
        text = ""
    text = text or json.dumps(data, ensure_ascii=False)
    return text if len(text) <= _CUT else text[: _CUT - 1] + "…"


def _created(data: Mapping[str, Any]) -> str:
    parent = f"from {data['parent']}: " if data.get("parent") else ""
    return f"{parent}{data.get('hypothesis') or data.get('source') or ''}"


def _started(data: Mapping[str, Any]) -> str:
    resumed = f", resumed from step {data['resumed_from']}" if data.get("resumed_from") is not None else ""
    return f"attempt {data.get('attempt')} on {data.get('host')}, pid {data.get('pid')}{resumed}"


def _evaluated(data: Mapping[str, Any]) -> str:
    text = f"{data.get('subject')} at step {data.get('step')} on {data.get('env')}: "
    text += f"reward {spell_interval(data.get('means', {}).get('reward'))}"
    gain = (data.get("gain") or {}).get("reward")
    return f"{text}, gain {spell_interval(gain)}" if gain else text


def _prompt_effect(data: Mapping[str, Any]) -> str:
    found = data.get("verdict", {}).get("reward")
    return f"on {data.get('env')}, {data.get('seed_run')} under the seed prompt: {str(found).replace('_', ' ')}"


def _finished(data: Mapping[str, Any]) -> str:
    step = f" at step {data['step']}" if data.get("step") is not None else ""
    took = f" after {spell_duration(data['wall_s'])}" if isinstance(data.get("wall_s"), int | float) else ""
    failure = f", {data['failure']} failure" if data.get("failure") else ""
    reason = f": {data['reason']}" if data.get("reason") else ""
    return f"attempt {data.get('attempt')} {data.get('outcome')}{step}{took}{failure}{reason}"


def _gated(data: Mapping[str, Any]) -> str:
    gates = ", ".join(f"{gate['name']} {gate['verdict']}" for gate in data.get("gates", []))
    return f"step {data.get('step')}: {data.get('verdict')} ({gates})"


def _tagged(data: Mapping[str, Any]) -> str:
    return f"{'removed' if data.get('removed') else 'added'} {data['tag']}"


def _proposed(data: Mapping[str, Any]) -> str:
    return f"dropped {data['dropped']}: {data.get('reason')}" if data.get("dropped") else str(data["hypothesis"])


_TELLERS = {
    "created": _created,
    "imported": _created,
    "started": _started,
    "evaluated": _evaluated,
    "finished": _finished,
    "prompt_effect": _prompt_effect,
    "decided": lambda data: f"{data['decision']}: {data.get('reason')}",
    "gated": _gated,
    "promoted": _gated,
    "noted": lambda data: str(data.get("text") or ""),
    "tagged": _tagged,
    "proposed": _proposed,
    "renumbered": lambda data: f"from {data['from']} to {data['to']}",
    "amended": lambda data: f"{data['file']}: {data.get('reason')}",
}
