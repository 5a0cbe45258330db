"""A small environment of several turns: the model asks a calculator, reads its answer, and says the result."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from harness.core.errors import ToolError
from harness.core.types import FailureClass, Message, Score, Task
from harness.envs.base import merge_components, unknown_split
from harness.envs.registry import ENVIRONMENTS, EnvSpec, parse_args

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SYSTEM = "Use the calculator: write 'calc: 2+3'. End with 'answer: 5'."


class CalculatorArgs(BaseModel):
    """`role` is who the calculator speaks as, `broken` makes it fail like a service that is down."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: Literal["user", "tool"] = "user"
    broken: bool = False


def compute(text: str) -> int:
    """Return the value of a sum or product of whole numbers; ValueError for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return int(OPERATIONS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError("not a sum or product of whole numbers")

    try:
        return value(ast.parse(text.strip()[:40], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("not a sum or product of whole numbers") from error


class CalculatorSession:
    def __init__(self, messages: tuple[Message, ...], args: CalculatorArgs) -> None:
        self.messages, self.args = messages, args

    def step(self, reply: str) -> tuple[Message, ...] | None:
        if re.search(r"^answer:", reply, re.MULTILINE):
            return None
        call = re.search(r"^calc:(.*)$", reply, re.MULTILINE)
        if call is None:
            return (Message("user", "Write calc: or answer:"),)
        if self.args.broken:
            raise ToolError("the calculator does not answer")
        try:
            said = f"= {compute(call[1])}"
        except ValueError as error:
            said = f"error: {error}"
        return (Message(self.args.role, said),)


class Calculator:
    id = "calculator"
    version = "1"
    verifier_version = "calculator-1"
    redistributable = True

    def __init__(self, args: CalculatorArgs = CalculatorArgs()) -> None:  # noqa: B008
        self.args = args

    def components(self) -> dict[str, str]:
        return {"system": SYSTEM}

    def component_names(self) -> tuple[str, ...]:
        return ("right", "format")

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "heldout"):
            raise unknown_split(self.id, split, ("train", "heldout"))
        base = 11 if split == "train" else 61
        made = []
        for index in range(12):
            sum_ = f"{base + index}*{3 + index % 5}+{index}"
            name = f"{split}-{index:02d}"
            made.append(Task(name, self.id, split, {"sum": sum_}, str(compute(sum_)), "sum", name))
        return made

    def start(self, task: Task, components: Mapping[str, str] | None = None) -> CalculatorSession:
        texts = merge_components(self.components(), components)
        messages = (Message("system", texts["system"]), Message("user", f"What is {task.fields['sum']}?"))
        return CalculatorSession(messages, self.args)

    def score(self, task: Task, episode: object) -> Score:
        said = re.search(r"^answer:\s*(-?\d+)", episode.final, re.MULTILINE)
        right = said is not None and said[1] == task.answer
        parts = {"right": float(right), "format": float(said is not None)}
        return Score(0.9 * right + 0.1 * parts["format"], parts, failure=None if right else FailureClass.MODEL)


def load(args):
    return Calculator(parse_args("calculator", CalculatorArgs, args))


SPEC = EnvSpec("calculator", load, "sums", CalculatorArgs)


def register():
    """Add the environment to the registry of this process."""
    ENVIRONMENTS["calculator"] = SPEC
