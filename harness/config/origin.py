"""Where each value of a run's config comes from; pure.

There is one chain: the command line of `new-run` goes over the parent's config, that over the defaults, and a key
that CONTEXT.md freezes is refused on the command line. No file of the user or of the machine takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from harness.config.changes import flatten, same
from harness.config.load import resolved, sparse
from harness.config.schema import RunConfig

DEFAULT = "default"


class Origin(NamedTuple):
    """A dotted key, its value, where that was set (a run id, or `default`), and whether CONTEXT.md freezes it."""

    key: str
    value: Any
    origin: str
    frozen: bool


def origins(chain: Sequence[tuple[str, RunConfig]], frozen: Mapping[str, Any] | None = None) -> list[Origin]:
    """Return every key of a run's config with the run that set it, in the schema's order.

    Args:
        chain: the run itself, its parent, and so on as far as configs are known.
        frozen: dotted keys of CONTEXT.md, `*` allowed, and their values.
    """
    flats = [(name, flatten(resolved(config)), flatten(sparse(config))) for name, config in chain]
    found = []
    for key, value in flats[0][1].items():
        held = any(fnmatchcase(key, pattern) for pattern in frozen or ())
        found.append(Origin(key, value, _setter(key, value, flats), held))
    return found


def _setter(key: str, value: Any, flats: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]) -> str:
    """Return the oldest run of the unbroken line that has this value; `default` when none of them wrote it."""
    if key not in flats[0][2]:
        return DEFAULT if len(flats) == 1 or same(flats[1][1].get(key), value) else flats[0][0]
    setter = flats[0][0]
    for name, flat, written in flats[1:]:
        if key not in written or not same(flat.get(key), value):
            break
        setter = name
    return setter
