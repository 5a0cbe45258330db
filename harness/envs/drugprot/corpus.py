"""The embedded corpus: documented drug-protein facts, put into short made-up abstracts.

`data/facts.tsv` holds one (chemical, protein, relation) fact a line with its source;
`data/phrasings.toml` holds, for each relation, two-sentence templates and, for all, neutral
opening sentences, each in a `train` and a `heldout` list. Nothing leaks by construction:

- a pair with more than one relation is dropped, with all its relations;
- a pair is in one split only (pairs are compared without case), about 35 % of each label held out;
- a template or opening is in one split only.

Every choice is made by SHA-256 of the names, so it is the same in every process and on every
machine, and a new fact does not move the others' phrasing.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError
from harness.core.types import Task
from harness.envs.drugprot.labels import LABELS, LETTERS, letter_of

HELDOUT_SHARE = 0.35
TRAIN_PHRASINGS = 4
"""Phrasings of each train pair."""
HELDOUT_PHRASINGS = 2
"""Phrasings of each held-out pair; the second ones follow after all the first ones."""
FACTS_HEADER = ("chemical", "protein", "relation", "source", "note")
_SLOT = re.compile(r"(^|[.!?] )?\{(chemical|protein)\}")


@dataclass(frozen=True, slots=True)
class Fact:
    """One documented relation; `source` identifies where it is documented."""

    chemical: str
    protein: str
    relation: str
    source: str
    note: str = ""

    @property
    def pair(self) -> str:
        """The pair as one key, without case."""
        return f"{self.chemical} | {self.protein}".casefold()


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Templates by split and relation, and opening sentences by split."""

    templates: dict[str, dict[str, tuple[str, ...]]]
    openings: dict[str, tuple[str, ...]]


def parse_facts(text: str) -> list[Fact]:
    """Return the facts of a TSV text with header, exact repeats once.

    Raises:
        ConfigError: on a wrong header, a wrong number of columns, an empty cell or an unknown relation.
    """
    header, *lines = text.rstrip("\n").split("\n")
    if tuple(header.split("\t")) != FACTS_HEADER:
        raise ConfigError(f"facts: the header is {header[:80]!r}", f"expected the columns {', '.join(FACTS_HEADER)}")
    facts: dict[tuple[str, str], Fact] = {}
    for number, line in enumerate(lines, 2):
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) == len(FACTS_HEADER) - 1:
            cells.append("")  # editors strip the tab of an empty note
        if len(cells) != len(FACTS_HEADER) or not all(cells[:4]) or cells[2] not in LABELS:
            raise ConfigError(f"facts line {number}: {line[:80]!r}", "five columns; relation is one of the 13 labels")
        fact = Fact(*cells)
        facts.setdefault((fact.pair, fact.relation), fact)
    return list(facts.values())


def parse_phrasings(text: str) -> Phrasings:
    """Return the phrasings of a TOML text.

    Raises:
        ConfigError: when a table is unknown, a list is missing, a template lacks a slot, or a text is in both splits.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"phrasings: {error}") from error
    unknown = set(tables) - set(LABELS) - {"background"}
    if unknown or "background" not in tables:
        raise ConfigError(f"phrasings: tables {sorted(unknown)} are unknown, or [background] is missing")
    lists: dict[str, dict[str, tuple[str, ...]]] = {"train": {}, "heldout": {}}
    for name, table in tables.items():
        for split in lists:
            lists[split][name] = tuple(table.get(split, ()))
            slots = () if name == "background" else ("{chemical}", "{protein}")
            bad = [t for t in lists[split][name] if any(slot not in t for slot in slots)]
            if bad or not lists[split][name]:
                raise ConfigError(f"phrasings [{name}] {split}: no templates, or one lacks a slot: {bad[:1]}")
        if set(lists["train"][name]) & set(lists["heldout"][name]):
            raise ConfigError(f"phrasings [{name}]: a text is in both splits")
    openings = {split: by_name.pop("background") for split, by_name in lists.items()}
    return Phrasings(lists, openings)


def single_relation(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts whose pair has one relation only; of the others, none."""
    by_pair: dict[str, set[str]] = defaultdict(set)
    facts = list(facts)
    for fact in facts:
        by_pair[fact.pair].add(fact.relation)
    return [fact for fact in facts if len(by_pair[fact.pair]) == 1]


