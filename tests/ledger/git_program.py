"""A program in a real git repository, with runs made on branches, for the tests of merges."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.cli.checking import check_program
from harness.config.load import config_sha, load_config, resolved
from harness.core.canonical import sha256_file
from harness.ledger import Ledger, State
from harness.ledger.verify import Finding
from harness.program import Program, init_program

ROOT = Path(__file__).parents[2]


class Repository:
    """A clone of a program.

    Args:
        root: its folder.
        path: the PATH that git runs with; it holds a `harness`.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.root = root
        self.path = path

    @classmethod
    def init(cls, tmp: Path) -> Repository:
        """Make a program with a first commit; `harness` for git is this very package."""
        tools = tmp / "bin"
        tools.mkdir()
        tool = tools / "harness"
        tool.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m harness "$@"\n')
        tool.chmod(0o755)
        init_program(tmp / "program")
        made = cls(tmp / "program", f"{tools}{os.pathsep}{os.environ['PATH']}")
        made.commit("start")
        return made

    def git(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run git; its output is kept."""
        who = {f"GIT_{role}_{what}": "t@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        env = dict(
            os.environ, PATH=self.path, GIT_CONFIG_GLOBAL=str(self.root / ".git/no-config"), GIT_EDITOR="true", **who
        )
        done = subprocess.run(["git", *arguments], cwd=self.root, env=env, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def commit(self, message: str) -> None:
        """Commit everything."""
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def branch(self, name: str, start: str = "main") -> None:
        """Check out a new branch."""
        self.git("checkout", "-q", "-b", name, start)

    def without_driver(self) -> None:
        """Make this clone one in which nobody ran `harness ledger install`, as GitHub's own is."""
        self.git("config", "--remove-section", "merge.harness-ledger")

    @property
    def program(self) -> Program:
        """The program."""
        return Program(self.root)

    @property
    def ledger(self) -> Ledger:
        """Its ledger, opened anew."""
        return Ledger(self.root / "runs.jsonl")

    def state(self) -> State:
        """Return the fold of the ledger."""
        return self.ledger.state()

    def findings(self, base: str | None = None) -> list[Finding]:
        """Return what verify says."""
        return check_program(self.program, base, [], False).findings

    def errors(self, base: str | None = None) -> list[str]:
        """Return the kinds of what verify calls an error."""
        return [finding.kind for finding in self.findings(base) if finding.severity == "error"]

    def note(self, run: str, text: str) -> None:
        """Append a note."""
        self.ledger.append(run, "noted", {"text": text})

    def make_run(self, run: str, hypothesis: str, *, parent: str | None = None, links: bool = True) -> None:
        """Make a run with a config, an eval with committed items, and a report."""
        config = self.root / f"rl/{run}.toml"
        names = f'parent = "{parent}"\n' if parent else ""
        config.write_text(f'# why: {hypothesis}\n{names}hypothesis = "{hypothesis}"\n\n[[env]]\nid = "drugprot"\n')
        loaded = load_config(config)
        created: dict[str, Any] = {
            "type": "training",
            "hypothesis": hypothesis,
            "parent": parent,
            "config": f"rl/{run}.toml",
        }
        created |= {"lever": None, "replicate_of": None, "config_sha": config_sha(loaded)}
        created |= {"basis": {"config": resolved(loaded)}}
        state = self.state()
        if links and parent:
            created["links"] = {parent: state.runs[parent].root}
        self.ledger.append(run, "created", created)
        self.ledger.append(run, "started", {"attempt": 1, "host": "elsewhere", "config_sha": config_sha(loaded)})
        items = self.root / f"analysis/{run}/evals/step_1.policy.drugprot.jsonl"
        items.parent.mkdir(parents=True)
        items.write_text(f'{{"task": "{hypothesis}"}}\n')
        (items.parents[1] / "report.md").write_text(f"# {run}: {hypothesis}\n")
        (items.parents[1] / f"{hypothesis.split()[0]}.txt").write_text("only this run has it\n")
        evaluated: dict[str, Any] = {
            "attempt": 1,
            "subject": "policy",
            "step": 1,
            "env": "drugprot",
            "prompt": "run",
            "n": 1,
        }
        evaluated |= {"requested": 1, "failures": {}, "means": {}, "gain": {}}
        evaluated |= {"file": items.relative_to(self.root).as_posix(), "file_sha": sha256_file(items)}
        self.ledger.append(run, "evaluated", evaluated)
        self.ledger.append(run, "finished", {"attempt": 1, "outcome": "completed"})


def summary(state: State) -> dict[str, list[str]]:
    """Return the hypothesis and the kinds of every run: what must be equal however branches met."""
    return {name: [run.hypothesis, *(event.kind for event in run.events)] for name, run in state.runs.items()}
