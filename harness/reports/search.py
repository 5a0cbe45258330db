"""The report of a prompt search: what was found and whether it holds, then how, and what it changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from harness.reports.blocks import Block, Code, Heading, Inline, Paragraph, Quote, Table, code, strong, text
from harness.reports.compact import cut
from harness.reports.inline import estimate, number
from harness.reports.model import ReportData, metric_order
from harness.reports.plots import Plot
from harness.reports.search_model import Candidate, Example, Score, Search
from harness.reports.sections import attempt_blocks, decision_line, environment_blocks, figure

MOST_STEPS = 60
MOST_DIFF_LINES = 400
_NAMES = {
    "found": "chosen prompt",
    "seed": "seed prompt",
    "random": "random demonstrations, else as chosen",
    "random_in_seed": "random demonstrations in the seed prompt",
}
_TITLES = {
    "scoring": "On training items that the selection never saw, scored once",
    "validation": "On search-validation, which chose, so the chosen prompt looks too good",
}


def search_blocks(data: ReportData, plots: Mapping[str, Plot]) -> list[Block]:
    """Return the report of a prompt search, most important first."""
    search = data.search
    if search is None:
        waiting = "The search has not ended, or its record is not here; the same `search-prompt` command goes on."
        return [*_head(data, None), Paragraph(text(waiting)), *attempt_blocks(data), *environment_blocks(data)]
    return [
        *_head(data, search),
        *_scores(search, data.confidence),
        *_candidates(search, plots),
        *_budget(search, plots),
        *_tree(search),
        *_diff(search),
        *_wins(search, plots),
        *attempt_blocks(data),
        *environment_blocks(data),
    ]


def _head(data: ReportData, search: Search | None) -> list[Block]:
    rows: list[tuple[Inline, Inline]] = [(text("Decision"), decision_line(data))]
    if search is not None:
        which = "the seed prompt itself" if search.chosen == 0 else f"candidate {search.chosen}"
        rows.append((text("Chosen"), code(search.prompt) + text(f", {which} of {len(search.candidates)} validated")))
        rows += [
            (text(f"Gain over the {_NAMES.get(score.name, score.name)}"), estimate(score.gain["reward"], signed=True))
            for score in search.parts["scoring"]
            if "reward" in score.gain
        ]
        rows.append((text("Ended by"), text(search.ended)))
        if not search.intact:
            rows.append((text("Warning"), text("the record of the search is not the one the ledger names", "bad")))
    rows.append((text("Status"), text(data.status)))
    return [
        Heading(1, f"{data.run}, a prompt search"),
        Quote(data.hypothesis or "No hypothesis is recorded."),
        Table(("", ""), tuple(rows)),
    ]


def _scores(search: Search, confidence: float) -> list[Block]:
    blocks: list[Block] = [Heading(2, "Does it hold?")]
    for name, title in _TITLES.items():
        items, clusters = search.sizes[name]
        blocks.append(Paragraph(text(f"{title}: {items} items in {clusters} clusters, {confidence:.0%} intervals.")))
        blocks.append(_score_table(search.parts[name]))
    return blocks


def _score_table(scores: tuple[Score, ...]) -> Table:
    metrics = metric_order({metric for score in scores for metric in score.means})
    columns = [column for metric in metrics for column in (metric, f"{metric}: gain of the chosen")]
    rows = tuple(
        (
            text(_NAMES.get(score.name, score.name)),
            *(
                cell
                for metric in metrics
                for cell in (estimate(score.means.get(metric)), estimate(score.gain.get(metric), signed=True))
            ),
        )
        for score in scores
    )
    return Table(("Prompt", *columns), rows, frozenset(range(1, 1 + len(columns))))


def _candidates(search: Search, plots: Mapping[str, Plot]) -> list[Block]:
    rows = tuple(
        (
            _name(candidate, search),
            text(", ".join(map(str, candidate.parents)) or "—"),
            text(", ".join(candidate.changed) or "—"),
            text(str(candidate.evaluations)),
            estimate(candidate.mean),
            estimate(candidate.gain, signed=True),
        )
        for candidate in search.candidates
    )
    columns = ("Candidate", "Parents", "Changed", "Validated after", "Reward", "Gain over the seed")
    table = Table(columns, rows, frozenset({3, 4, 5}))
    return [Heading(2, "Score by candidate"), *figure(plots, "candidates"), table]


def _name(candidate: Candidate, search: Search) -> Inline:
    if candidate.index == search.chosen:
        return strong(f"{candidate.index}, chosen", "good")
    return text(f"{candidate.index}, the seed" if candidate.index == 0 else str(candidate.index))


def _budget(search: Search, plots: Mapping[str, Plot]) -> list[Block]:
    facts = tuple((text(name), text(value)) for name, value in search.facts.items())
    counts = {what: sum(step.what == what for step in search.steps) for what in ("accepted", "rejected", "refused")}
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    blocks: list[Block] = [Heading(2, "Score by budget"), *figure(plots, "budget"), Table(("What", "Value"), facts)]
    blocks.append(Paragraph(text(f"{len(search.steps)} proposals: {told}.")))
    tones: Mapping[str, Inline] = {"accepted": text("accepted", "good"), "refused": text("refused", "warn")}
    rows = tuple(
        (text(str(step.evaluations)), tones.get(step.what, text(step.what)), text(step.why))
        for step in search.steps[:MOST_STEPS]
    )
    if rows:
        blocks.append(Table(("After", "Proposal", "Why"), rows, frozenset({0})))
    if len(search.steps) > MOST_STEPS:
        blocks.append(Paragraph(text(f"{len(search.steps) - MOST_STEPS} more are in the record, data/search.json.")))
    return blocks


def _tree(search: Search) -> list[Block]:
    return [Heading(2, "Candidate tree"), Code("\n".join(_branches(search)))]


def _branches(search: Search) -> Iterator[str]:
    """Yield one line a candidate, children below their first parent."""
    children: dict[int, list[Candidate]] = {}
    for candidate in search.candidates[1:]:
        children.setdefault(candidate.parents[0] if candidate.parents else 0, []).append(candidate)
    stack: list[tuple[Candidate, str, str]] = [(search.seed, "", "")]
    while stack:  # not by recursion: a chain may be as long as the budget allows
        candidate, mark, below = stack.pop()
        yield f"{mark}{_leaf(candidate, search)}"
        own = children.get(candidate.index, [])
        last = own[-1].index if own else -1
        for child in reversed(own):
            ends = child.index == last
            stack.append((child, f"{below}{'└─ ' if ends else '├─ '}", f"{below}{'   ' if ends else '│  '}"))


def _leaf(candidate: Candidate, search: Search) -> str:
    changed = "seed" if candidate.index == 0 else ", ".join(candidate.changed) or "as its parent"
    chosen = "  chosen" if candidate.index == search.chosen else ""
    return f"{candidate.index}  {number(candidate.mean.mean)}  {changed}{chosen}"


def _diff(search: Search) -> list[Block]:
    blocks: list[Block] = [Heading(2, "From the seed prompt to the chosen one")]
    if search.chosen == 0:
        return [*blocks, Paragraph(text("No prompt was better: the seed prompt was chosen, unchanged."))]
    seed, found = search.seed.texts, search.found.texts
    for name in sorted(found):
        if found[name] == seed.get(name):
            blocks.append(Paragraph(text(f"{name}: unchanged.")))
            continue
        lines = list(
            difflib.unified_diff(
                seed.get(name, "").splitlines(), found[name].splitlines(), "seed", "chosen", lineterm="", n=2
            )
        )
        left = len(lines) - MOST_DIFF_LINES
        more = [f"… {left} more lines; the whole text is in the prompt's file"] if left > 0 else []
        blocks += [Heading(3, name), Code("\n".join([*lines[:MOST_DIFF_LINES], *more]))]
    if search.shown:
        told = (
            f"Shown as demonstrations, so left out of the choice and of RL with this prompt: {', '.join(search.shown)}."
        )
        blocks.append(Paragraph(text(told)))
    return blocks


def _wins(search: Search, plots: Mapping[str, Plot]) -> list[Block]:
    seed = search.seed.scores
    rows = tuple(
        (
            _name(candidate, search),
            text(str(sum(score > seed[task] for task, score in candidate.scores.items()))),
            text(str(sum(score < seed[task] for task, score in candidate.scores.items()))),
            text(str(candidate.best)),
            text(str(candidate.alone)),
        )
        for candidate in search.candidates
    )
    columns = ("Candidate", "Better than the seed", "Worse", "Best of all", "Best alone")
    note = "Numbers of validation tasks; the last two leave out tasks on which all candidates are equal."
    table = Table(columns, rows, frozenset({1, 2, 3, 4}))
    return [Heading(2, "Which tasks each candidate wins"), *figure(plots, "wins"), Paragraph(text(note)), table]


def example_blocks(data: ReportData) -> list[Block]:
    """Return validation tasks with both replies, those whose reward moved most."""
    examples = () if data.search is None else data.search.examples
    if not examples:
        return [Heading(2, "Before and after"), Paragraph(text("No examples are on record."))]
    intro = "The validation tasks whose reward moved most, in either direction; chosen by rule, not by hand."
    blocks: list[Block] = [Heading(2, "Before and after"), Paragraph(text(intro))]
    for example in examples:
        blocks += _example(example)
    return blocks


def _example(example: Example) -> list[Block]:
    before, after = example.rewards
    return [
        Paragraph(text("Task ") + code(example.task) + text(f" · reward {number(before)} → {number(after)}")),
        Code(cut(example.before), "Seed prompt"),
        Code(cut(example.after), "Chosen prompt"),
    ]
