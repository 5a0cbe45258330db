"""Searched prompts: the texts that a run uses instead of an environment's shipped ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel, ConfigDict, Field

from harness.config.load import read_text
from harness.config.schema import RunConfig
from harness.config.validate import parse_toml, validate
from harness.core.canonical import content_sha
from harness.core.errors import RefusedError
from harness.core.files import atomic_write
from harness.program.model import Program

SHIPPED = "shipped"
_HEADER = (
    "A prompt that `harness search-prompt` found. A run uses it by `prompt` in [[env]]; it then does not train on",
    "the tasks in `demonstrations`. Edit a copy under another name: `search` tells what these very texts scored.",
)


class PromptFile(BaseModel):
    """A file `rl/prompts/<env>/<id>.toml`; `[components]` holds the texts by component name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field("", description="where the prompt comes from: a prompt-search run, or who wrote it")
    demonstrations: tuple[str, ...] = Field((), description="ids of the training tasks that the texts show")
    search: dict[str, Any] = Field(default_factory=dict, description="scores, budget, models and hashes of the search")
    components: dict[str, str] = Field(min_length=1)


def read_prompt_file(program: Program, env: str, prompt: str) -> PromptFile | None:
    """Return all that the file of a prompt says; None for `shipped`, which has no file.

    Raises:
        NotFoundError: when there is no such prompt.
        ConfigError: when its file is wrong.
    """
    if prompt == SHIPPED:
        return None
    path = program.prompt_path(env, prompt)
    text = read_text(path, "prompt", f'use prompt = "shipped", or put the texts in {program.relative(path)}')
    return validate(PromptFile, parse_toml(text, str(path)), str(path), text)


def seed_prompt_file(program: Program, env: str, prompt: str) -> PromptFile | None:
    """Return the prompt that a search begins with: `shipped`, an id, or the path of a file that ends in `.toml`.

    Raises:
        As `read_prompt_file`.
    """
    if not prompt.endswith(".toml"):
        return read_prompt_file(program, env, prompt)
    text = read_text(Path(prompt), "prompt", "name a TOML file with the texts under [components]")
    return validate(PromptFile, parse_toml(text, prompt), prompt, text)


def read_prompt(program: Program, env: str, prompt: str) -> dict[str, str] | None:
    """Return the texts of a prompt; None for `shipped`, which keeps the environment's own.

    Raises:
        NotFoundError: when there is no such prompt.
        ConfigError: when its file is wrong.
    """
    file = read_prompt_file(program, env, prompt)
    return None if file is None else dict(file.components)


def run_prompts(program: Program, config: RunConfig) -> dict[str, dict[str, str] | None]:
    """Return per environment the texts the run's prompt replaces; None for the shipped prompt."""
    return {section.id: read_prompt(program, section.id, section.prompt) for section in config.env}


def shown_tasks(program: Program, config: RunConfig) -> dict[str, frozenset[str]]:
    """Return per environment the ids of the training tasks that the run's prompt shows as demonstrations."""
    files = {section.id: read_prompt_file(program, section.id, section.prompt) for section in config.env}
    return {env: frozenset(file.demonstrations if file else ()) for env, file in files.items()}


def prompt_sha(shipped: Mapping[str, str], replaced: Mapping[str, str] | None = None) -> str:
    """Return the hash of the texts a run uses: the shipped ones with some of them replaced."""
    return content_sha({**shipped, **(replaced or {})})


def write_prompt(program: Program, env: str, prompt: str, file: PromptFile) -> str:
    """Write a prompt and return its path in the program; one that is there with the same bytes is left.

    Raises:
        RefusedError: when other texts have that id.
        InfraError: when the disk fails; an old file is untouched.
    """
    path = program.prompt_path(env, prompt)
    text = render_prompt(file)
    if path.exists() and (known := read_prompt_file(program, env, prompt)) is not None:
        if known.components != file.components:
            raise RefusedError(
                f"{program.relative(path)} exists with other texts", "move it away, or restore it with git"
            )
        if path.read_text(encoding="utf-8") == text:
            return program.relative(path)
    atomic_write(path, text)
    return program.relative(path)


def render_prompt(file: PromptFile) -> str:
    """Return a prompt file as TOML; reading it gives the same texts to the letter."""
    document = tomlkit.document()
    for line in _HEADER:
        document.add(tomlkit.comment(line))
    document.add(tomlkit.nl())
    document["source"] = file.source
    document["demonstrations"] = tomlkit.item(list(file.demonstrations)).multiline(True)
    document["search"] = file.search
    texts = tomlkit.table()
    for name, text in file.components.items():
        texts[name] = _text(text)
    document["components"] = texts
    return tomlkit.dumps(document)


def _text(text: str) -> Any:
    """Return a text as a multi-line string where that keeps every character, else on one line."""
    plain = "\n" in text and "\r" not in text and "'''" not in text and not text.endswith("'")
    printable = all(char in "\n\t" or (char.isprintable()) for char in text)
    return tomlkit.string(text, literal=True, multiline=True) if plain and printable else tomlkit.string(text)
