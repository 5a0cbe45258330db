"""GOAL.md, CONTEXT.md and PLAN.md: prose for people around one TOML block for the tool."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness.config.load import check_key, read_text
from harness.config.validate import parse_toml, validate
from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError, InfraError, NotFoundError
from harness.core.files import disk_hint
from harness.core.names import did_you_mean
from harness.program.model import DOCUMENTS, Program

Document = TypeVar("Document", bound=BaseModel)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*([^`]*)$")
_HINT = "the page needs exactly one block that begins with ```toml; `harness init` writes a template"

Finite = Annotated[float, Field(allow_inf_nan=False)]
Confidence = Annotated[float, Field(gt=0.5, lt=1)]


class Page(BaseModel):
    """Base of everything read from a page: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GoalGate(Page):
    """How a gain is judged."""

    baseline: Literal["base_run_prompt", "base_shipped_prompt"] = Field(
        "base_run_prompt", description="the base model under the run's prompt, or under the environment's shipped one"
    )
    confidence: Confidence = Field(0.95, description="level of every interval")


class GoalEnv(Page):
    """What a run must reach on one environment."""

    id: str
    metric: str = Field("reward", description="reward, or the name of a component")
    threshold: Finite = Field(description="the held-out mean must be at least this")
    min_gain: Finite = Field(0.0, description="the lower bound of the paired gain must be above this")
    not_below: tuple[str, ...] = Field((), description="metrics that must not get worse")


