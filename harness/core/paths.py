"""Folders outside a program."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder for converted models and device locks.

    HARNESS_CACHE, else XDG_CACHE_HOME/harness, else ~/.cache/harness.
    """
    if override := os.environ.get("HARNESS_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness"
