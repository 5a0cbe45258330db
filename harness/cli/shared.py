"""What command modules share: the typer settings and the common options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from harness.cli.complete import known_runs
from harness.cli.output import Result, settings, write_result

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and touch nothing.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Rows shown at most.")]
All = Annotated[bool, typer.Option("--all", help="Show all rows.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]


def complete_runs(incomplete: str) -> list[str]:
    """Return the run ids that begin with what was typed; nothing outside a program."""
    return [run for run in known_runs() if run.startswith(incomplete)]


RunArg = Annotated[str, typer.Argument(metavar="RUN", help="A run id such as run-002.", autocompletion=complete_runs)]
RunChoice = Annotated[
    str, typer.Argument(metavar="RUN", help="A run id; all runs when left out.", autocompletion=complete_runs)
]


def _examples(lines: Iterable[str]) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def new_app(*examples: str, **kwargs: Any) -> typer.Typer:
    """Return a typer application in the house settings: plain text, no pretty tracebacks.

    Args:
        examples: command lines for the end of a group's help.
        kwargs: passed to `typer.Typer`.
    """
    kwargs.setdefault("add_completion", False)
    if examples:
        kwargs["epilog"] = _examples(examples)
    return typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
        **kwargs,
    )


class _Plain:
    """Turn the text of an option into str, int or float without pydantic.

    Typer converts every value through a pydantic adapter, whose import alone would double the time of
    `harness list`. Enumerations and paths still take that way.
    """

    def __init__(self, kind: type, minimum: float | None) -> None:
        self.kind, self.minimum = kind, minimum

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if isinstance(value, list | tuple):
            return [self._one(item, param, ctx) for item in value]
        return self._one(value, param, ctx)

    def _one(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            number = self.kind(value)
        except ValueError:
            noun = "a whole number" if self.kind is int else "a number"
            raise typer.BadParameter(f"{value[:80]!r} is not {noun}", ctx=ctx, param=param) from None
        if self.kind is str and any("\ud800" <= char <= "\udfff" for char in number):
            raise typer.BadParameter("it is not UTF-8 text", ctx=ctx, param=param)
        if self.kind is int and abs(number) >= 2**63:
            raise typer.BadParameter("it does not fit into 64 bits", ctx=ctx, param=param)
        if self.minimum is not None and not number >= self.minimum:  # so that NaN is refused too
            raise typer.BadParameter(f"{value} is below {self.minimum:g}", ctx=ctx, param=param)
        return number


def _lean(param: Any) -> None:
    """Give a parameter of a plain type its converter, before typer builds one."""
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    kind = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    if kind in (str, int, float, bool) and hasattr(param, "_runtime_param"):
        param._runtime_param = _Plain(kind, param.min)


class LeanCommand(TyperCommand):
    """A command whose plain options need no pydantic."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, `--help` included, each with its converter."""
        params = super().get_params(ctx)
        for param in params:
            _lean(param)
        return params


def command(app: typer.Typer, name: str, *examples: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register a function as a command that takes `--json` and shows the `Result` it returns.

    Args:
        app: the typer application.
        name: the command's name.
        examples: command lines for the end of its help; at least one.
    """

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def run(as_json: bool = False, **kwargs: Any) -> int:
            settings.json = as_json or settings.json
            return write_result(function(**kwargs))

        own = inspect.signature(function, eval_str=True)
        flag = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()]
        run.__signature__ = own.replace(parameters=[*parameters, flag])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*parameters, flag]}
        del run.__wrapped__  # typer must read the signature above, not the function's own
        app.command(name, cls=LeanCommand, epilog=_examples(examples))(run)
        return function

    return register
