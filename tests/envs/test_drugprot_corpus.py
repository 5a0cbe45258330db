"""The embedded corpus as tasks: what is dropped, how it is split, that nothing leaks or depends on the process."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from harness.core.errors import ConfigError
from harness.envs.drugprot.corpus import (
    FACTS_HEADER,
    HELDOUT_PHRASINGS,
    TRAIN_PHRASINGS,
    build_tasks,
    embedded_facts,
    embedded_phrasings,
    embedded_tasks,
    fill,
    parse_facts,
    parse_phrasings,
    single_relation,
    split_facts,
)
from harness.envs.drugprot.labels import LABELS, RARE_LABELS
from harness.envs.drugprot.prompt import parse_demonstrations, shipped_components

HEADER = "\t".join(FACTS_HEADER)
FREQUENT = [label for label in LABELS if label not in RARE_LABELS]
ROOT = Path(__file__).resolve().parents[2]


def facts(*rows):
    return parse_facts("\n".join([HEADER, *("\t".join(row) for row in rows)]))


def phrasings(label="INHIBITOR", train='["{chemical} a {protein}."]', heldout='["{chemical} b {protein}."]'):
    return f'[background]\ntrain = ["T."]\nheldout = ["H."]\n[{label}]\ntrain = {train}\nheldout = {heldout}\n'


def test_size_and_labels():
    pairs = {fact.pair for fact in single_relation(embedded_facts())}
    assert len(pairs) >= 400
    heldout = embedded_tasks()["heldout"]
    assert len({task.cluster for task in heldout}) >= 130
    for split, tasks in embedded_tasks().items():
        assert {task.label for task in tasks} >= set(FREQUENT), split


def test_no_pair_and_no_phrasing_is_in_both_splits():
    tasks = embedded_tasks()
    for key in (lambda t: t.cluster, lambda t: t.id, lambda t: t.meta["phrasing"], lambda t: t.meta["opening"]):
        train, heldout = ({key(task) for task in tasks[split]} for split in ("train", "heldout"))
        assert train
        assert not train & heldout
    for split, members in tasks.items():
        texts = embedded_phrasings()
        for task in members:
            opening = next(o for o in texts.openings[split] if task.fields["abstract"].startswith(o + " "))
            body = task.fields["abstract"].removeprefix(opening + " ")
            rendered = {
                fill(t, task.fields["chemical"], task.fields["protein"]) for t in texts.templates[split][task.label]
            }
            assert body in rendered


def test_pairs_have_one_relation_and_several_phrasings():
    for split, count in (("train", TRAIN_PHRASINGS), ("heldout", HELDOUT_PHRASINGS)):
        per_pair = defaultdict(list)
        for task in embedded_tasks()[split]:
            per_pair[task.cluster].append(task)
        assert all(len({task.label for task in tasks}) == 1 for tasks in per_pair.values())
        assert all(1 <= len(tasks) <= count for tasks in per_pair.values())
        assert all(len({task.fields["abstract"] for task in tasks}) == len(tasks) for tasks in per_pair.values())


def test_heldout_share_of_each_label():
    pairs = {split: {task.cluster: task.label for task in tasks} for split, tasks in embedded_tasks().items()}
    held, train = (Counter(pairs[split].values()) for split in ("heldout", "train"))
    for label in FREQUENT:
        assert held[label] / (held[label] + train[label]) == pytest.approx(0.35, abs=0.03), label


@pytest.mark.parametrize("first", [10, 50, 100])
def test_first_items_cover_labels_evenly(first):
    items = embedded_tasks()["heldout"][:first]
    counts = Counter(task.label for task in items)
    assert max(counts.values()) - min(counts[label] for label in FREQUENT) <= 1
    assert len({task.cluster for task in items}) == first  # every pair once before any twice


def test_e3_19_no_task_spells_a_label():
    for tasks in embedded_tasks().values():
        for task in tasks:
            shown = " ".join(task.fields[key] for key in ("abstract", "chemical", "protein"))
            assert not [label for label in LABELS if label in shown], task.id
            if "-" in task.label or "_" in task.label:
                assert task.label.casefold() not in shown.casefold()
            assert "[[" not in shown
            assert "{" not in shown


def test_demonstrations_are_on_other_pairs_and_sentences():
    pairs = {fact.pair for fact in embedded_facts()}
    bodies = " ".join(task.fields["abstract"] for tasks in embedded_tasks().values() for task in tasks)
    records = parse_demonstrations(shipped_components()["demonstrations"])
    assert {record["label"] for record in records} == set(FREQUENT)
    for record in records:
        assert f"{record['chemical']} | {record['protein']}".casefold() not in pairs
        assert record["abstract"] not in bodies


def test_same_tasks_in_every_process():
    code = "from harness.envs.registry import *; e = load_environment('drugprot')\n"
    code += "print([tasks_sha(e, s) for s in ('train', 'heldout', 'heldout-permuted')])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("0", "4321")
    }  # fmt: skip
    assert len(runs) == 1


def test_a_new_fact_leaves_the_others_phrasing():
    texts = parse_phrasings(
        phrasings(train=str([f"{{chemical}} {n} {{protein}}." for n in range(9)]).replace("'", '"'))
    )
    few = facts(*((f"drug{n}", "P", "INHIBITOR", "s", "") for n in range(20)))
    more = [*few, *facts(("other", "P", "INHIBITOR", "s", ""))]
    before, after = (build_tasks(f, texts) for f in (few, more))
    ids = {task.id for tasks in after.values() for task in tasks}
    moved = [task.id for task in before["train"] if task.id not in ids]
    assert len({i[:14] for i in moved}) <= 1  # at most one pair crosses the split's boundary


def test_pairs_with_two_relations_are_dropped_without_case():
    rows = facts(
        ("Aspirin", "COX1", "INHIBITOR", "s", ""),
        ("aspirin", "cox1", "SUBSTRATE", "s", ""),
        ("aspirin", "COX2", "INHIBITOR", "s", ""),
    )
    assert [fact.protein for fact in single_relation(rows)] == ["COX2"]


def test_repeated_facts_count_once():
    assert len(facts(("a", "b", "INHIBITOR", "s", ""), ("A", "B", "INHIBITOR", "other", ""))) == 1


def test_split_is_by_pair_not_by_row():
    rows = facts(*((f"d{n}", f"p{n}", "AGONIST", "s", "") for n in range(20)))
    split = split_facts(rows)
    assert len(split["heldout"]) == 7
    assert {f.pair for f in split["train"]} | {f.pair for f in split["heldout"]} == {f.pair for f in rows}


@pytest.mark.parametrize(
    "text",
    [
        "a\tb\tc",
        f"{HEADER}\nx\ty\tINHIBITOR",
        f"{HEADER}\nx\ty\tINHIBITS\ts\tn",
        f"{HEADER}\nx\t\tINHIBITOR\ts\tn",
        f"{HEADER}\nx\ty\tINHIBITOR\ts\tn\textra",
    ],
)
def test_bad_facts_are_refused(text):
    with pytest.raises(ConfigError, match="facts"):
        parse_facts(text)


@pytest.mark.parametrize(
    "text",
    [
        phrasings(label="INHIBITS"),
        phrasings(train='["no slots"]'),
        phrasings(heldout="[]"),
        phrasings(heldout='["{chemical} a {protein}."]'),
        phrasings().replace("[background]", "[INHIBITOR2]"),
        "[background\n",
    ],
)
def test_bad_phrasings_are_refused(text):
    with pytest.raises(ConfigError, match="phrasings"):
        parse_phrasings(text)


def test_relation_without_phrasings_is_refused():
    with pytest.raises(ConfigError, match="AGONIST"):
        build_tasks(facts(("a", "b", "AGONIST", "s", "")), parse_phrasings(phrasings()))


@pytest.mark.parametrize(
    ("template", "chemical", "protein", "expected"),
    [
        ("{chemical} hits {protein}. {protein} stops.", "imatinib", "c-kit", "Imatinib hits c-kit. c-kit stops."),
        ("{protein} likes {chemical}.", "zinc", "mTOR", "mTOR likes zinc."),
        ("{protein} likes {chemical}.", "{protein}", "a {chemical} b", "a {chemical} b likes {protein}."),
        ("In {protein}, {chemical}.", "zinc", "insulin receptor", "In insulin receptor, zinc."),
        ("{protein}.", "zinc", "insulin receptor", "Insulin receptor."),
    ],
)
def test_fill(template, chemical, protein, expected):
    assert fill(template, chemical, protein) == expected
