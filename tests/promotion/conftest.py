"""The program that the tests of promotion judge."""

from __future__ import annotations

import pytest

from harness.program import Program
from tests.promotion.promotion_world import CONTEXT, GOAL, World


@pytest.fixture
def world(tmp_path):
    for name, text in (("GOAL.md", GOAL), ("CONTEXT.md", CONTEXT), ("PLAN.md", "```toml\n```\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "rl").mkdir()
    return World(Program(tmp_path))
