"""THREAD.md: the generated block that says where a program stands, and nothing outside it.

The block is a pure function of the ledger's state, so two people who render it get the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from harness.core.errors import ConfigError
from harness.core.files import atomic_write
from harness.core.numbers import number_or_none, spell_duration, spell_interval
from harness.core.text import md_escape
from harness.ledger import RunState, State
from harness.ledger.results import last_policy_evals, protocol_of, reference_protocols
from harness.program.model import Program

BEGIN = "<!-- harness:begin -->"
END = "<!-- harness:end -->"
_DECISIONS_SHOWN = 10
_OPEN_SHOWN = 20
_IDEAS_SHOWN = 5
_STATUSES = ("running", "created", "completed", "failed", "interrupted", "crashed", "stopped")
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


class Best(NamedTuple):
    """The best run of an environment, its result, how many compare with it, and how many do not."""

    run: RunState
    result: HeldOut
    tried: int
    others: int


def best_runs(state: State) -> dict[str, Best]:
    """Return per environment the run with the highest held-out reward under the protocol of the newest run there.

    Of two equal runs the older one stands. Rejected runs and runs to be run again are out, and so are
    imported ones, whose numbers another system took on other items. Runs that were measured on other items, by
    another verifier or with other sampling are counted but not ranked.
    """
    own = [run for run in state.runs.values() if run.kind != "import"]
    reference = reference_protocols(own)
    best: dict[str, tuple[RunState, HeldOut]] = {}
    tried, others = Counter[str](), Counter[str]()
    for run in own:
        last = last_policy_evals(run)
        for result in held_out(run):
            if result.mean != result.mean:
                continue
            if protocol_of(run, last[result.env]) != reference[result.env]:
                others[result.env] += 1
                continue
            tried[result.env] += 1
            if run.decision in ("reject", "rerun"):
                continue
            if result.env not in best or result.mean > best[result.env][1].mean:
                best[result.env] = (run, result)
    return {env: Best(*best[env], tried[env], others[env]) for env in sorted(best)}


def thread_block(state: State) -> str:
    """Return the generated block without its markers; the same state gives the same bytes."""
    parts = {
        "Where we stand": _standing(state),
        "Last decisions": _decisions(state),
        "Next": _next(state),
        "Open hypotheses": _open(state),
        "Budget used": _budget(state),
        "Runs by status": _by_status(state.runs.values()),
    }
    return "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in parts.items() if lines)


def _standing(state: State) -> list[str]:
    champion = state.runs.get(state.champion) if state.champion else None
    lines = []
    if champion is None:
        lines.append("- Champion: none yet; no run has been promoted.")
    else:
        at = (champion.promoted or {}).get("at", "")
        lines.append(f"- Champion: **{champion.run}**, {_inline(champion.hypothesis)} (promoted {at[:10]})")
        lines += _results(champion)
    for env, (run, result, tried, others) in best_runs(state).items():
        who = "the champion" if run is champion else f"**{run.run}**, {_inline(run.hypothesis)}"
        apart = f" ({others} more under another protocol, not compared)" if others else ""
        lines.append(f"- Best on {_inline(env)} of {tried} evaluated{apart}: {who}")
        lines += [] if run is champion else [_result(result)]
    if state.amendments:
        last = state.amendments[-1]
        name, reason = str(last.get("file", "")), str(last.get("reason", ""))
        lines.append(f"- Last amendment: {_inline(name)}, {last['at'][:10]}: {_inline(reason)}")
    return lines


def _results(run: RunState) -> list[str]:
    return [_result(result) for result in held_out(run)]


def _result(result: HeldOut) -> str:
    return f"  - {_inline(result.env)} at step {result.step}: {result.text}"


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


def _next(state: State) -> list[str]:
    """Return the ideas that nobody took up yet, the newest first; no section without one."""
    lines = []
    for idea in reversed(state.ideas[-_IDEAS_SHOWN:]):
        why = f" (because {_inline(str(idea['because']))})" if idea.get("because") else ""
        left = f"{_inline(str(idea['actor']['name']))}, {idea['at'][:10]}"
        lines.append(f"- {_inline(str(idea['hypothesis']))}{why}, left by {left}")
    older = len(state.ideas) - len(lines)
    return lines + ([f"- {older} older ideas: `harness next` lists them"] if older else [])


def _budget(state: State) -> list[str]:
    """Return what all attempts cost, and how much of it was lost to other causes than the model."""
    attempts = [attempt for run in state.runs.values() for attempt in run.attempts]
    if not attempts:
        return ["Nothing: no run has been launched."]
    spoiled = [attempt for attempt in attempts if attempt.get("failure") in ("infra", "tool", "verifier")]
    lost = f", {spell_duration(_seconds(spoiled))} of it in {len(spoiled)} that failed outside the model"
    looks = sum(data.get("subject") == "policy" for run in state.runs.values() for data in run.evals)
    tokens = sum(_tokens(run) for run in state.runs.values())
    return [
        f"- {_count(len(attempts), 'attempt')}: {spell_duration(_seconds(attempts))} of training and evaluation"
        + (lost if spoiled else ""),
        f"- {tokens:,} tokens sampled for training",
        f"- {_count(looks, 'look')} at the held-out items",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _seconds(attempts: Iterable[Mapping[str, Any]]) -> float:
    return sum(number_or_none(attempt.get("wall_s")) or 0.0 for attempt in attempts)


def _tokens(run: RunState) -> int:
    """Return the tokens that a run's attempts sampled.

    Events without `sampled_tokens` hold the sum up to the last step, attempts before it included.
    """
    total, reached = 0, 0
    for attempt in run.attempts:
        sampled, tokens = attempt.get("sampled_tokens"), attempt.get("tokens")
        if isinstance(sampled, int):
            total += sampled
        elif isinstance(tokens, int):
            total += max(tokens - (reached if attempt.get("resumed_from") else 0), 0)
        reached = tokens if isinstance(tokens, int) else reached
    return total


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
