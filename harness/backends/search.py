"""Run a prompt search on this machine: one attempt from `started` to `finished`, resumed by the same command.

Nothing of a search but its evaluation cache is needed to go on. A later attempt replays the earlier one from the cache,
so it chooses what an uninterrupted search would have chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.attempt import Report, ending, held_device, logged
from harness.backends.capture import capture_environment
from harness.backends.search_plan import OFFLINE, SearchPlan, SearchRequest, create_search
from harness.config.schema import ModelSection
from harness.core.canonical import canonical_json, encode_non_finite, sha256_file
from harness.core.errors import ConfigError, NotFoundError, RefusedError, UsageError
from harness.core.files import atomic_write
from harness.core.signals import held_signals
from harness.core.types import Outcome
from harness.envs.base import Environment, Searchable, merge_components, without_shown
from harness.envs.registry import load_environment
from harness.inference.engine import TransformersEngine
from harness.inference.lora import WEIGHTS, load_adapter, stored_adapters
from harness.inference.models import load_model, pick_device, set_threads
from harness.ledger import Ledger, RunState, this_process
from harness.ledger.life import liveness
from harness.ledger.recover import check_known, close
from harness.program import Program, read_context
from harness.program.prompts import PromptFile, seed_prompt_file, write_prompt
from harness.prompt_search.adapter import Evaluator, Player
from harness.prompt_search.budget import Budget, Limits, Sizes, sizes_for
from harness.prompt_search.cache import Cache
from harness.prompt_search.endpoint import Endpoint, EndpointSettings, prices_needed
from harness.prompt_search.local import NAME as LOCAL
from harness.prompt_search.local import LocalReflector
from harness.prompt_search.offline import OfflineProposer
from harness.prompt_search.proposer import Proposer
from harness.prompt_search.record import Finding, find
from harness.prompt_search.reflection import ReflectionProposer, Reflector
from harness.prompt_search.search import Question
from harness.prompt_search.splits import Guard, split_tasks
from harness.rollouts.collect import Sampling

CACHE = "evaluations.jsonl"
RECORD = "search.json"


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """How a search ended.

    Args:
        run: its run id.
        result: what `finished` says of it under `search`.
    """

    run: str
    result: dict[str, Any]


def run_search(program: Program, plan: SearchPlan, *, wait: bool = False, on_progress: Report) -> SearchOutcome:
    """Search a prompt, or go on where an earlier attempt of the same search ended.

    Args:
        program: the program.
        plan: of the search; one that is completed is not made again.
        wait: wait for the device instead of giving up at once.
        on_progress: called with `phase`, `step`, `steps` and numbers.

    Raises:
        UsageError: the budget is below the floor; nothing was started.
        RefusedError, ConfigError, NotFoundError: a rule or a page says no; nothing was started.
        BusyError: the device is in use.
        HarnessError, KeyboardInterrupt: what ended the attempt; its `finished` event is written.
    """
    ledger = Ledger(program.ledger)
    if plan.completed:
        return SearchOutcome(plan.run, stored_result(ledger.state().runs[plan.run]))
    limits, sizes = limits_of(plan)
    limits.check(sizes)
    endpoint = endpoint_of(plan.request)
    device = pick_device("auto")
    with held_device(device.type, wait, on_progress):
        run = create_search(program, plan, ledger)
        _check_start(ledger.state().runs[run])
        close(ledger, [run], program.run_dir)
        set_threads(0)
        facts = capture_environment(program.root, program.run_dir(run), {})
        with held_signals() as let_signals_through:
            attempt = _start(program, plan, ledger, run, facts)
            report = logged(program.run_dir(run) / "logs" / f"attempt_{attempt}.log", on_progress)
            with _recorded(ledger, run, attempt) as result:
                let_signals_through()
                result["search"], result["files"] = _search(program, plan, run, limits, sizes, endpoint, report)
    return SearchOutcome(run, result["search"])


def stored_result(run: RunState) -> dict[str, Any]:
    """Return what a completed search found, from the ledger."""
    return dict(run.attempts[-1].get("search") or {})


def limits_of(plan: SearchPlan) -> tuple[Limits, Sizes]:
    """Return the budget of a search and its sizes."""
    asked = plan.request
    limits = Limits(asked.evaluations, asked.tokens, asked.money, asked.seconds)
    return limits, sizes_for(asked.evaluations, asked.validation, asked.minibatch)


def _check_start(record: RunState) -> None:
    seen = liveness(record)
    if seen is not None and seen.alive:
        raise RefusedError(f"{record.run} is searching already: {seen.why}", f"`harness wait {record.run}`")
    check_known(record)


def _start(program: Program, plan: SearchPlan, ledger: Ledger, run: str, facts: Mapping[str, Any]) -> int:
    attempts = ledger.state().runs[run].attempts
    number = max((int(attempt["attempt"]) for attempt in attempts), default=0) + 1
    data = {"attempt": number, **this_process(), "resumed_from": None, "config_sha": plan.settings_sha}
    ledger.append(run, "started", data | {"protocol": plan.protocol, "environment": dict(facts)})
    return number


@contextmanager
def _recorded(ledger: Ledger, run: str, attempt: int) -> Iterator[dict[str, Any]]:
    """Yield the result to fill in; whatever ends the block is appended as `finished`."""
    result: dict[str, Any] = {}
    began = time.monotonic()
    ended: dict[str, Any] = {"outcome": str(Outcome.COMPLETED), "failure": None, "reason": None}
    with ExitStack() as stack:
        try:
            try:
                yield result
            finally:
                stack.enter_context(held_signals())
        except BaseException as error:
            ended = ending(error)
            raise
        finally:
            spent = result.get("search", {}).get("spent", {})
            data = {"attempt": attempt, **ended, "step": spent.get("evaluations"), "tokens": spent.get("tokens")}
            ledger.append(run, "finished", data | {"wall_s": round(time.monotonic() - began, 3)} | result)


def _search(
    program: Program,
    plan: SearchPlan,
    run: str,
    limits: Limits,
    sizes: Sizes,
    endpoint: Endpoint | None,
    report: Report,
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Search, score once, and write prompt and record; return the result and the files it names."""
    asked, context = plan.request, read_context(program)
    env, guard, question = _question(program, plan, sizes)
    cache = Cache(program.run_dir(run) / CACHE)
    with cache.held():
        report({"phase": "load", "message": f"loading {context.model.name}"})
        player = _player(program, plan, env)
        budget = Budget(limits)
        budget.spent.add(tokens=cache.failed_tokens)
        evaluator = Evaluator(player, cache, budget, guard, report)
        proposer = make_proposer(endpoint or asked.reflection, env, question, evaluator)
        finding = find(question, evaluator, proposer, context.eval.confidence, asked.scoring)
    record = program.analysis_dir(run) / "data" / RECORD
    atomic_write(record, canonical_json(encode_non_finite(finding.record()), sort=False) + "\n")
    result = finding.result() | {
        "env": env.id,
        "prompt": finding.prompt_id,
        "model": player.model,
        "reflection": proposer.name,
        "seed": asked.seed,
        "number": plan.number,
        "settings_sha": plan.settings_sha,
    }
    path = write_prompt(program, env.id, finding.prompt_id, _prompt_file(run, finding, result))
    names = [program.relative(record), path]
    files = [{"file": name, "sha": sha256_file(program.root / name)} for name in names]
    return dict(encode_non_finite(result)), files


