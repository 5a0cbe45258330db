"""Blocks to Markdown: no HTML, every dynamic string escaped, cut visibly at the size limit."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.text import md_code, md_escape, md_fence
from harness.reports.blocks import (
    Block,
    Bullets,
    Code,
    Figure,
    FileLink,
    Heading,
    Inline,
    Paragraph,
    Quote,
    Table,
)

MAX_BYTES = 1_000_000
"""GitHub refuses a step summary above 1 MiB; a report stays below."""


def render_markdown(blocks: Sequence[Block], *, limit: int = MAX_BYTES) -> str:
    """Return the blocks as Markdown of less than `limit` bytes.

    Whole blocks are dropped from the end when it would grow too long, and a last line says how many.
    """
    rendered = [_render(block) for block in blocks]
    room = limit - 200  # what the omission line and the joints may take
    kept: list[str] = []
    size = 0
    for part in rendered:
        size += len(part.encode()) + 2
        if size > room:
            break
        kept.append(part)
    if len(kept) < len(rendered):
        kept.append(f"**{len(rendered) - len(kept)} blocks omitted: the report would pass {limit} bytes.**")
    return "\n\n".join(kept) + "\n"


def _render(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {md_escape(block.text)}"
        case Paragraph():
            return _inline(block.content, line_start=True)
        case Quote():
            return f"> {md_escape(block.text)}"
        case Bullets():
            return "\n".join(f"- {_inline(item, line_start=True)}" for item in block.items)
        case Table():
            return _table(block)
        case Figure():
            caption = f"\n\n{md_escape(block.caption)}" if block.caption else ""
            return f"![{md_escape(block.alt)}]({block.path}){caption}"
        case Code():
            label = f"{md_escape(block.label)}\n\n" if block.label else ""
            return label + md_fence(block.text)
        case FileLink():
            return f"[{md_escape(block.text)}]({block.path})"


def _table(block: Table) -> str:
    head = "| " + " | ".join(md_escape(name, line_start=False) for name in block.columns) + " |"
    rule = "|" + "|".join("--:" if i in block.numeric else "---" for i in range(len(block.columns))) + "|"
    rows = ["| " + " | ".join(_inline(cell, line_start=False) for cell in row) + " |" for row in block.rows]
    return "\n".join([head, rule, *rows])


def _inline(content: Inline, *, line_start: bool) -> str:
    parts = []
    for index, span in enumerate(content):
        if not span.text.strip():
            parts.append(" " if span.text else "")
            continue
        if span.style == "code":
            parts.append(md_code(span.text))
            continue
        escaped = md_escape(span.text, line_start=line_start and index == 0)
        # one_line strips the edges; give back the space that separates two spans
        lead = " " if index and span.text[:1].isspace() else ""
        trail = " " if index < len(content) - 1 and span.text[-1:].isspace() else ""
        parts.append(f"{lead}**{escaped}**{trail}" if span.style == "strong" and escaped else f"{lead}{escaped}{trail}")
    return "".join(parts)
