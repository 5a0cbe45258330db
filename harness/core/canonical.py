"""Strict JSON: one spelling per value, no NaN, no duplicate keys, bounded depth."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NON_FINITE = "$non_finite"
MAX_DEPTH = 64


def sha256_hex(data: bytes | str) -> str:
    """Return the SHA-256 of bytes, or of text as UTF-8, in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal, reading it in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_non_finite(value: Any) -> Any:
    """Replace NaN and infinities by `{"$non_finite": "nan"|"inf"|"-inf"}`, recursively."""
    if isinstance(value, float) and not math.isfinite(value):
        return {NON_FINITE: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, Mapping):
        return {key: encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [encode_non_finite(item) for item in value]
    return value


def decode_number(value: Any) -> float:
    """Return a stored number as float; typed non-finite values become NaN or infinities.

    Raises:
        ValueError: when `value` is no number.
    """
    if isinstance(value, Mapping) and set(value) == {NON_FINITE}:
        return float(value[NON_FINITE])
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


def canonical_json(value: Any, *, sort: bool = True) -> str:
    """Return compact JSON without NaN; keys sorted unless `sort` is False.

    Raises:
        ValueError: on a non-finite number (encode it first), or text that is not valid Unicode.
    """
    text = json.dumps(value, sort_keys=sort, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate fails here, before anything is written
    return text


def content_sha(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return sha256_hex(canonical_json(encode_non_finite(value)))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r}")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:40]} overflows")
    return number


# Built once: json.loads with hooks builds a decoder per call, which costs more than a short line.
_STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
_scan = _STRICT.scan_once  # type: ignore[attr-defined]


def strict_loads(data: bytes | str) -> Any:
    """Parse JSON, refusing duplicate keys, NaN, overflow and nesting beyond `MAX_DEPTH`.

    Raises:
        ValueError: with the reason, for everything that is not strict JSON (UTF-8 without BOM).
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    depth = peak = 0
    if text.count("[") + text.count("{") > MAX_DEPTH:
        in_string = escaped = False
        for char in text:
            if in_string:
                escaped, in_string = (char == "\\" and not escaped), (char != '"' or escaped)
            elif char == '"':
                in_string = True
            elif char in "[{":
                depth += 1
                peak = max(peak, depth)
            elif char in "]}":
                depth -= 1
        if peak > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
    try:
        value, end = _scan(text, 0)  # what `decode` does, without looking for blanks around it
    except StopIteration:
        end = -1
    return value if end == len(text) else _STRICT.decode(text)
