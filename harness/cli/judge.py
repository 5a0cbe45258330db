"""Commands that judge a run: eval, report, decide and promote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, mutation_document, narrate, rows_document, table
from harness.cli.progress import progress, quiet_libraries
from harness.cli.shared import All, DryRun, RunArg, command, complete_runs, new_app
from harness.cli.state import find_run, program, read_state, refresh_thread
from harness.cli.views import styled
from harness.core.errors import ExitCode, UsageError
from harness.core.numbers import number_or_none, spell_interval
from harness.core.types import Verdict

if TYPE_CHECKING:
    from harness.program.model import Program
    from harness.promotion.promote import GateOutcome

APPS = {name: new_app() for name in ("eval", "report", "decide", "promote")}


@command(
    APPS["eval"],
    "eval",
    "harness eval run-002 --step 20",
    "harness eval base",
    "harness eval path/to/adapter",
    "harness eval run-004 --prompt-effect run-002",
)
def evaluate(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT", help="A run id, `base`, or a folder with an adapter.", autocompletion=complete_runs
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Step of a run; its last adapter when left out.", min=0)] = None,
    prompt_effect: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Measure what the searched prompt of SUBJECT and RL each give; RUN was trained under the seed prompt.",
            autocompletion=complete_runs,
        ),
    ] = None,
) -> Result:
    """Evaluate a run, the base model or an adapter on the frozen protocol.

    Items, sizes, sampling and scoring are those of CONTEXT.md. A run is sampled with its own `backend.engine`, and its
    results are added to its ledger; the base model and an adapter folder are sampled with transformers.
    With --prompt-effect the base and both runs are evaluated under both prompts, as far as that is not on record, and
    the table says how much of the gain belongs to the prompt, to RL and to both, and whether RL absorbs the prompt.
    """
    if prompt_effect is not None:
        return _prompt_effect(prompt_effect, subject, step)
    quiet_libraries()
    from harness.evaluation.heldout import evaluate as run_protocol

    here = program()
    if step is not None and not subject.startswith("run-"):
        raise UsageError("--step chooses a step of a run", f"`harness eval run-002 --step {step}`")
    if subject.startswith("run-"):
        find_run(read_state(here), subject)
    with progress(subject) as report:
        rows = run_protocol(here, subject, step, report)
    data = rows_document(rows, {"total": len(rows)}, False) | {"subject": subject}
    return Result(data, lambda: eval_lines(rows))


def _prompt_effect(seed_run: str, chosen_run: str, step: int | None) -> Result:
    if step is not None:
        raise UsageError("--prompt-effect takes the last adapter of both runs", "leave --step out")
    here = program()
    state = read_state(here)
    for run in (seed_run, chosen_run):
        find_run(state, run)
    quiet_libraries()
    from harness.evaluation.crossed import prompt_effect

    with progress(chosen_run) as report:
        rows = prompt_effect(here, seed_run, chosen_run, report)
    data = rows_document(rows, {"total": len(rows)}, False) | {"subject": chosen_run}
    return Result(data, lambda: _effect_lines(rows))


def _effect_lines(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    from harness.evaluation.effect import EFFECTS, VERDICTS

    lines: list[Line] = []
    for row in rows:
        cells = {(cell["model"], cell["prompt"]): spell_interval(cell["means"]["reward"]) for cell in row["cells"]}
        models = {"base": "base", "seed": row["seed_run"], "chosen": row["chosen_run"]}
        means = [(name, *(cells[model, prompt] for prompt in ("seed", "chosen"))) for model, name in models.items()]
        effects = [(effect.title, spell_interval(row["effects"]["reward"][effect.name])) for effect in EFFECTS]
        found = row["verdict"]["reward"]
        lines += [*table([f"reward, {row['env']}", "seed prompt", "chosen prompt"], means), ""]
        lines += [*table(["what", "gain"], effects), "", (Styled(found, "strong"), f": {VERDICTS[found]}")]
        if row["differs"]:
            lines.append(f"the runs differ in more than the prompt: {', '.join(row['differs'])}")
    return [*lines, f"`harness report {rows[0]['chosen_run']}` shows every metric"]


def eval_lines(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Lay out held-out results: one line per environment and metric, the gain beside the mean."""
    cells = [
        (
            row.get("env"),
            str(row.get("step", "-")),
            f"{row.get('n')} of {row.get('requested')}",
            metric,
            spell_interval(mean),
            spell_interval((row.get("gain") or {}).get(metric)),
        )
        for row in rows
        for metric, mean in (row.get("means") or {}).items()
    ]
    return table(["env", "step", "items", "metric", "mean", "gain over base"], cells, right="step items")


@command(APPS["report"], "report", "harness report run-002", "harness report --all", "harness report --check")
def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run id; may be left out with --all or --check.", autocompletion=complete_runs
        ),
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when a report is stale.")] = False,
    everything: All = False,
) -> Result:
    """Write the report of a run into analysis/.

    The same inputs always give the same bytes. --check without a run looks at every report there is.
    """
    here = program()
    state = read_state(here)
    if run:
        find_run(state, run)
        runs = [run]
    elif everything or check:
        runs = [name for name in state.runs if (here.analysis_dir(name) / "report.md").is_file() or not check]
    else:
        raise UsageError("no run named", "`harness report RUN`, or --all for every run")
    return _check_reports(here, runs) if check else _write_reports(here, runs)