def _prompt_file(run: str, finding: Finding, result: Mapping[str, Any]) -> PromptFile:
    """Return the file of the found prompt; TOML has no null, so what is unknown is left out."""
    kept = {key: _without_null(value) for key, value in result.items() if key not in ("env", "prompt")}
    shown = tuple(task.id for task in finding.shown)
    return PromptFile(source=run, demonstrations=shown, search=kept, components=finding.chosen.texts)


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return value


def _question(program: Program, plan: SearchPlan, sizes: Sizes) -> tuple[Environment, Guard, Question]:
    """Load the environment with the protocol's arguments and divide its training split."""
    asked, context = plan.request, read_context(program)
    protocol = next((item for item in context.eval.env if item.id == asked.env), None)
    env = load_environment(asked.env, protocol.args if protocol else {})
    train = env.tasks("train")
    heldout = {
        task.id: task for split in {"heldout", protocol.split if protocol else "heldout"} for task in env.tasks(split)
    }
    guard = Guard(train, heldout.values())
    file = seed_prompt_file(program, asked.env, asked.seed_prompt)
    seed = merge_components(env.components(), file.components if file else None)
    shown = tuple(task for task in train if file and task.id in file.demonstrations)
    parts = split_tasks(without_shown(train, {task.id for task in shown}), asked.seed)
    question = Question(seed, parts, sizes, asked.seed, shown)
    guard.check((*question.parts.searched, *question.parts.scoring))
    return env, guard, question


