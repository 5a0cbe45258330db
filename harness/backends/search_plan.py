"""Plan a prompt search: its settings, and the rule of one search per environment before RL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.config.schema import SamplingSection
from harness.core.canonical import content_sha
from harness.core.errors import NotFoundError, RefusedError
from harness.core.ids import run_id, run_number
from harness.core.names import did_you_mean
from harness.envs.base import merge_components
from harness.envs.registry import ENVIRONMENTS, load_environment
from harness.ledger import Ledger, NewEvent, RunState, State
from harness.program import Context, Program, prompt_sha, protocol_hashes, read_context
from harness.program.amend import check_amended
from harness.program.prompts import SHIPPED, seed_prompt_file

KIND = "prompt_search"
OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What the user asked of `search-prompt`.

    Args:
        env: environment id.
        evaluations: task evaluations the search may spend.
        tokens, money, seconds: further limits; None for none.
        reflection: what proposes texts: `offline`, `local`, or a model behind an endpoint.
        seed_prompt: the prompt to begin with: `shipped`, an id, or the path of a TOML file.
        seed: of splits, samples and proposals.
        validation, minibatch: tasks per candidate; None for what the budget can afford.
        around: run whose last adapter the prompt is searched for; None for the base model.
        reason: why another search, or one around a trained checkpoint.
        hypothesis: what the search should show; None for the usual one.
        scoring: items of the final scoring.
        reflection_url: base URL of the endpoint that has the model.
        key_variable: environment variable with the endpoint's key; neither decides a result.
        price_in, price_out: USD per million tokens of that model; None when not known.
    """

    env: str
    evaluations: int = 600
    tokens: int | None = None
    money: float | None = None
    seconds: float | None = None
    reflection: str = OFFLINE
    seed_prompt: str = SHIPPED
    seed: int = 0
    validation: int | None = None
    minibatch: int | None = None
    around: str | None = None
    reason: str | None = None
    hypothesis: str | None = None
    scoring: int = 240
    reflection_url: str | None = None
    key_variable: str = "OPENAI_API_KEY"
    price_in: float | None = None
    price_out: float | None = None


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search that every rule allows; nothing is written yet.

    Args:
        run: the id it would get, or has when `existing`.
        existing: the same search was begun before: it is resumed, or its result shown when it is `completed`.
        number: which search of the environment this is, from 1.
        hypothesis: of the run.
        settings: everything that decides the result; JSON-ready.
        protocol: hashes of GOAL, CONTEXT and PLAN.
    """

    request: SearchRequest
    run: str
    existing: bool
    completed: bool
    number: int
    hypothesis: str
    settings: dict[str, Any]
    protocol: dict[str, str]

    @property
    def settings_sha(self) -> str:
        """Hash of the settings."""
        return content_sha(self.settings)


def plan_search(program: Program, request: SearchRequest, state: State | None = None) -> SearchPlan:
    """Plan a prompt search and touch nothing.

    Args:
        program: the program.
        request: what was asked.
        state: of the ledger; read when None.

    Raises:
        NotFoundError: for an unknown environment, prompt or run.
        RefusedError: for a second search, or one around a trained checkpoint, without a reason.
    """
    known = Ledger(program.ledger).state() if state is None else state
    check_amended(program, known)
    context = read_context(program)
    settings = search_settings(program, context, request, known)
    earlier = [run for run in known.runs.values() if run.kind == KIND and _asked(run).get("env") == request.env]
    sha = content_sha(settings)
    same = next((run for run in earlier if run.created.get("config_sha") == sha), None)
    hypothesis = request.hypothesis or (
        f"A searched prompt of {request.env} earns more reward than its prompt {Path(request.seed_prompt).name!r}"
        " on training items that the search did not see."
    )
    if same is not None:
        number = int(_asked(same).get("number", 1))
        done, protocol = same.status == "completed", dict(same.created.get("protocol", {}))
        return SearchPlan(request, same.run, True, done, number, same.hypothesis, settings, protocol)
    _check_reason(request, earlier)
    run = run_id(max((run_number(name) for name in known.runs), default=0) + 1)
    return SearchPlan(request, run, False, False, len(earlier) + 1, hypothesis, settings, protocol_hashes(program))


def _asked(run: RunState) -> Mapping[str, Any]:
    found = run.created.get("search")
    return found if isinstance(found, Mapping) else {}


def _check_reason(request: SearchRequest, earlier: list[RunState]) -> None:
    """Refuse what the program's rule does not foresee, unless it is said why."""
    if (request.reason or "").strip():
        return
    if request.around is not None:
        raise RefusedError(
            f"a prompt is searched before RL, and {request.around} is trained already",
            'say why with --reason "…"; the ledger counts it',
        )
    if earlier:
        count = f"{len(earlier)} search{'es' if len(earlier) > 1 else ''}"
        raise RefusedError(
            f"{request.env} had {count} already ({', '.join(run.run for run in earlier[-3:])}), and one is the rule",
            'say why another is needed with --reason "…"; the same command as before resumes or shows that search',
        )


