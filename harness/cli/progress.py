"""Progress of a long command: a bar on a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness.cli.output import narrate, settings
from harness.core.numbers import spell_duration

Report = Callable[[dict[str, Any]], None]
_SHOWN = ("reward", "zero_spread", "entropy", "kl", "grad_norm", "tokens_per_s", "loss")
LINE_EVERY_S = 1.0


@contextlib.contextmanager
def progress(title: str) -> Iterator[Report]:
    """Yield the callback that shows where a long command stands.

    The callback takes `phase`, `step`, `steps` and any numbers; keys it does not know are shown when
    they are numbers in `_SHOWN`. While it is active, stray output of libraries on standard output goes
    to standard error, so that `--json` stays one document.

    Args:
        title: what is being done, for the bar.
    """
    with _stray_output_to_stderr():
        if sys.stderr is not None and sys.stderr.isatty() and not settings.json and os.environ.get("TERM") != "dumb":
            with _bar(title) as report:
                yield with_projection(report, time.monotonic)
        else:
            yield with_projection(plain_lines(time.monotonic), time.monotonic)


def quiet_libraries() -> None:
    """Turn off the bars and the advice of model libraries; call it before they are imported.

    Their bars would mix with ours and fill logs, and their warnings address programmers.
    """
    import warnings

    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"(transformers|peft|torch)\.")


def with_projection(report: Report, clock: Callable[[], float]) -> Report:
    """Return a callback that also says, after two training steps, what the rest will take.

    Args:
        report: where every update goes on to.
        clock: monotonic seconds.
    """
    first: dict[str, float] = {}

    def projected(update: dict[str, Any]) -> None:
        report(update)
        step, steps = update.get("step"), update.get("steps")
        if update.get("phase") != "train" or not step or not steps or "done" in first:
            return
        if "step" not in first:
            first.update(step=step, at=clock())
            return
        first["done"] = step
        per_step = (clock() - first["at"]) / max(step - first["step"], 1)
        memory = _peak_bytes() / 2**30
        rest = spell_duration(per_step * (steps - step))
        text = f"{spell_duration(per_step)} a step, {rest} to step {steps} besides evals"
        report({"phase": "estimate", "message": f"{text}; peak memory {memory:.1f} GiB so far"})

    return projected


def _peak_bytes() -> int:
    """Return the largest resident set of this process so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe(update: Mapping[str, Any]) -> str:
    """Return one line for an update: phase, step, and the numbers worth seeing."""
    parts = [str(update[key]) for key in ("phase", "env") if update.get(key)]
    if update.get("step") is not None:
        parts.append(f"{update['step']}/{update['steps']}" if update.get("steps") else str(update["step"]))
    parts += [f"{key} {update[key]:.4g}" for key in _SHOWN if isinstance(update.get(key), int | float)]
    if update.get("message"):
        parts.append(str(update["message"]))
    return "  ".join(part for part in parts if part)


def plain_lines(clock: Callable[[], float]) -> Report:
    """Return a callback that writes a line per update: each phase's first and last, at most one a second between.

    Args:
        clock: monotonic seconds.
    """
    last: dict[str, Any] = {"phase": None, "at": float("-inf")}

    def report(update: dict[str, Any]) -> None:
        phase = (update.get("phase"), update.get("env"))
        ended = bool(update.get("steps")) and update.get("step") == update.get("steps")
        if phase == last["phase"] and not ended and not update.get("message") and clock() - last["at"] < LINE_EVERY_S:
            return
        last.update(phase=phase, at=clock())
        narrate(describe(update))

    return report


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    from harness.cli.output import clean

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
    )
    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")))
    with Progress(*columns, console=console, refresh_per_second=8) as shown:
        tasks: dict[str, Any] = {}

        def report(update: dict[str, Any]) -> None:
            if not update.get("steps"):
                shown.console.print(Text(clean(describe(update))))
                return
            phase = clean(" ".join(str(update[key]) for key in ("phase", "env") if update.get(key)) or title)
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=update["steps"], numbers="")
            numbers = describe({key: value for key, value in update.items() if key in _SHOWN})
            shown.update(tasks[phase], completed=update.get("step") or 0, total=update["steps"], numbers=numbers)

        yield report


@contextlib.contextmanager
def _stray_output_to_stderr() -> Iterator[None]:
    """Point file descriptor 1 at standard error for a while; Python's own sys.stdout too."""
    try:
        sys.stdout.flush()
        real = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # no such descriptors; then nothing can stray there either
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(real, 1)
        os.close(real)
