"""The local backend: one attempt of a run in this process, from `started` to `finished`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.backends.capture import capture_environment
from harness.backends.launch import Launch, prepare_launch
from harness.config.load import learning_sha, resolved
from harness.config.schema import RunConfig
from harness.core.canonical import decode_number, sha256_file, strict_loads
from harness.core.errors import ConfigError, HarnessError, InfraError, RefusedError, StoppedError, is_out_of_memory
from harness.core.files import atomic_write, file_lock
from harness.core.paths import cache_dir
from harness.core.types import FailureClass, Outcome
from harness.envs.base import check_tasks_disjoint
from harness.envs.registry import load_environment
from harness.evaluation.heldout import Recorder, Suite, load_suites, run_prompts, run_suite
from harness.inference.engine import TransformersEngine
from harness.inference.lora import WEIGHTS
from harness.inference.models import LoadedModel, load_model, pick_device, pick_dtype, set_threads
from harness.ledger import Ledger, NewEvent, RunState, State, is_alive, this_process
from harness.program import Program, read_context
from harness.program.documents import Context
from harness.program.prompts import prompt_sha
from harness.rollouts.collect import Sampling
from harness.training.checkpoints import Numerics, checkpoint_steps, read_manifest
from harness.training.loop import Trainer, TrainingEnv, clear_run
from harness.training.tasks import TaskStream

Report = Callable[[dict[str, Any]], None]
WAIT_FOREVER_S = 10.0**9


@dataclass(slots=True)
class Attempt:
    """One execution of a run.

    Args:
        number: from 1, unique in the run.
        resumed_from: step of the checkpoint it starts from; None for a start at step 0.
    """

    program: Program
    ledger: Ledger
    plan: Launch
    context: Context
    number: int
    resumed_from: int | None
    report: Report
    began: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.program.run_dir(self.plan.run)


def launch(program: Program, run: str, *, resume: bool, wait: bool = False, on_progress: Report) -> Outcome:
    """Train a run on this machine and evaluate it on the frozen protocol.

    Args:
        program: the program.
        run: run id.
        resume: continue from the last checkpoint; without it an unfinished attempt is refused.
        wait: wait for the device instead of giving up at once.
        on_progress: called with `phase`, `step`, `steps` and numbers.

    Returns:
        How the attempt ended: completed, or stopped by a budget.

    Raises:
        RefusedError, ConfigError, NotFoundError: a rule or a page says no; nothing was started.
        BusyError: the device is in use.
        HarnessError, KeyboardInterrupt: what ended the attempt; its `finished` event is written.
    """
    plan = prepare_launch(program, run)
    device = pick_device(plan.config.model.device)
    lock = cache_dir() / "locks" / f"{device.type}.lock"
    with file_lock(lock, wait_s=WAIT_FOREVER_S if wait else 0, what=f"the device {device.type}:"):
        attempt = _start(program, plan, resume, on_progress)
        with _recorded(attempt) as result:
            result.update(_train(attempt))
    return Outcome(result["outcome"])


def _start(program: Program, plan: Launch, resume: bool, on_progress: Report) -> Attempt:
    """Append `started` under the ledger's lock, after closing an attempt whose process died."""
    folder = program.run_dir(plan.run)
    ledger = Ledger(program.ledger)
    checkpoints = checkpoint_steps(folder / "checkpoints")
    _check_start(ledger.state().runs[plan.run], resume, bool(checkpoints))
    if resume and checkpoints:
        _restore_threads(folder, checkpoints[-1], plan.config)
    else:
        set_threads(plan.config.backend.threads)
    if not (resume and checkpoints):
        _set_old_metrics_aside(folder, len(ledger.state().runs[plan.run].attempts) + 1)
        clear_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts = capture_environment(program.root, folder, _numerics(plan.config))
    atomic_write(folder / "config.json", json.dumps(resolved(plan.config), indent=2, sort_keys=True) + "\n")
    resumed_from = checkpoints[-1] if resume and checkpoints else None

    def build(state: State) -> list[NewEvent]:
        record = state.runs[plan.run]
        number = max((int(a["attempt"]) for a in record.attempts), default=0) + 1
        data = {"attempt": number, **this_process(), "resumed_from": resumed_from, "environment": facts}
        closing = [_closing(a) for a in record.attempts[-1:] if a["outcome"] is None]
        news = [*closing, data | plan.event_data()]
        kinds = ["finished"] * len(closing) + ["started"]
        return [NewEvent(plan.run, kind, item) for kind, item in zip(kinds, news, strict=True)]

    events = ledger.append_locked(build)
    number = int(events[-1].data["attempt"])
    log = folder / "logs" / f"attempt_{number}.log"
    return Attempt(program, ledger, plan, read_context(program), number, resumed_from, _logged(log, on_progress))


