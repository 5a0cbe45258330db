"""Run the six evals of a prompt's effect: base and two trained models, each under the seed and the chosen prompt.

Evals that are on record and unchanged are read back; the others are made on the frozen protocol and recorded like any
eval. A model's eval under the other run's prompt is recorded with that run's id in the place of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.load import resolved
from harness.config.schema import RunConfig
from harness.core.canonical import encode_non_finite, sha256_file
from harness.core.errors import NotFoundError, RefusedError
from harness.evaluation.effect import BASE, CELLS, CHOSEN, SEED, Cell, prompt_effects, verdict
from harness.evaluation.heldout import Progress, Recorder, Suite, load_suites, run_suite, trained
from harness.evaluation.records import ItemRecord, read_items
from harness.evaluation.statistics import mean_of
from harness.evaluation.summary import interval_json, metric_names
from harness.inference.engine import TransformersEngine
from harness.inference.lora import WEIGHTS, load_adapter
from harness.inference.models import LoadedModel, load_model
from harness.ledger import Ledger, RunState, State
from harness.ledger.results import current_evals
from harness.program import Context, Program, read_context
from harness.program.amend import check_amended
from harness.program.prompts import prompt_sha, run_prompts

Texts = dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two trained runs.

    Args:
        run: its id.
        config: as it was planned.
        step: of its last adapter.
        folder: of that adapter.
        sha: hash of its weights.
        prompts: the texts by environment; None for the shipped ones.
    """

    run: str
    config: RunConfig
    step: int
    folder: Path
    sha: str
    prompts: Mapping[str, Texts]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the eval of a cell is, or will be, on record.

    Args:
        run: whose ledger entry it is.
        subject: `base` or `policy`.
        step: 0 for the base.
        prompt: as in `evaluated` events.
        texts: of the prompt; None for the shipped one.
        prompt_sha: hash of all texts.
        adapter: hash of the weights; None for the base.
    """

    run: str
    subject: str
    step: int
    prompt: str
    texts: Texts
    prompt_sha: str
    adapter: str | None


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every part of the work needs."""

    program: Program
    ledger: Ledger
    context: Context
    sides: Mapping[str, Side]
    report: Progress


Items = dict[Cell, tuple[ItemRecord, ...]]


def prompt_effect(program: Program, seed_run: str, chosen_run: str, on_progress: Progress) -> list[dict[str, Any]]:
    """Measure what a chosen prompt and RL each give, and record it with the run of the chosen prompt.

    Args:
        seed_run: trained under the seed prompt.
        chosen_run: trained under the chosen one.

    Returns:
        One row per environment whose prompts differ, as in `prompt_effect` events.

    Raises:
        RefusedError: the runs have other models, or the same prompts; or one is not ready to be evaluated.
        NotFoundError: a run, an adapter or a prompt is not here.
    """
    ledger = Ledger(program.ledger)
    state = ledger.state()
    check_amended(program, state)
    sides = {name: _side(program, state, run) for name, run in ((SEED, seed_run), (CHOSEN, chosen_run))}
    if sides[SEED].config.model != sides[CHOSEN].config.model:
        raise RefusedError(
            f"{seed_run} and {chosen_run} have other base models, so nothing belongs to the prompt alone",
            "train both on the same base",
        )
    bench = _Bench(program, ledger, read_context(program), sides, on_progress)
    suites = [suite for suite in load_suites(bench.context) if _texts_differ(suite, sides)]
    if not suites:
        raise RefusedError(
            f"{seed_run} and {chosen_run} use the same prompt in every environment of the protocol",
            f"compare runs with `harness compare {seed_run} {chosen_run}`, or train one under a searched prompt",
        )
    work = [(suite, places, _on_record(bench, suite, places)) for suite in suites for places in [_places(suite, sides)]]
    for model in (BASE, SEED, CHOSEN):
        _evaluate_model(bench, model, work)
    return [_record(bench, suite, places, items) for suite, places, items in work]


def _side(program: Program, state: State, run: str) -> Side:
    if run not in state.runs:
        raise NotFoundError(f"the ledger has no {run[:80]}", "`harness list` shows the runs")
    config, step, folder = trained(program, state, run, None)
    return Side(run, config, step, folder, sha256_file(folder / WEIGHTS), run_prompts(program, config))


def _texts_differ(suite: Suite, sides: Mapping[str, Side]) -> bool:
    shipped, env = suite.env.components(), suite.protocol.id
    return len({prompt_sha(shipped, side.prompts.get(env)) for side in sides.values()}) > 1


def _places(suite: Suite, sides: Mapping[str, Side]) -> dict[Cell, Place]:
    shipped, env = suite.env.components(), suite.protocol.id
    places = {}
    for model, prompt in CELLS:
        texts = sides[prompt].prompts.get(env)
        sha = prompt_sha(shipped, texts)
        if model == BASE:
            places[model, prompt] = Place(sides[prompt].run, BASE, 0, "run", texts, sha, None)
        else:
            side = sides[model]
            named = "run" if model == prompt else sides[prompt].run
            places[model, prompt] = Place(side.run, "policy", side.step, named, texts, sha, side.sha)
    return places