def _player(program: Program, plan: SearchPlan, env: Environment) -> Player:
    """Load what plays: the base model, or a run's last adapter on it."""
    asked, context = plan.request, read_context(program)
    loaded = load_model(ModelSection(name=context.model.name, revision=context.model.revision))
    name = f"{context.model.name}{'@' + context.model.revision if context.model.revision else ''}"
    model = None
    if asked.around is not None:
        folder = _last_adapter(program, asked.around)
        model = load_adapter(loaded.model, folder)
        name += f" with the adapter {sha256_file(folder / WEIGHTS)[:12]} of {asked.around}"
    sampling = Sampling(**plan.settings["sampling"])
    engine = TransformersEngine(loaded, model)
    window = loaded.model.config.max_position_embeddings
    return Player(engine, loaded.tokenizer, loaded.eos_ids, env, name, sampling, asked.seed, window=window)


def _last_adapter(program: Program, run: str) -> Path:
    folders = list(stored_adapters(program.run_dir(run)).values())
    if not folders:
        hint = "adapters stand in outputs/, which git does not hold: search where the run was trained"
        raise NotFoundError(f"{run} has no adapter here", hint)
    return folders[-1]


def endpoint_of(asked: SearchRequest) -> Endpoint | None:
    """Return the endpoint of the reflection model; None where a search needs none. Nothing is sent.

    Raises:
        UsageError: without an address or a key, or a limit on money without prices.
    """
    if asked.reflection in (OFFLINE, LOCAL):
        return None
    if not asked.reflection_url:
        raise UsageError(
            f"where is the model {asked.reflection[:80]!r}?",
            "--reflection-url https://HOST/v1 names an OpenAI-compatible endpoint; `offline` and `local` need none",
        )
    settings = EndpointSettings(
        base_url=asked.reflection_url,
        model=asked.reflection,
        key_variable=asked.key_variable,
        price_in=asked.price_in,
        price_out=asked.price_out,
    )
    endpoint = Endpoint(settings)
    if asked.money is not None and not endpoint.priced:
        raise prices_needed()
    return endpoint


def make_proposer(reflection: str | Reflector, env: Environment, question: Question, evaluator: Evaluator) -> Proposer:
    """Return what proposes texts.

    Args:
        reflection: `offline`, `local`, or a model to ask.

    Raises:
        ConfigError: when the environment does not say what may be tried.
        RefusedError: when demonstrations would put source text into git that may not be passed on.
    """
    if reflection != OFFLINE:
        model = _local(evaluator.player) if isinstance(reflection, str) else reflection
        # their tasks must stay on record, which only a composed text keeps
        composed = env.demonstrations((), env.demonstration_styles()[0]) if isinstance(env, Searchable) else {}
        return ReflectionProposer(model, evaluator.budget, tuple(composed))
    if not isinstance(env, Searchable):
        raise ConfigError(
            f"environment {env.id} does not say what a search without a large model may try",
            "it needs instruction_variants, demonstration_styles and demonstrations (harness/envs/base.py)",
        )
    if not env.redistributable:
        raise RefusedError(
            f"demonstrations of {env.id} would put source text into rl/prompts/ that may not be passed on",
            "search on a source that may be: see the arguments in CONTEXT.md and `harness env show`",
        )
    played = (*question.trial, *question.validation)
    pool = question.parts.demonstrations
    return OfflineProposer(env, pool, played, evaluator.seen, evaluator.texts, question.seed)


def _local(player: Player) -> LocalReflector:
    """Return the searched model itself as the one that reflects."""
    window = player.window or player.sampling.context
    return LocalReflector(player.engine, player.tokenizer, player.eos_ids, window, seed=player.seed)
