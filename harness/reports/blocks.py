"""The report as a list of blocks: written once, rendered to Markdown and to HTML.

Every string in a block is plain text; the renderers escape all of it, so no block can carry
markup of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "good", "bad", "warn", "quiet"]
Style = Literal["plain", "code", "strong"]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text in one style; `tone` colours it in HTML and is never the only signal."""

    text: str
    style: Style = "plain"
    tone: Tone = ""


Inline = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """A section title, level 1 to 4."""

    level: int
    text: str

    kind: str = "heading"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text."""

    content: Inline

    kind: str = "paragraph"


@dataclass(frozen=True, slots=True)
class Quote:
    """The words of the program's people: hypothesis, reasons."""

    text: str

    kind: str = "quote"


@dataclass(frozen=True, slots=True)
class Bullets:
    """A flat list; `tone` marks a list of warnings."""

    items: tuple[Inline, ...]
    tone: Tone = ""

    kind: str = "bullets"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; `numeric` holds the indices of right-aligned columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Inline, ...], ...]
    numeric: frozenset[int] = frozenset()

    kind: str = "table"


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, by its path relative to the report."""

    path: str
    alt: str
    caption: str = ""

    kind: str = "figure"


@dataclass(frozen=True, slots=True)
class Code:
    """A block of verbatim text, such as a completion."""

    text: str
    label: str = ""

    kind: str = "code"


@dataclass(frozen=True, slots=True)
class FileLink:
    """A link to a file beside the report; HTML holds everything in one file and shows only the name."""

    text: str
    path: str

    kind: str = "link"


Block = Heading | Paragraph | Quote | Bullets | Table | Figure | Code | FileLink


def text(value: str, tone: Tone = "") -> Inline:
    """Return plain text as inline content."""
    return (Span(value, tone=tone),)


def code(value: str) -> Inline:
    """Return a name, key or hash as inline code."""
    return (Span(value, "code"),)


def strong(value: str, tone: Tone = "") -> Inline:
    """Return emphasised text, a verdict for example."""
    return (Span(value, "strong", tone),)
