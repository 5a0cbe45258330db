"""`harness report`: write the files of a run's report, and say whether written ones are stale."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import ConfigError, NotFoundError
from harness.core.files import atomic_write
from harness.core.ids import run_number
from harness.ledger import Ledger, RunState
from harness.program import Context, Program, read_context, read_goal
from harness.reports.blocks import Block, Heading
from harness.reports.collect import collect
from harness.reports.compact import (
    choose_samples,
    merge_metrics,
    metrics_csv,
    parse_metrics,
    parse_samples,
    read_lines,
    sample_line,
)
from harness.reports.html import GENERATOR, Chip, render_html
from harness.reports.markdown import render_markdown
from harness.reports.model import ReportData
from harness.reports.plots import render_plots
from harness.reports.search import example_blocks, search_blocks
from harness.reports.search_model import KIND as SEARCH
from harness.reports.search_model import RECORD, Search, read_search
from harness.reports.search_plots import search_plots
from harness.reports.sections import decision_chips, report_blocks, rollout_blocks, rollout_link
from harness.reports.summary import (
    EMPTY,
    Evaluated,
    baseline_rows,
    capture,
    dump_summary,
    evaluated_tasks,
    label_rows,
    parse_summary,
    part_rows,
    redistributable,
    training_args,
)
from harness.reports.warmstart import warm_start_rows
from harness.reports.warn import damaged_files

if TYPE_CHECKING:
    pass

MAX_FOLDER_BYTES = 5_000_000
METRICS, ROLLOUTS, SUMMARY = "data/metrics.csv", "data/rollouts.jsonl", "data/summary.json"
_OWNED = ("plots",)
_STEP = re.compile(r"step_(\d{1,9})")
_DATA_URI = re.compile(rb"data:image/png;base64,[A-Za-z0-9+/=]*")
_GENERATOR = re.compile(rb'<meta name="generator" content="([^"]*)">')


@dataclass(frozen=True, slots=True)
class ReportResult:
    """What `write_report` did.

    Args:
        paths: every file of the report.
        changed: whether any of them is new or different.
        damaged: files of the run with the numbers of their lines that could not be read.
    """

    paths: tuple[Path, ...]
    changed: bool
    damaged: tuple[tuple[str, tuple[int, ...]], ...] = ()


def write_report(program: Program, run: str) -> ReportResult:
    """Write `analysis/<run>/`: report.md, report.html, rollouts.md, plots/ and data/.

    With `outputs/<run>/` at hand the compact files in data/ are made from it first; without, the
    committed ones are used. Either way the same inputs give the same bytes.

    Raises:
        NotFoundError: when the ledger has no such run.
        ConfigError: when a committed compact file is damaged, or the folder would pass 5 MB.
    """
    folder = program.analysis_dir(run)
    files = build_report(program, run)
    changed = False
    for name, data in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            atomic_write(path, data)
            changed = True
    for path in _leftovers(folder, files):
        path.unlink()
        changed = True
    damaged = damaged_files(parse_summary(files[SUMMARY].decode(), SUMMARY))
    return ReportResult(tuple(folder / name for name in files), changed, tuple(damaged.items()))


def check_report(program: Program, run: str) -> list[str]:
    """Return what is stale in a run's report, one sentence a file; empty when it is current.

    PNG bytes depend on matplotlib's version; where the report was drawn by another one, images
    are not compared, everything else is.

    Raises:
        NotFoundError: when the ledger has no such run.
    """
    folder = program.analysis_dir(run)
    if not (folder / "report.md").is_file():
        return [f"{run} has no report"]
    files = build_report(program, run)
    same_renderer = _same_renderer(folder / "report.html")
    problems = []
    for name, data in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif not _equal(name, path.read_bytes(), data, same_renderer):
            problems.append(f"{name} is stale")
    return problems + [f"{path.relative_to(folder)} belongs to no current report" for path in _leftovers(folder, files)]


def _same_renderer(page: Path) -> bool:
    found = _GENERATOR.search(page.read_bytes()) if page.is_file() else None
    return found is None or found[1].decode(errors="replace") == GENERATOR


def _equal(name: str, old: bytes, new: bytes, same_renderer: bool) -> bool:
    if same_renderer or not name.endswith((".png", ".html")):
        return old == new
    if name.endswith(".png"):
        return True
    old, new = (_GENERATOR.sub(b"", _DATA_URI.sub(b"", page)) for page in (old, new))
    return old == new


def _leftovers(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Return plots of an earlier report that the current one does not have."""
    return [
        path for name in _OWNED for path in sorted((folder / name).glob("*.png")) if f"{name}/{path.name}" not in files
    ]


def build_report(program: Program, run: str) -> dict[str, bytes]:
    """Return every file of a run's report, by its path in `analysis/<run>/`.

    Raises:
        NotFoundError: when the ledger has no such run.
        ConfigError: when a committed compact file is damaged, or the files would pass 5 MB.
    """
    run_number(run)
    state = Ledger(program.ledger).state().runs.get(run)
    if state is None:
        raise NotFoundError(f"the ledger has no {run}", "`harness list` shows the runs")
    goal, context = read_goal(program), read_context(program)
    files = compact_files(program, state, context)
    data = collect(
        program.root,
        state,
        goal,
        context,
        metrics=parse_metrics(files[METRICS], METRICS),
        samples=parse_samples(files[ROLLOUTS], ROLLOUTS),
        summary=parse_summary(files[SUMMARY], SUMMARY),
        search=_search(program, state, context),
    )
    encoded = {name: content.encode() for name, content in files.items()} | render_report(data)
    size = sum(len(content) for content in encoded.values())
    if size >= MAX_FOLDER_BYTES:
        raise ConfigError(
            f"the report of {run} would take {size} bytes, the limit is {MAX_FOLDER_BYTES}",
            "metrics with very many keys or very long completions fill it: log fewer, or lower sampling.max_tokens",
        )
    return encoded


