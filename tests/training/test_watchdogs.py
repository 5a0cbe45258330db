"""What stops a run and what does not: rules on curves by hand, on synthetic ones, and on the twelve published runs."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import watchdog_alarms as synthetic  # noqa: E402

from harness.config.schema import WatchdogSection  # noqa: E402
from harness.training.watchdogs import (  # noqa: E402
    HeldOut,
    Watchdog,
    collapse_reason,
    divergence_quantile,
    paired,
    replay,
    replicated,
    rose,
)

SHARED = Path(os.environ.get("HARNESS_SHARED_DATA", ROOT.parent / "shared" / "data"))
PUBLISHED = SHARED / "published-runs"
LIMITS = WatchdogSection()
REWARD = "train/e/reward/mean"


def rows_of(**series):
    keys = {"reward": REWARD, "format": "train/e/component/format", "entropy": "train/entropy"}
    keys |= {"kl": "train/kl_sampler", "spread": "train/zero_spread_share", "loss": "train/loss"}
    length = max(map(len, series.values()))
    return [
        {"step": step + 1} | {keys[name]: values[step] for name, values in series.items() if step < len(values)}
        for step in range(length)
    ]


def told(rows, heldout=(), limits=LIMITS):
    return [(f.rule, f.action, f.step) for f in replay(rows, heldout, limits).findings]


# --- the published runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    """The twelve runs as (rows, held-out scores), under the names that reports use."""
    if not PUBLISHED.is_dir():
        pytest.skip(f"the published runs are not at {PUBLISHED}")
    from harness.imports import wandb_csv
    from harness.imports.names import house_names
    from harness.imports.source import Source

    runs = {}
    for run in wandb_csv.read(Source(PUBLISHED)):
        series, _ = house_names(run.metrics, run.env)
        steps = sorted({step for points in series.values() for step in points})
        rows = [{"step": step} | {k: v[step] for k, v in series.items() if step in v} for step in steps]
        runs[run.name] = rows, {e.source_step: e.means["reward"] for e in run.evals}
    return runs


def test_of_the_published_runs_only_the_highest_rate_is_stopped(published):
    base = [scores[1] for _, scores in published.values()]
    assert len(base) == 12 and np.std(base, ddof=1) == pytest.approx(0.0129, abs=1e-4)
    stopped = {}
    for name, (rows, scores) in published.items():
        assert not {31, 57, 83} & {row["step"] for row in rows}
        points = replicated(base, {step: value for step, value in scores.items() if step > 1})
        found = replay(rows, points)
        assert all(f.action == "stop" for f in found.findings), name
        if found.findings:
            stopped[name] = found.stops[0]
    assert set(stopped) == {"w1-alpha64-lr1e-5"}
    first = stopped["w1-alpha64-lr1e-5"]
    assert (first.rule, first.step) == ("divergence", 50)
    assert "while the training reward rose" in first.reason


def test_the_training_curve_alone_stops_it_by_step_78(published):
    rows, _ = published["w1-alpha64-lr1e-5"]
    found = {f.key.split("/", 2)[2]: f.step for f in replay(rows).stops}
    assert found["component/format"] == 78
    assert min(found.values()) in (76, 77, 78)
    assert set(found) >= {"component/format", "component/accuracy", "reward/mean"}
    assert replay([row for row in rows if row["step"] < 76]).findings == []
    for name, (others, _) in published.items():
        assert name == "w1-alpha64-lr1e-5" or replay(others).findings == [], name


def test_no_published_run_is_stopped_against_its_own_start_either(published):
    """Every run's own base score has the same noise: with one reading of it the error is that of a difference."""
    base = [scores[1] for _, scores in published.values()]
    error = float(np.std(base, ddof=1)) * math.sqrt(2)
    for name, (rows, scores) in published.items():
        own = [HeldOut(step, "e", value - scores[1], error, 11) for step, value in scores.items() if step > 1]
        stops = replay(rows, own).stops
        assert {f.step for f in stops if f.rule == "divergence"} == set(), name


def test_what_the_rules_say_of_alpha_128(published):
    """It fell by 0.050 from a start that was the luckiest of the twelve; from the base model it is 1.8 errors away."""
    base = [scores[1] for _, scores in published.values()]
    rows, scores = published["w1-alpha128-baseline"]
    assert max(base) == scores[1]
    last = replicated(base, {50: scores[50]})[0]
    assert -last.difference / last.error == pytest.approx(1.81, abs=0.01)
    assert divergence_quantile(1, last.degrees, LIMITS.divergence_alpha) > 2.7
    assert replay(rows, replicated(base, {step: value for step, value in scores.items() if step > 1})).findings == []


