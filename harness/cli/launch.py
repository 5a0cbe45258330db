"""`harness launch`: train a run, in the foreground or detached, or say what it would take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from harness.cli.output import Line, Result, Styled, fields, mutation_document, narrate, settings
from harness.cli.processes import live_process
from harness.cli.progress import progress, quiet_libraries
from harness.cli.shared import DryRun, RunArg, command, new_app
from harness.cli.state import find_run, program, read_state, refresh_thread
from harness.cli.views import DETACHED, change_lines, read_detached, section, styled
from harness.config.steps import effective_step, known_size, step_warning
from harness.core.errors import BusyError, ExitCode, UsageError
from harness.core.numbers import spell_duration
from harness.core.seat import Seat, seat_of
from harness.ledger.recover import check_known

if TYPE_CHECKING:
    from harness.backends.launch import Launch
    from harness.ledger import RunState
    from harness.program.model import Program

app = new_app()
APPS = {"launch": app}


@command(
    app,
    "launch",
    "harness launch run-002",
    "harness launch run-002 --resume",
    "harness launch run-002 --detach && harness wait run-002 --timeout 3600",
    "harness launch run-002 --estimate",
    "torchrun --standalone --nproc-per-node 2 -m harness launch run-002",
)
def launch(
    run: RunArg,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the device instead of exit code 75.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Train in the background and return at once.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Train although no group of the base model has spread.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say time and memory from shapes; train nothing.")
    ] = False,
    dry_run: DryRun = False,
) -> Result:
    """Train a run and evaluate it on the frozen protocol.

    Checks the change set again, evaluates before the first step, at every interval and at the end, and
    appends everything to the ledger. Exit code 0 completed, 2 refused (the base model gives nothing to learn
    from, say), 4 stopped by a budget or a watchdog, 71 the machine failed, 75 the device is in use, 130
    interrupted; --resume continues after any of them.
    """
    from harness.backends.launch import prepare_launch

    if sum((detach, estimate, dry_run)) > 1:
        raise UsageError("--detach, --estimate and --dry-run exclude each other", f"harness launch {run} --dry-run")
    seat = seat_of(os.environ)
    if seat is not None and seat.rank:
        _work(seat, idle=estimate or dry_run or detach)
    here = program()
    state = read_state(here)
    found = find_run(state, run)
    if not dry_run and not estimate:
        _refuse_running(here, found)
    plan = prepare_launch(here, run, state=state)
    if estimate:
        return _estimate(here, plan)
    detail = plan_detail(here, plan, found, resume)
    if dry_run:
        data = mutation_document(run, applied=False, dry_run=True, detail=detail)
        return Result(data, lambda: _plan_lines(detail))
    if detach and seat is not None:
        raise UsageError("--detach cannot be used under torchrun", f"harness launch {run} --detach starts the others")
    if detach:
        return _detach(here, run, resume, wait, anyway)
    return _train(here, run, resume, wait, anyway, detail)


def _work(seat: Seat, idle: bool) -> NoReturn:
    """Be one of the other processes of a run, without an answer of its own; does not return."""
    if not idle:
        quiet_libraries()
        from harness.backends.processes import serve

        serve(seat)
    raise typer.Exit(0)


def plan_detail(here: Program, plan: Launch, found: RunState, resume: bool) -> dict[str, Any]:
    """Return what the launch would execute: the same object for a dry run and for the real one."""
    train = plan.config.train
    data = plan.event_data()
    return {
        "run": plan.run,
        "attempt": max((int(attempt["attempt"]) for attempt in found.attempts), default=0) + 1,
        "resume": resume,
        "hypothesis": plan.config.hypothesis,
        "steps": train.steps,
        "rollouts_per_step": train.tasks_per_step * train.group_size,
        "seed": train.seed,
        "effective_step": effective_step(plan.config),
        "step_warning": step_warning(plan.config, known_size(plan.config.model.name)),
        "model": plan.config.model.name,
        "outputs": here.relative(here.run_dir(plan.run)),
        "config_sha": data["config_sha"],
        "changes": data["changes_at_launch"],
        "protocol": data["protocol"],
        "config": data["basis"]["config"],
    }


def _plan_lines(detail: dict[str, Any]) -> list[Line]:
    kind = "resume from the last checkpoint" if detail["resume"] else "start"
    lines = fields(
        [
            ("would launch", f"{detail['run']} attempt {detail['attempt']} ({kind})"),
            ("hypothesis", detail["hypothesis"]),
            ("model", detail["model"]),
            ("training", f"{detail['steps']} steps of {detail['rollouts_per_step']} rollouts, seed {detail['seed']}"),
            ("step", f"{detail['effective_step']:.1e} (learning rate × alpha / rank)"),
            ("outputs", detail["outputs"]),
            ("config", detail["config_sha"][:12]),
        ]
    )
    lines += _warning_lines(detail["step_warning"])
    return [*lines, *section("Changes to the parent, as they are now", change_lines(detail["changes"]))]


def _warning_lines(warning: str | None) -> list[Line]:
    return [(Styled("warning: ", "warn"), warning)] if warning else []


def _refuse_running(here: Program, found: RunState) -> None:
    """Refuse a second launch of the same run while the first one lives."""
    process, alive = live_process(found.attempts, read_detached(here.run_dir(found.run)))
    check_known(found)
    if process.get("pid") == os.getpid() or not alive:
        return
    raise BusyError(
        f"{found.run} is already running (pid {process.get('pid')} on {process.get('host')})",
        f"`harness wait {found.run}` waits for it, `harness stop {found.run}` ends it",
    )


def _train(here: Program, run: str, resume: bool, wait: bool, anyway: bool, detail: dict[str, Any]) -> Result:
    """Train in this process."""
    quiet_libraries()
    from harness.backends.local import launch as execute

    start = {"event": "launch", "run": run, "pid": os.getpid(), "outputs": detail["outputs"]}
    if settings.json:
        sys.stderr.write(json.dumps(start) + "\n")
    else:
        narrate(f"launching {run}, attempt {detail['attempt']}: {detail['steps']} steps; pid {os.getpid()}")
        for line in _warning_lines(detail["step_warning"]):
            narrate(line)
    try:
        with progress(run) as report:
            outcome = str(execute(here, run, resume=resume, wait=wait, anyway=anyway, on_progress=report))
    except BusyError as error:
        raise BusyError(error.message, f"`harness launch {run} --wait` waits for the device") from error
    finally:
        refresh_thread(here)
    attempt = find_run(read_state(here), run).attempts[-1]
    codes = {"completed": ExitCode.OK, "stopped": ExitCode.STOPPED, "interrupted": ExitCode.INTERRUPTED}
    keys = ("step", "reason", "failure", "wall_s", "tokens", "adapter_sha", "summary")
    result = {"outcome": outcome} | {key: attempt.get(key) for key in keys}
    data = mutation_document(run, applied=True, dry_run=False, detail=detail | result)
    lines: list[Line] = [(f"{run} attempt {attempt['attempt']} ", styled(outcome), f" at step {attempt.get('step')}")]
    if attempt.get("reason"):
        lines.append(("  ", str(attempt["reason"])))
    if outcome == "completed":
        lines.append(("next: ", Styled(f"harness report {run}", "strong")))
    return Result(data, lines, codes.get(outcome, ExitCode.INFRA))


def _detach(here: Program, run: str, resume: bool, wait: bool, anyway: bool) -> Result:
    """Start `harness launch` in a session of its own and record which process it is."""
    import harness
    from harness.core.files import atomic_write
    from harness.ledger.process import process_start, this_process

    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    log = here.run_dir(run) / "logs" / f"detached-{stamp}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    asked = {"--resume": resume, "--wait": wait, "--anyway": anyway}
    flags = [flag for flag, set_ in asked.items() if set_]
    package = str(Path(harness.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "HARNESS_PROGRAM": str(here.root),
        "HARNESS_NO_INPUT": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "harness", "launch", run, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=here.root,
            env=environment,
            start_new_session=True,
        )
    started = {"host": this_process()["host"], "pid": child.pid, "pid_start": process_start(child.pid)}
    relative = here.relative(log)
    atomic_write(here.run_dir(run) / DETACHED, json.dumps(started | {"log": relative}) + "\n")
    data = mutation_document(run, applied=True, dry_run=False, detail=started | {"log": relative})
    lines = fields([("launched", f"{run} in the background"), ("pid", str(child.pid)), ("log", relative)])
    return Result(data, [*lines, ("next: ", Styled(f"harness wait {run}", "strong"))])


def _estimate(here: Program, plan: Launch) -> Result:
    quiet_libraries()
    from harness.backends.estimate import estimate_launch
    from harness.cli.doctor_checks import GIB, available_memory
    from harness.program.documents import read_context

    data = estimate_launch(plan.config, read_context(here)) | {"run": plan.run, "basis": "shapes"}
    found, work, machine = data["estimate"], data["workload"], data["machine"]
    warning = step_warning(plan.config, found["parameters"])
    data |= {"effective_step": effective_step(plan.config), "step_warning": warning}
    available = available_memory() if machine["device"] == "cpu" else None
    data["memory_available_bytes"] = available

    def lines() -> list[Line]:
        memory = f"{found['memory_bytes'] / GIB:.1f} GiB"
        if available is not None:
            memory += f" of {available / GIB:.1f} GiB available"
        tight = available is not None and found["memory_bytes"] > available
        shown = fields(
            [
                ("run", f"{plan.run}: {work['steps']} steps, {work['evals']} held-out evals"),
                (
                    "model",
                    f"{found['parameters'] / 1e6:.0f} M weights, {found['adapter_parameters'] / 1e6:.1f} M trained",
                ),
                ("machine", f"{machine['device']}, {machine['dtype']}, {machine['gflops']:.0f} GFLOP/s"),
                ("a step", spell_duration(found["step_s"])),
                ("an eval", spell_duration(found["eval_s"])),
                ("in all", f"about {spell_duration(found['total_s'])} (from shapes; within a factor of two)"),
                ("memory", Styled(memory + ", too little", "bad") if tight else memory),
                ("disk", f"{found['disk_bytes'] / 2**20:.0f} MiB of adapters and checkpoints"),
                ("step", f"{data['effective_step']:.1e} (learning rate × alpha / rank)"),
            ]
        )
        return [*shown, *_warning_lines(warning)]

    return Result(data, lines)
