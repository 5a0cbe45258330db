"""The environments there are, and how to load one from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.core.errors import ConfigError, NotFoundError
from harness.core.names import did_you_mean
from harness.envs.base import Environment, check_disjoint, tasks_sha
from harness.envs.bioreason_go.environment import BioReasonGo, BioReasonGoArgs
from harness.envs.drugprot.environment import DrugProt, DrugProtArgs

__all__ = ["ENVIRONMENTS", "EnvSpec", "check_disjoint", "load_environment", "tasks_sha"]


Args = TypeVar("Args", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment of the registry.

    Args:
        load: builds it from the `args` table of a config; raises ConfigError on a bad one.
        args: the model of its arguments, for listings.
    """

    id: str
    load: Callable[[Mapping[str, Any]], Environment]
    summary: str
    args: type[BaseModel]


def parse_args(env: str, model: type[Args], args: Mapping[str, Any]) -> Args:
    """Return checked arguments.

    Raises:
        ConfigError: naming the first bad argument, with a suggestion for a misspelt one.
    """
    try:
        return model.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(name, model.model_fields)
            raise ConfigError(f"environment {env} has no argument {name[:80]!r}", hint) from None
        raise ConfigError(
            f"environment {env}, argument {name!r}: {first['msg']}", f"`harness env show {env}` lists the arguments"
        ) from None


def _drugprot(args: Mapping[str, Any]) -> Environment:
    return DrugProt(parse_args("drugprot", DrugProtArgs, args))


def _bioreason_go(args: Mapping[str, Any]) -> Environment:
    return BioReasonGo(parse_args("bioreason-go", BioReasonGoArgs, args))


ENVIRONMENTS: dict[str, EnvSpec] = {
    "drugprot": EnvSpec(
        "drugprot",
        _drugprot,
        "name the relation between a drug or chemical and a gene or protein in an abstract (13 choices)",
        DrugProtArgs,
    ),
    "bioreason-go": EnvSpec(
        "bioreason-go",
        _bioreason_go,
        "judge guessed Gene Ontology terms of a protein, answer with one JSON object of ids",
        BioReasonGoArgs,
    ),
}


def load_environment(env: str, args: Mapping[str, Any] | None = None) -> Environment:
    """Return the environment of this id, built from its arguments.

    Raises:
        NotFoundError: when there is no such environment.
        ConfigError: when an argument is unknown or has a bad value.
    """
    if env not in ENVIRONMENTS:
        raise NotFoundError(f"unknown environment {env[:80]!r}", did_you_mean(env, ENVIRONMENTS))
    return ENVIRONMENTS[env].load(args or {})
