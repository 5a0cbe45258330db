"""The table of commands and the group that imports a command's module only when it is called."""

from __future__ import annotations

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One line of `harness --help`: where the command lives and what it does.

    Args:
        module: of `harness.cli`, with the command in its `APPS`.
        summary: first line of the command's help.
        plain: a function of `harness.cli.views` that answers the command when it has no options but
            `--json`; it spares the import of typer.
    """

    module: str
    summary: str
    plain: str = ""


SECTIONS: dict[str, dict[str, Entry]] = {
    "The loop": {
        "init": Entry("programs", "Write a new research program into a folder."),
        "search-prompt": Entry("search_prompt", "Search an environment's prompt before RL; score it on unseen items."),
        "new-run": Entry("new_run", "Plan a run: one hypothesis, one change to its parent."),
        "launch": Entry("launch", "Train a run and evaluate it on the frozen protocol."),
        "eval": Entry("judge", "Evaluate a run, the base model or an adapter on the frozen protocol."),
        "report": Entry("judge", "Write the report of a run into analysis/."),
        "decide": Entry("judge", "Record what was concluded from a run, with the reason."),
        "promote": Entry("judge", "Apply the gates of GOAL.md and promote the run if they pass."),
    },
    "Look": {
        "status": Entry("look", "Show where the program stands and what is running.", "status"),
        "list": Entry("look", "List the runs of the program, newest first.", "list_runs"),
        "show": Entry("look", "Show everything the ledger knows about a run."),
        "diff": Entry("look", "Compare two runs: their change set, held-out results and decisions."),
        "log": Entry("log", "Show the events of the ledger, newest first."),
        "lineage": Entry("lineage", "Show the parent tree of the runs, with decisions and gains."),
        "curves": Entry("curves", "Compare the learning curves of several runs, imported ones too."),
        "query": Entry("query", "Ask the ledger in SQL, read-only."),
        "export": Entry("export", "Write runs, evals, events or metrics as CSV, Parquet or JSON."),
        "rollouts": Entry("rollouts", "Page through the stored rollouts of a run."),
        "watch": Entry("watch", "Show a run's record to the watchdogs, as they would have seen it."),
        "model": Entry("model", "Show what a model weighs, and check that it trains and samples as one."),
        "env": Entry("env", "List environments, show a task as the model sees it, score an answer."),
    },
    "Running processes": {
        "wait": Entry("processes", "Wait until a run has ended."),
        "stop": Entry("processes", "Ask a running launch to stop; it can be resumed."),
        "recover": Entry("recover", "Close a run whose process died without a word."),
    },
    "Upkeep": {
        "doctor": Entry("doctor", "Check this machine and this program, and say what to do."),
        "prune": Entry("prune", "Delete checkpoints and rollouts of decided runs."),
        "amend": Entry("programs", "Record a change of GOAL.md, CONTEXT.md or PLAN.md, with the reason."),
        "import": Entry("imports", "Read runs of W&B, TensorBoard, MLflow, TRL or verifiers into the ledger."),
        "note": Entry("programs", "Add an observation to a run, or to the program, in the ledger."),
        "tag": Entry("marks", "Give a run a name to find it by, or take it away."),
        "next": Entry("marks", "Leave an idea for the next run, or show the open ones."),
        "thread": Entry("programs", "Rewrite the generated block of THREAD.md."),
        "ledger": Entry("ledger", "Verify the ledger, and merge it in git."),
        "help": Entry("help", "Show a help topic or the help of a command."),
    },
}
COMMANDS: dict[str, Entry] = {name: entry for section in SECTIONS.values() for name, entry in section.items()}
INTRO = "Run a post-training program on an open model and know which of its runs is really better."


def root_help() -> str:
    """Return the text of `harness --help`, from the table alone."""
    width = max(len(name) for name in COMMANDS)
    lines = ["Usage: harness COMMAND [OPTIONS]", "", f"  {INTRO}", ""]
    for title, entries in SECTIONS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<{width}}  {entry.summary}" for name, entry in entries.items()]
        lines.append("")
    lines += [
        "Options:",
        "  --version             Print the version and exit.",
        "  --install-completion  Install completion for the current shell.",
        "  --show-completion     Print the completion script of the current shell.",
        "  --help                Show this text and exit.",
        "",
        "Every command takes --help and --json. `harness help exit-codes` lists the exit codes,",
        "`harness help environment` the environment variables.",
        "",
        "Examples:",
        "  harness init my-program",
        '  harness new-run --hypothesis "Alpha 64 learns faster than 32" --set lora.alpha=64',
        "  harness launch run-002",
    ]
    return "\n".join(lines)


def load_command(name: str) -> Any:
    """Import the module of a command and return its click command.

    Args:
        name: a key of `COMMANDS`.
    """
    import importlib

    import typer.main

    module = importlib.import_module(f"harness.cli.{COMMANDS[name].module}")
    app = module.APPS[name]
    command = typer.main.get_command(app)
    command.name = name
    return command


def completion_group() -> Any:
    """Return all commands as one typer group: what shell completion walks through."""
    import typer.main
    from typer.core import TyperGroup

    from harness.cli.shared import new_app

    class LazyGroup(TyperGroup):
        """A group that knows its commands by name and imports them on demand."""

        def list_commands(self, ctx: Any) -> list[str]:
            return list(COMMANDS)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return load_command(cmd_name) if cmd_name in COMMANDS else None

    app = new_app(cls=LazyGroup, add_completion=True)

    @app.callback(help=INTRO)
    def root() -> None:
        """Hold the completion options; the commands do the work."""

    return typer.main.get_command(app)
