"""`harness rollouts`: page through what the policy wrote during training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, page, rows_document
from harness.cli.shared import All, RunArg, command, new_app
from harness.cli.state import find_run, program, read_state
from harness.core.errors import NotFoundError, UsageError
from harness.core.files import step_folders
from harness.core.names import did_you_mean
from harness.core.numbers import number_or_none
from harness.ledger.superseded import FOLDER

app = new_app()
APPS = {"rollouts": app}


@command(
    app,
    "rollouts",
    "harness rollouts run-002",
    "harness rollouts run-002 --step 20 --worst --limit 3",
    "harness rollouts run-002 --task dp-0042 --json",
    "harness rollouts run-002 --attempt 1",
)
def rollouts(
    run: RunArg,
    step: Annotated[int | None, typer.Option(help="Training step; the last stored one when left out.", min=0)] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Superseded rollouts of this attempt, which a later one trained again.", min=1)
    ] = None,
    env: Annotated[str, typer.Option(help="Only this environment.")] = "",
    task: Annotated[str, typer.Option(help="Only rollouts of this task id.")] = "",
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    prompt: Annotated[bool, typer.Option("--prompt", help="Show the prompts too.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rollouts shown at most.")] = 5,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Rollouts left out at the beginning.")] = 0,
    everything: All = False,
) -> Result:
    """Page through the stored rollouts of a run.

    Each shows reward, components, failure class and the whole completion, so that a rising reward can
    be checked against what the model writes. What a later attempt trained again is kept, and shown with
    --attempt only.
    """
    if worst and best:
        raise UsageError("--worst and --best exclude each other", f"`harness rollouts {run} --worst`")
    here = program()
    find_run(read_state(here), run)
    steps = stored_steps(_folder(here.run_dir(run), attempt))
    if not steps and attempt is not None:
        raise NotFoundError(
            f"no rollouts of attempt {attempt} were superseded here", _superseded_hint(here.run_dir(run))
        )
    if not steps:
        hint = f"a launch stores them in outputs/, which git does not hold; analysis/{run}/rollouts.md has chosen ones"
        raise NotFoundError(f"{run} has no stored rollouts here", hint)
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        known = f"steps {min(steps)} to {max(steps)} are stored ({len(steps)} of them)"
        raise NotFoundError(f"{run} has no rollouts of step {chosen}", known)
    rows = [row | {"superseded": attempt is not None} for row in _read(steps[chosen], env)]
    if task:
        rows = [row for row in rows if row.get("task") == task]
    if worst or best:
        rows.sort(key=_reward, reverse=best)
    shown, truncated = page(rows[skip:], limit, everything)
    counts = {"total": len(rows), "shown": len(shown), "skipped": min(skip, len(rows))}
    data = rows_document(shown, counts, truncated) | {"run": run, "step": chosen, "steps": sorted(steps)}
    name = run if attempt is None else f"{run} attempt {attempt} (superseded)"
    return Result(data, lambda: _lines(shown, counts, name, chosen, prompt), multiline=True)


def _folder(run_dir: Path, attempt: int | None) -> Path:
    return run_dir / "rollouts" if attempt is None else run_dir / FOLDER / f"attempt_{attempt}" / "rollouts"


def _superseded_hint(run_dir: Path) -> str:
    kept = sorted(path.name.removeprefix("attempt_") for path in (run_dir / FOLDER).glob("attempt_*"))
    return f"kept here: attempts {', '.join(kept)}" if kept else "no attempt was superseded; leave out --attempt"


def stored_steps(folder: Path) -> dict[int, Path]:
    """Return the folders of stored rollouts by step."""
    return {step: path for step, path in step_folders(folder) if path.is_dir()}


def _read(folder: Path, env: str) -> list[dict[str, Any]]:
    from harness.rollouts.store import read_rollouts

    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if env and env not in files:
        raise NotFoundError(
            f"no rollouts of {env!r} in this step", did_you_mean(env, files, f"stored: {', '.join(files)}")
        )
    return [
        {"env": name} | row for name, path in files.items() if not env or name == env for row in read_rollouts(path)
    ]


def _reward(row: dict[str, Any]) -> float:
    reward = number_or_none(row.get("reward"))
    return float("-inf") if reward is None else reward


def _lines(rows: list[dict[str, Any]], counts: dict[str, int], run: str, step: int, prompt: bool) -> list[Line]:
    if not rows:
        return ["no rollout matches"]
    lines: list[Line] = []
    for row in rows:
        reward = number_or_none(row.get("reward"))
        advantage = number_or_none(row.get("advantage"))
        numbers = {name: number_or_none(value) for name, value in (row.get("components") or {}).items()}
        components = ", ".join(f"{name} {value:g}" for name, value in numbers.items() if value is not None)
        head = f"{row['env']}  {row.get('task')}  group {row.get('group')} #{row.get('index')}"
        shown = "-" if reward is None else f"{reward:.3f}"
        lines.append((Styled(f"reward {shown}", "strong"), f"  {head}"))
        note = f"  {components}; failure {row.get('failure') or 'none'}; finish {row.get('finish')}"
        note += f"; {row.get('tokens')} tokens" + ("" if advantage is None else f"; advantage {advantage:+.3f}")
        if "turns" in row:
            note += f"; last of {row['turns']} replies, the others with --prompt"
        lines.append(Styled(note, "dim"))
        if prompt:
            lines += [Styled("[prompt]", "strong"), str(row.get("prompt", ""))]
        lines += [Styled("[completion]", "strong"), str(row.get("completion", "")), ""]
    last = counts["skipped"] + counts["shown"]
    lines.append(Styled(f"{run} step {step}: {counts['skipped'] + 1} to {last} of {counts['total']}", "dim"))
    if last < counts["total"]:
        lines.append(Styled(f"next page: --skip {last}", "dim"))
    return lines
