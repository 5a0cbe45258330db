"""Hostile text in every field of a report: no new element, attribute, link, image or comment."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

import pytest
from markdown_it import MarkdownIt

from harness.core.errors import UsageError
from harness.ledger import Ledger
from harness.program import Program, read_context, read_goal
from harness.reports.blocks import Span
from harness.reports.collect import collect
from harness.reports.compact import parse_metrics, parse_samples
from harness.reports.html import render_html
from harness.reports.markdown import render_markdown
from harness.reports.model import ReportData
from harness.reports.plots import render_plots
from harness.reports.sections import report_blocks, rollout_blocks, rollout_link
from harness.reports.summary import parse_summary
from harness.reports.write import METRICS, ROLLOUTS, SUMMARY, build_report
from tests.payloads import PAYLOADS
from tests.reports.reports_synthetic import RUN

KEPT = frozenset({"env"})  # checked to be a plain name when it is read


class Page(HTMLParser):
    """Counts elements and collects attributes."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.comments: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_pi(self, data: str) -> None:
        self.comments.append(data)


@pytest.fixture
def data(trained: Program) -> ReportData:
    files = {name: body.decode() for name, body in build_report(trained, RUN).items() if name.startswith("data/")}
    everything = collect(
        trained.root,
        Ledger(trained.ledger).state().runs[RUN],
        read_goal(trained),
        read_context(trained),
        metrics=parse_metrics(files[METRICS], METRICS),
        samples=parse_samples(files[ROLLOUTS], ROLLOUTS),
        summary=parse_summary(files[SUMMARY], SUMMARY),
    )
    return dataclasses.replace(everything, evals=everything.evals[:3], samples=everything.samples[:2])


def poison(value: Any, payload: str, name: str = "") -> Any:
    """Return the value with every text in it replaced by the payload, keys of mappings included."""
    if name in KEPT or name == "metrics":
        return value
    if isinstance(value, str):
        return payload
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: poison(getattr(value, f.name), payload, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        return {f"{key}{payload}": poison(item, payload) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(poison(item, payload, name) for item in value)
    return value


def poisoned(data: ReportData, payload: str) -> ReportData:
    bad = poison(data, payload)
    # who was evaluated decides what is shown; the text beside it is what gets poisoned
    evals = tuple(
        dataclasses.replace(b, subject=g.subject, prompt=g.prompt) for b, g in zip(bad.evals, data.evals, strict=True)
    )
    return dataclasses.replace(bad, evals=evals, warnings=(payload,) * max(1, len(data.warnings)))


def page(data: ReportData, plots: dict[str, Any]) -> Page:
    parsed = Page()
    images = {f"plots/{name}.png": b"png" for name in plots}
    html = render_html(data.hypothesis, [*report_blocks(data, plots), *rollout_blocks(data)], images)
    parsed.feed(html)
    parsed.close()
    return parsed


def test_html_gains_no_element_attribute_or_script_from_any_payload(data):
    plots = render_plots(data)
    clean = page(poisoned(data, "plain"), plots)
    names = Counter((tag, name) for tag, name, _ in clean.attributes)
    for payload in PAYLOADS:
        bad = page(poisoned(data, payload), plots)
        for tag in ("script", "a", "iframe", "svg", "style", "meta", "base", "img", "h1", "details"):
            assert bad.elements[tag] == clean.elements[tag], (payload, tag)
        assert set(bad.elements) <= set(clean.elements), payload
        found = Counter((tag, name) for tag, name, _ in bad.attributes)
        assert set(found) <= set(names), payload
        assert not [a for a in bad.attributes if a[1].startswith("on") or a[2].lower().startswith("javascript:")], (
            payload
        )
        assert {value for tag, name, value in bad.attributes if name == "src"} == {"data:image/png;base64,cG5n"}
        assert bad.comments == [], payload


def test_markdown_gains_no_link_image_html_or_heading_from_any_payload(data):
    plots = render_plots(data)
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def parse(shown: ReportData) -> tuple[Counter[str], set[str]]:
        counts: Counter[str] = Counter()
        targets = set()
        blocks = [*report_blocks(shown, plots), *rollout_link(shown), *rollout_blocks(shown)]
        for token in parser.parse(render_markdown(blocks)):
            for part in (token, *(token.children or [])):
                counts[part.type] += 1
                targets |= {str(v) for k, v in part.attrs.items() if k in ("href", "src")}
        return counts, targets

    clean, targets = parse(poisoned(data, "plain"))
    structural = (
        "heading_open",
        "fence",
        "table_open",
        "link_open",
        "image",
        "hr",
        "tr_open",
        "td_open",
        "list_item_open",
    )
    for payload in PAYLOADS:
        counts, found = parse(poisoned(data, payload))
        assert not counts["html_block"] + counts["html_inline"] + counts["s_open"] + counts["em_open"], payload
        assert found == targets, payload
        if payload.strip():  # without any text, optional rows are rightly left out
            assert {kind: counts[kind] for kind in structural} == {kind: clean[kind] for kind in structural}, payload


def test_the_page_asks_nothing_of_any_network(trained):
    html = build_report(trained, RUN)["report.html"].decode()
    parsed = Page()
    parsed.feed(html)
    policies = [v for tag, name, v in parsed.attributes if tag == "meta" and name == "content" and "default-src" in v]
    assert policies == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]
    linked = [value for _, name, value in parsed.attributes if name in ("src", "href", "srcset", "action", "poster")]
    assert linked and all(value.startswith("data:image/png;base64,") for value in linked)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style


def test_a_hostile_environment_name_is_refused(trained):
    event = Ledger(trained.ledger).state().runs[RUN].evals[0]
    Ledger(trained.ledger).append(RUN, "evaluated", {**event, "env": "../../x"})
    with pytest.raises(UsageError, match="environment"):
        build_report(trained, RUN)


def test_a_template_is_never_made_from_data():
    html = render_html("{{ 7 * 7 }}", [], {}, [])
    assert "{{ 7 * 7 }}" in html


def test_spans_have_no_markup_style():
    assert {f.name for f in dataclasses.fields(Span)} == {"text", "style", "tone"}
