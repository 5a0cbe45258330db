"""`harness help`: topics that no single command's help can carry."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from harness.cli.main import BROKEN_PIPE
from harness.cli.output import Line, Result, Styled, fields
from harness.cli.root import COMMANDS, load_command, root_help
from harness.cli.shared import command, new_app
from harness.core.errors import ExitCode, NotFoundError
from harness.core.names import did_you_mean

EXIT_CODES: dict[int, str] = {
    ExitCode.OK: "done; the answer, if there was a question, is yes",
    ExitCode.NO: "the answer is no: a gate failed, verify found damage, a report is stale",
    ExitCode.USAGE: "bad arguments, a bad configuration, an unknown name, a missing extra, a broken rule",
    ExitCode.CANNOT_TELL: "cannot tell: evidence is missing, so there is no verdict",
    ExitCode.STOPPED: "a watchdog or a budget stopped the run",
    ExitCode.LEDGER_CORRUPT: "the ledger is damaged",
    ExitCode.INTERNAL: "a bug in harness",
    ExitCode.INFRA: "the machine failed: disk full, corrupt adapter, engine lost, output lost",
    ExitCode.BUSY: "another process holds what is needed, or it is not over yet; try again",
    ExitCode.INTERRUPTED: "interrupted (SIGINT)",
    BROKEN_PIPE: "the reader of the output went away (SIGPIPE)",
    ExitCode.TERMINATED: "terminated (SIGTERM, or SIGHUP of a terminal that closed)",
}
ENVIRONMENT: dict[str, str] = {
    "HARNESS_PROGRAM": "folder of the program, instead of the one around the current folder",
    "HARNESS_CACHE": "folder of converted models and device locks, instead of ~/.cache/harness",
    "HARNESS_ACTOR": "who acts, as KIND:NAME with KIND person, agent or ci; recorded in the ledger",
    "HARNESS_NO_INPUT": "when set, nothing is ever asked",
    "HARNESS_DRUGPROT": "folder or file with the official DrugProt release, when env.drugprot.args.path is not set",
    "HARNESS_STORE": "file in which the processes of a run find each other; a launch sets it for those it starts",
    "HARNESS_BIOREASON_GO": "file or folder of bioreason-go records, when args.path and args.hub are not set",
    "HARNESS_DEBUG": "when set, a bug also prints its traceback",
    "NO_COLOR": "when set, no colour on a terminal; TERM=dumb has the same effect",
}
TOPICS: dict[str, tuple[str, dict[str, str]]] = {
    "exit-codes": ("Exit codes of every command", {str(code): text for code, text in EXIT_CODES.items()}),
    "environment": ("Environment variables", ENVIRONMENT),
}

app = new_app()
APPS = {"help": app}


@command(app, "help", "harness help exit-codes", "harness help environment", "harness help launch")
def show_help(
    topic: Annotated[str, typer.Argument(help="exit-codes, environment, or a command.")] = "",
) -> Result:
    """Show a help topic or the help of a command."""
    if not topic:
        return Result({"commands": {name: entry.summary for name, entry in COMMANDS.items()}}, [root_help()], 0, True)
    if topic in TOPICS:
        title, entries = TOPICS[topic]
        lines: list[Line] = [Styled(title, "strong"), *fields((key, text) for key, text in entries.items())]
        return Result({"topic": topic, "entries": entries}, lines)
    if topic in COMMANDS:
        text = help_of(topic)
        return Result({"command": topic, "help": text}, [text], multiline=True)
    names = [*TOPICS, *COMMANDS]
    raise NotFoundError(f"no help on {topic!r}", did_you_mean(topic, names, "`harness --help` lists the commands"))


def help_of(name: str, width: int = 100) -> str:
    """Return the help text of a command, or of a group and all its commands.

    Args:
        name: a command of the root.
        width: columns of the text.
    """
    import typer.core

    loaded = load_command(name)
    texts = [_help_text(loaded, f"harness {name}", width)]
    if isinstance(loaded, typer.core.TyperGroup):
        texts += [_help_text(sub, f"harness {name} {key}", width) for key, sub in loaded.commands.items()]
    return "\n\n".join(texts)


def _help_text(loaded: Any, path: str, width: int) -> str:
    context = loaded.make_context(path, [], resilient_parsing=True, terminal_width=width, max_content_width=width)
    return loaded.get_help(context)
