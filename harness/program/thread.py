"""THREAD.md: the generated block that says where a program stands, and nothing outside it.

The block is a pure function of the ledger's state, so two people who render it get the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from harness.core.errors import ConfigError
from harness.core.files import atomic_write
from harness.core.numbers import number_or_none, spell_interval
from harness.core.text import md_escape
from harness.ledger import RunState, State
from harness.ledger.results import last_policy_evals
from harness.program.model import Program

BEGIN = "<!-- harness:begin -->"
END = "<!-- harness:end -->"
_DECISIONS_SHOWN = 10
_OPEN_SHOWN = 20
_STATUSES = ("running", "created", "completed", "failed", "interrupted", "stopped")
_INLINE_CHARS = 200


class HeldOut(NamedTuple):
    """The last held-out result of a run's policy on one environment."""

    env: str
    step: int
    mean: float
    text: str


def _inline(text: str) -> str:
    """Return text as one short line of Markdown that renders as itself, in a list item or in a table cell."""
    return md_escape(text, line_start=False, limit=_INLINE_CHARS)


def held_out(run: RunState, metric: str = "reward") -> list[HeldOut]:
    """Return a run's last policy result per environment under its own prompt, environments sorted."""
    result = []
    for env, data in sorted(last_policy_evals(run).items()):
        stats = (data.get("means") or {}).get(metric)
        mean = number_or_none(stats.get("mean")) if isinstance(stats, Mapping) else None
        if mean is None:
            continue
        gain = spell_interval((data.get("gain") or {}).get(metric))
        text = f"{metric} {spell_interval(stats)}" + ("" if gain == "-" else f", gain over base {gain}")
        result.append(HeldOut(env, int(data.get("step", 0)), mean, text))
    return result


def best_run(state: State) -> RunState | None:
    """Return the run with the highest held-out reward, averaged over its environments; rejected runs are out."""
    scored = []
    for run in state.runs.values():
        results = held_out(run)
        mean = sum(result.mean for result in results) / len(results) if results else float("nan")
        if mean == mean and run.decision not in ("reject", "rerun"):
            scored.append((mean, run))
    return max(scored, key=lambda item: item[0])[1] if scored else None


def thread_block(state: State) -> str:
    """Return the generated block without its markers; the same state gives the same bytes."""
    lines = ["## Where we stand", "", *_standing(state), "", "## Last decisions", "", *_decisions(state), ""]
    lines += ["## Open hypotheses", "", *_open(state), "", "## Runs by status", "", *_by_status(state.runs.values())]
    return "\n".join(lines)


def _standing(state: State) -> list[str]:
    champion = state.runs.get(state.champion) if state.champion else None
    lines = []
    if champion is None:
        lines.append("- Champion: none yet; no run has been promoted.")
    else:
        at = (champion.promoted or {}).get("at", "")
        lines.append(f"- Champion: **{champion.run}**, {_inline(champion.hypothesis)} (promoted {at[:10]})")
        lines += _results(champion)
    best = best_run(state)
    if best is not None and best is not champion:
        tried = sum(bool(held_out(run)) for run in state.runs.values())
        lines.append(f"- Best held-out reward of {tried} evaluated: **{best.run}**, {_inline(best.hypothesis)}")
        lines += _results(best)
    if state.amendments:
        last = state.amendments[-1]
        name, reason = str(last.get("file", "")), str(last.get("reason", ""))
        lines.append(f"- Last amendment: {_inline(name)}, {last['at'][:10]}: {_inline(reason)}")
    return lines


def _results(run: RunState) -> list[str]:
    return [f"  - {_inline(result.env)} at step {result.step}: {result.text}" for result in held_out(run)]


def _decisions(state: State) -> list[str]:
    made = [(data["at"], run.run, data) for run in state.runs.values() for data in run.decisions]
    made.sort(key=lambda item: item[:2], reverse=True)
    if not made:
        return ["None yet."]
    rows = [
        (name, str(data.get("decision", "")), state.runs[name].hypothesis, str(data.get("reason", "")), at[:10])
        for at, name, data in made[:_DECISIONS_SHOWN]
    ]
    return _table(("run", "decision", "hypothesis", "reason", "date"), rows)


def _open(state: State) -> list[str]:
    waiting = [
        run for run in state.runs.values() if run.kind == "training" and not run.decision and run.run != state.champion
    ]
    if not waiting:
        return ["None: every run has a decision."]
    rows = [(run.run, run.status, run.hypothesis) for run in waiting[-_OPEN_SHOWN:]]
    more = len(waiting) - len(rows)
    note = ["", f"{more} older runs also wait for a decision."] if more else []
    return _table(("run", "status", "hypothesis"), rows) + note


def _by_status(runs: Iterable[RunState]) -> list[str]:
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(run.status, []).append(run.run)
    if not names:
        return ["No runs yet; `harness new-run` makes the first."]
    known = [status for status in _STATUSES if status in names]
    return [f"- {status}: {len(names[status])} ({_shorten(names[status])})" for status in known]


def _shorten(names: Sequence[str], shown: int = 8) -> str:
    return ", ".join(names) if len(names) <= shown else f"…, {', '.join(names[-shown:])}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(_inline(cell) for cell in row)} |" for row in rows]


def replace_block(text: str, block: str) -> str:
    """Return a page with its generated block replaced, or with one appended when it has no markers.

    Raises:
        ConfigError: when the markers do not form one pair, so that free text cannot be told apart.
    """
    lines = text.split("\n")
    begins = [index for index, line in enumerate(lines) if line.strip() == BEGIN]
    ends = [index for index, line in enumerate(lines) if line.strip() == END]
    if not begins and not ends:
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        return f"{text}{gap}{BEGIN}\n{block}\n{END}\n"
    if len(begins) != 1 or len(ends) != 1 or begins[0] > ends[0]:
        raise ConfigError(
            f"THREAD.md needs one {BEGIN} line and one {END} line after it; it has {len(begins)} and {len(ends)}",
            "delete the surplus lines; the block is written again from the ledger",
        )
    return "\n".join([*lines[: begins[0] + 1], block, *lines[ends[0] :]])


def render_thread(program: Program, state: State) -> bool:
    """Rewrite the generated block of THREAD.md; text outside the markers is never touched.

    Returns:
        Whether the file changed.

    Raises:
        ConfigError: when the markers do not form one pair.
        InfraError: when the file cannot be written.
    """
    exists = program.thread.exists()
    old = program.thread.read_bytes().decode("utf-8", errors="surrogateescape") if exists else "# Thread\n"
    new = replace_block(old, thread_block(state))
    if exists and new == old:
        return False
    atomic_write(program.thread, new.encode("utf-8", errors="surrogateescape"))
    return True