@pytest.mark.parametrize("scale", [0.01, 7.0, 1000.0])
def test_the_published_runs_on_another_scale(published, scale):
    base = [scale * scores[1] for _, scores in published.values()]
    for name, (rows, scores) in published.items():
        scaled = [{k: v * scale if "/reward" in k or "/component" in k else v for k, v in row.items()} for row in rows]
        points = replicated(base, {step: scale * value for step, value in scores.items() if step > 1})
        stops = replay(scaled, points).stops
        assert bool(stops) is (name == "w1-alpha64-lr1e-5"), name
        assert not stops or stops[0].step == 50


# --- collapse ----------------------------------------------------------------------------------------------------


def test_a_collapse_by_hand():
    level = [0.8] * 30
    assert collapse_reason([*level, 0.0], [], LIMITS) is None
    assert collapse_reason([*level, 0.0, 0.0], [], LIMITS) is None  # (1/32)^2 is above 1e-3 / 22
    reason = collapse_reason([*level, 0.0, 0.0, 0.0], [], LIMITS)
    assert reason == "fell from 0.8 to 0, 3 steps in a row below half of what it was"
    assert collapse_reason([*level, 0.3, 0.3, 0.3, 0.3], [], LIMITS) is None  # low, and not near zero
    assert collapse_reason([0.8] * 9 + [0.0] * 3, [], LIMITS) is None  # too few rows to know its level
    assert collapse_reason([*level, 0.0, 0.0, 0.0, 0.7], [], LIMITS) is None  # it came back
    assert collapse_reason([0.0] * 60, [], LIMITS) is None  # it never was anywhere


def test_a_penalty_that_vanishes_and_a_reward_around_zero_are_no_collapse():
    penalty, reward = [0.5] * 30 + [0.0] * 20, [0.4] * 30 + [0.6] * 20
    assert told(rows_of(format=penalty, reward=reward)) == []
    for seed in range(20):
        random = np.random.default_rng(seed)
        assert told(rows_of(reward=list(random.normal(0.05, 0.5, 200)))) == []


