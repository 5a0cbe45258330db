"""The local backend: one attempt of a run in this process, from `started` to `finished`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.backends.aside import set_aside
from harness.backends.attempt import Report, ending, held_device, logged
from harness.backends.capture import capture_environment
from harness.backends.launch import Launch, prepare_launch
from harness.backends.processes import check_seat, hello, joined, threads_each
from harness.config.load import learning_sha, resolved
from harness.config.schema import RunConfig
from harness.core.canonical import sha256_file
from harness.core.errors import ConfigError, InfraError, RefusedError, StoppedError
from harness.core.files import atomic_write
from harness.core.numbers import number_or_none
from harness.core.signals import held_signals
from harness.core.types import Outcome
from harness.envs.base import check_tasks_disjoint, without_shown
from harness.envs.registry import load_environment
from harness.evaluation.heldout import Recorder, Suite, load_suites, run_suite
from harness.inference.lora import WEIGHTS
from harness.inference.models import LoadedModel, load_model, pick_device, pick_dtype, set_threads
from harness.inference.vllm_engine import VllmEngine
from harness.inference.vllm_server import start_engine
from harness.inference.vllm_settings import check_possible
from harness.ledger import Ledger, NewEvent, RunState, State, this_process
from harness.ledger.life import liveness
from harness.ledger.recover import check_known, close, closing_data
from harness.ledger.results import own_prompt_evals
from harness.ledger.superseded import current_rows, read_rows
from harness.program import Program, read_context
from harness.program.documents import Context
from harness.program.prompts import prompt_sha, run_prompts, shown_tasks
from harness.rollouts.collect import Engine, Sampling
from harness.training.checkpoints import Numerics, checkpoint_steps, read_manifest
from harness.training.crew import Site, eval_site, training_site
from harness.training.draws import TrainingEnv
from harness.training.loop import Trainer
from harness.training.ranks import ALONE, LostProcessError, Ranks
from harness.training.sampler import FOLDER as SAMPLER
from harness.training.tasks import TaskStream
from harness.training.warmup import choose_demonstrations, read_summary, without
from harness.training.watchdogs import HeldOut, paired


@dataclass(slots=True)
class Attempt:
    """One execution of a run.

    Args:
        number: from 1, unique in the run.
        resumed_from: step of the checkpoint it starts from; None for a start at step 0.
        trainer: once everything is loaded; knows how far the attempt came, however it ends.
        tokens_before: tokens that the attempts before it had sampled up to that checkpoint.
        anyway: train although the preflight says that nothing can be learned.
        ranks: the processes of the run, once they have met.
    """

    program: Program
    ledger: Ledger
    plan: Launch
    context: Context
    number: int
    resumed_from: int | None
    report: Report
    began: float = field(default_factory=time.monotonic)
    trainer: Trainer | None = None
    tokens_before: int = 0
    anyway: bool = False
    ranks: Ranks = ALONE

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.program.run_dir(self.plan.run)


def launch(
    program: Program, run: str, *, resume: bool, wait: bool = False, anyway: bool = False, on_progress: Report
) -> Outcome:
    """Train a run on this machine and evaluate it on the frozen protocol.

    Args:
        program: the program.
        run: run id.
        resume: continue from the last checkpoint; without it an unfinished attempt is refused.
        wait: wait for the device instead of giving up at once.
        anyway: train although the preflight says that nothing can be learned.
        on_progress: called with `phase`, `step`, `steps` and numbers.

    Returns:
        How the attempt ended: completed, or stopped by a budget or a watchdog.

    Raises:
        RefusedError, ConfigError, NotFoundError: a rule or a page says no; nothing was started.
        MissingExtraError: the engine is not installed; nothing was started.
        BusyError: the device is in use.
        HarnessError, KeyboardInterrupt: what ended the attempt; its `finished` event is written.
    """
    plan = prepare_launch(program, run)
    if plan.config.backend.engine == "vllm":
        check_possible(plan.config)
    check_seat(plan.config)
    device = pick_device(plan.config.model.device)
    with held_device(device.type, wait, on_progress):
        ledger, facts, resumed_from = _prepare(program, plan, resume)
        # A signal between `started` and the block that records how the attempt ends would leave it open for ever.
        with held_signals() as let_signals_through:
            attempt = _start(program, plan, ledger, facts, resumed_from, on_progress)
            attempt.anyway = anyway
            with _recorded(attempt) as result:
                let_signals_through()
                result.update(_train(attempt))
    return Outcome(result["outcome"])


def _prepare(program: Program, plan: Launch, resume: bool) -> tuple[Ledger, dict[str, Any], int | None]:
    """Check that an attempt may start, make the run's folder ready for it, and describe this process.

    Returns:
        The ledger, the captured environment, and the step to resume from; None to start at step 0.
    """
    folder = program.run_dir(plan.run)
    ledger = Ledger(program.ledger)
    record = ledger.state().runs[plan.run]
    checkpoints = checkpoint_steps(folder / "checkpoints")
    _check_start(record, resume, bool(checkpoints))
    resumed_from = checkpoints[-1] if resume and checkpoints else None
    if resumed_from is not None:
        _restore_threads(folder, resumed_from, plan.config)
    else:
        set_threads(threads_each(plan.config))
    folder.mkdir(parents=True, exist_ok=True)
    if record.attempts:
        close(ledger, [plan.run], program.run_dir)  # an attempt that died, while its traces are where it left them
        set_aside(folder, int(record.attempts[-1]["attempt"]), resumed_from)
    facts = capture_environment(program.root, folder, _numerics(plan.config))
    atomic_write(folder / "config.json", json.dumps(resolved(plan.config), indent=2, sort_keys=True) + "\n")
    return ledger, facts, resumed_from


def _start(
    program: Program,
    plan: Launch,
    ledger: Ledger,
    facts: Mapping[str, Any],
    resumed_from: int | None,
    on_progress: Report,
) -> Attempt:
    """Append `started` under the ledger's lock, after closing an attempt whose process died."""
    context, folder = read_context(program), program.run_dir(plan.run)

    def build(state: State) -> list[NewEvent]:
        record = state.runs[plan.run]
        number = max((int(a["attempt"]) for a in record.attempts), default=0) + 1
        data = {"attempt": number, **this_process(), "resumed_from": resumed_from, "environment": facts}
        closing = closing_data(record, folder)
        dead = [] if closing is None else [NewEvent(plan.run, "finished", closing)]
        return [*dead, NewEvent(plan.run, "started", data | plan.event_data())]

    number = int(ledger.append_locked(build)[-1].data["attempt"])
    log = folder / "logs" / f"attempt_{number}.log"
    return Attempt(program, ledger, plan, context, number, resumed_from, logged(log, on_progress))


