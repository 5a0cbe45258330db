"""Losses through the model: splits, reference, importance correction, and groups as the loop makes them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import get_args

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import OptimizerSection, TrainSection  # noqa: E402
from harness.core.canonical import strict_loads  # noqa: E402
from harness.core.types import FinishReason, Score, Segment  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.training.batches import Group  # noqa: E402
from harness.training.fused import fuse_adapters  # noqa: E402
from harness.training.grouping import Shaping, make_group, scale_groups  # noqa: E402
from harness.training.optimizer import build_optimizer  # noqa: E402
from harness.training.policy import StepStats, accumulate_gradient, adapters_off, update_policy  # noqa: E402
from tests.torch_support import tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import naive_logprobs, random_group, relative_difference  # noqa: E402
from tests.training.test_data_loop import trainer  # noqa: E402

LOSSES = get_args(TrainSection.model_fields["loss"].annotation)
MAX_TOKENS = 16


def groups_near(wrapped, count=4, lengths=(5, 1, 7, 3), seed=3, noise=0.3):
    """Return groups whose sampler's log probabilities are the model's own plus noise."""
    source = random.Random(seed)
    root = [source.randrange(10, 128) for _ in range(12)]
    made = []
    for index in range(count):
        group = random_group(f"t{index}", [*root, 20 + index], lengths, [0.5, -0.25, 0.5, -0.75], 128, seed + index)
        rollouts = []
        for rollout in group.rollouts:
            with torch.no_grad():
                own = naive_logprobs(wrapped.get_base_model(), group.prompt, rollout.token_ids)
            logprobs = tuple(min(float(value) + source.gauss(0, noise), -1e-3) for value in own)
            rollouts.append(replace(rollout, segments=(Segment(rollout.token_ids, True, logprobs),)))
        made.append(Group(tuple(rollouts), group.advantages))
    return made


def gradient(wrapped, groups, stats=None, **section):
    parameters = trainable(wrapped)
    for parameter in parameters.values():
        parameter.grad = None
    settings = TrainSection(**({"entropy_beta": 0.0, "minibatches": 2} | section))
    accumulate_gradient(wrapped.get_base_model(), groups, settings, stats or StepStats(), MAX_TOKENS)
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize("loss", LOSSES)
def test_item_19_one_two_or_four_micro_batches_have_one_gradient(loss):
    """TRL#6024, #3021: denominators are those of the optimizer batch, for every loss, in float32."""
    wrapped = with_adapter(tiny_llama())
    groups = groups_near(wrapped)
    section = {"loss": loss, "importance": "token", "kl_beta": 0.05, "entropy_beta": 0.01}
    counts, gradients = [], []
    for budget in (100_000, 50, 30):
        stats = StepStats()
        gradients.append(gradient(wrapped, groups, stats, microbatch_tokens=budget, **section))
        counts.append(stats.computed_tokens)
    assert counts[0] < counts[1] < counts[2]  # the shared root is computed once per pass: one, two, four of them
    assert relative_difference(gradients[1], gradients[0]) < 1e-5
    assert relative_difference(gradients[2], gradients[0]) < 1e-5


@pytest.mark.parametrize("fused", [False, True])
def test_the_reference_is_the_model_without_its_adapter(fused):
    wrapped = with_adapter(tiny_llama(torch.float64))
    base = wrapped.get_base_model()
    groups = groups_near(wrapped, count=2)
    plain = tiny_llama(torch.float64)
    if fused:
        assert fuse_adapters(wrapped)
    total, tokens = 0.0, 0
    for group in groups:
        for rollout in group.rollouts:
            with torch.no_grad():
                own = naive_logprobs(base, group.prompt, rollout.token_ids)
                gap = naive_logprobs(plain, group.prompt, rollout.token_ids) - own
            ratio = (own - own.new_tensor(rollout.completion.logprobs)).exp()
            total += float((ratio * (gap.exp() - gap - 1)).sum())
            tokens += len(gap)
    stats = StepStats()
    gradient(wrapped, groups, stats, kl_beta=0.1)
    assert stats.metrics()["train/kl_reference"] == pytest.approx(total / tokens, rel=1e-6)
    assert total > 1e-4
    assert "train/kl_reference" not in StepStats().metrics()
    assert all(parameter.requires_grad for parameter in trainable(wrapped).values())
    with adapters_off(base):
        assert not any(parameter.requires_grad for parameter in base.parameters())


