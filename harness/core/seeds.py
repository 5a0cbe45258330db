"""Random seeds derived from names instead of carried as state.

A draw is addressed by what it is for (run seed, step, task, sample), so a resumed run draws what
the uninterrupted one would have drawn, and two policies can share their random numbers.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: str | int) -> int:
    """Return a 63-bit seed for the address `parts`; stable across processes and machines."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
