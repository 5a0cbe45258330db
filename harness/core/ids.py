"""Names and identifiers: what may be a path component, and how events are numbered."""

from __future__ import annotations

import os
import re
import time

from harness.core.errors import UsageError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RUN_PATTERN = re.compile(r"run-([0-9]{3,9})")
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10)}
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def check_name(name: str, what: str = "name") -> str:
    """Return `name` when it is safe as one path component.

    Args:
        name: the candidate, taken from a user, a config or a file.
        what: the noun for the message.

    Raises:
        UsageError: on anything outside the allow-list, `..`, or a device name.
    """
    stem = name.split(".")[0].lower()
    if not NAME_PATTERN.fullmatch(name) or ".." in name or stem in _WINDOWS_DEVICES:
        raise UsageError(
            f"{what} {name[:80]!r} is not allowed",
            "use letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
        )
    return name


def run_number(run: str) -> int:
    """Return the number in a run id such as `run-007`.

    Raises:
        UsageError: when `run` is no run id in its canonical spelling.
    """
    match = RUN_PATTERN.fullmatch(run)
    if match is None or run != run_id(int(match[1])):
        raise UsageError(f"{run[:80]!r} is not a run id", "run ids look like run-001; `harness list` shows them")
    return int(match[1])


def run_id(number: int) -> str:
    """Spell a run number as an id: at least three digits."""
    return f"run-{number:03d}"


def new_ulid(now_ms: int | None = None, randomness: bytes | None = None) -> str:
    """Return a ULID: 48 bits of time, 80 random bits, Crockford base 32, sortable.

    Args:
        now_ms: Unix time in milliseconds; the clock when None.
        randomness: 10 bytes; the system's generator when None.

    Source: the ULID specification, github.com/ulid/spec.
    """
    milliseconds = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    value = (milliseconds << 80) | int.from_bytes(randomness or os.urandom(10), "big")
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))
