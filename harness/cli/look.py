"""Commands that only look: status, list, show and diff."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.names import suggest
from harness.cli.output import Line, Part, Result, Styled, fields, page, rows_document, table
from harness.cli.shared import All, Limit, RunArg, command, find_run, new_app, program, read_state
from harness.core.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from harness.ledger import RunState, State

APPS = {name: new_app() for name in ("status", "list", "show", "diff")}
STATUSES = ("created", "running", "completed", "failed", "interrupted", "stopped")
_STYLES = {
    "completed": "good",
    "keep": "good",
    "pass": "good",
    "running": "strong",
    "failed": "bad",
    "reject": "bad",
    "fail": "bad",
    "interrupted": "warn",
    "stopped": "warn",
    "cannot_tell": "warn",
}


def styled(word: str | None) -> Part:
    """Return a status, decision or verdict in its colour; `-` when there is none."""
    return Styled(word, _STYLES[word]) if word in _STYLES else word or "-"


def number(value: Any) -> float | None:
    """Return a number of an event as float, None when absent or no number."""
    from harness.core.canonical import decode_number

    try:
        return decode_number(value)
    except ValueError:
        return None


def interval(value: Mapping[str, Any] | None) -> str:
    """Spell `{mean, low, high}` as `0.512 [0.430, 0.594]`."""
    if not value:
        return "-"
    mean, low, high = (number(value.get(key)) for key in ("mean", "low", "high"))
    if mean is None:
        return "-"
    bounds = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{mean:.3f}{bounds}"


def last_evals(run: RunState) -> dict[str, dict[str, Any]]:
    """Return the last held-out eval of the policy per environment."""
    evals = [data for data in run.evals if data.get("subject") == "policy" and data.get("prompt", "run") == "run"]
    return {str(data.get("env")): data for data in evals}


def alive(attempt: Mapping[str, Any]) -> bool | None:
    """Tell whether the process of an attempt lives; None when this machine cannot know."""
    from harness.ledger.process import is_alive

    return is_alive(attempt)


def live_status(run: RunState) -> str:
    """Return the run's status; `interrupted` instead of `running` when its process is gone."""
    if run.status == "running" and alive(run.attempts[-1]) is False:
        return "interrupted"
    return run.status


def _row(run: RunState) -> dict[str, Any]:
    last = last_evals(run)
    return {
        "run": run.run,
        "status": live_status(run),
        "decision": run.decision,
        "promoted": run.promoted is not None,
        "kind": run.kind,
        "parent": run.parent,
        "attempts": len(run.attempts),
        "reward": {env: data.get("means", {}).get("reward") for env, data in last.items()},
        "gain": {env: (data.get("gain") or {}).get("reward") for env, data in last.items()},
        "hypothesis": run.hypothesis,
        "created_at": run.created_at,
    }


def _brief(values: Mapping[str, Any], signed: bool = False) -> str:
    means = {env: number((value or {}).get("mean")) for env, value in values.items()}
    spelt = [(env, f"{mean:+.3f}" if signed else f"{mean:.3f}") for env, mean in means.items() if mean is not None]
    if len(means) == 1:
        return spelt[0][1] if spelt else "-"
    return " ".join(f"{env} {text}" for env, text in spelt) or "-"


@command(
    APPS["list"], "list", "harness list", "harness list --status completed --limit 20", "harness list --all --json"
)
def list_runs(
    status: Annotated[str, typer.Option(help=f"Only runs with this status: {', '.join(STATUSES)}.")] = "",
    decision: Annotated[str, typer.Option(help="Only runs with this decision; `none` for undecided ones.")] = "",
    limit: Limit = 100,
    everything: All = False,
) -> Result:
    """List the runs of the program, newest first."""
    if status and status not in STATUSES:
        raise UsageError(f"no status {status!r}", suggest(status, STATUSES, f"one of {', '.join(STATUSES)}"))
    decisions = ("keep", "reject", "rerun", "retune", "inconclusive", "none")
    if decision and decision not in decisions:
        raise UsageError(f"no decision {decision!r}", suggest(decision, decisions, f"one of {', '.join(decisions)}"))
    state = read_state(program())
    wanted = [
        run
        for run in reversed(state.runs.values())
        if (not status or live_status(run) == status) and (not decision or (run.decision or "none") == decision)
    ]
    shown, truncated = page(wanted, limit, everything)
    rows = [_row(run) | {"champion": run.run == state.champion} for run in shown]
    counts = {"total": len(state.runs), "matching": len(wanted), "shown": len(rows)}
    return Result(rows_document(rows, counts, truncated), lambda: _list_lines(rows, counts))


