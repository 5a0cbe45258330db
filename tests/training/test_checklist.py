"""docs/training-checklist.md names a test that exists, or a reason, for each of the 28 items."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_item_has_its_test_or_its_reason():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_item_\w+)", source, re.MULTILINE))
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", (ROOT / "docs/training-checklist.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 29))
    for number, last in rows:
        named = re.findall(r"`(test_\w+)`", last)
        assert all(name in defined and name.startswith(f"test_item_{int(number):02}_") for name in named), number
        assert named or len(last.split()) > 8, number
