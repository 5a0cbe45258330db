"""Text that others wrote, made safe to show: one cleaner for every medium, one escape for Markdown.

Hypotheses, reasons, model output and names of files are hostile until cleaned. `clean_text` takes out
what no medium should show (control, bidirectional and invisible characters); `md_escape` and `md_code`
make one line of Markdown inert; `md_fence` wraps a block. HTML is escaped by the template engine and
terminal escape sequences are cut out by `cli.output`; both build on the same cleaned text.
"""

from __future__ import annotations

import re
import unicodedata

WORD_JOINER = "\u2060"
_REPLACEMENT = "\ufffd"
_KEPT_CONTROLS = "\n\t"
# Categories: Cc control, Cf format (bidi marks, zero width, tags), Cs surrogate, Co private, Zl/Zp separators.
_DROPPED = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_MD_SPECIAL = re.compile(r"([\\`*_\[\]<>#!|~&{}$])")
_LINE_START = re.compile(r"^(\s*)([-+=:]|\d{1,9}(?=[.)]))")
_BREAKS = (
    (re.compile(r"@"), f"@{WORD_JOINER}"),
    (re.compile(r"#"), f"#{WORD_JOINER}"),
    (re.compile(r":(?=//)"), f":{WORD_JOINER}"),
    (re.compile(r"\b(mailto|xmpp|javascript|data|vbscript):", re.IGNORECASE), rf"\1{WORD_JOINER}:"),
    (re.compile(r"\bwww\.", re.IGNORECASE), f"www{WORD_JOINER}."),
    (re.compile(r"\bGH-(?=\d)", re.IGNORECASE), f"GH{WORD_JOINER}-"),
)


def clean_text(text: str) -> str:
    """Return `text` without control, bidirectional and invisible characters.

    Line ends become LF, tabs stay, and a lone surrogate becomes U+FFFD. Idempotent.
    """
    unified = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u2028", "\n").replace("\u2029", "\n")
    if unified.isascii() and unified.isprintable():
        return unified
    kept = []
    for char in unified:
        category = unicodedata.category(char)
        if char in _KEPT_CONTROLS or category not in _DROPPED:
            kept.append(char)
        elif category == "Cs":
            kept.append(_REPLACEMENT)
    return "".join(kept)


def one_line(text: str, limit: int = 2000) -> str:
    """Return cleaned text on one line, cut at `limit` characters with a visible mark."""
    flat = " ".join(clean_text(text).split())
    return flat if len(flat) <= limit else f"{flat[:limit]} … ({len(flat) - limit} characters omitted)"


def md_escape(text: str, *, line_start: bool = True, limit: int = 2000) -> str:
    """Return `text` as one line of Markdown that renders as itself and as nothing else.

    Mentions, issue references and automatic links are recognised after rendering, so escaping
    cannot stop them; an invisible word joiner inside them does.

    Args:
        text: any string.
        line_start: whether it may stand at the start of a line, where list marks have a meaning;
            False inside a table row keeps signs of numbers readable.
        limit: characters kept, as `one_line` cuts them.
    """
    flat = _MD_SPECIAL.sub(r"\\\1", one_line(text, limit))
    for pattern, replacement in _BREAKS:
        flat = pattern.sub(replacement, flat)
    return _LINE_START.sub(_escape_start, flat) if line_start else flat


def _escape_start(match: re.Match[str]) -> str:
    mark = match[2]
    # "1." and "1)" open a list; a joiner after the digits stops that, digits cannot be escaped.
    return f"{match[1]}{mark}{WORD_JOINER}" if mark[0].isdigit() else f"{match[1]}\\{mark}"


def md_code(text: str) -> str:
    """Return `text` as an inline code span that also survives inside a table row."""
    flat = one_line(text)
    if not flat:
        return ""
    fence = "`" * (_longest_run(flat, "`") + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat}{pad}{fence}".replace("|", "\\|")


def md_fence(text: str) -> str:
    """Return `text` as a fenced block whose fence is longer than any run of back-ticks inside."""
    body = clean_text(text)
    fence = "`" * max(3, _longest_run(body, "`") + 1)
    return f"{fence}text\n{body}\n{fence}"


def _longest_run(text: str, char: str) -> int:
    return max((len(run) for run in re.findall(re.escape(char) + "+", text)), default=0)
