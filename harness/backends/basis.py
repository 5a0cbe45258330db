"""What a run stands on, gathered from the code and the data as they are now."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import harness
from harness.config.changes import Basis
from harness.config.load import resolved
from harness.config.schema import EnvSection, RunConfig
from harness.core.canonical import content_sha
from harness.core.git import git_line
from harness.envs.base import Environment, merge_components, tasks_sha
from harness.envs.registry import ENVIRONMENTS, load_environment
from harness.ledger import RunState
from harness.program import Context, ContextEnv, Program, prompt_sha, read_context, read_prompt
from harness.training.version import TRAINING_VERSION

TRAIN_SPLIT = "train"


class BasisReader:
    """Gathers bases; environments and hashes are read once, since loading tasks takes a while.

    Args:
        program: where searched prompts live.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._loaded: dict[str, tuple[Environment, dict[str, Any]]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._code: dict[str, Any] | None = None

    def read(self, config: RunConfig, context: Context) -> Basis:
        """Return the basis of a config under a protocol.

        Raises:
            NotFoundError: for an unknown environment, split or prompt.
            ConfigError: for a bad argument of an environment or an unknown prompt component.
        """
        facts: dict[str, dict[str, Any]] = {}
        prompts: dict[str, str] = {}
        for section in config.env:
            facts[section.id] = dict(self._training(section))
            prompts[section.id] = self._prompt(section)
        for protocol in context.eval.env:
            facts.setdefault(protocol.id, {}).update(self._evaluation(protocol, context))
        if self._code is None:
            self._code = code_facts()
        return Basis(resolved(config), facts, prompts, self._code)

    def _environment(self, env: str, args: dict[str, Any]) -> tuple[Environment, dict[str, Any]]:
        key = content_sha([env, args])
        if key not in self._loaded:
            environment = load_environment(env, args)
            full = ENVIRONMENTS[env].args.model_validate(args).model_dump(mode="json")
            self._loaded[key] = (environment, full)
        return self._loaded[key]

    def _tasks_sha(self, env: str, args: dict[str, Any], split: str) -> dict[str, Any]:
        key = content_sha([env, args, split])
        if key not in self._facts:
            environment, _ = self._environment(env, args)
            self._facts[key] = {"sha": tasks_sha(environment, split)}
        return self._facts[key]

    def _training(self, section: EnvSection) -> dict[str, Any]:
        environment, full = self._environment(section.id, section.args)
        return {
            "args": full,
            "version": environment.version,
            "verifier": environment.verifier_version,
            "tasks_sha": self._tasks_sha(section.id, section.args, TRAIN_SPLIT)["sha"],
        }

    def _evaluation(self, protocol: ContextEnv, context: Context) -> dict[str, Any]:
        environment, full = self._environment(protocol.id, protocol.args)
        frozen = {**protocol.model_dump(mode="json"), "args": full}
        sampling = {"seed": context.eval.seed, "interval": context.eval.interval}
        return {
            "eval_protocol": content_sha({**frozen, **sampling}),
            "eval_verifier": environment.verifier_version,
            "eval_tasks_sha": self._tasks_sha(protocol.id, protocol.args, protocol.split)["sha"],
        }

    def _prompt(self, section: EnvSection) -> str:
        environment, _ = self._environment(section.id, section.args)
        shipped = environment.components()
        replaced = read_prompt(self._program, section.id, section.prompt)
        return prompt_sha(merge_components(shipped, replaced))


def basis_of(program: Program, config: RunConfig, context: Context | None = None) -> Basis:
    """Return what a config stands on now: environments, verifiers, task sets, prompts and code.

    Args:
        program: the program.
        config: the run's config.
        context: the protocol; read from CONTEXT.md when None.

    Raises:
        NotFoundError: for an unknown environment, split or prompt.
        ConfigError: for a bad argument of an environment or an unknown prompt component.
    """
    return BasisReader(program).read(config, context or read_context(program))


def stored_basis(run: RunState) -> Basis | None:
    """Return what a run really ran with: of its last attempt, else of its creation; None for imports without one."""
    started = next((attempt["basis"] for attempt in reversed(run.attempts) if attempt.get("basis")), None)
    data = started or run.created.get("basis")
    return Basis.from_json(data) if data and data.get("config") else None


def code_facts(package: Path | None = None) -> dict[str, Any]:
    """Return the last commit that touched `harness/`, a hash over its files, and the version of the training maths.

    Args:
        package: the package folder; the imported one when None.
    """
    folder = package or Path(harness.__file__).parent
    return {
        "commit": _last_commit(folder),
        "harness_sha": _tree_sha(folder),
        "training_version": TRAINING_VERSION,
    }


def _last_commit(folder: Path) -> str | None:
    """Return the last commit that touched a folder; None outside git, or where git does not track it."""
    return git_line(folder, "log", "-1", "--format=%H", "--", ".")


def _tree_sha(folder: Path) -> str:
    """Return one hash over the names and bytes of all files that belong to the package."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.is_file() and not hidden:
            digest.update(name.as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
