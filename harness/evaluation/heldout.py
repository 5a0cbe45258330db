"""Run the frozen protocol of CONTEXT.md with an engine and record what came out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.config.load import load_config
from harness.config.schema import ModelSection, RunConfig
from harness.core.canonical import content_sha, sha256_file, sha256_hex
from harness.core.errors import ConfigError, NotFoundError, RefusedError
from harness.core.files import atomic_write
from harness.core.redact import redactor
from harness.core.seeds import derive_seed
from harness.core.types import Rollout, Task
from harness.envs.base import Environment
from harness.envs.registry import load_environment
from harness.evaluation.records import ItemRecord, read_items, write_items
from harness.evaluation.summary import summarise
from harness.inference.engine import TransformersEngine
from harness.inference.experts import rewrite_per_expert
from harness.inference.lora import WEIGHTS, load_adapter, read_adapter, stored_adapters
from harness.inference.models import LoadedModel, load_model
from harness.inference.vllm_server import start_engine
from harness.inference.vllm_settings import check_possible
from harness.ledger import Ledger, State
from harness.ledger.life import live_status
from harness.ledger.results import current_evals
from harness.ledger.superseded import FOLDER as SUPERSEDED
from harness.program import Context, Program, read_context
from harness.program.amend import check_amended
from harness.program.documents import ContextEnv
from harness.program.prompts import prompt_sha, run_prompts
from harness.rollouts.collect import Engine, Sampling, Timing, collect

Progress = Callable[[dict[str, Any]], None]
CHUNK = 64


@dataclass(frozen=True, slots=True)
class Suite:
    """One environment of the protocol, ready to be run.

    Args:
        protocol: sizes and sampling from CONTEXT.md.
        env: the environment with the protocol's own arguments.
        tasks: the items, always the same ones in the same order.
        items_sha: hash over items, samples and sampling.
    """

    protocol: ContextEnv
    env: Environment
    tasks: tuple[Task, ...]
    items_sha: str

    @property
    def requested(self) -> int:
        """Samples the protocol asks for."""
        return len(self.tasks) * self.protocol.samples


def load_suites(context: Context) -> list[Suite]:
    """Load every environment of the protocol.

    Raises:
        ConfigError: when a split has fewer tasks than CONTEXT.md asks for.
    """
    suites = []
    for protocol in context.eval.env:
        env = load_environment(protocol.id, protocol.args)
        tasks = tuple(env.tasks(protocol.split)[: protocol.items])
        if len(tasks) < protocol.items:
            raise ConfigError(
                f"CONTEXT.md asks for {protocol.items} items of {protocol.id}/{protocol.split}, which has {len(tasks)}",
                "lower items in CONTEXT.md and record it: `harness amend CONTEXT.md --reason …`",
            )
        facts = {
            "tasks": [task.sha for task in tasks],
            "samples": protocol.samples,
            "max_tokens": protocol.max_tokens,
            "temperature": protocol.temperature,
            "seed": context.eval.seed,
        }
        if protocol.max_turns > 1:
            facts["max_turns"] = protocol.max_turns
        suites.append(Suite(protocol, env, tasks, content_sha(facts)))
    return suites


def run_suite(
    suite: Suite,
    engine: Engine,
    loaded: LoadedModel,
    context: Context,
    components: Mapping[str, str] | None,
    on_progress: Progress,
) -> list[ItemRecord]:
    """Sample and score every item of a suite.

    Each sample's random numbers depend on the protocol's seed and the item alone, so two policies
    meet the same ones and their paired difference loses that noise.

    Args:
        components: prompt texts that replace the shipped ones; None for the shipped prompt.
    """
    protocol = suite.protocol
    context_tokens = loaded.model.config.max_position_embeddings
    sampling = Sampling(protocol.max_tokens, protocol.temperature, context_tokens, protocol.max_turns)
    timing, items = Timing(), []
    for start in range(0, len(suite.tasks), CHUNK):
        tasks = suite.tasks[start : start + CHUNK]
        seeds = [
            [derive_seed(context.eval.seed, "eval", protocol.id, task.id, s) for s in range(protocol.samples)]
            for task in tasks
        ]
        rollouts = collect(
            engine,
            loaded.tokenizer,
            loaded.eos_ids,
            suite.env,
            tasks,
            protocol.samples,
            sampling,
            seeds,
            components,
            timing,
        )
        items += [item_record(rollout) for rollout in rollouts]
        on_progress({"phase": "eval", "env": protocol.id, "step": start + len(tasks), "steps": len(suite.tasks)})
    return items


def item_record(rollout: Rollout) -> ItemRecord:
    """Return the full record of one held-out sample; its texts hold no secrets."""
    score, text = rollout.score, redactor()
    return ItemRecord(
        task=rollout.task.id,
        cluster=rollout.task.cluster,
        sample=rollout.index,
        reward=score.reward,
        components=score.components,
        metrics=score.metrics,
        failure=score.failure,
        prompt=text.data(rollout.episode.prompt_text),
        completion=text.data(rollout.episode.final),
        finish=rollout.completion.finish_reason,
        diagnostics=text.data(score.diagnostics),
    )


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes the item files of a run's evals and their `evaluated` events.

    Args:
        attempt: the attempt that evaluates; 0 for an eval outside any attempt.
    """

    program: Program
    ledger: Ledger
    run: str
    attempt: int
    context: Context

    def record(
        self,
        suite: Suite,
        items: Sequence[ItemRecord],
        subject: str,
        step: int,
        prompt: str,
        sha: str,
        adapter: str | None,
    ) -> dict[str, Any]:
        """Store the items in both forms, append the event, and return its data.

        Args:
            subject: `base` or `policy`.
            prompt: `run`, `shipped`, or the id of another run whose prompt it was.
            sha: hash of the prompt's texts.
            adapter: hash of the adapter evaluated; None for the base.
        """
        env = suite.protocol.id
        full = self.program.run_dir(self.run) / "evals" / f"step_{step}" / _file_name(subject, env, prompt)
        write_items(full, items, compact=False)
        compact = self._compact(subject, step, env, prompt)
        file_sha = _replace_items(compact, items)
        own = subject == "policy" and prompt == "run"  # a gain is one under the same prompt
        base = self._base(suite, "run") if own else None
        shipped = self._base(suite, "shipped") if own else None
        confidence = self.context.eval.confidence
        data: dict[str, Any] = {
            "attempt": self.attempt,
            "subject": subject,
            "step": step,
            "env": env,
            "prompt": prompt,
            "prompt_sha": sha,
            "items_sha": suite.items_sha,
            "protocol": suite.protocol.described(),
            "verifier": suite.env.verifier_version,
            "file": self.program.relative(compact),
            "file_sha": file_sha,
            **summarise(
                items, requested=suite.requested, confidence=confidence, base=base, base_shipped=shipped or base
            ),
        }
        if adapter is not None:
            data["adapter_sha"] = adapter
        self.ledger.append(self.run, "evaluated", data)
        return data

    def _compact(self, subject: str, step: int, env: str, prompt: str) -> Path:
        return self.program.analysis_dir(self.run) / "evals" / f"step_{step}.{_file_name(subject, env, prompt)}"

    def _base(self, suite: Suite, prompt: str) -> list[ItemRecord] | None:
        """Return the base model's items; None unless they are on record and answer this suite."""
        path = self._compact("base", 0, suite.protocol.id, prompt)
        return list(read_items(path)) if self.has(suite, "base", 0, prompt) else None

    def has(self, suite: Suite, subject: str, step: int, prompt: str, adapter: str | None = None) -> bool:
        """Whether the ledger holds this very eval, of the same adapter and items, and its file is unchanged.

        One that a later attempt superseded does not count, even of an equal adapter: success is the current attempt's.
        """
        env = suite.protocol.id
        path = self._compact(subject, step, env, prompt)
        run = self.ledger.state().runs.get(self.run)
        if run is None or not path.is_file():
            return False
        wanted = (subject, step, env, prompt, adapter, suite.items_sha, sha256_file(path))
        return any(
            (e["subject"], e["step"], e["env"], e["prompt"], e.get("adapter_sha"), e["items_sha"], e["file_sha"])
            == wanted
            for e in current_evals(run)
        )