def test_a_strong_pull_to_the_reference_shrinks_the_adapter_s_effect():
    wrapped = with_adapter(tiny_llama(torch.float64), scale=0.1)
    groups = [replace(g, advantages=(0.0,) * 4) for g in groups_near(wrapped, count=2, noise=0.0)]
    parameters = list(trainable(wrapped).values())
    optimizer = build_optimizer(trainable(wrapped), OptimizerSection(learning_rate=0.003))
    section = TrainSection(kl_beta=1.0, entropy_beta=0.0)
    values = [
        update_policy(wrapped.get_base_model(), parameters, optimizer, groups, section, 1.0).metrics() for _ in range(6)
    ]
    kl = [row["train/kl_reference"] for row in values]
    assert kl[-1] < 0.8 * kl[0]


def test_the_ratio_goes_on_from_the_policy_before_the_first_update():
    """With a correction, the weight covers sampler to old policy, the ratio old policy to new one."""
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = groups_near(wrapped, noise=0.6)
    optimizer = build_optimizer(trainable(wrapped), OptimizerSection(learning_rate=1e-9))
    clipped = {}
    for importance in ("none", "token"):
        section = TrainSection(minibatches=2, importance=importance, importance_cap=1.2, entropy_beta=0.0)
        stats = update_policy(
            wrapped.get_base_model(), list(trainable(wrapped).values()), optimizer, groups, section, 1.0
        )
        clipped[importance] = stats.metrics()["train/clipped_share"]
        cut = stats.metrics().get("train/importance_cut_share")
        assert (cut is None) == (importance == "none") and (cut is None or cut > 0.1)
    # nothing moved: what "none" clips is the sampler's noise alone
    assert clipped["none"] > 0.1 and clipped["token"] == 0


def rollouts_of(lengths, rewards, components=None, group="t0", finish=FinishReason.STOP):
    made = random_group(group, [5, 6], lengths, rewards, 128, 0).rollouts
    components = components or [{}] * len(rewards)
    return [
        replace(r, score=Score(reward, part), episode=replace(r.episode, finish_reason=finish))
        for r, reward, part in zip(made, rewards, components, strict=True)
    ]


def test_the_overlong_penalty_enters_the_baseline():
    shaping = Shaping(max_tokens=10, overlong_buffer=4, overlong_penalty=0.5)
    group = make_group(rollouts_of([6, 8, 10, 2], [1.0] * 4), "mean", False, 1.0, shaping)
    # penalties 0, 0.25, 0.5, 0: shaped rewards 1, 0.75, 0.5, 1, mean 0.8125
    assert group.advantages == pytest.approx((0.1875, -0.0625, -0.3125, 0.1875))
    assert not any(make_group(rollouts_of([6, 8, 10, 2], [1.0] * 4), "mean", False, 1.0).advantages)
    assert Shaping.of(TrainSection(overlong_buffer=4, overlong_penalty=0.5), 10) == shaping


def test_a_step_s_groups_are_divided_by_what_they_share():
    groups = [
        make_group(rollouts_of([3, 3], rewards, group=name), "batch_std", False, 1.0)
        for name, rewards in (("a", [1.0, 0.0]), ("b", [0.5, 0.5]))
    ]
    scaled = scale_groups(groups, "batch_std", {"toy": Shaping()})
    # rewards 1, 0, 0.5, 0.5: variance (0.25 + 0.25) / 4
    assert scaled[0].advantages == pytest.approx((0.5 / 0.125**0.5, -0.5 / 0.125**0.5))
    assert scaled[1].advantages == (0.0, 0.0)
    assert scale_groups(groups, "mean", {"toy": Shaping()}) == groups


def test_the_loop_trains_with_everything_on(tmp_path):
    """Metrics of the optional parts appear and are finite; the row says how far an update moves the weights."""
    run = trainer(
        tmp_path, 2, loss="dr_grpo", advantage="component", minibatches=2, importance="token", kl_beta=0.01,
        overlong_buffer=4, overlong_penalty=0.2, resample_groups=2,
    )  # fmt: skip
    run.run()
    rows = [strict_loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    updated = [row for row in rows if "train/loss" in row]
    assert updated
    for row in updated:
        assert {"train/kl_reference", "train/importance_cut_share", "optim/effective_step"} <= set(row)
        assert all(math.isfinite(value) for value in row.values())
        section = run.config
        expected = row["optim/learning_rate"] * section.lora.alpha / section.lora.rank
        assert row["optim/effective_step"] == pytest.approx(expected)