def _numerics(config: RunConfig) -> dict[str, Any]:
    """Return what decides rounding in this process, for the record."""
    device = pick_device(config.model.device)
    return asdict(Numerics.here(device, pick_dtype(config.model.dtype, device)))


def _check_start(record: RunState, resume: bool, checkpoint: bool) -> None:
    last = record.attempts[-1] if record.attempts else None
    if last is None:
        return
    seen = liveness(record)
    if seen is not None and seen.alive:
        raise RefusedError(f"{record.run} is running (pid {last['pid']})", f"`harness wait {record.run}`")
    check_known(record)
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


@contextmanager
def _recorded(attempt: Attempt) -> Iterator[dict[str, Any]]:
    """Yield the result to fill in; whatever ends the block is appended as `finished`."""
    result: dict[str, Any] = {"outcome": str(Outcome.COMPLETED), "failure": None, "reason": None}
    with ExitStack() as stack:
        try:
            try:
                yield result
            finally:  # inside the outer `try`: a signal that comes before they are held is recorded like any other
                stack.enter_context(held_signals())
        except BaseException as error:
            lost = _lost(attempt, error)
            result |= ending(lost or error)
            _finish(attempt, result)
            if lost is not None:
                raise lost from error
            if not isinstance(error, StoppedError):
                raise
        else:
            _finish(attempt, result)


def _lost(attempt: Attempt, error: BaseException) -> InfraError | None:
    """Return what really happened when another process of the run has died: torchrun then stops this one."""
    gone = attempt.ranks.lost
    if not isinstance(error, LostProcessError) and not (gone and isinstance(error, KeyboardInterrupt | SystemExit)):
        return None
    which = f"process {gone[0]}" if gone else "a process"
    return InfraError(
        f"{which} of the {attempt.ranks.size} of this run is gone",
        f"its output is in {attempt.program.relative(attempt.folder / 'logs')} or with torchrun; "
        f"`harness launch {attempt.plan.run} --resume` goes on",
    )


