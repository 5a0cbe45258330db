"""Who is acting: a person, an agent or a CI job, told from the environment."""

from __future__ import annotations

import functools
import getpass
import os
from collections.abc import Mapping

from harness.core.errors import UsageError
from harness.core.git import git_line
from harness.ledger.events import ACTOR_KINDS, Actor


def current_actor(environ: Mapping[str, str] | None = None) -> Actor:
    """Return the actor: `HARNESS_ACTOR` ("agent:name"), else CI, else the person git knows.

    Args:
        environ: environment variables; the process's own when None.

    Raises:
        UsageError: when `HARNESS_ACTOR` is not `kind:name` with a known kind.
    """
    variables = os.environ if environ is None else environ
    named = variables.get("HARNESS_ACTOR", "")
    if named:
        kind, _, name = named.partition(":")
        if kind not in ACTOR_KINDS or not name.strip():
            raise UsageError(
                f"HARNESS_ACTOR={named[:80]!r} names no actor",
                'set it to "agent:NAME", "person:NAME" or "ci:NAME"',
            )
        return Actor(kind, _one_line(name))
    if variables.get("CI", "").lower() not in ("", "0", "false"):
        return Actor("ci", _one_line(variables.get("GITHUB_ACTOR", "")) or "ci")
    return Actor("person", person_name())


@functools.cache
def person_name() -> str:
    """Return git's `user.name`, else the login name, else `unknown`."""
    name = _one_line(git_line(None, "config", "user.name") or "")
    if name:
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container user without an entry in passwd
        return "unknown"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:128]
