"""The program folder: GOAL, CONTEXT, PLAN and THREAD, read, checked, rendered and made new.

Names are loaded on first use: `harness list` needs the paths of a program, and not the parser of its pages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.program.amend import unamended as unamended
    from harness.program.documents import Context as Context
    from harness.program.documents import ContextEnv as ContextEnv
    from harness.program.documents import Goal as Goal
    from harness.program.documents import GoalEnv as GoalEnv
    from harness.program.documents import Plan as Plan
    from harness.program.documents import check_documents as check_documents
    from harness.program.documents import protocol_hashes as protocol_hashes
    from harness.program.documents import read_context as read_context
    from harness.program.documents import read_goal as read_goal
    from harness.program.documents import read_plan as read_plan
    from harness.program.init import init_program as init_program
    from harness.program.model import Program as Program
    from harness.program.prompts import prompt_sha as prompt_sha
    from harness.program.prompts import read_prompt as read_prompt
    from harness.program.thread import render_thread as render_thread

_DOCUMENTS = (
    "Context",
    "ContextEnv",
    "Goal",
    "GoalEnv",
    "Plan",
    "check_documents",
    "protocol_hashes",
    "read_context",
    "read_goal",
    "read_plan",
)
_HOMES = dict.fromkeys(_DOCUMENTS, "documents") | {
    "Program": "model",
    "init_program": "init",
    "prompt_sha": "prompts",
    "read_prompt": "prompts",
    "render_thread": "thread",
    "unamended": "amend",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module.

    Raises:
        AttributeError: when there is no such name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