def test_rare_zeros_of_a_hard_task_are_noise_and_a_lasting_zero_is_not():
    random = np.random.default_rng(3)
    hard = list(random.binomial(32, 0.04, 150) / 32)
    assert hard.count(0.0) > 30
    assert told(rows_of(reward=hard)) == []
    assert [rule for rule, _, _ in told(rows_of(reward=hard + [0.0] * 25))] == ["collapse"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", sorted(synthetic.FAILING))
def test_every_synthetic_collapse_is_stopped_soon(name, seed):
    kind = synthetic.FAILING[name]
    stops = [f.step for f in synthetic.watch(kind, 1000 + seed).stops if f.rule == "collapse"]
    assert stops, "it collapsed and was not stopped"
    hard = kind.start < 0.2
    assert kind.fall <= min(stops) <= kind.fall + kind.over + (45 if hard else 15)


@pytest.mark.parametrize("name", sorted(name for name, kind in synthetic.HEALTHY.items() if kind.steps <= 100))
def test_synthetic_runs_that_do_not_collapse_are_not_stopped(name):
    kind = synthetic.HEALTHY[name]
    stopped = [seed for seed in range(12) if synthetic.watch(kind, 2000 + seed).stops]
    assert stopped == []


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_of_rewards_plays_no_part(seed):
    for name in ("collapse (4 x 8)", "collapse over 20 steps (4 x 8)"):
        rows = synthetic.metrics(synthetic.FAILING[name], np.random.default_rng(seed))
        scaled = [{k: v * 250.0 if "/reward" in k or "/component" in k else v for k, v in row.items()} for row in rows]
        one, other = (replay(some).findings for some in (rows, scaled))
        assert [(f.rule, f.step, f.key) for f in one] == [(f.rule, f.step, f.key) for f in other]


# --- held-out ----------------------------------------------------------------------------------------------------


def test_the_error_over_all_looks_stays_below_alpha():
    alpha = 0.005
    spent = [1.0 / (look * (look + 1)) for look in range(1, 5000)]
    assert sum(spent) < 1
    limits = [divergence_quantile(look, 119, alpha) for look in range(1, 50)]
    assert limits == sorted(limits)
    # the chance of any alarm for a policy that equals its base, measured
    random = np.random.default_rng(5)
    looks = [divergence_quantile(look, 11, 0.05) for look in range(1, 11)]
    alarms = sum(
        any(-value > limit for value, limit in zip(random.standard_t(11, 10), looks, strict=True)) for _ in range(4000)
    )
    assert alarms / 4000 < 0.06


def test_held_out_falls_while_the_reward_rises_or_not():
    rising, falling = [0.2 + 0.01 * step for step in range(40)], [0.9 - 0.01 * step for step in range(40)]
    fall = [HeldOut(20, "e", -0.1, 0.02, 119)]
    assert told(rows_of(reward=rising), fall) == [("divergence", "stop", 20)]
    assert told(rows_of(reward=falling), fall) == [("divergence", "mark", 20)]
    assert told(rows_of(reward=rising), [HeldOut(20, "e", -0.04, 0.02, 119)]) == []
    assert told(rows_of(reward=rising), fall, WatchdogSection(divergence="off")) == []
    assert not rose([0.3]) and rose([0.1, 0.2]) and not rose([])


def test_the_noise_of_paired_items_is_read_back_from_the_interval():
    from harness.evaluation.records import ItemRecord
    from harness.evaluation.statistics import paired_difference

    random = np.random.default_rng(1)
    base = random.uniform(0, 1, 40)
    policy = np.clip(base + random.normal(-0.2, 0.2, 40), 0, 1)

    def items(values):
        return [ItemRecord(f"t{i}", f"c{i}", 0, float(v), {}, {}, None) for i, v in enumerate(values)]

    interval = paired_difference(items(policy), items(base), "reward", 0.95)
    gain = {"mean": interval.mean, "low": interval.low, "high": interval.high, "clusters": interval.clusters}
    data = {"subject": "policy", "step": 10, "env": "e", "gain": {"reward": gain}}
    (point,) = paired([data, data | {"subject": "base"}, data | {"gain": None}], 0.95)
    differences = policy - base
    assert point.error == pytest.approx(differences.std(ddof=1) / math.sqrt(40), rel=1e-6)
    assert (point.degrees, point.step) == (39, 10)
    assert point.difference == pytest.approx(differences.mean())


def test_repeated_evaluations_by_hand():
    points = replicated([0.7, 0.8, 0.9], {5: 0.6}, "e")
    assert points[0].difference == pytest.approx(-0.2)
    assert points[0].error == pytest.approx(0.1 * math.sqrt(4 / 3))
    assert points[0].degrees == 2
    for scores in ([0.5], [0.5, 0.5]):
        with pytest.raises(ValueError, match="noise"):
            replicated(scores, {1: 0.1})


# --- the other rules ---------------------------------------------------------------------------------------------


def test_each_of_the_other_rules_by_hand():
    steady = [1.0] * 30
    assert told(rows_of(loss=[0.1, math.nan])) == [("non_finite", "stop", 2)]
    assert told(rows_of(reward=[0.1, math.inf])) == [("non_finite", "stop", 2)]
    assert told(rows_of(kl=[1e-3] * 5 + [2.5, 3.0, 4.0])) == [("kl", "stop", 8)]
    assert told(rows_of(kl=[1e-3] * 5 + [2.5, 0.1, 4.0, 5.0])) == []
    assert told(rows_of(entropy=steady[:10] + [0.04] * 5)) == [("entropy", "mark", 15)]
    assert told(rows_of(entropy=steady[:10] + [0.1] * 20)) == []
    assert told(rows_of(spread=[0.5] * 5 + [1.0] * 10)) == [("zero_spread", "mark", 13)]
    assert told(rows_of(spread=[0.75] * 50)) == []
    off = WatchdogSection(kl="off", non_finite="mark")
    assert told(rows_of(kl=[9.0] * 9, loss=[math.nan] * 9), limits=off) == [("non_finite", "mark", 1)]


def test_a_finding_is_told_once_and_a_replay_equals_the_live_run():
    rows = synthetic.metrics(synthetic.FAILING["collapse (4 x 8)"], np.random.default_rng(4))
    live = Watchdog(LIMITS)
    news = [finding for row in rows for finding in live.observe(row)]
    assert news == live.findings == replay(rows).findings
    assert len({(f.rule, f.key) for f in news}) == len(news) > 1
    # rows of one step that came in parts are one row
    parts = [part for row in rows for part in ({"step": row["step"]}, row)]
    assert replay(parts).findings == news


def test_the_committed_runs_of_this_program_are_left_alone():
    from harness.reports.compact import parse_metrics

    files = sorted(ROOT.glob("analysis/run-*/data/metrics.csv"))
    assert files, "the program has committed runs"
    for path in files:
        metrics = parse_metrics(path.read_text(), path.name)
        rows = [
            {"step": step} | {k: v[i] for k, v in metrics.columns.items() if not math.isnan(v[i])}
            for i, step in enumerate(metrics.steps)
        ]
        assert replay(rows).stops == [], path