def _finish(attempt: Attempt, result: Mapping[str, Any]) -> None:
    """Append `finished`; signals are held, so that an attempt that ended is never left open."""
    metrics, trainer = attempt.folder / "metrics.jsonl", attempt.trainer
    merged = {row["step"]: row for row in current_rows(read_rows(metrics))}
    last = [row[key] for _, row in sorted(merged.items())[-5:] if (key := "train/zero_spread_share") in row]
    warmup = read_summary(attempt.folder)
    warmed = {} if warmup is None else {"warmup": warmup}
    data = {
        "attempt": attempt.number,
        # From this attempt alone: the file may hold rows that an earlier one left further on.
        "step": trainer.progress.step if trainer else attempt.resumed_from or 0,
        "wall_s": round(time.monotonic() - attempt.began, 3),
        "tokens": trainer.progress.tokens if trainer else None,
        "sampled_tokens": _sampled(trainer, attempt.tokens_before) if trainer else 0,
        "metrics_sha": sha256_file(metrics) if metrics.is_file() else None,
        "adapter_sha": result.get("adapter_sha"),
        "summary": {"zero_spread_last5": sum(last) / len(last) if last else None} | _seen(trainer) | warmed,
    }
    data |= {key: result[key] for key in ("outcome", "failure", "reason")}
    attempt.ledger.append(attempt.plan.run, "finished", data)
    attempt.report({"phase": "finished", "message": f"{result['outcome']} {result['reason'] or ''}".strip()})


def _sampled(trainer: Trainer, before: int) -> int:
    """Return the tokens that an attempt sampled; what its warm start trained on was not sampled."""
    return trainer.progress.tokens - before - trainer.demonstrated_tokens


def _seen(trainer: Trainer | None) -> dict[str, Any]:
    """Return what watchdogs and preflight found, for the record; nothing when they found nothing."""
    found: dict[str, Any] = {}
    if trainer and trainer.watchdog.findings:
        found["watchdog"] = [finding.to_json() for finding in trainer.watchdog.findings]
    if trainer and trainer.preflight:
        found["preflight"] = trainer.preflight.metrics()
    return found


def _train(attempt: Attempt) -> dict[str, Any]:
    """Load everything, check that training and held-out tasks are disjoint, and run the loop."""
    config, report = attempt.plan.config, attempt.report
    report({"phase": "load", "message": f"loading {config.model.name}"})
    suites = load_suites(attempt.context)
    prompts = run_prompts(attempt.program, config)
    shown = shown_tasks(attempt.program, config)
    envs = {section.id: _training_env(section, config, prompts, shown[section.id]) for section in config.env}
    if config.warmup.steps:
        _demonstrate(config, envs)
    check_leaks(envs, suites)
    with joined(config, attempt.plan.run, attempt.folder / "logs") as attempt.ranks:
        attempt.ranks.tell(hello(config, [suite.protocol for suite in suites]))
        loaded = load_model(config.model)
        with _engine(attempt, loaded) as vllm:
            return _loop(attempt, loaded, vllm, suites, prompts, envs)


@contextmanager
def _engine(attempt: Attempt, loaded: LoadedModel) -> Iterator[VllmEngine | None]:
    """Yield vLLM where the run asks for it, and end it whatever ends the block."""
    if attempt.plan.config.backend.engine != "vllm":
        yield None
        return
    log = attempt.folder / "logs" / f"vllm_{attempt.number}.log"
    attempt.report({"phase": "load", "message": f"starting vLLM; its output is in {attempt.program.relative(log)}"})
    try:
        with start_engine(attempt.plan.config, loaded, log) as engine:
            yield engine
    finally:
        shutil.rmtree(attempt.folder / SAMPLER, ignore_errors=True)


def _loop(
    attempt: Attempt,
    loaded: LoadedModel,
    vllm: VllmEngine | None,
    suites: Sequence[Suite],
    prompts: Mapping[str, dict[str, str] | None],
    envs: dict[str, TrainingEnv],
) -> dict[str, Any]:
    """Run the loop with everything loaded."""
    config, report = attempt.plan.config, attempt.report
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
        heldout=lambda: _heldout(attempt),
        anyway=attempt.anyway,
        spent_s=_seconds_before(attempt) + time.monotonic() - attempt.began,
        vllm=vllm,
        ranks=attempt.ranks,
        sites=_sites(envs, suites) if attempt.ranks.size > 1 else {},
    )
    if attempt.resumed_from is not None:
        trainer.resume()
    attempt.trainer, attempt.tokens_before = trainer, trainer.progress.tokens
    progress = trainer.run()
    adapter = attempt.folder / "adapters" / f"step_{progress.step}" / WEIGHTS
    return {"adapter_sha": sha256_file(adapter)}