def _on_record(bench: _Bench, suite: Suite, places: Mapping[Cell, Place]) -> Items:
    """Return the items of the cells that are on record: same items, verifier, texts and weights, and unchanged."""
    state, root = bench.ledger.state(), bench.program.root
    found: Items = {}
    for cell, place in places.items():
        data = _eval_of(state.runs[place.run], suite, place)
        path = root / str(data["file"]) if data else None
        if data and path and path.is_file() and sha256_file(path) == data["file_sha"]:
            found[cell] = tuple(read_items(path))
    return found


def _eval_of(run: RunState, suite: Suite, place: Place) -> dict[str, Any] | None:
    """Return the last eval of a place; raises RefusedError when the run was evaluated under texts that are gone."""
    env, wanted = suite.protocol.id, (place.subject, place.step, place.prompt, place.adapter)
    mine = [
        data
        for data in current_evals(run)
        if (data["env"], data.get("items_sha"), data.get("verifier"))
        == (env, suite.items_sha, suite.env.verifier_version)
        and (data["subject"], data["step"], data["prompt"], data.get("adapter_sha")) == wanted
    ]
    if place.prompt == "run" and mine and mine[-1]["prompt_sha"] != place.prompt_sha:
        raise RefusedError(
            f"the prompt of {run.run} in {env} is not the one it was evaluated under: its file was changed since",
            "restore the file in rl/prompts/ with git",
        )
    return next((data for data in reversed(mine) if data["prompt_sha"] == place.prompt_sha), None)


def _evaluate_model(bench: _Bench, model: str, work: Sequence[tuple[Suite, Mapping[Cell, Place], Items]]) -> None:
    """Make the evals of one model that are missing; it is loaded only when there are any."""
    missing = [
        (suite, places, items, cell)
        for suite, places, items in work
        for cell in CELLS
        if cell[0] == model and cell not in items
    ]
    if not missing:
        return
    loaded = load_model(bench.sides[SEED].config.model)
    adapted = None if model == BASE else load_adapter(loaded.model, bench.sides[model].folder)
    engine = TransformersEngine(loaded, adapted)
    for suite, places, items, cell in missing:
        items[cell] = _sample(bench, suite, places[cell], engine, loaded)


def _sample(
    bench: _Bench, suite: Suite, place: Place, engine: TransformersEngine, loaded: LoadedModel
) -> tuple[ItemRecord, ...]:
    """Make one eval and record it as any other."""
    attempts = bench.ledger.state().runs[place.run].attempts
    number = attempts[-1]["attempt"] if attempts else 0
    recorder = Recorder(bench.program, bench.ledger, place.run, number, bench.context)
    items = run_suite(suite, engine, loaded, bench.context, place.texts, bench.report)
    recorder.record(suite, items, place.subject, place.step, place.prompt, place.prompt_sha, place.adapter)
    return tuple(items)


def _record(bench: _Bench, suite: Suite, places: Mapping[Cell, Place], cells: Items) -> dict[str, Any]:
    """Append what the six evals say of one environment, and return it; the same again is not appended twice."""
    sides, confidence = bench.sides, bench.context.eval.confidence
    chosen = sides[CHOSEN].run
    shared = [name for name in metric_names(cells[CELLS[0]]) if all(name in metric_names(cells[c]) for c in CELLS)]
    effects = {name: prompt_effects(cells, name, confidence) for name in shared}
    state = bench.ledger.state()
    data = {
        "env": suite.protocol.id,
        "seed_run": sides[SEED].run,
        "seed_root": state.runs[sides[SEED].run].root,
        "chosen_run": chosen,
        "items_sha": suite.items_sha,
        "verifier": suite.env.verifier_version,
        "confidence": confidence,
        "cells": [_cell(cell, places[cell], cells[cell], suite, shared, confidence) for cell in CELLS],
        "effects": {
            metric: {name: interval_json(interval) for name, interval in found.items()}
            for metric, found in effects.items()
        },
        "verdict": {metric: verdict(found) for metric, found in effects.items()},
        "differs": _differs(sides),
    }
    data = dict(encode_non_finite(data))
    if data not in [event.data for event in state.runs[chosen].of_kind("prompt_effect")]:
        bench.ledger.append(chosen, "prompt_effect", data)
    return data


def _cell(
    cell: Cell, place: Place, items: Sequence[ItemRecord], suite: Suite, names: Sequence[str], confidence: float
) -> dict[str, Any]:
    return {
        "model": cell[0],
        "prompt": cell[1],
        "run": place.run,
        "step": place.step,
        "prompt_sha": place.prompt_sha,
        "means": {name: interval_json(mean_of(items, name, confidence)) for name in names},
        "n": sum(item.counts for item in items),
        "requested": suite.requested,
    }


def _differs(sides: Mapping[str, Side]) -> list[str]:
    """Return the config keys in which the two runs differ beside their prompts; each could be the cause as well."""
    first, second = (_flat(resolved(side.config)) for side in (sides[SEED], sides[CHOSEN]))
    keys = {key for key in {*first, *second} if first.get(key) != second.get(key)}
    told = ("hypothesis", "parent", "replicate_of", "lever")
    return sorted(key for key in keys if key not in told and not key.endswith(".prompt"))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) and "id" in item for item in value):
        pairs = {item["id"]: item for item in value}.items()
    else:
        return {prefix.removesuffix("."): value}
    return {name: found for key, item in pairs for name, found in _flat(item, f"{prefix}{key}.").items()}