def _list_lines(rows: list[dict[str, Any]], counts: Mapping[str, int]) -> list[Line]:
    if not rows:
        nothing = "no run matches" if counts["total"] else "no runs yet; `harness new-run` plans the first one"
        return [nothing]
    cells = [
        (
            Styled(row["run"] + " *", "strong") if row["champion"] else row["run"],
            styled(row["status"]),
            styled(row["decision"]),
            _brief(row["reward"]),
            _brief(row["gain"], signed=True),
            row["hypothesis"] or row["kind"],
        )
        for row in rows
    ]
    lines = table(["run", "status", "decision", "reward", "gain", "hypothesis"], cells, right="reward gain")
    if counts["shown"] < counts["matching"]:
        lines.append(Styled(f"{counts['shown']} of {counts['matching']} shown; --limit N or --all shows more", "dim"))
    return lines


@command(APPS["status"], "status", "harness status", "harness status --json")
def status() -> Result:
    """Show where the program stands and what is running."""
    here = program()
    state = read_state(here)
    runs = list(state.runs.values())
    statuses = Counter(live_status(run) for run in runs)
    running = [_running(run) for run in runs if live_status(run) == "running"]
    decided = [(run, decision) for run in runs for decision in run.decisions]
    last = max(decided, key=lambda pair: pair[1]["at"], default=None)
    open_runs = [run for run in runs if not run.decision]
    data: dict[str, Any] = {
        "program": str(here.root),
        "runs": len(runs),
        "champion": state.champion,
        "by_status": dict(statuses),
        "running": running,
        "last_decision": None if last is None else {"run": last[0].run} | last[1],
        "undecided": [run.run for run in open_runs],
        "next": next_step(state),
    }
    champion = state.runs[state.champion] if state.champion else None

    def lines() -> list[Line]:
        best = f"{champion.run}  {_brief(_row(champion)['reward'])}  {champion.hypothesis}" if champion else "none yet"
        pairs: list[tuple[str, Any]] = [
            ("program", str(here.root)),
            ("runs", ", ".join(f"{count} {name}" for name, count in statuses.items()) or "none"),
            ("champion", best),
        ]
        pairs += [("running", f"{r['run']} attempt {r['attempt']}, pid {r['pid']} on {r['host']}") for r in running]
        if last is not None:
            pairs.append(("last decision", f"{last[0].run} {last[1]['decision']}: {last[1]['reason']}"))
        pairs += [("undecided", f"{run.run}  {run.hypothesis}") for run in open_runs[-5:]]
        return [*fields(pairs), "", ("next: ", Styled(data["next"], "strong"))]

    return Result(data, lines)


def _running(run: RunState) -> dict[str, Any]:
    attempt = run.attempts[-1]
    keys = ("attempt", "host", "pid", "at")
    return {"run": run.run} | {key: attempt.get(key) for key in keys} | {"alive": alive(attempt)}


def next_step(state: State) -> str:
    """Return the command that takes the program's newest run one step on."""
    if not state.runs:
        return 'harness new-run --hypothesis "…"'
    run = list(state.runs.values())[-1]
    now = live_status(run)
    if run.decision == "rerun" or (now == "created" and not run.decision):
        return f"harness launch {run.run}"
    if now == "running":
        return f"harness wait {run.run}"
    if now in ("interrupted", "failed") and not run.decision:
        return f"harness launch {run.run} --resume"
    if not run.decision:
        return f'harness report {run.run}, then harness decide {run.run} DECISION --reason "…"'
    if run.decision == "keep" and run.promoted is None:
        return f"harness promote {run.run}"
    return 'harness new-run --hypothesis "…"'


