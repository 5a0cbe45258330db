"""What the commands that only look show: pure views of the ledger's state.

No typer here: `harness list` and `harness status` without options come straight from this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.cli.output import Line, Part, Result, Styled, fields, page, rows_document, table
from harness.cli.state import program, read_state
from harness.core.errors import UsageError
from harness.core.names import did_you_mean
from harness.core.numbers import number_or_none

if TYPE_CHECKING:
    from pathlib import Path

    from harness.ledger import RunState, State
    from harness.program.model import Program

DETACHED = "detached.json"
"""In a run's folder: `host`, `pid` and `pid_start` of a launch in the background, before it has a ledger event."""
STATUSES = ("created", "running", "stale", "completed", "failed", "interrupted", "crashed", "stopped")
_STYLES = {
    "completed": "good",
    "keep": "good",
    "pass": "good",
    "running": "strong",
    "failed": "bad",
    "stale": "bad",
    "crashed": "bad",
    "reject": "bad",
    "fail": "bad",
    "interrupted": "warn",
    "stopped": "warn",
    "cannot_tell": "warn",
}


def styled(word: str | None) -> Part:
    """Return a status, decision or verdict in its colour; `-` when there is none."""
    return Styled(word, _STYLES[word]) if word in _STYLES else word or "-"


def alive(attempt: Mapping[str, Any]) -> bool | None:
    """Tell whether the process of an attempt lives; None when this machine cannot know."""
    from harness.ledger.process import is_alive

    return is_alive(attempt)