def _replace_items(path: Path, items: Sequence[ItemRecord]) -> str:
    """Write the committed items of an eval and return their hash; others of an earlier attempt are kept beside them."""
    old = path.read_bytes() if path.is_file() else None
    if old is None:
        return write_items(path, items, compact=True)
    kept = path.parent / SUPERSEDED / f"{path.stem}.{sha256_hex(old)[:12]}{path.suffix}"
    existed = kept.exists()
    atomic_write(kept, old)  # first, so that a kill here loses nothing
    sha = write_items(path, items, compact=True)
    if sha == sha256_hex(old) and not existed:
        kept.unlink()
    return sha


def _file_name(subject: str, env: str, prompt: str) -> str:
    return f"{subject}.{env}{'' if prompt == 'run' else f'.{prompt}'}.jsonl"


def evaluate(program: Program, subject: str, step: int | None, on_progress: Progress) -> list[dict[str, Any]]:
    """Evaluate a run's adapter, the base model, or an adapter folder on the frozen protocol.

    Args:
        subject: a run id, `base`, or a folder with an adapter.
        step: which adapter of a run; the last one when None.

    Returns:
        One row per environment, as in `evaluated` events. Only a run's evals enter the ledger.

    Raises:
        NotFoundError: no such run, adapter or folder.
        RefusedError: the subject is a run, and GOAL or CONTEXT was edited without `harness amend`, or it is running.
    """
    context = read_context(program)
    suites = load_suites(context)
    if subject.startswith("run-"):
        return _evaluate_run(program, subject, step, context, suites, on_progress)
    if subject != "base" and not os.path.isfile(Path(subject) / WEIGHTS):
        raise NotFoundError(
            f"{subject[:200]} is no run, not `base`, and no folder with {WEIGHTS}", "`harness list` shows the runs"
        )
    loaded = load_model(ModelSection(name=context.model.name, revision=context.model.revision))
    model = None if subject == "base" else load_adapter(loaded.model, Path(subject))
    engine = TransformersEngine(loaded, model)
    rows = []
    for suite in suites:
        items = run_suite(suite, engine, loaded, context, None, on_progress)
        facts = {
            "subject": subject,
            "step": step,
            "env": suite.protocol.id,
            "prompt": "shipped",
            "items_sha": suite.items_sha,
        }
        rows.append(facts | summarise(items, requested=suite.requested, confidence=context.eval.confidence))
    return rows