def _sites(envs: Mapping[str, TrainingEnv], suites: Sequence[Suite]) -> dict[str, Site]:
    """Return where tasks come from, by the names that the other processes know."""
    training = {training_site(name): Site.of(item.env, "train") for name, item in envs.items()}
    evals = {eval_site(i): Site.of(suite.env, suite.protocol.split) for i, suite in enumerate(suites)}
    return training | evals


def _heldout(attempt: Attempt) -> list[HeldOut]:
    """Return the run's held-out points on record, for the watchdog."""
    run = attempt.ledger.state().runs[attempt.plan.run]
    return paired(own_prompt_evals(run), attempt.context.eval.confidence)


def _seconds_before(attempt: Attempt) -> float:
    """Return the seconds of the run's earlier attempts, as far as they are on record."""
    earlier = attempt.ledger.state().runs[attempt.plan.run].attempts[:-1]
    return sum(number_or_none(item.get("wall_s")) or 0.0 for item in earlier)


def _training_env(
    section: Any, config: RunConfig, prompts: Mapping[str, dict[str, str] | None], shown: Collection[str]
) -> TrainingEnv:
    """Return an environment to train on, without the tasks that its prompt shows as demonstrations."""
    env = load_environment(section.id, section.args)
    tasks = without_shown(env.tasks("train"), shown)
    if not tasks:
        raise ConfigError(f"environment {section.id} has no training tasks with these arguments", "check [[env]] args")
    sampling = Sampling(
        section.sampling.max_tokens or config.sampling.max_tokens,
        section.sampling.temperature or config.sampling.temperature,
        config.sampling.context,
        section.sampling.max_turns or config.sampling.max_turns,
    )
    stream = TaskStream(tasks, config.train.balance_labels, config.train.seed)
    return TrainingEnv(section, env, stream, prompts[section.id], sampling)


def _demonstrate(config: RunConfig, envs: Mapping[str, TrainingEnv]) -> None:
    """Choose the tasks of the warm start, and take them out of the loop's where the config says so."""
    section, seed = config.warmup, config.train.seed
    loaded = {name: item.env for name, item in envs.items()}
    weights = {name: item.section.weight for name, item in envs.items()}
    chosen = choose_demonstrations(loaded, weights, section.demonstrations, section.exclude_demonstrated, seed)
    for name, tasks in chosen.items():
        envs[name].demonstrated = tasks
        if section.exclude_demonstrated:
            left = without(envs[name].stream.tasks, tasks)
            envs[name].stream = TaskStream(left, config.train.balance_labels, seed)


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
    engine: Engine,
    loaded: LoadedModel,
    step: int,
    adapter_sha: str | None,
    context: Context,
    report: Report,
) -> None:
    """Evaluate the policy at a step; without an adapter, which is at step 0 only, the base model.

    An eval that an earlier attempt recorded for the same adapter is not repeated.
    """
    if step and adapter_sha is None:
        raise InfraError("an eval needs a stored adapter", "launch with --resume")
    subject = "base" if adapter_sha is None else "policy"
    for suite in suites:
        name = suite.protocol.id
        shipped = prompt_sha(suite.env.components())
        components = prompts.get(name)
        sha = prompt_sha(suite.env.components(), components)
        variants = [("run", components, sha)]
        if subject == "base" and sha != shipped:
            variants.append(("shipped", None, shipped))
        for prompt, texts, digest in variants:
            if recorder.has(
                suite, subject, step, prompt, adapter_sha
            ):  # of this attempt, or from before its checkpoint
                continue
            items = run_suite(suite, engine, loaded, context, texts, report)
            data = recorder.record(suite, items, subject, step, prompt, digest, adapter_sha)
            mean = data["means"].get("reward", {}).get("mean")
            report({"phase": "evaluated", "env": name, "step": step, "reward": mean, "message": f"{subject} {prompt}"})
