"""`harness env`: the environments, a task as the model sees it, and the score of an answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import output
from harness.cli.output import Line, Result, Styled, fields, rows_document, table
from harness.cli.shared import command, new_app
from harness.core.errors import NotFoundError, UsageError
from harness.core.names import did_you_mean

if TYPE_CHECKING:
    from harness.core.types import FinishReason, Message, Score, Task
    from harness.envs.base import Environment, Session

app = new_app(
    "harness env list",
    "harness env show drugprot",
    "harness env score answers.jsonl --env bioreason-go",
    no_args_is_help=True,
    help="List environments, show a task as the model sees it, score an answer.",
)
APPS = {"env": app}

NameArg = Annotated[str, typer.Argument(metavar="ENV", help="An environment id; `harness env list` shows them.")]
TaskOption = Annotated[str, typer.Option("--task", metavar="ID", help="Task id; the first task when left out.")]
SplitOption = Annotated[str, typer.Option("--split", help="Split the task is in.")]
ArgOption = Annotated[list[str], typer.Option("--arg", metavar="KEY=VALUE", help="Environment argument; repeatable.")]
MAX_TURNS = 32
REPLY_TOKENS = 256


@command(app, "list", "harness env list", "harness env list --json")
def list_environments() -> Result:
    """List the environments there are."""
    from harness.envs.registry import ENVIRONMENTS

    rows = [{"id": spec.id, "summary": spec.summary} for spec in ENVIRONMENTS.values()]
    data = rows_document(rows, {"total": len(rows)}, False)
    return Result(data, lambda: table(["env", "what the model does"], [(row["id"], row["summary"]) for row in rows]))


@command(app, "show", "harness env show drugprot", "harness env show drugprot --split train --json")
def show(name: NameArg, task: TaskOption = "", split: SplitOption = "heldout", arg: ArgOption = []) -> Result:  # noqa: B006
    """Show a task as the model sees it, with its gold answer below.

    Also lists the versions, the reward components and the arguments of the environment.
    """
    from harness.envs.base import HasDataNotes

    env, chosen, count = _load(name, task, split, arg)
    session = env.start(chosen)
    data: dict[str, Any] = {
        "env": env.id,
        "version": env.version,
        "verifier": env.verifier_version,
        "components": list(env.component_names()),
        "prompt_texts": list(env.components()),
        "arguments": _arguments(name),
        "split": split,
        "tasks": count,
        "task": chosen.id,
        "messages": [_message(message) for message in session.messages],
        "answer": chosen.answer,
        "label": chosen.label,
        "meta": dict(chosen.meta),
        "data": dict(env.data_notes()) if isinstance(env, HasDataNotes) else {},
    }

    def lines() -> list[Line]:
        arguments = ", ".join(f"{key}={value!r}" for key, value in data["arguments"].items())
        head = fields(
            [
                ("environment", f"{env.id} {env.version}, verifier {env.verifier_version}"),
                ("components", ", ".join(env.component_names())),
                ("arguments", arguments or "none"),
                *data["data"].items(),
                ("task", f"{chosen.id} ({split}, {count} tasks)"),
            ]
        )
        meta = [(key, value) for key, value in chosen.meta.items()]
        tail = fields([("gold answer", chosen.answer), ("label", chosen.label), *meta])
        return [*head, "", *_conversation(session.messages), *tail]

    return Result(data, lines, multiline=True)


@command(
    app,
    "try",
    'harness env try drugprot --answer "<think>…</think> \\\\boxed{E}"',
    "harness env try drugprot --answer - < answer.txt",
    "harness env try bioreason-go --model smollm2-135m",
)
def try_answer(
    name: NameArg,
    answer: Annotated[list[str], typer.Option(help="The reply; `-` reads it from standard input. One per turn.")] = [],  # noqa: B006
    task: TaskOption = "",
    split: SplitOption = "heldout",
    arg: ArgOption = [],  # noqa: B006
    model: Annotated[str, typer.Option(metavar="NAME", help="A base model answers, greedily, with 256 tokens.")] = "",
) -> Result:
    """Play one task and score the answer.

    On a terminal without --answer and --model the task is shown and the reply is read from the keyboard.
    """
    from harness.core.types import Episode, FinishReason

    if model and answer:
        raise UsageError("both --model and --answer are given", "leave one of them out")
    env, chosen, _ = _load(name, task, split, arg)
    session = env.start(chosen)
    messages, finish = _ask(session, model) if model else (_play(session, list(answer)), FinishReason.STOP)
    score = env.score(chosen, Episode(chosen.id, tuple(messages), finish))
    data = {
        "env": env.id,
        "task": chosen.id,
        "reply": messages[-1].content,
        "verifier": env.verifier_version,
        "reward": score.reward,
        "components": dict(score.components),
        "metrics": dict(score.metrics),
        "diagnostics": dict(score.diagnostics),
        "failure": score.failure,
        "answer": chosen.answer,
    }

    def lines() -> list[Line]:
        said = _conversation(messages[-1:]) if model else []
        return [*said, *_score_lines(score, chosen)]

    return Result(data, lines, multiline=bool(model))


@command(
    app,
    "score",
    "harness env score answers.jsonl --env bioreason-go",
    "harness env score answers.jsonl --env bioreason-go --split train --json",
)
def score_file(
    file: Annotated[Path, typer.Argument(help='JSON lines {"task": ID, "completion": TEXT}, optionally "finish".')],
    env: Annotated[str, typer.Option("--env", metavar="ENV", help="Environment of the tasks.")],
    split: SplitOption = "heldout",
    arg: ArgOption = [],  # noqa: B006
) -> Result:
    """Score completions that were made elsewhere, each with its task id.

    A line may hold "finish": "length" for a completion that was cut off; other members are ignored, so
    files of rollouts can be scored again. A task may occur several times.
    """
    from harness.cli.env_score import means, score_lines
    from harness.envs.registry import load_environment

    loaded = load_environment(env, parse_arguments(arg))
    rows = score_lines(file, loaded, split)
    summary = means(rows)
    counts = {"total": len(rows), "tasks": len({row["task"] for row in rows})}
    data = rows_document(rows, counts, False)
    data |= {"env": loaded.id, "split": split, "verifier": loaded.verifier_version, "means": summary}

    def lines() -> list[Line]:
        head = fields([("environment", f"{loaded.id}, verifier {loaded.verifier_version}"), *counts.items()])
        return [*head, *table(["mean of", "value"], list(summary.items()))]

    return Result(data, lines)


def _ask(session: Session, model: str) -> tuple[list[Message], FinishReason]:
    """Let a base model reply until the session is over, and return the conversation and how the last reply ended."""
    from harness.config.schema import ModelSection
    from harness.core.types import FinishReason, Message
    from harness.inference.chat import decode, render_chat
    from harness.inference.engine import TransformersEngine
    from harness.inference.models import load_model

    loaded = load_model(ModelSection(name=model))
    engine, messages, finish = TransformersEngine(loaded), list(session.messages), FinishReason.MAX_TURNS
    for _ in range(MAX_TURNS):
        prompt = render_chat(loaded.tokenizer, messages)
        completion = engine.generate([prompt], 1, REPLY_TOKENS, 0.0, [[0]])[0][0]
        reply, finish = decode(loaded.tokenizer, completion.token_ids, loaded.eos_ids), completion.finish_reason
        messages.append(Message("assistant", reply))
        following = session.step(reply)
        if following is None or finish is FinishReason.LENGTH:
            break
        messages += following
    return messages, finish


def _play(session: Session, answers: list[str]) -> list[Message]:
    """Feed the replies to the session until it is over, and return the whole conversation."""
    from harness.core.types import Message

    if not answers and not output.can_prompt():
        raise UsageError("no answer given", "pass --answer TEXT, or --answer - to read it from standard input")
    messages = list(session.messages)
    shown = 0
    for turn in range(MAX_TURNS):
        if turn < len(answers):
            reply = _read_all() if answers[turn] == "-" else answers[turn]
        elif turn and not output.can_prompt():
            return messages  # fewer answers than turns: the episode is scored as far as it went
        elif turn and answers:
            return messages
        else:
            for line in _conversation(messages[shown:]):
                output.echo(line, err=True, multiline=True)
            output.narrate("your reply, ended by Ctrl-D on an empty line:")
            reply = _read_all()
        messages.append(Message("assistant", reply))
        shown = len(messages)
        following = session.step(reply)
        if following is None:
            return messages
        messages += following
    return messages


def _read_all() -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed", "pass --answer TEXT")
    return sys.stdin.read()


def _load(name: str, task: str, split: str, arguments: list[str]) -> tuple[Environment, Task, int]:
    """Return the environment, the task asked for, and the number of tasks in the split."""
    from harness.envs.registry import load_environment

    env = load_environment(name, parse_arguments(arguments))
    tasks = env.tasks(split)
    if not tasks:
        raise NotFoundError(f"split {split!r} of {name} is empty", f"`harness env show {name}` shows another split")
    if not task:
        return env, tasks[0], len(tasks)
    for candidate in tasks:
        if candidate.id == task:
            return env, candidate, len(tasks)
    hint = did_you_mean(task, [t.id for t in tasks], f"ids look like {tasks[0].id}; --split chooses another split")
    raise NotFoundError(f"no task {task!r} in split {split!r} of {name}", hint)


def parse_arguments(pairs: list[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs; the value in TOML syntax, bare words are text.

    Raises:
        UsageError: when a pair has no `=`.
    """
    import tomllib

    result: dict[str, Any] = {}
    for pair in pairs:
        key, equals, raw = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"{pair!r} is no argument", "write --arg KEY=VALUE")
        try:
            result[key] = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            result[key] = raw
    return result


def _arguments(name: str) -> dict[str, Any]:
    """Return the arguments of an environment with their defaults."""
    from pydantic import BaseModel

    from harness.envs.registry import ENVIRONMENTS

    model = ENVIRONMENTS[name].args
    plain = {key: None if field.is_required() else field.default for key, field in model.model_fields.items()}
    return {key: value.model_dump() if isinstance(value, BaseModel) else value for key, value in plain.items()}


def _message(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _conversation(messages: Any) -> list[Line]:
    lines: list[Line] = []
    for message in messages:
        lines += [Styled(f"[{message.role}]", "strong"), message.content, ""]
    return lines


def _score_lines(score: Score, task: Task) -> list[Line]:
    def group(title: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(f"{title} {key}", value) for key, value in values.items()]

    right = score.failure is None
    verdict = Styled("right", "good") if right else Styled(f"failure class: {score.failure}", "bad")
    return fields(
        [
            ("task", task.id),
            ("reward", score.reward),
            *group("component", score.components),
            *group("metric", score.metrics),
            *group("note", score.diagnostics),
            ("gold answer", task.answer),
            ("verdict", verdict),
        ]
    )
