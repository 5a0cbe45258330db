"""What belongs to a prompt, to RL and to both: against a naive computation, and by construction."""

import math
import random

import pytest
from scipy import stats

from harness.core.types import FailureClass
from harness.evaluation.effect import BASE, CELLS, CHOSEN, EFFECTS, SEED, VERDICTS, prompt_effects, verdict
from harness.evaluation.records import ItemRecord
from harness.evaluation.statistics import PairedInterval, contrast, paired_difference


def item(task, reward, cluster, failure=None):
    return ItemRecord(f"t{task}", cluster, 0, reward, {"right": reward}, {}, failure)


def world(means, items=60, clusters=20, seed=0):
    """Return six evals whose rewards are 0 or 1 with the given chances."""
    source = random.Random(seed)
    luck = [source.random() for _ in range(items)]
    return {
        cell: [
            item(n, float(luck[n] + 0.2 * source.random() < means[cell] + 0.1), f"c{n % clusters}")
            for n in range(items)
        ]
        for cell in CELLS
    }


def naive(cells, plus, minus):
    """Return mean and bounds, item by item and cluster by cluster."""
    sums, clusters = [], []
    for position in range(len(cells[CELLS[0]])):
        row = {cell: cells[cell][position] for cell in CELLS}
        sums.append(sum(row[cell].reward for cell in plus) - sum(row[cell].reward for cell in minus))
        clusters.append(row[CELLS[0]].cluster)
    mean = sum(sums) / len(sums)
    squares = 0.0
    for name in sorted(set(clusters)):
        residual = sum(value - mean for value, cluster in zip(sums, clusters, strict=True) if cluster == name)
        squares += residual**2
    count = len(set(clusters))
    half = stats.t.ppf(0.975, count - 1) * math.sqrt(count / (count - 1) * squares) / len(sums)
    return mean, mean - half, mean + half


FLAT = dict.fromkeys(CELLS, 0.5)


def test_every_effect_is_the_naive_one():
    cells = world({cell: 0.25 + 0.1 * number for number, cell in enumerate(CELLS)})
    found = prompt_effects(cells)
    assert [*found] == [effect.name for effect in EFFECTS]
    for effect in EFFECTS:
        mine = found[effect.name]
        assert (mine.mean, mine.low, mine.high) == pytest.approx(naive(cells, effect.plus, effect.minus))


def test_the_parts_add_up_also_when_items_failed_on_one_side():
    cells = world({cell: 0.2 + 0.1 * number for number, cell in enumerate(CELLS)})
    cells[SEED, CHOSEN][3] = item(3, 0.0, "c3", FailureClass.INFRA)
    del cells[BASE, SEED][7]
    found = prompt_effects(cells)
    assert {effect.n for effect in found.values()} == {58} and {effect.missing for effect in found.values()} == {2}
    parts = sum(found[name].mean for name in ("prompt_before", "rl_seed", "interaction"))
    assert found["total"].mean == pytest.approx(parts)
    assert found["interaction"].mean == pytest.approx(found["prompt_after"].mean - found["prompt_before"].mean)
    assert found["interaction"].mean == pytest.approx(found["rl_chosen"].mean - found["rl_seed"].mean)


def test_a_contrast_of_two_is_the_paired_difference():
    cells = world(FLAT)
    a, b = cells[CHOSEN, CHOSEN], cells[BASE, SEED]
    assert contrast((a, b), (1.0, -1.0)) == paired_difference(a, b)
    doubled = contrast((a, b, a, b), (1.0, -1.0, 1.0, -1.0))
    assert doubled.mean == pytest.approx(2 * paired_difference(a, b).mean)


def test_a_constant_difference_of_differences_has_the_range_of_both():
    rows = [item(n, 0.0, f"c{n}") for n in range(8)]
    same = contrast((rows, rows, rows, rows), (1.0, -1.0, -1.0, 1.0))
    assert same.mean == 0 and -2 <= same.low < 0 < same.high <= 2


def effects(before, after, change):
    """Return the three effects a verdict looks at, as (low, high)."""
    names = zip(("prompt_before", "prompt_after", "interaction"), (before, after, change), strict=True)
    return {name: PairedInterval(sum(pair) / 2, pair[0], pair[1], 9, 9, 1, 1, 1, 0) for name, pair in names}


UP, DOWN, NONE = (0.1, 0.3), (-0.3, -0.1), (-0.1, 0.1)


@pytest.mark.parametrize(
    ("before", "after", "change", "expected"),
    [
        (UP, UP, NONE, "kept"),
        (UP, NONE, DOWN, "absorbed"),
        (UP, UP, DOWN, "partly absorbed"),
        (UP, UP, UP, "grown"),
        (UP, NONE, NONE, "cannot tell"),
        (NONE, UP, NONE, "only after RL"),
        (NONE, NONE, NONE, "no effect"),
        (DOWN, NONE, NONE, "harmful"),
        (UP, DOWN, DOWN, "harmful"),
        (DOWN, UP, UP, "only after RL"),
    ],
)
def test_verdicts_say_only_what_intervals_allow(before, after, change, expected):
    assert verdict(effects(before, after, change)) == expected
    assert expected in VERDICTS


def test_simulated_programs_get_their_verdicts():
    kept = {(m, p): 0.2 + 0.3 * (p == CHOSEN) + 0.3 * (m != BASE) for m, p in CELLS}
    gone = kept | {(SEED, SEED): 0.8, (SEED, CHOSEN): 0.8, (CHOSEN, SEED): 0.8}
    assert verdict(prompt_effects(world(kept, 300, 100))) == "kept"
    assert verdict(prompt_effects(world(gone, 300, 100))) == "absorbed"