@command(APPS["show"], "show", "harness show run-002", "harness show run-002 --json")
def show(run: RunArg) -> Result:
    """Show everything the ledger knows about a run."""
    here = program()
    state = read_state(here)
    found = find_run(state, run)
    data = _row(found) | {
        "champion": state.champion == run,
        "config": found.created.get("config"),
        "config_sha": found.config_sha,
        "lever": found.created.get("lever"),
        "replicate_of": found.created.get("replicate_of"),
        "changes": found.created.get("changes", []),
        "attempts": found.attempts,
        "evals": found.evals,
        "decisions": found.decisions,
        "gated": found.gated,
        "promoted": found.promoted,
        "notes": found.notes,
        "protocol": found.created.get("protocol"),
        "report": _existing(here.analysis_dir(run) / "report.md", here.root),
        "outputs": _existing(here.run_dir(run), here.root),
    }
    return Result(data, lambda: _show_lines(found, data))


def _existing(path: Any, root: Any) -> str | None:
    return path.relative_to(root).as_posix() if path.exists() else None


def _show_lines(run: RunState, data: Mapping[str, Any]) -> list[Line]:
    lines = fields(
        [
            ("run", f"{run.run}{' (champion)' if data['champion'] else ''}"),
            ("hypothesis", run.hypothesis),
            ("status", styled(data["status"])),
            ("decision", styled(run.decision)),
            ("reason", run.reason),
            ("parent", run.parent or "none (first run)"),
            ("lever", data["lever"]),
            ("replicates", data["replicate_of"]),
            ("config", data["config"]),
            ("report", data["report"]),
            ("outputs", data["outputs"]),
        ]
    )
    lines += section("Changes to the parent", change_lines(data["changes"]))
    attempts = [
        (str(a["attempt"]), styled(a["outcome"] or data["status"]), a["at"], a.get("step"), a.get("reason") or "")
        for a in run.attempts
    ]
    lines += section(
        "Attempts", table(["attempt", "outcome", "started", "step", "reason"], attempts) if attempts else []
    )
    lines += section("Held-out evals", _eval_lines(run.evals))
    gates = [
        (gate.get("at"), styled(gate.get("verdict")), ", ".join(f"{g['name']} {g['verdict']}" for g in gate["gates"]))
        for gate in run.gated
    ]
    lines += section("Gates", table(["at", "verdict", "gates"], gates) if gates else [])
    lines += section("Notes", [note.get("text", "") for note in run.notes])
    return lines


def section(title: str, lines: Sequence[Line]) -> list[Line]:
    """Return a titled block, or nothing when it has no lines."""
    return ["", Styled(title, "strong"), *lines] if lines else []


def change_lines(changes: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Lay out a change set: what counts as the change, and what may differ without counting."""
    if not changes:
        return []
    rows = [
        (change["key"], _value(change["old"]), _value(change["new"]), change["kind"], "" if change["counts"] else "no")
        for change in changes
    ]
    return table(["key", "old", "new", "kind", "counts"], rows)


def _value(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _eval_lines(evals: list[dict[str, Any]]) -> list[Line]:
    if not evals:
        return []
    rows = []
    for data in evals:
        requested, counted = data.get("requested"), data.get("n")
        items = str(counted) if requested == counted else f"{counted} of {requested}"
        rows.append(
            (
                str(data.get("step")),
                data.get("subject"),
                data.get("env"),
                data.get("prompt"),
                items,
                interval(data.get("means", {}).get("reward")),
                interval((data.get("gain") or {}).get("reward")),
            )
        )
    header = ["step", "subject", "env", "prompt", "items", "reward", "gain"]
    return table(header, rows, right="step items")


@command(APPS["diff"], "diff", "harness diff run-001 run-002", "harness diff run-001 run-002 --json")
def diff(old: RunArg, new: RunArg) -> Result:
    """Show the change set between two runs: config, environments, prompts, verifiers and code."""
    from harness.backends.basis import stored_basis
    from harness.config.changes import change_set
    from harness.program.documents import read_plan

    here = program()
    state = read_state(here)
    bases = []
    for name in (old, new):
        basis = stored_basis(find_run(state, name))
        if basis is None:
            raise RefusedError(f"{name} has no recorded basis (it was imported)", f"`harness show {name}`")
        bases.append(basis)
    found = change_set(bases[0], bases[1], read_plan(here).nuisance)
    changes = found.to_json()
    counts = {"total": len(changes), "counting": sum(change["counts"] for change in changes)}
    data = rows_document(changes, counts, False) | {"old": old, "new": new}

    def lines() -> list[Line]:
        if not changes:
            return [f"{old} and {new} do not differ"]
        summary = f"{counts['counting']} of {counts['total']} differences count as changes"
        return [*change_lines(changes), Styled(summary, "dim")]

    return Result(data, lines)
