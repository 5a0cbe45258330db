"""Held-out results of a run, as its `evaluated` events hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.core.canonical import canonical_json, encode_non_finite
from harness.ledger.fold import RunState
from harness.ledger.superseded import is_superseded


def current_evals(run: RunState) -> list[dict[str, Any]]:
    """Return the data of the evals that count: those of weights that no later attempt trained again."""
    return [data for data in run.evals if not is_superseded(data, run.attempts)]


def own_prompt_evals(run: RunState) -> list[dict[str, Any]]:
    """Return the data of the evals that count and were done under the run's own prompt, as the event says."""
    return [data for data in current_evals(run) if data.get("prompt") == "run"]


def last_policy_evals(run: RunState) -> dict[str, dict[str, Any]]:
    """Return the policy's eval of the highest step per environment, under the run's own prompt.

    An earlier step that was evaluated later does not take its place, and an eval of weights that a later
    attempt trained again does not count.
    """
    last: dict[str, dict[str, Any]] = {}
    for data in current_evals(run):
        if data.get("subject") == "policy" and data.get("prompt", "run") == "run":
            env = str(data.get("env"))
            if env not in last or data.get("step", 0) >= last[env].get("step", 0):
                last[env] = data
    return last


def protocol_of(run: RunState, data: Mapping[str, Any]) -> str:
    """Return what a result depends on beside the weights, as text: results with equal texts may be compared.

    For a run of this program that is the items, the verifier and the sampling; for an imported one the source it was
    read from and what little that tells.

    Args:
        run: whose eval it is.
        data: of the `evaluated` event.
    """
    if run.kind == "import":
        source = run.created.get("source")
        name = source.get("name") if isinstance(source, Mapping) else None
        binding: list[Any] = ["import", run.created.get("format"), name, data.get("requested")]
    else:
        binding = [data.get("items_sha"), data.get("verifier")]
    return canonical_json(encode_non_finite([*binding, data.get("protocol")]))


def reference_protocols(runs: Iterable[RunState]) -> dict[str, str]:
    """Return per environment the protocol that results are compared under.

    It is that of the newest run of this program that was evaluated there; imported runs give one only where no run
    of the program has.

    Args:
        runs: in the order of their numbers.
    """
    own: dict[str, str] = {}
    imported: dict[str, str] = {}
    for run in runs:
        found = imported if run.kind == "import" else own
        found |= {env: protocol_of(run, data) for env, data in last_policy_evals(run).items()}
    return imported | own
