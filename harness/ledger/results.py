"""Held-out results of a run, as its `evaluated` events hold them."""

from __future__ import annotations

from typing import Any

from harness.ledger.fold import RunState
from harness.ledger.superseded import is_superseded


def current_evals(run: RunState) -> list[dict[str, Any]]:
    """Return the data of the evals that count: those of weights that no later attempt trained again."""
    return [data for data in run.evals if not is_superseded(data, run.attempts)]


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
