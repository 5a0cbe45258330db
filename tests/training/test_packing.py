"""How groups are spread over passes: few passes, nothing lost, and no work that cannot matter."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from harness.config.schema import TrainSection  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.training.batches import Group, micro_batch, plan_passes, split_groups, without_idle_rows  # noqa: E402
from harness.training.policy import StepStats, accumulate_gradient  # noqa: E402
from tests.torch_support import tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import naive_gradient, random_group, relative_difference  # noqa: E402

ROOT = 5
CASES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 30), min_size=1, max_size=5)), min_size=1, max_size=9
)


def made(cases):
    source = random.Random(0)
    groups = []
    for number, (suffix, lengths) in enumerate(cases):
        prompt = [7] * ROOT + [source.randrange(10, 128) for _ in range(suffix)]
        groups.append(random_group(f"t{number}", prompt, lengths, [0.5] * len(lengths), 128, number))
    return groups


def rows(part):
    return [(group.rollouts[i].group, i) for group in part for i in group.computed]


def tokens(part):
    """Count the tokens of a pass one by one: a token of a prompt is its place behind what comes before it."""
    inner = {group.prompt[:end] for group in part for end in range(1, len(group.prompt))}
    return len(inner) + sum(1 + sum(len(group.rollouts[i].token_ids) for i in group.computed) for group in part)


def next_fit(groups, budget):
    """Return the passes of groups in order, each with as many as fit."""
    parts = []
    for group in groups:
        if not parts or tokens([*parts[-1], group]) > budget:
            parts.append([])
        parts[-1].append(group)
    return parts


@settings(deadline=None, max_examples=150)
@given(CASES, st.integers(1, 150))
def test_every_rollout_is_computed_once_within_the_budget(cases, budget):
    groups = made(cases)
    parts = split_groups(groups, budget)
    computed = [row for part in parts for row in rows(part)]
    written = [(r.group, r.index) for g in groups for r in g.rollouts if r.token_ids]
    assert sorted(computed) == sorted(written)
    for part in parts:
        assert tokens(part) <= budget or len(rows(part)) <= 1
        flat = micro_batch(part, torch.device("cpu"), torch.float32)
        assert flat.tree.tokens == tokens(part)
        assert sum(flat.lengths) == len(flat.advantages) == len(flat.tree.target_ids())
    assert split_groups(groups, budget) == parts
    # groups count in the denominators as they are, wherever their rollouts are computed
    assert all(sum(len(r.token_ids) for r in g.rollouts) == g.completion_tokens for part in parts for g in part)


@settings(deadline=None, max_examples=150)
@given(CASES, st.integers(40, 150))
def test_never_more_passes_than_in_order(cases, budget):
    groups = [group for group in made(cases) if tokens([group]) <= budget]
    in_order = next_fit(groups, budget)
    parts = split_groups(groups, budget)
    assert len(parts) <= len(in_order)
    if len(parts) == len(in_order):  # then the split is the one in order, and rounding stays what it was
        computed = [sum(map(tokens, passes)) for passes in (parts, in_order)]
        assert computed[0] < computed[1] or parts == in_order


def test_long_and_short_groups_share_passes():
    groups = made([(1, [29]), (1, [9]), (1, [29]), (1, [9]), (1, [29]), (1, [9])])
    assert len(next_fit(groups, ROOT + 60)) == 3
    names = [[group.rollouts[0].group for group in part] for part in split_groups(groups, ROOT + 60)]
    assert names == [["t0", "t2"], ["t1", "t3", "t4", "t5"]]


def test_everything_that_fits_is_one_pass_in_order():
    groups = made([(2, [3, 1]), (4, [9]), (1, [2, 2, 2])])
    (part,) = split_groups(groups, tokens(groups))
    assert part == groups and all(one is other for one, other in zip(part, groups, strict=True))
    assert len(split_groups(groups, tokens(groups) - 1)) == 2


def gradient(wrapped, groups, **changes):
    parameters, stats = trainable(wrapped), StepStats()
    for parameter in parameters.values():
        parameter.grad = None
    accumulate_gradient(wrapped.get_base_model(), groups, TrainSection(**changes), stats)
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}, stats


def uneven(advantages=(0.5, 0.0, -0.25, 0.0, -0.25)):
    prompts = [[7] * ROOT + [20 + i] * (i + 1) for i in range(3)]
    return [
        random_group(f"t{i}", prompt, [9, 30, 4, 12, 1], list(advantages), 128, i) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("budget", [1, 45, 70, 10_000])
def test_a_group_over_the_budget_is_spread_with_the_same_gradient(budget):
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = uneven()
    found, _ = gradient(wrapped, groups, microbatch_tokens=budget, entropy_beta=0.0)
    naive = naive_gradient(wrapped.get_base_model(), trainable(wrapped), groups)
    assert relative_difference(found, naive) < 1e-6


def test_the_order_of_groups_and_rollouts_does_not_matter():
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = uneven()
    turned = [Group(g.rollouts[::-1], g.advantages[::-1], g.temperature) for g in groups[::-1]]
    found, stats = gradient(wrapped, groups, microbatch_tokens=70, entropy_beta=0.01)
    other, again = gradient(wrapped, turned, microbatch_tokens=70, entropy_beta=0.01)
    assert relative_difference(other, found) < 1e-6
    assert again.loss == pytest.approx(stats.loss, rel=1e-6)


def test_rollouts_without_advantage_cost_nothing_and_stay_in_the_denominator():
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = uneven()
    found, stats = gradient(wrapped, groups, entropy_beta=0.0)
    naive = naive_gradient(wrapped.get_base_model(), trainable(wrapped), groups)
    assert relative_difference(found, naive) < 1e-6
    assert stats.computed_tokens == ROOT + (1 + 2 + 3) + 3 * (9 + 4 + 1)
    assert stats.tokens == 3 * (9 + 4 + 1)
    assert [group.completion_tokens for group in without_idle_rows(groups)] == [56] * 3


def test_rollouts_without_advantage_are_computed_for_an_entropy_bonus():
    wrapped = with_adapter(tiny_llama(torch.float64))
    found, stats = gradient(wrapped, uneven(), entropy_beta=0.01)
    assert stats.tokens == 3 * 56
    without, _ = gradient(wrapped, uneven(), entropy_beta=0.0)
    assert relative_difference(found, without) > 1e-4


def test_a_group_without_any_advantage_leaves_the_passes():
    idle = uneven((0.0,) * 5)[1]
    assert without_idle_rows([idle]) == []
    kept = without_idle_rows([uneven()[0], idle])
    assert [group.rollouts[0].group for group in kept] == ["t0"]


def test_an_empty_rollout_is_in_no_pass_however_small_the_budget():
    """A pass without a token to predict would have no gradient graph (TRL#3248)."""
    group = random_group("t", [7] * ROOT + [20], [4, 0, 3], [0.5, 0.5, -1.0], 128, 0)
    assert [rows(part) for part in plan_passes([group], 1, False).parts] == [[("t", 0)], [("t", 2)]]
    empty = random_group("e", [7] * ROOT + [20], [0, 0], [0.5, -0.5], 128, 0)
    assert plan_passes([empty], 100, False).parts == [] and plan_passes([empty], 100, False).largest == 0


def test_a_rollout_outside_the_loss_is_in_no_pass():
    group = uneven()[0]
    masked = Group(group.rollouts, group.advantages, 1.0, outside=frozenset({1, 4}))
    parts = split_groups([masked], 30)
    assert sorted(row for part in parts for _, row in rows(part)) == [0, 2, 3]
    assert masked.completion_tokens == 9 + 4 + 12