def _numerics(config: RunConfig) -> dict[str, Any]:
    """Return what decides rounding in this process, for the record."""
    device = pick_device(config.model.device)
    return asdict(Numerics.here(device, pick_dtype(config.model.dtype, device)))


def _check_start(record: RunState, resume: bool, checkpoint: bool) -> None:
    last = record.attempts[-1] if record.attempts else None
    if last is None:
        return
    if last["outcome"] is None and is_alive(last):
        raise RefusedError(f"{record.run} is running (pid {last['pid']})", f"`harness wait {record.run}`")
    if record.decision == "rerun" and record.decisions[-1]["at"] > last["at"]:
        return
    if last["outcome"] == Outcome.COMPLETED:
        raise RefusedError(
            f"{record.run} is completed; a second training of it is a rerun",
            f"`harness decide {record.run} rerun --reason …` first, or `harness new-run --replicate {record.run}`",
        )
    if checkpoint and not resume:
        raise RefusedError(
            f"{record.run} has an unfinished attempt with checkpoints",
            f"`harness launch {record.run} --resume` continues",
        )


def _closing(dead: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attempt": dead["attempt"],
        "outcome": str(Outcome.INTERRUPTED),
        "failure": str(FailureClass.INFRA),
        "reason": "the process died without a word; found at the next launch",
        "step": None,
    }


def _restore_threads(folder: Path, step: int, config: RunConfig) -> None:
    threads = int(read_manifest(folder / "checkpoints", step)["numerics"]["threads"])
    cores = os.cpu_count() or 1
    if threads > cores:
        raise ConfigError(
            f"the checkpoint was made with {threads} threads, this machine has {cores} cores",
            "resume on a machine with as many cores, so that the result stays bit-exact",
        )
    if config.backend.threads not in (0, threads):
        raise ConfigError(
            f"the checkpoint was made with {threads} threads, backend.threads is {config.backend.threads}",
            "undo the edit of backend.threads in the run's file, so that the result stays bit-exact",
        )
    torch.set_num_threads(threads)


def _set_old_metrics_aside(folder: Path, attempt: int) -> None:
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        metrics.rename(folder / f"metrics.before_{attempt}.jsonl")