def _search(program: Program, state: RunState, context: Context) -> Search | None:
    """Return what a prompt search found; None for another run, and for one that has not ended."""
    record = program.analysis_dir(state.run) / RECORD
    if state.kind != SEARCH or not record.is_file():
        return None
    return read_search(record.read_bytes(), state.attempts, context.eval.confidence)


def render_report(data: ReportData) -> dict[str, bytes]:
    """Return the pages and plots of a report, by path; pure."""
    plots = search_plots(data.search, data.confidence) if data.search is not None else render_plots(data)
    images = {f"plots/{name}.png": plot.data for name, plot in plots.items()}
    if data.kind == SEARCH:
        blocks, rollouts, what = search_blocks(data, plots), example_blocks(data), "examples"
    else:
        blocks, rollouts, what = report_blocks(data, plots), rollout_blocks(data), "rollouts"
    chips = [Chip(label, tone) for label, tone in decision_chips(data)]
    title = f"{data.run} report"
    markdown: list[Block] = [*blocks, *rollout_link(data)]
    return {
        "report.md": render_markdown(markdown).encode(),
        "rollouts.md": render_markdown([Heading(1, f"{data.run} {what}"), *rollouts]).encode(),
        "report.html": render_html(title, [*blocks, *rollouts], images, chips).encode(),
        **images,
    }


def compact_files(program: Program, state: RunState, context: Context) -> dict[str, str]:
    """Return the compact files: made from the run directory where it is, read back where it is not."""
    outputs, committed = program.run_dir(state.run), program.analysis_dir(state.run)
    if (outputs / "metrics.jsonl").is_file():
        return _from_outputs(program, outputs, state, context)
    names = (METRICS, ROLLOUTS, SUMMARY)
    if all((committed / name).is_file() for name in names):
        return {name: (committed / name).read_text(encoding="utf-8") for name in names}
    if state.kind == "import" and (committed / METRICS).is_file():
        absent = {ROLLOUTS: "", SUMMARY: dump_summary(EMPTY)}  # an import writes only what its source has
        found = {name: committed / name for name in names}
        return {
            name: path.read_text(encoding="utf-8") if path.is_file() else absent[name] for name, path in found.items()
        }
    # an import without metrics, or a run that was never started: evals and ledger are all there is
    tasks = evaluated_tasks(program.root, state, context)
    summary = {**EMPTY, **_derived(program, state, tasks, context)}
    return {METRICS: "step\n", ROLLOUTS: "", SUMMARY: dump_summary(summary)}


def _derived(
    program: Program, state: RunState, tasks: Mapping[str, Evaluated], context: Context
) -> dict[str, list[dict[str, Any]]]:
    """Return the members of a summary that come from the evaluated items.

    What only some runs have is left out elsewhere, so that older reports keep their bytes.
    """
    rows = {"labels": label_rows(program.root, state, tasks), "baselines": baseline_rows(tasks)}
    some = {
        "parts": part_rows(program.root, state, tasks),
        "warm_start": warm_start_rows(program.root, state, tasks, float(context.eval.confidence)),
    }
    return rows | {name: found for name, found in some.items() if found}


def _from_outputs(program: Program, outputs: Path, state: RunState, context: Context) -> dict[str, str]:
    damaged: dict[str, list[int]] = {}

    def read(path: Path) -> list[dict[str, Any]]:
        found, broken = read_lines(path)
        if broken:
            damaged[path.relative_to(outputs).as_posix()] = broken
        return found

    rows = read(outputs / "metrics.jsonl")
    shared = {env: redistributable(env, args) for env, args in sorted(training_args(state).items())}
    lines = []
    for env, by_step in sorted(_stored_rollouts(outputs / "rollouts").items()):
        picks = choose_samples(state.run, env, {step: read(path) for step, path in by_step.items()})
        lines += [sample_line(row, redistributable=shared.get(env, False)) + "\n" for row in picks]
    tasks = evaluated_tasks(program.root, state, context)
    captured, packages = capture(outputs / "environment.json")
    summary = {
        "capture": captured,
        "packages": packages,
        "redistributable": shared,
        **_derived(program, state, tasks, context),
        "broken_lines": len(damaged.get("metrics.jsonl", ())),
    }
    if damaged:  # left out otherwise, so that reports of whole files keep their bytes
        summary["damaged"] = [{"file": name, "lines": lines} for name, lines in sorted(damaged.items())]
    return {METRICS: metrics_csv(merge_metrics(rows)), ROLLOUTS: "".join(lines), SUMMARY: dump_summary(summary)}


def _stored_rollouts(folder: Path) -> dict[str, dict[int, Path]]:
    """Return the files of the first and the last stored step, by environment and step."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("step_*/*.jsonl")):
        match = _STEP.fullmatch(path.parent.name)
        if match:
            found.setdefault(path.stem, {})[int(match[1])] = path
    return {env: {step: paths[step] for step in (min(paths), max(paths))} for env, paths in found.items()}
