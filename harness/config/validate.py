"""TOML to frozen pydantic models, with errors that name the file, the line, the key and a suggestion."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from harness.core.errors import ConfigError
from harness.core.names import did_you_mean

Model = TypeVar("Model", bound=BaseModel)
Loc = tuple[str | int, ...]
MAX_NESTING = 32
"""Levels of tables and lists in a file; what the ledger stores of it may not be nested deeper than 64."""

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_.\s-])+?)\s*=""")
_NUMBER_HINT = "whole numbers fit into 64 bits here; a longer one is text and needs quotes"
_KEY_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*(?:\.|$)""")


def parse_toml(text: str, source: str, first_line: int = 1) -> dict[str, Any]:
    """Parse TOML text.

    Args:
        text: the TOML.
        source: what to call the text in messages, a path as a rule.
        first_line: the line of `source` that the text begins on; line numbers in messages count from it.

    Raises:
        ConfigError: naming source, line and column.
    """
    try:
        return tomllib.loads("\n" * (first_line - 1) + text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source} is not valid TOML: {error}", "text values need quotes; see https://toml.io"
        ) from None
    except ValueError:  # Python reads no integer of more than 4300 digits
        raise ConfigError(f"{source} holds a number with too many digits", _NUMBER_HINT) from None
    except RecursionError:
        raise ConfigError(f"{source} is not valid TOML: nested too deeply") from None


def _key_parts(text: str) -> tuple[str, ...]:
    return tuple(next(part for part in match.groups() if part is not None) for match in _KEY_PART.finditer(text))


def _assignments(text: str) -> Iterator[tuple[int, Loc]]:
    """Yield (line, location) of every table header and single-line assignment; arrays of tables by index."""
    table: Loc = ()
    counts: dict[Loc, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            parts = _key_parts(header[2])
            if header[1] == "[[":
                counts[parts] = counts.get(parts, -1) + 1
            table = _indexed(parts, counts)
            yield number, table
        elif assignment := _ASSIGNMENT.match(line):
            yield number, table + _key_parts(assignment[1])


def _indexed(parts: tuple[str, ...], counts: Mapping[Loc, int]) -> Loc:
    result: Loc = ()
    for length, part in enumerate(parts, 1):
        result += (part,)
        if parts[:length] in counts:
            result += (counts[parts[:length]],)
    return result


def line_of(text: str, loc: Loc) -> int | None:
    """Return the line of the longest known prefix of a location in TOML text; None when none is written there."""
    found = {place: line for line, place in reversed(list(_assignments(text)))}
    return next((found[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in found), None)


def dotted(loc: Loc, data: Any) -> str:
    """Spell a location as a dotted key; items of a list of tables by their `id`."""
    parts: list[str] = []
    for step in loc:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            data = None
        if isinstance(step, int):
            name = data.get("id") if isinstance(data, Mapping) else None
            parts.append(name if isinstance(name, str) else str(step))
        else:
            parts.append(str(step))
    return ".".join(parts)


def _submodel(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for item in get_args(annotation) if (found := _submodel(item))), None)


def fields_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """Return the field names of the model nested at a location; empty when there is no model."""
    current: type[BaseModel] | None = model
    for step in loc:
        if current is None:
            return []
        if isinstance(step, str) and step in current.model_fields:
            current = _submodel(current.model_fields[step].annotation)
    return list(current.model_fields) if current else []


def _unfit(data: Any, loc: Loc = ()) -> Iterator[tuple[Loc, str, str]]:
    """Yield (location, what is wrong, hint) of every value that no key takes and the ledger could not hold."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        place: Loc = (*loc, key)
        if isinstance(value, float) and not math.isfinite(value):
            yield place, f"is {value}; numbers must be finite", "write a number such as 0.5"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield place, "is an integer beyond 64 bits", _NUMBER_HINT
        elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            yield place, "is not UTF-8 text", "save or type it as UTF-8"
        elif len(place) > MAX_NESTING:
            yield place, f"is nested more than {MAX_NESTING} levels deep", "flatten it"
        else:
            yield from _unfit(value, place)


def _describe(error: Mapping[str, Any], model: type[BaseModel], data: Any) -> tuple[str, str]:
    """Return (what is wrong, hint) for one pydantic error."""
    loc: Loc = tuple(error["loc"])
    key = dotted(loc, data)[:200]
    kind = error["type"]
    if kind == "extra_forbidden":
        known = [*loc[:-1], ""]
        return f"unknown key {key!r}", did_you_mean(str(loc[-1]), fields_at(model, known[:-1]))
    if kind == "missing":
        return f"{key!r} is missing", f"add {loc[-1]} = …"
    if kind == "value_error":
        text = str(error["ctx"]["error"])
        return f"{key}: {text}" if key else text, "edit it there"
    text = str(error["msg"]).replace("Input should be", "must be").replace("String should", "must")
    shown = json.dumps(error["input"], default=str, ensure_ascii=False)
    return f"{key} {text}, not {shown[:80]}", _meaning(model, loc)


def _meaning(model: type[BaseModel], loc: Loc) -> str:
    """Return what the key at a location means and its default, as a hint."""
    names = [step for step in loc if isinstance(step, str)]
    current: type[BaseModel] | None = model
    for depth, name in enumerate(names, 1):
        field = current.model_fields.get(name) if current else None
        if field is None:
            return ""
        current = _submodel(field.annotation)
        if depth == len(names) and current is None:
            default = "" if field.is_required() or field.default is None else f"the default is {field.default!r}"
            return "; ".join(filter(None, (field.description, default)))
    return "write it as a table of keys, such as " + ", ".join(list(current.model_fields)[:3]) if current else ""


def validate(model: type[Model], data: Mapping[str, Any], source: str, text: str = "") -> Model:
    """Return `data` as a model; types are strict, so "64" is no number and 1 is no boolean.

    Args:
        model: the pydantic model.
        data: parsed TOML.
        source: what to call it in messages.
        text: the TOML text, to name lines; without it no line is named.

    Raises:
        ConfigError: with the first thing that is wrong, and how many more there are.
    """

    def place(loc: Loc) -> str:
        line = line_of(text, loc) if text else None
        return f"{source}:{line}" if line else source

    for loc, what, hint in _unfit(data):
        raise ConfigError(f"{place(loc)}: {dotted(loc, data)[:200]} {what}", hint)
    try:
        return model.model_validate_json(json.dumps(data, allow_nan=False), strict=True)
    except ValidationError as error:
        # A misspelt key comes first: what is reported as missing often follows from it.
        problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
        what, hint = _describe(problems[0], model, data)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{place(tuple(problems[0]['loc']))}: {what}{more}", hint) from None
    except TypeError as error:  # a TOML date has no JSON form, and no key takes one
        raise ConfigError(
            f"{source}: dates and times are not values here ({error})", "write it as text in quotes"
        ) from None