def split_facts(facts: Sequence[Fact]) -> dict[str, list[Fact]]:
    """Return train and held-out facts: in each label the pairs with the smallest hashes are held out."""
    split: dict[str, list[Fact]] = {"train": [], "heldout": []}
    for label in LABELS:
        ranked = sorted((f for f in facts if f.relation == label), key=lambda f: sha256_hex(f"split/{f.pair}"))
        cut = math.ceil(HELDOUT_SHARE * len(ranked))
        split["heldout"] += ranked[:cut]
        split["train"] += ranked[cut:]
    return split


def fill(template: str, chemical: str, protein: str) -> str:
    """Return a template with both names in place, an ordinary word capitalised where a sentence starts."""
    names = {"chemical": chemical, "protein": protein}

    def name(slot: re.Match[str]) -> str:
        text = names[slot[2]]
        starts = slot[1] is not None
        word = re.match(r"[a-z]{4,}(?![^\s,-])", text)  # not c-kit, p53, mTOR
        return (slot[1] or "") + (text[0].upper() + text[1:] if starts and word else text)

    return _SLOT.sub(name, template)


def _pick(items: Sequence[str], key: str, count: int) -> list[str]:
    return sorted(items, key=lambda item: sha256_hex(f"{key}/{item}"))[:count]


def _pair_tasks(fact: Fact, split: str, phrasings: Phrasings) -> list[Task]:
    count = TRAIN_PHRASINGS if split == "train" else HELDOUT_PHRASINGS
    chosen = _pick(phrasings.templates[split][fact.relation], f"phrasing/{fact.pair}", count)
    tasks = []
    for template in chosen:
        opening = _pick(phrasings.openings[split], f"opening/{fact.pair}/{template}", 1)[0]
        body = fill(template, fact.chemical, fact.protein)
        tasks.append(
            Task(
                id=f"emb-{sha256_hex(fact.pair)[:10]}-{sha256_hex(template)[:6]}",
                env="drugprot",
                split=split,
                fields={
                    "abstract": f"{opening} {body}",
                    "chemical": fact.chemical,
                    "protein": fact.protein,
                    "letters": LETTERS,
                },
                answer=letter_of(fact.relation),
                label=fact.relation,
                cluster=fact.pair,
                meta={"source": fact.source, "phrasing": sha256_hex(template)[:6], "opening": sha256_hex(opening)[:6]},
            )
        )
    return tasks


def _round_robin(rows: Iterable[Task]) -> list[Task]:
    """Return the tasks so that every stretch covers the labels as evenly as their numbers allow."""
    by_label: dict[str, list[Task]] = defaultdict(list)
    for task in sorted(rows, key=lambda task: sha256_hex(f"order/{task.id}")):
        by_label[task.label].append(task)
    ranked = [(rank, LABELS.index(label), task) for label, tasks in by_label.items() for rank, task in enumerate(tasks)]
    return [task for _, _, task in sorted(ranked, key=lambda row: row[:2])]


def build_tasks(facts: Sequence[Fact], phrasings: Phrasings) -> dict[str, tuple[Task, ...]]:
    """Return train and held-out tasks in their fixed order.

    Held-out tasks come in rounds: every pair once before any pair a second time.

    Raises:
        ConfigError: when a relation of the facts has no phrasings.
    """
    kept = single_relation(facts)
    lacking = sorted({f.relation for f in kept} - set(phrasings.templates["train"]))
    if lacking:
        raise ConfigError(f"no phrasings for the relations {', '.join(lacking)}")
    result = {}
    for split, members in split_facts(kept).items():
        per_pair = [_pair_tasks(fact, split, phrasings) for fact in members]
        rounds = max((len(tasks) for tasks in per_pair), default=0)
        result[split] = tuple(
            task for turn in range(rounds) for task in _round_robin(ts[turn] for ts in per_pair if turn < len(ts))
        )
    return result


def _data() -> Traversable:
    return files("harness.envs.drugprot") / "data"


@lru_cache(maxsize=1)
def embedded_facts() -> tuple[Fact, ...]:
    """Return the facts of the embedded corpus, multi-relation pairs included."""
    return tuple(parse_facts((_data() / "facts.tsv").read_text(encoding="utf-8")))


@lru_cache(maxsize=1)
def embedded_phrasings() -> Phrasings:
    """Return the sentences of the embedded corpus."""
    return parse_phrasings((_data() / "phrasings.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def embedded_tasks() -> dict[str, tuple[Task, ...]]:
    """Return the tasks of the embedded corpus by split."""
    return build_tasks(embedded_facts(), embedded_phrasings())
