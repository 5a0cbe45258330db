"""Sanitisers: whatever goes in comes out as text and as nothing else."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from harness.core.text import WORD_JOINER, clean_text, md_code, md_escape, md_fence, one_line
from tests.payloads import PAYLOADS

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def tokens(markdown: str) -> list[Token]:
    found = []
    for token in PARSER.parse(markdown):
        found += [token, *(token.children or [])]
    return found


def types(markdown: str) -> set[str]:
    return {token.type for token in tokens(markdown)}


def shown(markdown: str) -> str:
    text = "".join(token.content for token in tokens(markdown) if token.type in ("text", "text_special", "code_inline"))
    return text.replace(WORD_JOINER, "")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_escaped_text_is_one_paragraph_of_text(payload):
    assert types(md_escape(payload)) <= {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    assert shown(md_escape(payload)) == one_line(payload)


@given(st.text(st.characters(codec=None), max_size=200))
def test_any_text_escapes_to_itself(text):
    assert types(md_escape(text)) <= {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    assert shown(md_escape(text)) == one_line(text)


@given(st.text("`|~*_[]()<>#!-+=1. \\\n\tax", max_size=60))
def test_text_of_markup_characters_escapes_to_itself(text):
    assert shown(md_escape(text)) == one_line(text)
    assert "|" not in md_escape(text).replace("\\|", "")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_code_span_stays_one_code_span(payload):
    if one_line(payload):
        assert [t.type for t in tokens(f"x {md_code(payload)} y")].count("code_inline") == 1
        assert not types(f"x {md_code(payload)} y") & {"html_inline", "link_open", "image", "softbreak"}


@given(st.text("`| a", min_size=1, max_size=30))
def test_a_code_span_in_a_table_is_one_cell(text):
    table = f"| a | b |\n|---|---|\n| {md_code(text)} | end |"
    cells = [token.content for token in PARSER.parse(table) if token.type == "inline"]
    assert len(cells) == 4
    assert cells[3] == "end"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_fence_holds_all_of_its_text(payload):
    parsed = PARSER.parse(f"before\n\n{md_fence(payload)}\n\nafter")
    assert [token.type for token in parsed].count("fence") == 1
    assert next(token for token in parsed if token.type == "fence").content == clean_text(payload) + "\n"


@given(st.text("`~\n >-a", max_size=60))
def test_a_fence_cannot_be_closed_from_inside(text):
    parsed = PARSER.parse(md_fence(text))
    assert [token.type for token in parsed] == ["fence"]


@given(st.text(st.characters(codec=None)))
def test_cleaning_leaves_nothing_invisible_and_is_idempotent(text):
    cleaned = clean_text(text)
    assert clean_text(cleaned) == cleaned
    cleaned.encode()
    assert all(c in "\n\t" or unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"} for c in cleaned)


@pytest.mark.parametrize(
    "text", ["@octocat", "see #12", "https://evil.example", "GH-7", "www.evil.example", "mailto:x"]
)
def test_what_a_host_links_after_rendering_is_broken_by_a_joiner(text):
    assert WORD_JOINER in md_escape(text)


def test_long_text_is_cut_visibly():
    assert one_line("a" * 3000).endswith("(1000 characters omitted)")


def test_numbers_stay_readable_in_a_table():
    assert md_escape("+0.371 (+0.302 to +0.440)", line_start=False) == "+0.371 (+0.302 to +0.440)"
