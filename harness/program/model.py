"""A research program on disk: its root and where everything in it lives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.core.errors import NotFoundError
from harness.core.ids import check_name, run_number

DOCUMENTS = ("GOAL.md", "CONTEXT.md", "PLAN.md")
"""The pages people write; their hashes stand in the ledger."""
_MARKS = (*DOCUMENTS, "rl")


@dataclass(frozen=True, slots=True)
class Program:
    """A program folder; every path of it comes from here.

    Args:
        root: the absolute folder that holds GOAL.md.
    """

    root: Path

    @classmethod
    def find(cls, start: Path | None = None, environ: Mapping[str, str] | None = None) -> Program:
        """Find the program that a folder belongs to, walking up.

        Args:
            start: where to begin; the current folder when None. `HARNESS_PROGRAM` overrides both.
            environ: environment variables; the process's own when None.

        Raises:
            NotFoundError: when no folder above is a program, naming what a near miss lacks.
        """
        override = (os.environ if environ is None else environ).get("HARNESS_PROGRAM")
        if override:
            root = Path(os.path.realpath(os.path.expanduser(override)))
            _check_marks(root, "HARNESS_PROGRAM names it; unset that or name a program folder")
            return cls(root)
        begin = Path(os.path.realpath(start or Path.cwd()))
        for folder in (begin, *begin.parents):
            present = [mark for mark in _MARKS if (folder / mark).exists()]
            if len(present) >= 2:  # one file named PLAN.md is no program; two of four are a damaged one
                _check_marks(
                    folder, "`git checkout -- <file>` brings a deleted file back; `harness init` makes a new program"
                )
                return cls(folder)
        raise NotFoundError(
            f"{begin} is not inside a research program (a folder with GOAL.md, CONTEXT.md, PLAN.md and rl/)",
            "`harness init my-program` makes one, then `cd my-program`",
        )

    @property
    def goal(self) -> Path:
        """GOAL.md: what a run must reach to be promoted."""
        return self.root / "GOAL.md"

    @property
    def context(self) -> Path:
        """CONTEXT.md: the frozen protocol."""
        return self.root / "CONTEXT.md"

    @property
    def plan(self) -> Path:
        """PLAN.md: the rules of the loop and the search space."""
        return self.root / "PLAN.md"

    @property
    def thread(self) -> Path:
        """THREAD.md: where the program stands."""
        return self.root / "THREAD.md"

    @property
    def ledger(self) -> Path:
        """runs.jsonl: the append-only ledger."""
        return self.root / "runs.jsonl"

    @property
    def rl(self) -> Path:
        """The folder of run configs."""
        return self.root / "rl"

    @property
    def analysis(self) -> Path:
        """The folder of committed reports."""
        return self.root / "analysis"

    @property
    def outputs(self) -> Path:
        """The git-ignored folder of heavy artefacts."""
        return self.root / "outputs"

    def config_path(self, run: str) -> Path:
        """Return where a run's config lives; `run` must be a run id."""
        run_number(run)
        return self.rl / f"{run}.toml"

    def run_dir(self, run: str) -> Path:
        """Return a run's folder under outputs/; `run` must be a run id."""
        run_number(run)
        return self.outputs / run

    def analysis_dir(self, run: str) -> Path:
        """Return a run's report folder; `run` must be a run id."""
        run_number(run)
        return self.analysis / run

    def prompt_path(self, env: str, prompt: str) -> Path:
        """Return where a searched prompt of an environment lives."""
        check_name(env, "environment")
        check_name(prompt, "prompt")
        return self.rl / "prompts" / env / f"{prompt}.toml"

    def relative(self, path: Path) -> str:
        """Spell a path inside the program as the ledger does: relative, with forward slashes."""
        return path.relative_to(self.root).as_posix()


def _check_marks(folder: Path, hint: str) -> None:
    missing = [mark for mark in _MARKS if not (folder / mark).exists()]
    if missing:
        names = ", ".join(f"{mark}/" if mark == "rl" else mark for mark in missing)
        raise NotFoundError(f"{folder} is not a whole research program: {names} is missing", hint)