def _logged(path: Path, report: Report) -> Report:
    """Return a report that also appends a line to the attempt's log."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def both(update: dict[str, Any]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pairs = " ".join(f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}" for k, v in update.items())
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{stamp} {pairs}\n")
        report(update)

    return both


@contextmanager
def _recorded(attempt: Attempt) -> Iterator[dict[str, Any]]:
    """Yield the result to fill in; whatever ends the block is appended as `finished`."""
    result: dict[str, Any] = {"outcome": str(Outcome.COMPLETED), "failure": None, "reason": None}
    try:
        yield result
    except StoppedError as error:
        result |= {"outcome": str(Outcome.STOPPED), "reason": f"{error.message}. {error.hint}"}
        _finish(attempt, result)
        return
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        outcome = Outcome.INTERRUPTED if interrupted else Outcome.FAILED
        result |= {"outcome": str(outcome), "failure": failure_of(error), "reason": describe(error)}
        _finish(attempt, result)
        raise
    _finish(attempt, result)


def failure_of(error: BaseException) -> str | None:
    """Return the failure class of what ended an attempt; None for a bug or a wrong config.

    The machine's failures are OSError (InfraError is one), memory errors, and torch's out-of-memory.
    """
    return str(FailureClass.INFRA) if isinstance(error, OSError) or is_out_of_memory(error) else None


def describe(error: BaseException) -> str:
    """Return one line about an exception, without its values where they may be secret."""
    if isinstance(error, HarnessError):
        return error.message[:500]
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped by a signal"
    return f"{type(error).__name__}: {str(error)[:300]}"


def _finish(attempt: Attempt, result: Mapping[str, Any]) -> None:
    rows = list(_rows(attempt.folder / "metrics.jsonl"))
    merged = {row["step"]: row for row in rows}
    steps = sorted(merged)
    last = [merged[step]["train/zero_spread_share"] for step in steps[-5:] if "train/zero_spread_share" in merged[step]]
    metrics = attempt.folder / "metrics.jsonl"
    data = {
        "attempt": attempt.number,
        "step": result.get("step", steps[-1] if steps else 0),
        "wall_s": round(time.monotonic() - attempt.began, 3),
        "tokens": result.get("tokens"),
        "metrics_sha": sha256_file(metrics) if metrics.is_file() else None,
        "adapter_sha": result.get("adapter_sha"),
        "summary": {"zero_spread_last5": sum(last) / len(last) if last else None},
    }
    attempt.ledger.append(attempt.plan.run, "finished", data | {k: result[k] for k in ("outcome", "failure", "reason")})
    attempt.report({"phase": "finished", "message": f"{result['outcome']} {result['reason'] or ''}".strip()})


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            row = strict_loads(line)
        except ValueError:  # a line torn by a kill; the resumed attempt wrote the step again
            continue
        yield {key: decode_number(value) if isinstance(value, dict) else value for key, value in row.items()}


def _train(attempt: Attempt) -> dict[str, Any]:
    """Load everything, check that training and held-out tasks are disjoint, and run the loop."""
    config, report = attempt.plan.config, attempt.report
    report({"phase": "load", "message": f"loading {config.model.name}"})
    suites = load_suites(attempt.context)
    prompts = run_prompts(attempt.program, config)
    envs = {section.id: _training_env(section, config, prompts) for section in config.env}
    check_leaks(envs, suites)
    loaded = load_model(config.model)
    recorder = Recorder(attempt.program, attempt.ledger, attempt.plan.run, attempt.number, attempt.context)
    steps, interval = config.train.steps, attempt.context.eval.interval
    trainer = Trainer(
        config=config,
        config_sha=learning_sha(config),
        loaded=loaded,
        envs=envs,
        folder=attempt.folder,
        attempt=attempt.number,
        eval_due=lambda step: step % interval == 0 or step == steps,
        on_eval=lambda engine, step, sha: _evaluate(
            recorder, suites, prompts, engine, loaded, step, sha, attempt.context, report
        ),
        report=report,
    )
    if attempt.resumed_from is not None:
        trainer.resume()
    progress = trainer.run()
    adapter = attempt.folder / "adapters" / f"step_{progress.step}" / WEIGHTS
    return {"step": progress.step, "tokens": progress.tokens, "adapter_sha": sha256_file(adapter)}


def _training_env(section: Any, config: RunConfig, prompts: Mapping[str, dict[str, str] | None]) -> TrainingEnv:
    env = load_environment(section.id, section.args)
    tasks = env.tasks("train")
    if not tasks:
        raise ConfigError(f"environment {section.id} has no training tasks with these arguments", "check [[env]] args")
    sampling = Sampling(
        section.sampling.max_tokens or config.sampling.max_tokens,
        section.sampling.temperature or config.sampling.temperature,
        config.sampling.context,
    )
    stream = TaskStream(tasks, config.train.balance_labels, config.train.seed)
    return TrainingEnv(section, env, stream, prompts[section.id], sampling)


def check_leaks(envs: Mapping[str, TrainingEnv], suites: Sequence[Suite]) -> None:
    """Check that no held-out item is trained on: neither its id, nor its content, nor its cluster.

    Raises:
        RefusedError: naming the first task found in both.
    """
    for suite in suites:
        if suite.protocol.id in envs:
            trained = envs[suite.protocol.id].env.tasks("train")
            check_tasks_disjoint(suite.protocol.id, trained, suite.tasks)


def _evaluate(
    recorder: Recorder,
    suites: Sequence[Suite],
    prompts: Mapping[str, dict[str, str] | None],
    engine: TransformersEngine,
    loaded: LoadedModel,
    step: int,
    adapter_sha: str | None,
    context: Context,
    report: Report,
) -> None:
    """Evaluate at a step; at step 0 the adapter is still zero, so that is the base model.

    An eval that an earlier attempt recorded for the same adapter is not repeated.
    """
    if step and adapter_sha is None:
        raise InfraError("an eval needs a stored adapter", "launch with --resume")
    subject = "policy" if step else "base"
    for suite in suites:
        name = suite.protocol.id
        shipped = prompt_sha(suite.env.components())
        components = prompts.get(name)
        sha = prompt_sha(suite.env.components(), components)
        variants = [("run", components, sha)]
        if subject == "base" and sha != shipped:
            variants.append(("shipped", None, shipped))
        for prompt, texts, digest in variants:
            if recorder.has(suite, subject, step, prompt, adapter_sha):
                continue
            items = run_suite(suite, engine, loaded, context, texts, report)
            data = recorder.record(suite, items, subject, step, prompt, digest, adapter_sha)
            mean = data["means"].get("reward", {}).get("mean")
            report({"phase": "evaluated", "env": name, "step": step, "reward": mean, "message": f"{subject} {prompt}"})
