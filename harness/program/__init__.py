"""The program folder: GOAL, CONTEXT, PLAN and THREAD, read, checked, rendered and made new.

Names are imported when first used: `harness list` needs `Program` and not pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from harness.program.amend import amend, unamended
from harness.program.model import Program

if TYPE_CHECKING:
    from harness.program.documents import (
        Context,
        ContextEnv,
        Goal,
        GoalEnv,
        Plan,
        check_documents,
        protocol_hashes,
        read_context,
        read_goal,
        read_plan,
    )
    from harness.program.init import init_program
    from harness.program.prompts import prompt_sha, read_prompt
    from harness.program.thread import render_thread

_DOCUMENTS = ("Context", "ContextEnv", "Goal", "GoalEnv", "Plan", "check_documents", "protocol_hashes")
_HOMES = dict.fromkeys((*_DOCUMENTS, "read_context", "read_goal", "read_plan"), "documents") | {
    "init_program": "init",
    "prompt_sha": "prompts",
    "read_prompt": "prompts",
    "render_thread": "thread",
}

__all__ = [
    "Context",
    "ContextEnv",
    "Goal",
    "GoalEnv",
    "Plan",
    "Program",
    "amend",
    "check_documents",
    "init_program",
    "prompt_sha",
    "protocol_hashes",
    "read_context",
    "read_goal",
    "read_plan",
    "read_prompt",
    "render_thread",
    "unamended",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
