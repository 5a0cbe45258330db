"""The certificate of a promotion: what was judged, by which rules, with which result.

It is content-addressed and free of clocks, so the same evidence always gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import harness
from harness.core.canonical import content_sha, sha256_file
from harness.core.types import Verdict
from harness.ledger import RunState
from harness.program import Program, protocol_hashes
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


def certificate_problems(program: Program, run: RunState) -> list[str]:
    """Return what no longer matches a run's certificate; empty when it still holds, or there is none.

    Checks the certificate's own bytes, every item file it binds, and GOAL.md and CONTEXT.md.
    """
    if run.promoted is None:
        return []
    path = program.root / run.promoted["certificate"]
    if not path.is_file():
        return [f"{run.promoted['certificate']} is missing"]
    if sha256_file(path) != run.promoted["certificate_sha"]:
        return [f"{run.promoted['certificate']} was changed after the promotion"]
    certificate = json.loads(path.read_text(encoding="utf-8"))
    problems = []
    for entry in certificate["evals"]:
        file = program.root / entry["file"]
        if not file.is_file():
            problems.append(f"{entry['file']} is missing")
        elif sha256_file(file) != entry["file_sha"]:
            problems.append(f"{entry['file']} was changed after the promotion")
    now = protocol_hashes(program)
    for key, name in (("goal", "GOAL.md"), ("context", "CONTEXT.md")):
        if now[key] != certificate["protocol"][key]:
            problems.append(f"{name} is not the one the promotion was judged by")
    return problems
