"""Blocks to one self-contained HTML file: inline style, images as data URIs, no request leaves it."""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import jinja2
import matplotlib

from harness.core.text import clean_text
from harness.reports.blocks import Block

GENERATOR = f"harness; matplotlib {matplotlib.__version__}"


@dataclass(frozen=True, slots=True)
class Chip:
    """A short label in the head of the page, such as the decision."""

    text: str
    tone: str


@functools.cache
def environment() -> jinja2.Environment:
    """Return the template environment: escaping everywhere, whatever the template is called."""
    templates = resources.files("harness.reports") / "templates"
    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(lambda name: (templates / name).read_text(encoding="utf-8")),
        finalize=lambda value: clean_text(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_html(title: str, blocks: Sequence[Block], images: Mapping[str, bytes], chips: Sequence[Chip] = ()) -> str:
    """Return the page.

    Args:
        title: for the browser's tab; plain text.
        blocks: the report.
        images: PNG bytes by the path the figures name.
        chips: labels beside the title.
    """
    uris = {path: "data:image/png;base64," + base64.b64encode(data).decode() for path, data in images.items()}
    template = environment().get_template("report.html.j2")
    return template.render(title=title, blocks=blocks, uris=uris, chips=chips, generator=GENERATOR)
