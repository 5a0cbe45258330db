"""Public bug reports of other trainers that concern baselines, masks, ratios and denominators.

The item numbers are those of docs/training-checklist.md; item 19 stands in test_losses_model.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

torch = pytest.importorskip("torch")

from harness.config.load import known_keys  # noqa: E402
from harness.config.schema import OptimizerSection, TrainSection  # noqa: E402
from harness.core.types import Episode, FailureClass, FinishReason, Message, Score, Segment, failed_score  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.rollouts.collect import score_episode  # noqa: E402
from harness.training.batches import Group  # noqa: E402
from harness.training.grouping import make_group  # noqa: E402
from harness.training.losses import LossInputs, importance_weights  # noqa: E402
from harness.training.metrics import rollout_metrics  # noqa: E402
from harness.training.optimizer import build_optimizer  # noqa: E402
from harness.training.policy import StepStats, accumulate_gradient, batch_totals, update_policy  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402
from tests.toy_env import Toy, ToyArgs, toy_task  # noqa: E402
from tests.training.reference import naive_logprobs, random_group, relative_difference  # noqa: E402
from tests.training.test_losses_model import gradient, groups_near, rollouts_of  # noqa: E402

KINDS = ["mean", "mean_std", "batch_std", "component"]


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_item_01_a_reward_that_is_no_number_is_a_failure_and_no_zero(reward):
    """TRL#5773, #5775: it is counted on its own and moves neither mean nor spread."""

    class Broken(Toy):
        def score(self, task, episode):
            return Score(reward, {"early": 0.0})

    episode = Episode("t", (Message("assistant", "abc"),), FinishReason.STOP)
    score = score_episode(Broken(ToyArgs()), toy_task(0, "train"), episode)
    assert score.failure is FailureClass.VERIFIER and not score.counts
    rows = rollouts_of([3, 3, 3], [1.0, 0.0, 0.0])
    rows[2] = replace(rows[2], score=score)
    group = make_group(rows, "mean", False, 1.0)
    assert group.advantages == (0.5, -0.5, 0.0) and group.outside == {2}
    assert rollout_metrics({"toy": [group]})["train/failures/verifier"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_item_02_a_rollout_without_a_trained_token_leaves_the_baseline(kind):
    """verl#6375: -49.5 instead of +1. Masked truncated rollouts leave it too, which TRL 1.16 keeps in the mean."""
    parts = [{"a": value} for value in (1.0, 0.0, -50.0)]
    rows = rollouts_of([3, 3, 3], [1.0, 0.0, -50.0], parts)
    alone = make_group(rows[:2], kind, False, 1.0).advantages
    empty = replace(rows[2], segments=(Segment((), True, ()),))
    cut = replace(rows[2], episode=replace(rows[2].episode, finish_reason=FinishReason.LENGTH))
    assert make_group([*rows[:2], empty], kind, False, 1.0).advantages == (*alone, 0.0)
    assert make_group([*rows[:2], cut], kind, True, 1.0).advantages == (*alone, 0.0)
    assert make_group([*rows[:2], cut], kind, False, 1.0).advantages[1] > 0 or kind == "component"


def test_item_03_a_group_of_one_learns_nothing_and_is_a_config_error():
    """Elsewhere the advantage of a single rollout is its raw reward."""
    with pytest.raises(ValidationError, match="group_size"):
        TrainSection(group_size=1)
    for kind in KINDS:
        rows = rollouts_of([3, 3], [1.0, 0.0], [{"a": 1.0}, {"a": 0.0}])
        rows[1] = replace(rows[1], score=failed_score(FailureClass.INFRA, "lost"))
        group = make_group(rows, kind, False, 1.0)
        assert group.advantages == (0.0, 0.0)
        assert rollout_metrics({"toy": [group]})["train/zero_spread_share"] == 1


def test_item_04_baselines_go_by_group_id_and_prompt():
    """R1-V#67, PipelineRL#54: rows in the wrong order once mixed prompts; here that is an error."""
    first, second = rollouts_of([3, 3], [1.0, 0.0], group="a"), rollouts_of([3, 3], [1.0, 0.0], group="b")
    with pytest.raises(ValueError, match="cannot share a baseline"):
        make_group([first[0], second[1]], "mean", False, 1.0)
    with pytest.raises(ValueError, match="cannot share a baseline"):
        make_group([first[0], replace(first[1], prompt_ids=(9, 9))], "mean", False, 1.0)
    for kind in KINDS:
        rows = rollouts_of(
            [3] * 4, [0.9, 0.1, 0.4, 0.4], [{"a": x, "b": y} for x, y in ((1, 0), (0, 1), (1, 1), (0, 0))]
        )
        assert math.fsum(make_group(rows, kind, False, 1.0).advantages) == pytest.approx(0, abs=1e-12)


def test_item_06_a_group_without_spread_is_in_no_gradient_and_no_denominator():
    """TRL#5640, #6681: such groups kept their KL gradient and diluted the mean. The loop drops them; their share is
    logged, and the run stops after 20 steps without any other (test_data_loop.py)."""
    from harness.training.loop import EMPTY_LIMIT

    assert EMPTY_LIMIT == 20
    flat_group = make_group(rollouts_of([3, 3], [0.4, 0.4]), "mean", False, 1.0)
    informative = make_group(rollouts_of([3, 3], [0.4, 0.6], group="b"), "mean", False, 1.0)
    metrics = rollout_metrics({"toy": [flat_group, informative]})
    assert metrics["train/zero_spread_share"] == 0.5
    usable = [group for group in (flat_group, informative) if any(group.advantages)]
    assert usable == [informative] and batch_totals(usable, None).tokens == 6


def test_item_07_components_can_be_normalised_on_their_own_and_their_spread_is_logged():
    """TRL#4841: the sum of two rewards cannot tell a right answer in a wrong format from the reverse."""
    parts = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}, {"right": 0.0, "form": 1.0}]
    rows = rollouts_of([3] * 3, [1.0, 1.0, 1.0], parts)
    assert not any(make_group(rows, "mean", False, 1.0).advantages)
    advantages = make_group(rows[:2], "component", False, 1.0).advantages
    assert advantages == (0.0, 0.0)  # equal weights: exactly opposite parts cancel, as they should
    metrics = rollout_metrics({"toy": [make_group(rows, "mean", False, 1.0)]})
    assert metrics["train/toy/component_spread/right"] == pytest.approx(math.sqrt(2) / 3)
    uneven = rollouts_of([3] * 4, [1.0, 1.0, 1.0, 0.0], [*parts, {"right": 0.0, "form": 0.0}])
    apart = make_group(uneven, "component", False, 1.0).advantages
    assert apart[0] > apart[1] + 0.1  # the rarer achievement is worth more, though the sums are equal


