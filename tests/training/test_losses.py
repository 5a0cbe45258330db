"""The policy loss against hand-computed numbers and a loop over tokens; ratios; metrics of a step."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import OptimizerSection, TrainSection  # noqa: E402
from harness.core.errors import StoppedError  # noqa: E402
from harness.core.types import Completion, FinishReason  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.training.batches import Group, split_groups  # noqa: E402
from harness.training.losses import LossInputs, Totals, policy_loss  # noqa: E402
from harness.training.optimizer import build_optimizer  # noqa: E402
from harness.training.policy import StepStats, accumulate_gradient, update_policy  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import naive_logprobs, random_group, relative_difference  # noqa: E402


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def dapo_loss(logprobs, old, advantages, active, low, high):
    inputs = LossInputs(logprobs, old, advantages, [len(logprobs)])
    section = TrainSection(clip_low=low, clip_high=high)
    return policy_loss(inputs, Totals(active, 1), section)


def naive_loss(logprobs, old, advantages, active, low, high):
    total, clipped = 0.0, 0
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = math.exp(new - before)
        bounded = min(max(ratio, 1 - low), 1 + high) * advantage
        clipped += bounded < ratio * advantage
        total += min(ratio * advantage, bounded)
    return -total / active, clipped


def test_by_hand():
    # ratios 1.5, 0.5, 1.5, 0.5 against bounds 0.8 and 1.28
    logprobs = tensor(math.log(1.5), math.log(0.5), math.log(1.5), math.log(0.5))
    out = dapo_loss(logprobs, torch.zeros(4).double(), tensor(1.0, 1.0, -1.0, -1.0), 4, 0.2, 0.28)
    # min(1.5, 1.28) + min(0.5, 0.8) + min(-1.5, -1.28) + min(-0.5, -0.8) = 1.28 + 0.5 - 1.5 - 0.8 = -0.52
    assert float(out.loss) == pytest.approx(0.52 / 4, abs=1e-12)
    assert int(out.clipped) == 2


def test_a_clipped_token_has_no_gradient():
    logprobs = tensor(math.log(1.5), math.log(1.5)).requires_grad_()
    dapo_loss(logprobs, torch.zeros(2).double(), tensor(1.0, -1.0), 2, 0.2, 0.28).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.75])  # -(-1) * 1.5 / 2


def test_equals_a_loop_over_tokens():
    source = random.Random(1)
    new = [source.uniform(-3, 0) for _ in range(300)]
    old = [value + source.gauss(0, 0.4) for value in new]
    advantages = [source.choice([-1.0, -0.25, 0.0, 0.75]) for _ in new]
    expected, clipped = naive_loss(new, old, advantages, 450, 0.1, 0.3)
    out = dapo_loss(tensor(*new), tensor(*old), tensor(*advantages), 450, 0.1, 0.3)
    assert float(out.loss) == pytest.approx(expected, abs=1e-12)
    assert int(out.clipped) == clipped > 20


def test_the_denominator_counts_the_whole_batch():
    """Long and short rollouts weigh by their tokens: the mean is over tokens, not over rollouts."""
    logprobs = torch.zeros(6).double()
    advantages = tensor(1.0, 1.0, 1.0, 1.0, 1.0, -1.0)
    whole = dapo_loss(logprobs, logprobs, advantages, 6, 0.2, 0.2).loss
    parts = [dapo_loss(logprobs[a:b], logprobs[a:b], advantages[a:b], 6, 0.2, 0.2).loss for a, b in [(0, 5), (5, 6)]]
    assert float(whole) == pytest.approx(-4 / 6)
    assert float(sum(parts)) == pytest.approx(float(whole))


def sampled_groups(wrapped, count=4, size=4):
    """Return groups whose completions and logprobs come from the engine."""
    engine = TransformersEngine(loaded(wrapped.get_base_model(), eos=()), wrapped)
    prompts = [[10, 11, 12, 20 + index, 30 + index] for index in range(count)]
    seeds = [[100 * index + row for row in range(size)] for index in range(count)]
    rows = engine.generate(prompts, size, 6, 1.0, seeds)
    groups = []
    for index, (prompt, completions) in enumerate(zip(prompts, rows, strict=True)):
        shape = random_group(f"t{index}", prompt, [6] * size, [0.75, -0.25, -0.25, -0.25], 128, index)
        rollouts = tuple(
            type(rollout)(
                rollout.task,
                rollout.group,
                rollout.index,
                rollout.prompt_ids,
                (completion.segment,),
                rollout.episode,
                rollout.score,
            )
            for rollout, completion in zip(shape.rollouts, completions, strict=True)
        )
        groups.append(Group(rollouts, shape.advantages))
    return groups


PLAIN = TrainSection(entropy_beta=0.0)


def fresh():
    wrapped = with_adapter(tiny_llama(torch.float64))
    return wrapped, list(trainable(wrapped).values())


def run_update(groups, minibatches, learning_rate=0.02, max_grad_norm=1e9):
    wrapped, parameters = fresh()
    optimizer = build_optimizer(parameters, OptimizerSection(learning_rate=learning_rate))
    section = TrainSection(minibatches=minibatches, entropy_beta=0.0)
    stats = update_policy(wrapped.get_base_model(), parameters, optimizer, groups, section, max_grad_norm)
    return wrapped, stats


def naive_update(groups, minibatches, learning_rate):
    """Do the optimizer updates with one plain forward pass per rollout and ratios against the sampler."""
    wrapped, parameters = fresh()
    optimizer = build_optimizer(parameters, OptimizerSection(learning_rate=learning_rate))
    clipped = 0
    for index in range(minibatches):
        optimizer.zero_grad()
        batch = groups[index::minibatches]
        active = sum(len(r.completion.token_ids) for group in batch for r in group.rollouts)
        for group in batch:
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
                new = naive_logprobs(wrapped.get_base_model(), group.prompt, rollout.completion.token_ids)
                ratio = (new - torch.tensor(rollout.completion.logprobs, dtype=new.dtype)).exp()
                bounded = ratio.clamp(0.8, 1.28) * advantage
                clipped += int((bounded < ratio * advantage).sum())
                (-torch.minimum(ratio * advantage, bounded).sum() / active).backward()
        optimizer.step()
    return wrapped, clipped


def values(wrapped):
    return {name: parameter.detach() for name, parameter in trainable(wrapped).items()}


def moved(wrapped):
    start = values(fresh()[0])
    return {name: value - start[name] for name, value in values(wrapped).items()}


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_updates_equal_naive_ones_with_ratios_against_the_sampler(minibatches):
    groups = sampled_groups(fresh()[0])
    wrapped, stats = run_update(groups, minibatches)
    expected, clipped = naive_update(groups, minibatches, 0.02)
    assert stats.updates == minibatches
    # the engine reports float32 log probabilities, and Adam's first updates divide by their own size
    assert relative_difference(moved(wrapped), moved(expected)) < 1e-3
    assert stats.clipped == pytest.approx(clipped, abs=1)
    if minibatches == 4:
        assert stats.clipped > 0  # later minibatches really see another policy than the sampler's
        assert stats.kl_sampler > 1e-3


def test_on_policy_statistics():
    groups = sampled_groups(fresh()[0])
    _, stats = run_update(groups, 1)
    metrics = stats.metrics()
    assert abs(metrics["train/kl_sampler"]) < 1e-10
    assert metrics["train/logprob_gap"] < 1e-5
    assert metrics["train/clipped_share"] == 0
    assert metrics["perf/tree_tokens"] == 3 + 4 * (2 + 4 * 6)  # root 3, two own tokens, 24 sampled ones
    # ratio 1 everywhere: -sum(advantage * tokens) / tokens, and each group's advantages sum to zero
    assert metrics["train/loss"] == pytest.approx(0, abs=1e-9)


def test_entropy_is_that_of_the_full_distribution():
    wrapped, _ = fresh()
    groups = sampled_groups(wrapped, count=2)
    model = wrapped.get_base_model()
    model.set_attn_implementation("eager")
    total, tokens = 0.0, 0
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([[*group.prompt, *rollout.completion.token_ids]])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, len(group.prompt) - 1 : -1]
            for row in torch.softmax(logits.double(), -1).tolist():
                total -= math.fsum(p * math.log(p) for p in row)
                tokens += 1
    stats = StepStats()
    accumulate_gradient(model, groups, PLAIN, stats)
    assert stats.tokens == tokens == 48
    assert stats.metrics()["train/entropy"] == pytest.approx(total / tokens, rel=1e-6)


def test_an_entropy_bonus_pushes_towards_the_even_distribution():
    wrapped, parameters = fresh()
    groups = [Group(group.rollouts, tuple(0.0 for _ in group.advantages)) for group in sampled_groups(wrapped, count=2)]
    optimizer = build_optimizer(parameters, OptimizerSection(learning_rate=0.01))
    section = TrainSection(entropy_beta=0.05)
    entropies = [
        update_policy(wrapped.get_base_model(), parameters, optimizer, groups, section, 1.0).metrics()["train/entropy"]
        for _ in range(5)
    ]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_the_joint_norm_is_clipped_and_the_full_one_reported():
    groups = sampled_groups(fresh()[0])
    wrapped, parameters = fresh()
    accumulate_gradient(wrapped.get_base_model(), groups, PLAIN, StepStats())
    norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in parameters))
    seen = []

    optimizer = build_optimizer(parameters, OptimizerSection())
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(math.sqrt(sum(float(p.grad.pow(2).sum()) for p in parameters)))
    )
    stats = update_policy(wrapped.get_base_model(), parameters, optimizer, groups, PLAIN, norm / 10)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-6)
    assert seen == [pytest.approx(norm / 10, rel=1e-3)]
    assert all(p.grad is None for p in parameters)


def test_a_gradient_that_is_not_finite_stops_before_the_update():
    groups = sampled_groups(fresh()[0])
    broken = [Group(group.rollouts, (math.inf, *group.advantages[1:])) for group in groups]
    wrapped, parameters = fresh()
    before = {name: value.clone() for name, value in values(wrapped).items()}
    optimizer = build_optimizer(parameters, OptimizerSection())
    with pytest.raises(StoppedError, match="not finite"):
        update_policy(wrapped.get_base_model(), parameters, optimizer, broken, PLAIN, 1.0)
    assert all(torch.equal(before[name], value) for name, value in values(wrapped).items())


def test_groups_are_split_in_order_within_the_budget():
    groups = [random_group(f"t{i}", [1] * 10 + [i], [5, 5], [0.5, -0.5], 128, i) for i in range(5)]
    # beyond a root of 10 each group adds 1 + 10 tokens: two fit into 32, three into 43
    assert [[g.rollouts[0].group for g in part] for part in split_groups(groups, 32)] == [
        ["t0", "t1"],
        ["t2", "t3"],
        ["t4"],
    ]
    assert [len(part) for part in split_groups(groups, 43)] == [3, 2]
    # a group over the budget is spread by rollouts
    assert [len(part) for part in split_groups(groups, 1)] == [1] * 10


def test_an_empty_completion_takes_no_part():
    wrapped, _ = fresh()
    group = sampled_groups(wrapped, count=1)[0]
    empty = type(group.rollouts[0])(
        group.rollouts[0].task,
        "t0",
        9,
        group.prompt,
        (Completion((), (), FinishReason.STOP).segment,),
        group.rollouts[0].episode,
        group.rollouts[0].score,
    )
    plain, padded = StepStats(), StepStats()
    accumulate_gradient(wrapped.get_base_model(), [group], PLAIN, plain)
    with_empty = Group((*group.rollouts, empty), (*group.advantages, 0.5))
    accumulate_gradient(wrapped.get_base_model(), [with_empty], PLAIN, padded)
    assert plain.tokens == padded.tokens
    assert plain.loss == pytest.approx(padded.loss)


def test_a_rollout_outside_the_loss_changes_neither_gradient_nor_entropy():
    wrapped, parameters = fresh()
    group = sampled_groups(wrapped, count=1)[0]
    section = TrainSection(entropy_beta=0.05)
    outside = Group(group.rollouts, (*group.advantages[:-1], 0.0), outside=frozenset({len(group.rollouts) - 1}))
    alone = Group(group.rollouts[:-1], group.advantages[:-1])
    gradients = []
    for shown in (outside, alone):
        for parameter in parameters:
            parameter.grad = None
        accumulate_gradient(wrapped.get_base_model(), [shown], section, StepStats())
        gradients.append([parameter.grad.clone() for parameter in parameters])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert sum(float(part.abs().sum()) for part in gradients[0]) > 0


def test_the_difference_of_sampler_and_trainer_is_logged_by_size_tail_and_sign():
    metrics = StepStats(tokens=4, gaps=[torch.tensor([1.0, -3.0]), torch.tensor([0.0, -1.0])]).metrics()
    assert metrics["train/logprob_gap"] == 1.25
    assert metrics["train/logprob_gap_signed"] == -0.75
    assert metrics["train/logprob_gap_p99"] == pytest.approx(2.94)  # between 1 and 3, linearly
