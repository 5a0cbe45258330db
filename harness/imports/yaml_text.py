"""YAML of other tools, plain data only: no aliases, no tags, bounded depth and size."""

from __future__ import annotations

from typing import Any

from harness.core.errors import MissingExtraError
from harness.imports.source import SourceError

MAX_NODES = 100_000
MAX_DEPTH = 32


def load_yaml(text: str, where: str) -> Any:
    """Parse YAML as plain data.

    The events are checked before anything is built, so an alias bomb or a tag never reaches a constructor.

    Raises:
        SourceError: on an alias, an anchor, a tag, deep nesting, more than one document, or damage.
        MissingExtraError: when PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingExtraError("imports", "pyyaml") from None
    try:
        _check(yaml.parse(text, Loader=yaml.SafeLoader), yaml, where)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{where} is damaged YAML: {str(error).splitlines()[0][:200]}") from error


def _check(events: Any, yaml: Any, where: str) -> None:
    depth = documents = 0
    for count, event in enumerate(events):
        if count > MAX_NODES:
            raise SourceError(f"{where} has more than {MAX_NODES} YAML nodes")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise SourceError(f"{where} uses YAML aliases, which are not read")
        if getattr(event, "tag", None) is not None:
            raise SourceError(f"{where} uses the YAML tag {str(event.tag)[:80]!r}, which is not read")
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise SourceError(f"{where} holds more than one YAML document")
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise SourceError(f"{where} is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