def _check_reports(here: Program, runs: list[str]) -> Result:
    from harness.reports.write import check_report

    rows = [{"run": name, "problems": check_report(here, name)} for name in runs]
    stale = [row for row in rows if row["problems"]]
    data = rows_document(rows, {"total": len(rows), "stale": len(stale)}, False)
    if not stale:
        return Result(data, [f"{len(rows)} reports are current"])
    lines: list[Line] = [
        (Styled("stale", "bad"), f"  {row['run']}: {text}") for row in stale for text in row["problems"]
    ]
    lines.append(f"`harness report {stale[0]['run']}` writes it again")
    return Result(data, lines, ExitCode.NO)


def _write_reports(here: Program, runs: list[str]) -> Result:
    from harness.reports.warn import damage_text
    from harness.reports.write import write_report

    rows = []
    for name in runs:
        written = write_report(here, name)
        paths = [here.relative(path) for path in written.paths]
        damaged = [{"file": file, "lines": list(numbers)} for file, numbers in written.damaged]
        rows.append({"run": name, "changed": written.changed, "files": paths, "damaged": damaged})
        for file, numbers in written.damaged:
            narrate((Styled("warning:", "warn"), f" {name}: {damage_text(file, numbers)}"))
    detail = {"reports": rows}
    data = mutation_document(",".join(runs), applied=any(row["changed"] for row in rows), dry_run=False, detail=detail)
    lines: list[Line] = [
        f"{row['run']}: analysis/{row['run']}/report.md {'written' if row['changed'] else 'is current'}" for row in rows
    ]
    return Result(data, lines)


@command(
    APPS["decide"],
    "decide",
    'harness decide run-002 keep --reason "gain 0.12 [0.05, 0.19], accuracy not below"',
    'harness decide run-003 rerun --reason "the disk was full"',
)
def decide(
    run: RunArg,
    decision: Annotated[str, typer.Argument(help="keep, reject, rerun, retune or inconclusive.")],
    reason: Annotated[str, typer.Option(help="Why; recorded for good.")],
) -> Result:
    """Record what was concluded from a run, with the reason.

    A later decision replaces an earlier one; both stay in the ledger. `rerun` says that infrastructure
    spoiled the run, `retune` that the idea is right and the setting wrong.
    """
    from harness.promotion.promote import decide as record

    here = program()
    find_run(read_state(here), run)
    record(here, run, decision, reason)
    refresh_thread(here)
    detail = {"decision": decision, "reason": reason}
    data = mutation_document(run, applied=True, dry_run=False, detail=detail)
    return Result(data, [(f"{run}: ", styled(decision), f" ({reason})")])


@command(
    APPS["promote"],
    "promote",
    "harness promote run-002",
    "harness promote run-002 --gates heldout",
    "harness promote run-002 --dry-run --json",
)
def promote(
    run: RunArg,
    gates: Annotated[str, typer.Option(help="Names of the gates, separated by commas; all when left out.")] = "",
    step: Annotated[int | None, typer.Option(help="Eval step to judge; the final one when left out.", min=0)] = None,
    dry_run: DryRun = False,
) -> Result:
    """Apply the gates of GOAL.md and promote the run if they pass.

    Exit code 0 promoted, 1 refused with each reason, 3 cannot tell (evidence is missing, or a gate was
    not run). The record says which gates were asked for.
    """
    from harness.promotion.promote import GATES
    from harness.promotion.promote import promote as apply

    here = program()
    find_run(read_state(here), run)
    asked = tuple(name.strip() for name in gates.split(",") if name.strip()) if gates else GATES
    outcome = apply(here, run, asked, dry_run=dry_run, step=step)
    if not dry_run:
        refresh_thread(here)
    data = mutation_document(run, applied=outcome.promoted, dry_run=dry_run, detail=outcome.to_json())
    return Result(data, lambda: _gate_lines(outcome), outcome.exit_code)


def _gate_lines(outcome: GateOutcome) -> list[Line]:
    rows = [
        (
            gate.name,
            check.env,
            check.check,
            check.metric,
            number_or_none(check.value),
            number_or_none(check.bound),
            styled(check.verdict),
        )
        for gate in outcome.gates
        for check in gate.checks
    ]
    header = ["gate", "env", "check", "metric", "value", "bound", "verdict"]
    lines = [*table(header, rows, right="value bound"), ""] if rows else []
    lines += [("- ", reason) for reason in outcome.reasons]
    if outcome.post_hoc:
        lines.append("- GOAL.md or CONTEXT.md was amended after the run started; the record says so")
    at = f" at step {outcome.step}" if outcome.step is not None else ""
    words = {"pass": "passes", "fail": "refused", "cannot_tell": "cannot tell"}
    verdict = Styled(
        words.get(str(outcome.verdict), str(outcome.verdict)),
        {"pass": "good", "fail": "bad"}.get(str(outcome.verdict), "warn"),
    )
    if outcome.promoted:
        return [*lines, (Styled(f"{outcome.run} promoted", "good"), f"{at}; certificate {outcome.certificate}")]
    if any(gate.verdict is Verdict.NOT_RUN for gate in outcome.gates):
        lines.append("- gates that were not run are not built yet; `--gates heldout` asks for the one that is")
    note = " (dry run, nothing written)" if outcome.dry_run else ""
    return [*lines, (f"{outcome.run}{at}: ", verdict, note)]
