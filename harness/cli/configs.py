"""`harness show RUN --config`: the values of a run's config and where each comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.cli.output import Line, Result, rows_document, table
from harness.config.load import config_from, load_config
from harness.config.origin import Origin, origins
from harness.core.errors import ConfigError, HarnessError, RefusedError
from harness.ledger.select import run_config

if TYPE_CHECKING:
    from harness.config.schema import RunConfig
    from harness.ledger import RunState, State
    from harness.program.model import Program


def config_origins(here: Program, state: State, run: str) -> Result:
    """Return every key of a run's config with its value and origin.

    Args:
        here: the program.
        state: of its ledger, which has the run.
        run: its id.

    Raises:
        RefusedError: for an imported run, whose settings are those of another tool.
        ConfigError, NotFoundError: when the run's own config cannot be read.
    """
    if state.runs[run].kind == "import":
        raise RefusedError(f"{run} is imported: its settings are those of its tool", f"`harness show {run}`")
    chain = [(run, load_config(here.config_path(run))), *_ancestors(here, state, run)]
    found = origins(chain, _frozen(here))
    rows = [{"key": o.key, "value": o.value, "origin": o.origin, "frozen": o.frozen} for o in found]
    data = rows_document(rows, {"total": len(rows), "shown": len(rows)}, False) | {"run": run}
    return Result(data, lambda: _lines(found))


def _ancestors(here: Program, state: State, run: str) -> Iterator[tuple[str, RunConfig]]:
    """Yield the configs of the ancestors, nearest first, as far as there are any."""
    seen = {run}
    parent = state.runs[run].parent
    while parent and parent not in seen and parent in state.runs:
        seen.add(parent)
        config = _config(here, state.runs[parent])
        if config is None:
            return
        yield parent, config
        parent = state.runs[parent].parent


def _config(here: Program, run: RunState) -> RunConfig | None:
    """Return an ancestor's config: its file, else what the ledger recorded of it; None without either."""
    try:
        return load_config(here.config_path(run.run))
    except HarnessError:
        pass
    try:
        return config_from(dict(run_config(run)), "stored config")
    except ConfigError:
        return None


def _frozen(here: Program) -> dict[str, Any]:
    """Return what CONTEXT.md freezes; nothing while the page cannot be read, which `harness doctor` says."""
    from harness.program import read_context

    try:
        return read_context(here).frozen_values()
    except HarnessError:
        return {}


def _lines(found: list[Origin]) -> list[Line]:
    cells = [
        (o.key, "-" if o.value is None else json.dumps(o.value), f"{o.origin}, frozen" if o.frozen else o.origin)
        for o in found
    ]
    return table(["key", "value", "from"], cells)
