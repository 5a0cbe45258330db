"""Fmax and Smin worked out by hand, the baselines, and the table of how scores can be gamed."""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest

from harness.envs.bioreason_go.baselines import answerers, domain_table, frequent_terms, reply, report_rows
from harness.envs.bioreason_go.environment import BioReasonGo
from harness.envs.bioreason_go.metrics import consensus, corpus_metrics, fmax, smin
from harness.envs.bioreason_go.records import task_candidates
from tests.envs.go_support import ATP, KINASE, LABELS, TYROSINE_KINASE, information_of_train, score, scorer
from tests.envs.go_support import reply as answer

ROOT = Path(__file__).resolve().parents[2]


def test_fmax_by_hand():
    predictions = [{1: 1.0, 2: 0.5}, {1: 0.5, 3: 0.5}, {}]
    labels = [frozenset({1, 2}), frozenset({1}), frozenset({4})]
    # at 1.0: precision 1 over one protein, recall (1/2 + 0 + 0) / 3; at 0.5: precision (1 + 1/2) / 2, recall 2/3
    assert fmax(predictions, labels) == pytest.approx((2 * 0.75 * (2 / 3) / (0.75 + 2 / 3), 0.5))
    assert fmax([{}], [frozenset({1})]) == (0.0, 1.0)
    assert fmax([{1: 0.2}], [frozenset({1})]) == (1.0, 0.2)


def test_smin_by_hand():
    ia = [0.0, 3.0, 4.0, 12.0]
    # at 0.5 nothing is missed and 12 bits are false; at 1.0 term 2 is missed and nothing false
    assert smin([{1: 1.0, 2: 0.5, 3: 0.5}], [frozenset({1, 2})], ia) == (4.0, 1.0)
    assert smin([{1: 1.0, 3: 1.0}], [frozenset({2})], ia) == pytest.approx((math.hypot(4, 15), 1.0))
    assert smin([{}], [frozenset({1, 2})], ia) == (7.0, 1.0)


@pytest.mark.parametrize("measure", [fmax, lambda p, t: smin(p, t, [0.0, 1.0])])
def test_measures_refuse_what_they_cannot_score(measure):
    for predictions, labels in (([], []), ([{}], []), ([{}], [frozenset()])):
        with pytest.raises(ValueError):
            measure(predictions, labels)


def test_consensus_is_the_share_of_samples():
    assert consensus([{1, 2}, [1, 1], ()]) == {1: 2 / 3, 2: 1 / 3}


def test_measures_of_scored_answers_equal_fmax_and_smin_of_their_sets():
    s = scorer()
    of, ia = s.ontology.index_of, information_of_train().ia.tolist()
    guesses = [[KINASE], [ATP, "GO:0003677"], []]
    results = [score(answer(mf=ids), {"mf": LABELS["mf"]}) for ids in guesses]
    roots = set(s.ontology.roots.values())
    closed = [set(s.ontology.closure([of(i) for i in ids]).tolist()) - roots for ids in guesses]
    truth = frozenset(set(s.ontology.closure([of(i) for i in LABELS["mf"]]).tolist()) - roots)
    predictions = [dict.fromkeys(part, 1.0) for part in closed]
    found = corpus_metrics([result.metrics for result in results])
    assert found["mf_fmax"] == pytest.approx(fmax(predictions, [truth] * 3)[0])
    assert found["mf_smin_bits"] == pytest.approx(smin(predictions, [truth] * 3, ia)[0])
    assert set(found) == {"mf_fmax", "mf_smin_bits"}
    assert corpus_metrics([]) == {}


@pytest.fixture(scope="module")
def env():
    return BioReasonGo()


def test_baselines_know_the_train_split_alone(env):
    train = env.tasks("train")
    frequent = frequent_terms(train)
    assert all(len(ids) == 5 for ids in frequent.values())
    assert frequent["cc"][0] in ("GO:0005829", "GO:0005634", "GO:0005737", "GO:0005886", "GO:0005654")
    table = domain_table(train)
    assert any(TYROSINE_KINASE in terms["mf"] or KINASE in terms["mf"] for terms in table.values())
    answers = answerers(train)
    task = env.tasks("heldout")[0]
    assert answers["copy all candidates"](task) == task_candidates(task)
    for name, found in answers.items():
        valid = env.scorer.score_reply(reply(found(task)), env.gold(task))
        assert valid.components["valid"] == 1.0, name


def test_report_rows_of_each_baseline(env):
    rows = report_rows(env, env.tasks("heldout")[:40])
    names = {name for name, _, _ in rows}
    assert names == {"copy all candidates", "most frequent term", "5 most frequent terms", "domain lookup"}
    values = {(name, metric): value for name, metric, value in rows}
    assert len(values) == len(rows)
    for name in names:
        assert 0.1 < values[name, "reward"] < 1.0
        assert 0.0 < values[name, "mf_fmax"] < 1.0
        assert values[name, "bp_smin_bits"] > 0.0
    assert values["copy all candidates", "exact_recall"] > 0.4


@pytest.fixture(scope="module")
def gaming():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("go_gaming_table")
    finally:
        sys.path.pop(0)


def test_no_spam_beats_an_honest_half(env, gaming):
    found = gaming.measure(env, 60)
    page = gaming.PAGE.read_text(encoding="utf-8").split(gaming.BEGIN)[1].split(gaming.END)[0]
    assert [line.split(" | ")[0][2:] for line in page.splitlines()[2:]] == list(found)
    honest = min(found[name]["reward"] for name in gaming.HONEST)
    spam = list(found)[: list(found).index("domain lookup")]
    assert len(spam) == 9
    assert all(found[name]["reward"] < honest - 0.03 for name in spam), found
    assert found["the labels"]["reward"] == pytest.approx(1.0)
    assert found["an empty object"]["reward"] == pytest.approx(0.1)


@pytest.mark.slow
def test_the_table_of_the_page_is_current():
    command = [sys.executable, "scripts/go_gaming_table.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