def read_detached(run_dir: Path) -> dict[str, Any]:
    """Return the process a `launch --detach` started last; empty when there is none."""
    import json

    try:
        found = json.loads((run_dir / DETACHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def live_status(run: RunState) -> str:
    """Return the run's status; `stale` instead of `running` when its process is gone."""
    if run.status != "running":
        return run.status
    from harness.ledger import life

    return life.live_status(run)


_NOT_STALE: Mapping[str, Any] = {"stale_since": None, "stale_reason": None}


def stale_members(here: Program | None, run: RunState) -> Mapping[str, Any]:
    """Return `stale_since` and `stale_reason` of a run; both None unless its process is gone."""
    from harness.ledger import life

    return life.stale_members(run, here.run_dir(run.run) if here else None)


def status_cell(row: Mapping[str, Any]) -> Part:
    """Return the status of a row in its colour; for a stale run also since when."""
    if row["status"] != "stale":
        return styled(row["status"])
    return Styled(f"stale since {str(row['stale_since'])[:19].replace('T', ' ')} UTC", "bad")


def run_row(run: RunState, here: Program | None = None) -> dict[str, Any]:
    """Return a run as one row of `harness list`; the same members in every row.

    Args:
        run: its state.
        here: the program, whose outputs tell since when a run is stale; the ledger alone when None.
    """
    from harness.ledger.results import last_policy_evals

    last = last_policy_evals(run)
    status = live_status(run)
    return {
        "run": run.run,
        "status": status,
        **(stale_members(here, run) if status == "stale" else _NOT_STALE),
        "decision": run.decision,
        "promoted": run.promoted is not None,
        "kind": run.kind,
        "parent": run.parent,
        "attempts": len(run.attempts),
        "reward": {env: data.get("means", {}).get("reward") for env, data in last.items()},
        "gain": {env: (data.get("gain") or {}).get("reward") for env, data in last.items()},
        "tags": list(run.tags),
        "hypothesis": run.hypothesis,
        "created_at": run.created_at,
    }


def brief(values: Mapping[str, Any], signed: bool = False) -> str:
    """Spell the means of intervals by environment; without the name of the environment when there is one."""
    means = {env: number_or_none((value or {}).get("mean")) for env, value in values.items()}
    spelt = [(env, f"{mean:+.3f}" if signed else f"{mean:.3f}") for env, mean in means.items() if mean is not None]
    if len(means) == 1:
        return spelt[0][1] if spelt else "-"
    return " ".join(f"{env} {text}" for env, text in spelt) or "-"


def list_runs(status: str = "", decision: str = "", limit: int = 100, everything: bool = False) -> Result:
    """Return the runs of the program, newest first.

    Args:
        status: only runs with this status; all when empty.
        decision: only runs with this decision, `none` for undecided ones; all when empty.
        limit: runs shown at most.
        everything: show all of them.
    """
    if status and status not in STATUSES:
        raise UsageError(f"no status {status!r}", did_you_mean(status, STATUSES, f"one of {', '.join(STATUSES)}"))
    decisions = ("keep", "reject", "rerun", "retune", "inconclusive", "none")
    if decision and decision not in decisions:
        raise UsageError(
            f"no decision {decision!r}", did_you_mean(decision, decisions, f"one of {', '.join(decisions)}")
        )
    here = program()
    state = read_state(here)
    wanted = [
        run
        for run in reversed(state.runs.values())
        if (not status or live_status(run) == status) and (not decision or (run.decision or "none") == decision)
    ]
    shown, truncated = page(wanted, limit, everything)
    rows = [run_row(run, here) | {"champion": run.run == state.champion} for run in shown]
    counts = {"total": len(state.runs), "matching": len(wanted), "shown": len(rows)}
    return Result(rows_document(rows, counts, truncated), lambda: list_lines(rows, counts))


def list_lines(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> list[Line]:
    """Lay out rows of `harness list`."""
    if not rows:
        nothing = "no run matches" if counts["total"] else "no runs yet; `harness new-run` plans the first one"
        return [nothing]
    cells = [
        (
            Styled(row["run"] + " *", "strong") if row["champion"] else row["run"],
            status_cell(row),
            styled(row["decision"]),
            brief(row["reward"]),
            brief(row["gain"], signed=True),
            row["hypothesis"] or row["kind"],
        )
        for row in rows
    ]
    lines = table(["run", "status", "decision", "reward", "gain", "hypothesis"], cells, right="reward gain")
    return [*lines, *more_lines(counts)]


def more_lines(counts: Mapping[str, int]) -> list[Line]:
    """Return the line that says what a list left out; nothing when it is whole."""
    if counts["shown"] >= counts["matching"]:
        return []
    return [Styled(f"{counts['shown']} of {counts['matching']} shown; --limit N or --all shows more", "dim")]


def status() -> Result:
    """Return where the program stands and what is running."""
    here = program()
    state = read_state(here)
    runs = list(state.runs.values())
    statuses = Counter(live_status(run) for run in runs)
    running = [_running(run) for run in runs if live_status(run) == "running"]
    stale = [{"run": run.run, **stale_members(here, run)} for run in runs if live_status(run) == "stale"]
    decider = max((run for run in runs if run.decided_at), key=lambda run: str(run.decided_at), default=None)
    last = None if decider is None else (decider, decider.decisions[-1])
    open_runs = [run for run in runs if not run.decision and run.kind != "import"]
    starting = [run.run for run in runs[-5:] if alive(read_detached(here.run_dir(run.run))) and not _is_open(run)]
    data: dict[str, Any] = {
        "program": str(here.root),
        "runs": len(runs),
        "champion": state.champion,
        "by_status": dict(statuses),
        "running": running,
        "stale": stale,
        "ideas": state.ideas,
        "last_decision": None if last is None else {"run": last[0].run} | last[1],
        "starting": starting,
        "undecided": [run.run for run in open_runs],
        "next": next_step(state, starting),
    }
    champion = state.runs[state.champion] if state.champion else None

    def lines() -> list[Line]:
        best = (
            f"{champion.run}  {brief(run_row(champion)['reward'])}  {champion.hypothesis}" if champion else "none yet"
        )
        pairs: list[tuple[str, Any]] = [
            ("program", str(here.root)),
            ("runs", ", ".join(f"{count} {name}" for name, count in statuses.items()) or "none"),
            ("champion", best),
        ]
        pairs += [("running", f"{r['run']} attempt {r['attempt']}, pid {r['pid']} on {r['host']}") for r in running]
        pairs += [("stale", (f"{r['run']} since {r['stale_since']}: {r['stale_reason']}")) for r in stale]
        pairs += [("idea", idea["hypothesis"]) for idea in state.ideas]
        if last is not None:
            pairs.append(("last decision", f"{last[0].run} {last[1]['decision']}: {last[1]['reason']}"))
        pairs += [("starting", f"{name} in the background") for name in starting]
        pairs += [("undecided", f"{run.run}  {run.hypothesis}") for run in open_runs[-5:]]
        return [*fields(pairs), "", ("next: ", Styled(data["next"], "strong"))]

    return Result(data, lines)


def _is_open(run: RunState) -> bool:
    return bool(run.attempts) and run.attempts[-1]["outcome"] is None


def _running(run: RunState) -> dict[str, Any]:
    attempt = run.attempts[-1]
    keys = ("attempt", "host", "pid", "at")
    return {"run": run.run} | {key: attempt.get(key) for key in keys} | {"alive": alive(attempt)}


def next_step(state: State, starting: Collection[str] = ()) -> str:
    """Return the command that takes the program's newest run one step on; imported ones are over.

    Args:
        state: of the ledger.
        starting: runs whose background launch lives and has no event yet.
    """
    new_run = "harness new-run --next" if state.ideas else 'harness new-run --hypothesis "…"'
    run = next((run for run in reversed(state.runs.values()) if run.kind != "import"), None)
    if run is None:
        return new_run
    now = live_status(run)
    if now == "running" or run.run in starting:
        return f"harness wait {run.run}"
    if now == "stale":
        return f"harness recover {run.run}"
    if run.decision == "rerun" or (now == "created" and not run.decision):
        return f"harness launch {run.run}"
    if now in ("interrupted", "failed", "crashed") and not run.decision:
        return f"harness launch {run.run} --resume"
    if not run.decision:
        return f'harness report {run.run}, then harness decide {run.run} DECISION --reason "…"'
    if run.decision == "keep" and run.promoted is None:
        return f"harness promote {run.run} --gates heldout"
    return new_run


def section(title: str, lines: Sequence[Line]) -> list[Line]:
    """Return a titled block, or nothing when it has no lines."""
    return ["", Styled(title, "strong"), *lines] if lines else []


def change_lines(changes: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Lay out a change set: what counts as the change, and what may differ without counting."""
    if not changes:
        return []
    rows = [
        (
            change["key"],
            _value(change["old"]),
            _value(change["new"]),
            change["kind"],
            "yes" if change["counts"] else "no",
        )
        for change in changes
    ]
    return table(["key", "old", "new", "kind", "counts"], rows)


def _value(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"
