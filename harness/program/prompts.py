"""Searched prompts: the texts that a run uses instead of an environment's shipped ones."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from harness.config.load import read_text
from harness.config.schema import RunConfig
from harness.config.validate import parse_toml, validate
from harness.core.canonical import content_sha
from harness.program.model import Program

SHIPPED = "shipped"


class PromptFile(BaseModel):
    """A file `rl/prompts/<env>/<id>.toml`; `[components]` holds the texts by component name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field("", description="where the prompt comes from: a prompt-search run, or who wrote it")
    components: dict[str, str] = Field(min_length=1)


def read_prompt(program: Program, env: str, prompt: str) -> dict[str, str] | None:
    """Return the texts of a prompt; None for `shipped`, which keeps the environment's own.

    Raises:
        NotFoundError: when there is no such prompt.
        ConfigError: when its file is wrong.
    """
    if prompt == SHIPPED:
        return None
    path = program.prompt_path(env, prompt)
    text = read_text(path, "prompt", f'use prompt = "shipped", or put the texts in {program.relative(path)}')
    return dict(validate(PromptFile, parse_toml(text, str(path)), str(path), text).components)


def run_prompts(program: Program, config: RunConfig) -> dict[str, dict[str, str] | None]:
    """Return per environment the texts the run's prompt replaces; None for the shipped prompt."""
    return {section.id: read_prompt(program, section.id, section.prompt) for section in config.env}


def prompt_sha(shipped: Mapping[str, str], replaced: Mapping[str, str] | None = None) -> str:
    """Return the hash of the texts a run uses: the shipped ones with some of them replaced."""
    return content_sha({**shipped, **(replaced or {})})