def test_item_12_masked_tokens_are_in_numerator_and_denominator_or_in_neither():
    """TRL#6369, #4976: one mask for both; also for the entropy bonus and the KL."""
    wrapped = with_adapter(tiny_llama(torch.float64))
    (group,) = groups_near(wrapped, count=1)
    outside = Group(group.rollouts, (*group.advantages[:-1], 0.0), outside=frozenset({3}))
    alone = Group(group.rollouts[:-1], group.advantages[:-1])
    for loss in ("dapo", "grpo", "dr_grpo", "gspo"):
        section = {"loss": loss, "kl_beta": 0.1, "entropy_beta": 0.01}
        masked, without = (gradient(wrapped, [shown], **section) for shown in (outside, alone))
        assert relative_difference(masked, without) < 1e-12
        assert batch_totals([outside], 8) == batch_totals([alone], 8)


def test_item_13_a_batch_without_an_active_token_is_neither_nan_nor_an_error():
    """TRL#3248, unsloth-zoo#1262: 0/0, or a backward pass without a graph."""
    wrapped = with_adapter(tiny_llama(torch.float64))
    (group,) = groups_near(wrapped, count=1)
    nothing = Group(group.rollouts, (0.0,) * 4, outside=frozenset(range(4)))
    parameters, before = trainable(wrapped), {n: p.detach().clone() for n, p in trainable(wrapped).items()}
    optimizer = build_optimizer(parameters, OptimizerSection())
    stats = update_policy(
        wrapped.get_base_model(), list(parameters.values()), optimizer, [nothing], TrainSection(kl_beta=0.1), 1.0
    )
    assert all(math.isfinite(value) for value in stats.metrics().values())
    assert all(torch.equal(before[name], p.detach()) for name, p in parameters.items())
    beside = {**{"kl_beta": 0.1, "entropy_beta": 0.01}}
    both, one = (gradient(wrapped, groups, **beside) for groups in ([nothing, group], [group]))
    assert relative_difference(both, one) < 1e-7


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_item_16_temperature_divides_the_logits_on_both_sides(temperature):
    """TRL#4159, prime-rl#697: raw log probabilities, or log probabilities divided by T, give ratios around 2."""
    wrapped = with_adapter(tiny_llama(torch.float64))
    engine = TransformersEngine(loaded(wrapped.get_base_model(), eos=()), wrapped)
    prompt = [10, 11, 12, 13]
    rows = engine.generate([prompt], 4, 6, temperature, [[1, 2, 3, 4]])[0]
    shape = random_group("t", prompt, [6] * 4, [0.5, -0.5, 0.5, -0.5], 128, 0)
    rollouts = tuple(replace(r, segments=(row.segment,)) for r, row in zip(shape.rollouts, rows, strict=True))
    stats = StepStats()
    group = Group(rollouts, shape.advantages, temperature)
    accumulate_gradient(wrapped.get_base_model(), [group], TrainSection(), stats)
    assert stats.metrics()["train/logprob_gap"] < 1e-5
    if temperature != 1.0:  # the fault is seen when it is there
        faulty = StepStats()
        accumulate_gradient(wrapped.get_base_model(), [replace(group, temperature=1.0)], TrainSection(), faulty)
        assert faulty.metrics()["train/logprob_gap"] > 0.01


