"""`harness search-prompt`: search the prompt of an environment before RL."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import Line, Result, Styled, fields, mutation_document, narrate, settings, table
from harness.cli.progress import progress, quiet_libraries
from harness.cli.shared import DryRun, command, complete_runs, new_app
from harness.cli.state import find_run, program, read_state, refresh_thread
from harness.cli.views import section
from harness.core.numbers import spell_duration, spell_interval

if TYPE_CHECKING:
    from harness.backends.search_plan import SearchPlan, SearchRequest
    from harness.program.model import Program

app = new_app()
APPS = {"search-prompt": app}
URL = "OPENAI_BASE_URL"
_OTHERS = {
    "seed": "the seed prompt",
    "random": "random demonstrations, else as found",
    "random_in_seed": "random demonstrations in the seed prompt",
}
ReflectionOption = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="What proposes texts: `offline` (no large model), `local` (the searched one), or a name at the URL.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="OpenAI-compatible base URL; tasks and replies are sent there.", envvar=URL),
]
KeyOption = Annotated[str, typer.Option(metavar="NAME", help="Environment variable that holds the endpoint's key.")]
SeedPromptOption = Annotated[
    str, typer.Option(metavar="FILE", help="Prompt to begin with: a TOML file, an id of rl/prompts/ENV/, `shipped`.")
]
MinibatchOption = Annotated[
    int | None, typer.Option(min=1, help="Tasks a proposal is tried on first; a third of --validation.")
]
AroundOption = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Search for a trained run, not the base.", autocompletion=complete_runs),
]


@command(
    app,
    "search-prompt",
    "harness search-prompt drugprot --budget 600",
    "harness search-prompt drugprot --budget 600 --dry-run --json",
    "harness search-prompt drugprot --reflection gpt-oss-120b --reflection-url http://127.0.0.1:8000/v1",
    'harness search-prompt drugprot --seed 1 --reason "is the gain of the first search its seed?"',
)
def search_prompt(
    env: Annotated[str, typer.Argument(metavar="ENV", help="An environment id; `harness env list` shows them.")],
    budget: Annotated[int, typer.Option(help="Task evaluations to spend; the final scoring is not among them.")] = 600,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to spend at most, of both models.")] = None,
    max_money: Annotated[float | None, typer.Option(help="Money to spend at most on the reflection model.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Seconds of search at most, over all attempts.")] = None,
    reflection: ReflectionOption = "offline",
    reflection_url: UrlOption = None,
    reflection_key_env: KeyOption = "OPENAI_API_KEY",
    price_in: Annotated[float | None, typer.Option(help="USD per million tokens that MODEL reads.")] = None,
    price_out: Annotated[float | None, typer.Option(help="USD per million tokens that MODEL writes.")] = None,
    seed_prompt: SeedPromptOption = "shipped",
    seed: Annotated[int, typer.Option(min=0, help="Decides splits, samples and proposals.")] = 0,
    validation: Annotated[int | None, typer.Option(min=2, help="Tasks that choose; a tenth of the budget.")] = None,
    minibatch: MinibatchOption = None,
    scoring: Annotated[int, typer.Option(min=2, help="Unseen items the found prompt is scored on, once.")] = 240,
    around: AroundOption = None,
    reason: Annotated[str | None, typer.Option(help="Why another search, or one around a trained run.")] = None,
    hypothesis: Annotated[str | None, typer.Option(help="What the search should show.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the device instead of exit code 75.")] = False,
    dry_run: DryRun = False,
) -> Result:
    """Search an environment's prompt before RL; score it on unseen items.

    Writes rl/prompts/ENV/ID.toml, which a run uses by `--set env.ENV.prompt=ID`, and records the search as a run
    of its own kind. Held-out items are never seen. The same command goes on where a killed search ended, without
    paying for an evaluation twice, and shows the result of one that is done. Exit code 0 done, 2 refused (a second
    search without --reason, a budget below the floor), 71 the machine failed, 75 the device is in use.
    """
    from harness.backends.search_plan import SearchRequest, plan_search

    here = program()
    state = read_state(here)
    if around is not None:
        find_run(state, around)
    limits, sizes = (budget, max_tokens, max_money, max_seconds), (validation, minibatch)
    request = SearchRequest(env, *limits, reflection, seed_prompt, seed, *sizes, around, reason, hypothesis, scoring)
    request = replace(request, reflection_url=reflection_url, key_variable=reflection_key_env)
    request = replace(request, price_in=price_in, price_out=price_out)
    plan = plan_search(here, request, state)
    detail = _plan_detail(plan, request)
    if dry_run:
        data = mutation_document(plan.run, applied=False, dry_run=True, detail=detail)
        return Result(data, lambda: _plan_lines(detail))
    return _search(here, plan, wait, detail)


def _plan_detail(plan: SearchPlan, request: SearchRequest) -> dict[str, Any]:
    """Return what the search would do: the same object for a dry run and for the real one."""
    from harness.prompt_search.budget import Limits, sizes_for

    sizes = sizes_for(request.evaluations, request.validation, request.minibatch)
    Limits(request.evaluations, request.tokens, request.money, request.seconds).check(sizes)
    return {
        "run": plan.run,
        "existing": plan.existing,
        "completed": plan.completed,
        "search_number": plan.number,
        "hypothesis": plan.hypothesis,
        "settings": plan.settings,
        "sizes": sizes._asdict(),
        "floor": sizes.floor,
    }


def _plan_lines(detail: Mapping[str, Any]) -> list[Line]:
    asked, sizes = detail["settings"], detail["sizes"]
    begun = "show the result of" if detail["completed"] else "resume" if detail["existing"] else "begin"
    return fields(
        [
            ("would", f"{begun} {detail['run']}, search {detail['search_number']} of {asked['env']}"),
            ("hypothesis", detail["hypothesis"]),
            ("budget", f"{asked['evaluations']} evaluations, the floor is {detail['floor']}"),
            ("tasks", f"{sizes['validation']} choose, {sizes['minibatch']} for the first trial of a proposal"),
            ("proposals", asked["reflection"]),
            ("begins with", asked["seed_prompt"]),
            ("reason", asked["reason"]),
        ]
    )


def _search(here: Program, plan: SearchPlan, wait: bool, detail: dict[str, Any]) -> Result:
    """Search in this process."""
    quiet_libraries()
    from harness.backends.search import run_search

    if not plan.completed:
        start = {"event": "search", "run": plan.run, "pid": os.getpid()}
        if settings.json:
            sys.stderr.write(json.dumps(start) + "\n")
        else:
            verb = "resuming" if plan.existing else "searching"
            narrate(f"{verb} a prompt of {plan.request.env} as {plan.run}; pid {os.getpid()}")
    try:
        with progress(plan.run) as report:
            outcome = run_search(here, plan, wait=wait, on_progress=report)
    finally:
        refresh_thread(here)
    data = mutation_document(
        outcome.run, applied=not plan.completed, dry_run=False, detail=detail | {"result": outcome.result}
    )
    return Result(data, lambda: _result_lines(outcome.run, outcome.result), multiline=True)


def _result_lines(run: str, result: Mapping[str, Any]) -> list[Line]:
    spent = result["spent"]
    used = f"{spent['evaluations']} evaluations, {spent['tokens']} tokens in {spell_duration(spent['seconds'])}"
    chosen = "the seed prompt itself" if result["chosen"] == 0 else f"candidate {result['chosen']}"
    lines = fields(
        [
            ("run", run),
            ("found", f"{result['prompt']}: {chosen} of {result['candidates']}"),
            ("spent", f"{used}; ended by {result['ended']}"),
            ("demonstrations", f"{result['demonstrations']} training tasks, left out of RL with this prompt"),
        ]
    )
    for name, title in (("validation", "On search-validation, which chose"), ("scoring", "On unseen training items")):
        part = result[name]
        lines += section(f"{title} ({part['items']} items, {part['clusters']} clusters)", _score_lines(part))
    env = result["env"]
    use = Styled(f"harness new-run --set env.{env}.prompt={result['prompt']} --hypothesis …", "strong")
    return [*lines, "", ("next: ", Styled(f"harness decide {run} keep --reason …", "strong"), ", then ", use)]


def _score_lines(part: Mapping[str, Any]) -> list[Line]:
    rows = [("the found prompt", "reward", spell_interval(part["found"]["reward"]), "")]
    for name, title in _OTHERS.items():
        for metric, mean in (part.get(name) or {}).items():
            rows.append((title, metric, spell_interval(mean), spell_interval(part["gain"][name][metric])))
    return table(["prompt", "metric", "mean", "gain of the found prompt"], rows)
