"""The biomedical terms the reasoning score counts.

The original list has 37 terms and is not public beyond agonist, inhibit, substrate, kinase and
transporter. This one is a reconstruction of our own; `KEYWORDS_VERSION` moves with it.

A term counts once, however often and in whatever inflection it occurs, and only as a whole word:
`agonist` is not found in `antagonist`. A word is a run of letters, digits and underscores, so a
hyphen ends it; words with a non-ASCII character never match.
"""

from __future__ import annotations

import re

KEYWORDS_VERSION = "keywords-1"
KEYWORDS: tuple[str, ...] = (
    "activate",
    "affinity",
    "agonist",
    "allosteric",
    "antagonist",
    "bind",
    "block",
    "catalyze",
    "channel",
    "cleave",
    "competitive",
    "complex",
    "domain",
    "downregulate",
    "enzyme",
    "express",
    "hydrolyze",
    "induce",
    "inhibit",
    "kinase",
    "ligand",
    "metabolize",
    "modulate",
    "pathway",
    "phosphorylate",
    "potent",
    "product",
    "receptor",
    "regulate",
    "residue",
    "selective",
    "stimulate",
    "substrate",
    "subunit",
    "suppress",
    "transporter",
    "upregulate",
)
_SUFFIXES = ("s", "es", "d", "ed", "ing", "ion", "ions", "or", "ors", "er", "ers", "ory", "ive", "ly")
_WORD = re.compile(r"\w+")


def _inflections(term: str) -> set[str]:
    """Return the term and its regular inflections; over-generation is harmless, a form is one term."""
    stems = {term, term.removesuffix("e"), term.removesuffix("y") + "i"}
    spellings = stems | {stem[:-1] + "s" for stem in stems if stem.endswith("z")}
    return {term} | {stem + suffix for stem in spellings for suffix in _SUFFIXES}


_TERM_OF = {form: term for term in KEYWORDS for form in _inflections(term)}


def words(text: str) -> set[str]:
    """Return the distinct ASCII words of a text in lower case, in time linear in its length."""
    return {word.lower() for word in _WORD.findall(text) if word.isascii()}


def distinct_keywords(found: set[str]) -> int:
    """Return how many of the terms occur among lower-case words, 0 to 37."""
    return len({_TERM_OF[word] for word in found if word in _TERM_OF})