def test_item_17_nothing_but_the_temperature_shapes_training_samples():
    """TRL#6789: top_p, top_k and min_p renormalise the sampler's support, so ratios are biased. No key sets them, and
    the engine's log probabilities are those of the whole vocabulary."""
    shaping = ("top_p", "top_k", "min_p", "penalty", "typical", "logit_bias")
    sampling = [key for key in known_keys() if "sampling" in key]
    assert sampling and not [key for key in sampling if any(word in key for word in shaping)]
    wrapped = with_adapter(tiny_llama(torch.float64))
    engine = TransformersEngine(loaded(wrapped.get_base_model(), eos=()), wrapped)
    (row,) = engine.generate([[10, 11, 12]], 1, 8, 1.3, [[5]])[0]
    with torch.no_grad():
        full = naive_logprobs(wrapped.get_base_model(), [10, 11, 12], row.token_ids, 1.3)
    assert list(row.logprobs) == pytest.approx(full.tolist(), abs=1e-5)


def test_item_18_a_long_completion_survives_the_length_free_corrections():
    """TRL#4772, #6688: 4,000 tokens off by 0.001 each drop the whole completion under the mask of the sum."""
    length = 4000
    old = torch.full((length,), -1.0, dtype=torch.float64)
    given = LossInputs(old, old, torch.ones(length).double(), [length], old - 0.001)
    dropped = {kind: float(importance_weights(given, kind)[1].double().mean()) for kind in ("token", "geometric_mask")}
    assert dropped == {"token": 0.0, "geometric_mask": 0.0}
    weights, cut = importance_weights(given, "sequence_mask")
    assert cut.all() and not weights.any()
    stats = StepStats(tokens=4, corrected=1.0)  # and the dropped share is logged
    assert stats.metrics()["train/importance_cut_share"] == 0.25


@pytest.mark.parametrize("loss", ["dapo", "grpo", "gspo", "cispo", "dppo"])
def test_item_20_on_policy_the_ratio_is_one_and_each_rollout_is_used_once(loss):
    """unsloth#4502, TRL#3532: ratios beside 1 with one update per batch; rollouts used the wrong number of times."""
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = groups_near(wrapped, noise=1.0)  # whatever the sampler reported
    parameters = list(trainable(wrapped).values())
    for minibatches in (1, 2, 4):
        optimizer = build_optimizer(trainable(wrapped), OptimizerSection(learning_rate=1e-12))
        section = TrainSection(loss=loss, minibatches=minibatches, entropy_beta=0.001)
        stats = update_policy(wrapped.get_base_model(), parameters, optimizer, groups, section, 1.0)
        assert stats.updates == minibatches
        assert stats.tokens == sum(group.completion_tokens for group in groups)
        if minibatches == 1 and loss != "dppo":  # its mask asks about the sampler, not about the ratio
            assert stats.metrics()["train/clipped_share"] == 0