class Goal(Page):
    """The block of GOAL.md."""

    gate: GoalGate = GoalGate()
    env: tuple[GoalEnv, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Goal:
        names = [(env.id, env.metric) for env in self.env]
        if len(set(names)) != len(names):
            raise ValueError("two [[env]] tables set a goal for the same environment and metric")
        return self


class ContextModel(Page):
    """The base checkpoint every run starts from."""

    name: str
    revision: str | None = None


class ContextEnv(Page):
    """How one environment is evaluated; the same items for every run."""

    id: str
    items: Annotated[int, Field(ge=1)] = Field(description="tasks, from the start of the split")
    split: str = "heldout"
    samples: Annotated[int, Field(ge=1)] = Field(1, description="completions per task")
    max_tokens: Annotated[int, Field(ge=1)] = Field(description="tokens per turn")
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(1.0, description="0 is greedy")
    max_turns: Annotated[int, Field(ge=1, le=32)] = Field(1, description="replies per episode")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment for evaluation")

    def described(self) -> dict[str, Any]:
        """Return the protocol as events record it; where a file lies is a machine's own affair."""
        facts = self.model_dump(mode="json", exclude={"id"} if self.max_turns > 1 else {"id", "max_turns"})
        return facts | {"args": {key: value for key, value in facts["args"].items() if key != "path"}}


class ContextEval(Page):
    """The held-out protocol."""

    interval: Annotated[int, Field(ge=1)] = Field(10, description="steps between evaluations")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of evaluation sampling, the same for every run")
    confidence: Confidence = Field(0.95, description="level of the intervals shown")
    env: tuple[ContextEnv, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> ContextEval:
        ids = [env.id for env in self.env]
        if len(set(ids)) != len(ids):
            raise ValueError("two [[eval.env]] tables name the same environment")
        return self


class Context(Page):
    """The block of CONTEXT.md."""

    model: ContextModel
    eval: ContextEval
    frozen: dict[str, Any] = Field(default_factory=dict, description="config keys and the value they must have")

    @field_validator("frozen")
    @classmethod
    def _known_keys(cls, frozen: dict[str, Any]) -> dict[str, Any]:
        flat = dict(_flatten(frozen))
        for key in flat:
            _known(key)
        return flat

    def frozen_values(self) -> dict[str, Any]:
        """Return every config key a run may not change: the base checkpoint and the `[frozen]` table."""
        return {"model.name": self.model.name, "model.revision": self.model.revision, **self.frozen}

    def eval_env(self, env: str) -> ContextEnv | None:
        """Return the protocol of one environment; None when it is not evaluated."""
        return next((item for item in self.eval.env if item.id == env), None)


class Range(Page):
    """What values a key may take: a list, or bounds; with neither, any value."""

    values: list[Any] | None = None
    min: Finite | None = None
    max: Finite | None = None

    @model_validator(mode="before")
    @classmethod
    def _list(cls, data: Any) -> Any:
        return {"values": data} if isinstance(data, list) else data

    def holds(self, value: Any) -> bool:
        """Say whether a value lies in the range; numbers compare as numbers, true and 1 differ."""
        if self.values is not None:
            return any(isinstance(item, bool) == isinstance(value, bool) and item == value for item in self.values)
        if self.min is None and self.max is None:
            return True
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    def __str__(self) -> str:
        if self.values is not None:
            return "one of " + ", ".join(map(str, self.values))
        low = "" if self.min is None else f"from {self.min:g}"
        high = "" if self.max is None else f"up to {self.max:g}"
        return f"{low} {high}".strip() or "any value"


class Plan(Page):
    """The block of PLAN.md."""

    search_space: dict[str, Range] = Field(default_factory=dict, description="config keys a run may change")
    nuisance: tuple[str, ...] = Field((), description="keys that may differ without being a hypothesis; may hold *")

    @field_validator("search_space")
    @classmethod
    def _known_keys(cls, space: dict[str, Range]) -> dict[str, Range]:
        for key in space:
            _known(key)
        return space

    @field_validator("nuisance")
    @classmethod
    def _known_nuisance(cls, nuisance: tuple[str, ...]) -> tuple[str, ...]:
        for key in nuisance:
            _known(key)
        return nuisance

    def range_of(self, key: str) -> Range | None:
        """Return what PLAN.md allows for a dotted key; None when the key is outside the search space."""
        if key in self.search_space:
            return self.search_space[key]
        return next((found for pattern, found in self.search_space.items() if fnmatchcase(key, pattern)), None)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in table.items():
        nested = isinstance(value, Mapping)
        flat += _flatten(value, f"{prefix}{key}.") if nested else [(prefix + key, value)]
    return flat


def _known(key: str) -> None:
    try:
        check_key(key)
    except ConfigError as error:
        raise ValueError(f"{error.message} ({error.hint})") from None


def toml_block(text: str, source: str) -> tuple[str, int]:
    """Return the one fenced toml block of a page and the line its content begins on.

    Blocks of other languages are prose, and what they hold is not looked at.

    Raises:
        ConfigError: when there is none, more than one, or one that is never closed.
    """
    blocks: list[tuple[int, list[str]]] = []
    fence, is_toml = "", False
    for number, line in enumerate(text.split("\n"), 1):
        match = _FENCE.match(line)
        if not fence and match:
            fence, is_toml = match[1], match[2].split()[:1] == ["toml"]
            if is_toml:
                blocks.append((number, []))
        elif fence and match and match[1].startswith(fence) and not match[2].strip():
            fence = ""
        elif fence and is_toml:
            blocks[-1][1].append(line)
    if fence:
        raise ConfigError(f"{source} has a block that is never closed with {fence}", _HINT)
    if not blocks:
        raise ConfigError(f"{source} has no ```toml block", _HINT)
    if len(blocks) > 1:
        lines = " and ".join(str(number) for number, _ in blocks)
        raise ConfigError(f"{source} has {len(blocks)} ```toml blocks, on lines {lines}", _HINT)
    opened, content = blocks[0]
    return "\n".join(content), opened + 1


def parse_page(model: type[Document], text: str, source: str) -> Document:
    """Read a page's block into a model; line numbers in errors are those of the page.

    Raises:
        ConfigError: naming the page, the line, the key and, for a misspelt key, a suggestion.
    """
    block, line = toml_block(text, source)
    padded = "\n" * (line - 1) + block + "\n"
    return validate(model, parse_toml(padded, source), source, padded)


def _read(model: type[Document], path: Path) -> Document:
    text = read_text(path, "the page", "`git checkout -- " + path.name + "` brings it back; `harness init` writes one")
    return parse_page(model, text, path.name)


def read_goal(program: Program) -> Goal:
    """Read GOAL.md: what every promotion must reach."""
    return _read(Goal, program.goal)


def read_context(program: Program) -> Context:
    """Read CONTEXT.md: the protocol no run may change."""
    return _read(Context, program.context)


def read_plan(program: Program) -> Plan:
    """Read PLAN.md: the rules of the loop and the bounded search space."""
    return _read(Plan, program.plan)


READERS: dict[str, Callable[[Program], BaseModel]] = {
    "GOAL.md": read_goal,
    "CONTEXT.md": read_context,
    "PLAN.md": read_plan,
}


def check_documents(program: Program) -> tuple[Goal, Context, Plan]:
    """Read all three pages and check that they fit each other.

    Raises:
        ConfigError: when a page is wrong, or GOAL.md asks for an environment CONTEXT.md does not evaluate.
    """
    goal, context, plan = read_goal(program), read_context(program), read_plan(program)
    evaluated = [env.id for env in context.eval.env]
    for env in goal.env:
        if env.id not in evaluated:
            raise ConfigError(
                f"GOAL.md sets a goal for {env.id!r}, which CONTEXT.md does not evaluate",
                did_you_mean(env.id, evaluated),
            )
    return goal, context, plan


def protocol_hashes(program: Program) -> dict[str, str]:
    """Return the SHA-256 of the bytes of GOAL.md, CONTEXT.md and PLAN.md as `goal`, `context`, `plan`.

    Raises:
        NotFoundError: when one of them is missing.
        InfraError: when one cannot be read, such as a folder of that name.
    """
    hashes: dict[str, str] = {}
    for name in DOCUMENTS:
        try:
            hashes[document_key(name)] = sha256_hex((program.root / name).read_bytes())
        except FileNotFoundError:
            raise NotFoundError(f"{name} is missing in {program.root}", f"`git checkout -- {name}`") from None
        except OSError as error:
            raise InfraError(f"cannot read {name} in {program.root}: {error.strerror}", disk_hint(error)) from None
    return hashes


def document_key(name: str) -> str:
    """Return the key a page has in the ledger: `GOAL.md` is `goal`."""
    return name.removesuffix(".md").lower()
