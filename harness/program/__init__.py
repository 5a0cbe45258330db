"""The program folder: GOAL, CONTEXT, PLAN and THREAD, read, checked, rendered and made new."""

from harness.program.amend import amend, unamended
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
from harness.program.model import Program
from harness.program.prompts import prompt_sha, read_prompt
from harness.program.thread import render_thread

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