def _evaluate_run(
    program: Program, run: str, step: int | None, context: Context, suites: list[Suite], on_progress: Progress
) -> list[dict[str, Any]]:
    ledger = Ledger(program.ledger)
    state = ledger.state()
    check_amended(program, state)
    config, chosen, place = trained(program, state, run, step)
    if config.backend.engine == "vllm":
        check_possible(config)
    loaded = load_model(config.model)
    # step 0 is the warm start where the run has one, else the base model
    folder = place if (place / WEIGHTS).exists() else None
    attempts = state.runs[run].attempts
    recorder = Recorder(program, ledger, run, attempts[-1]["attempt"] if attempts else 0, context)
    prompts = run_prompts(program, config)
    rows = []
    with engine_of(config, loaded, folder, program.run_dir(run) / "logs" / "vllm_eval.log") as engine:
        for suite in suites:
            components = prompts.get(suite.protocol.id)
            items = run_suite(suite, engine, loaded, context, components, on_progress)
            sha = prompt_sha(suite.env.components(), components)
            adapter = sha256_file(folder / WEIGHTS) if folder else None
            rows.append(recorder.record(suite, items, "policy" if folder else "base", chosen, "run", sha, adapter))
    return rows


def trained(program: Program, state: State, run: str, step: int | None) -> tuple[RunConfig, int, Path]:
    """Return a run's config, and the step and folder of an adapter that may be evaluated.

    Args:
        step: 0 for the warm start, and for the base model where the run has none; the last adapter when None.

    Raises:
        RefusedError: it is running, or its process is gone and nobody closed it.
        NotFoundError: there is no such adapter here.
    """
    config = load_config(program.config_path(run))
    if live_status(state.runs[run]) == "stale":
        raise RefusedError(
            f"the process of {run} is gone and its attempt is open", f"`harness recover {run}` closes it"
        )
    if state.runs[run].status == "running":
        raise RefusedError(f"{run} is still running and evaluates itself", f"`harness wait {run}`")
    adapters = program.run_dir(run) / "adapters"
    steps = list(stored_adapters(program.run_dir(run)))
    chosen = step if step is not None else (steps[-1] if steps else None)
    if chosen is None or (chosen and chosen not in steps):
        have = f"there are adapters of steps {', '.join(map(str, steps))}" if steps else "it has none here"
        asked = "adapter" if chosen is None else f"adapter of step {chosen}"
        hint = "adapters stand in outputs/, which git does not hold: evaluate where the run was trained"
        raise NotFoundError(f"{run} has no {asked}: {have}", hint)
    return config, chosen, adapters / f"step_{chosen}"


@contextmanager
def engine_of(config: RunConfig, loaded: LoadedModel, adapter: Path | None, log: Path) -> Iterator[Engine]:
    """Yield the engine that a run samples with, with an adapter of it or none; it ends with the block.

    Raises:
        InfraError: vLLM does not start, or the adapter is damaged.
    """
    if config.backend.engine != "vllm":
        yield TransformersEngine(loaded, load_adapter(loaded.model, adapter) if adapter else None)
        return
    with TemporaryDirectory(prefix="harness-eval-") as place, start_engine(config, loaded, log) as engine:
        if adapter:
            read_adapter(adapter)
            copy = Path(place) / adapter.name
            shutil.copytree(adapter, copy)
            if loaded.model.config.model_type == "afmoe":
                rewrite_per_expert(copy)
            engine.sync(f"eval-{adapter.name}-{sha256_file(adapter / WEIGHTS)[:12]}", copy)
        yield engine
