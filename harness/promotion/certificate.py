"""The certificate of a promotion: what was judged, by which rules, with which result.

It is content-addressed and free of clocks, so the same evidence always gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import harness
from harness.core.canonical import content_sha
from harness.core.types import Verdict
from harness.ledger import RunState
from harness.promotion.gates import Evidence, GateResult

FILE = "certificate.json"


def build_certificate(
    run: RunState, evidence: Evidence, gates: Sequence[GateResult], protocol: Mapping[str, str], *, post_hoc: bool
) -> dict[str, Any]:
    """Return the certificate of a passed promotion; its `id` is the hash of all other members.

    Args:
        run: state of the promoted run.
        evidence: what the gates judged.
        gates: results of the gates asked for.
        protocol: hashes of `goal` and `context` that the gates were read from.
        post_hoc: whether GOAL or CONTEXT was amended after the run started.
    """
    names = ("subject", "prompt", "step", "requested", "items_sha", "prompt_sha", "verifier", "file", "file_sha")
    evals = [
        {"env": env} | {name: getattr(side, name) for name in names}
        for env, found in sorted(evidence.envs.items())
        for side in (found.policy, found.baseline)
        if side is not None
    ]
    body: dict[str, Any] = {
        "v": 1,
        "run": run.run,
        "step": evidence.step,
        "verdict": Verdict.PASS,
        "adapter_sha": evidence.adapter_sha,
        "config_sha": run.config_sha,
        "protocol": {name: protocol[name] for name in ("goal", "context")},
        "post_hoc": post_hoc,
        "evals": evals,
        "gates_asked": [gate.name for gate in gates],
        "gates": [gate.to_json() for gate in gates],
        "harness": harness.__version__,
    }
    return {"id": content_sha(body)} | body


def certificate_text(certificate: Mapping[str, Any]) -> str:
    """Return the bytes of certificate.json as text: indented for reviewers, keys sorted after `id`."""
    rest = {key: certificate[key] for key in sorted(certificate) if key != "id"}
    return json.dumps({"id": certificate["id"]} | rest, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