def search_settings(program: Program, context: Context, request: SearchRequest, state: State) -> dict[str, Any]:
    """Return everything that decides what a search finds, JSON-ready; environment and sampling are the protocol's.

    Raises:
        NotFoundError: for an unknown environment, prompt or run.
    """
    if request.env not in ENVIRONMENTS:
        raise NotFoundError(f"unknown environment {request.env[:80]!r}", did_you_mean(request.env, ENVIRONMENTS))
    protocol = next((item for item in context.eval.env if item.id == request.env), None)
    usual = SamplingSection()
    sampling = {
        "max_tokens": protocol.max_tokens if protocol else usual.max_tokens,
        "temperature": protocol.temperature if protocol else usual.temperature,
        "max_turns": protocol.max_turns if protocol else usual.max_turns,
        "context": usual.context,
    }
    args = dict(protocol.args) if protocol else {}
    env = load_environment(request.env, args)
    seed = seed_prompt_file(program, request.env, request.seed_prompt)
    settings = asdict(request) | {
        "seed_prompt": Path(request.seed_prompt).name,  # where a file lies is a machine's own affair
        "args": {key: value for key, value in args.items() if key != "path"},
        "versions": [env.version, env.verifier_version],
        "sampling": sampling,
        "model": {"name": context.model.name, "revision": context.model.revision},
        "seed_sha": prompt_sha(merge_components(env.components(), seed.components if seed else None)),
        "around_root": _root(state, request.around),
    }
    return {
        key: value for key, value in settings.items() if key not in ("hypothesis", "reflection_url", "key_variable")
    }


def _root(state: State, around: str | None) -> str | None:
    """Return the hash that identifies the run a search is made around."""
    if around is None:
        return None
    if around not in state.runs:
        raise NotFoundError(f"there is no run {around[:80]!r}", did_you_mean(around, list(state.runs)[-20:]))
    return state.runs[around].root


def create_search(program: Program, plan: SearchPlan, ledger: Ledger) -> str:
    """Record a planned search and return its run id; decided again under the ledger's lock.

    Raises:
        As `plan_search`.
    """
    made: list[str] = []

    def build(state: State) -> list[NewEvent]:
        fresh = plan_search(program, plan.request, state)
        made.append(fresh.run)
        return [] if fresh.existing else [NewEvent(fresh.run, "created", created_data(fresh))]

    ledger.append_locked(build)
    return made[-1]


def created_data(plan: SearchPlan) -> dict[str, Any]:
    """Return the data of the `created` event."""
    return {
        "type": KIND,
        "hypothesis": plan.hypothesis,
        "parent": None,
        "changes": [],
        "lever": None,
        "replicate_of": None,
        "config": None,
        "config_sha": plan.settings_sha,
        "protocol": plan.protocol,
        "search": plan.settings | {"number": plan.number},
    }
