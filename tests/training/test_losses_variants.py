"""Every loss against numbers by hand, a loop over tokens, and TRL's own numbers; and what all of them owe a batch."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import get_args

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from harness.config.schema import TrainSection  # noqa: E402
from harness.training.losses import (  # noqa: E402
    IMPORTANCE_CAPS,
    LossInputs,
    Totals,
    importance_weights,
    policy_loss,
    reference_kl,
)
from tests.training.naive_losses import naive_policy_loss  # noqa: E402

LOSSES = get_args(TrainSection.model_fields["loss"].annotation)
IMPORTANCE = get_args(TrainSection.model_fields["importance"].annotation)
TRL = json.loads((Path(__file__).parent / "data" / "trl_losses.json").read_text())


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def flat(rows, lengths):
    """Return padded rows as one vector of their real tokens."""
    return tensor(*(value for row, length in zip(rows, lengths, strict=True) for value in row[:length]))


def spread_out(advantages, lengths):
    return tensor(*(a for a, length in zip(advantages, lengths, strict=True) for _ in range(length)))


def inputs_of(batch, gradient=False):
    new, old, sampler, reference = (tensor(*(v for row in batch for v in row[k])) for k in range(4))
    lengths = [len(row[0]) for row in batch]
    advantages = spread_out([row[4] for row in batch], lengths)
    return LossInputs(new.requires_grad_(gradient), old, advantages, lengths, sampler, reference)


def totals_of(batch, max_tokens=20):
    return Totals(sum(len(row[0]) for row in batch), sum(1 for row in batch if row[0]), max_tokens)


def random_batch(seed, lengths=(5, 1, 7, 0, 3, 4, 9, 2), drift=0.4):
    source = random.Random(seed)
    batch = []
    for length in lengths:
        old = [source.uniform(-3, -0.05) for _ in range(length)]
        rows = [[value + source.gauss(0, spread) for value in old] for spread in (drift, 0.15, 0.5)]
        batch.append((rows[0], old, rows[1], rows[2], source.choice([-1.0, -0.25, 0.0, 0.75])))
    return batch


# ratios 1.5 and 0.5 in the first completion (advantage 1), 1.5 in the second (advantage -1); bounds 0.8 and 1.28
HAND = [
    ([math.log(0.6), math.log(0.1)], [math.log(0.4), math.log(0.2)], [math.log(0.4), math.log(0.2)], [-1.0, -1.0], 1.0),
    ([math.log(0.3)], [math.log(0.2)], [math.log(0.2)], [-1.0], -1.0),
]


@pytest.mark.parametrize(
    ("loss", "expected", "clipped"),
    [
        # min(1.5, 1.28) + min(0.5, 0.8) = 1.78; min(-1.5, -1.28) = -1.5
        ("dapo", -(1.78 - 1.5) / 3, 1),
        ("bnpo", -(1.78 - 1.5) / 3, 1),
        ("grpo", -(1.78 / 2 - 1.5) / 2, 1),
        ("dr_grpo", -(1.78 - 1.5) / (2 * 20), 1),
        # sequence ratios sqrt(0.75) = 0.866 and 1.5: inside the bounds, and worse than the bound
        ("gspo", -(math.sqrt(0.75) - 1.5) / 2, 0),
        # weights 1.28, 0.5, 1.28 times advantage times log probability
        ("cispo", -(1.28 * math.log(0.6) + 0.5 * math.log(0.1) - 1.28 * math.log(0.3)) / 3, 2),
        # probabilities move by +0.2, -0.1, +0.1; only the first is not allowed to go on: 0 + 0.5 - 1.5
        ("dppo", -(0.5 - 1.5) / 3, 1),
    ],
)
def test_by_hand(loss, expected, clipped):
    section = TrainSection(loss=loss, clip_low=0.2, clip_high=0.28 if loss != "dppo" else 0.15)
    out = policy_loss(inputs_of(HAND), totals_of(HAND), section)
    assert float(out.loss) == pytest.approx(expected, abs=1e-12)
    assert int(out.clipped) == clipped


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("importance", IMPORTANCE)
def test_equals_a_loop_over_tokens(loss, importance):
    batch = random_batch(3)
    section = TrainSection(
        loss=loss, clip_low=0.1, clip_high=0.15, importance=importance, importance_cap=1.05, kl_beta=0.02
    )
    out = policy_loss(inputs_of(batch), totals_of(batch), section)
    expected = naive_policy_loss(loss, batch, 0.1, 0.15, 20, importance, 1.05, 0.02)
    assert float(out.loss) == pytest.approx(expected, abs=1e-12)
    assert int(out.clipped) > 0
    assert (int(out.corrected) > 0) == (importance != "none")


def test_the_default_loss_is_the_one_of_earlier_runs_bit_for_bit():
    batch = random_batch(8, lengths=(64,) * 16)
    new, old, advantages = (t.float() for t in (inputs_of(batch).logprobs, inputs_of(batch).old_logprobs,
                                                inputs_of(batch).advantages))  # fmt: skip
    gradients, losses = [], []
    for earlier in (True, False):
        logprobs = new.clone().requires_grad_()
        if earlier:
            ratio = torch.exp(logprobs - old)
            loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages).sum() / 1024
        else:
            loss = policy_loss(LossInputs(logprobs, old, advantages, [64] * 16), Totals(1024, 16), TrainSection()).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append(logprobs.grad)
    assert torch.equal(*losses) and torch.equal(*gradients)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("importance", IMPORTANCE)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_split_into_micro_batches_changes_nothing(loss, importance, parts):
    batch = random_batch(11)
    section = TrainSection(loss=loss, importance=importance, importance_cap=1.5, kl_beta=0.05)
    whole = inputs_of(batch, gradient=True)
    policy_loss(whole, totals_of(batch), section).loss.backward()
    pieces, size = [], len(batch) // parts
    for start in range(0, len(batch), size):
        piece = inputs_of(batch[start : start + size], gradient=True)
        policy_loss(piece, totals_of(batch), section).loss.backward()
        pieces.append(piece.logprobs.grad)
    assert whole.logprobs.grad.abs().max() > 0
    torch.testing.assert_close(torch.cat(pieces), whole.logprobs.grad, rtol=1e-12, atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
def test_on_policy_every_loss_has_the_gradient_of_plain_policy_gradient(loss, lengths, seed):
    """Ratio 1, nothing clipped: the gradient is -A / denominator, whatever the loss."""
    batch = [(old, old, old, ref, a) for _, old, _, ref, a in random_batch(seed, lengths)]
    given_ = inputs_of(batch, gradient=True)
    out = policy_loss(given_, totals_of(batch), TrainSection(loss=loss, clip_high=0.28))
    out.loss.backward()
    totals = totals_of(batch)
    expected = []
    for row in batch:
        weight = {
            "grpo": 1 / max(len(row[0]), 1) / max(totals.sequences, 1),
            "gspo": 1 / max(len(row[0]), 1) / max(totals.sequences, 1),
            "dr_grpo": 1 / max(20 * totals.sequences, 1),
        }.get(loss, 1 / max(totals.tokens, 1))
        expected += [-row[4] * weight] * len(row[0])
    assert int(out.clipped) == 0
    torch.testing.assert_close(given_.logprobs.grad, tensor(*expected), rtol=1e-9, atol=1e-15)


def test_a_batch_without_tokens_is_a_zero_with_a_graph():
    for loss in LOSSES:
        empty = LossInputs(
            torch.zeros(0, dtype=torch.float64, requires_grad=True), tensor(), tensor(), [0, 0], tensor()
        )
        out = policy_loss(empty, Totals(0, 0, 8), TrainSection(loss=loss))
        out.loss.backward()
        assert float(out.loss.detach()) == 0 and empty.logprobs.grad.shape == (0,)


@pytest.mark.parametrize("loss", ["gspo", "dppo", "cispo", "dapo"])
def test_what_is_clipped_has_no_gradient(loss):
    """Except for cispo, which keeps the gradient of every token and cuts its weight only."""
    given_ = inputs_of([HAND[0]], gradient=True)
    policy_loss(given_, totals_of([HAND[0]]), TrainSection(loss=loss, clip_low=0.05, clip_high=0.15)).loss.backward()
    first, second = given_.logprobs.grad.tolist()
    # gspo: one ratio sqrt(0.75) for the completion, not clipped at advantage 1; half its gradient for each token
    expected = {
        "gspo": (-math.sqrt(0.75) / 2, -math.sqrt(0.75) / 2),
        "dppo": (0.0, -0.5 / 2),
        "cispo": (-1.15 / 2, -0.5 / 2),
        "dapo": (0.0, -0.5 / 2),
    }[loss]
    assert (first, second) == pytest.approx(expected, abs=1e-12)


def test_importance_weights_by_hand():
    # exp(old - sampler): 2, 1 and 4 in one completion, 0.5 in the next
    old = tensor(math.log(0.4), math.log(0.3), math.log(0.4), math.log(0.1))
    sampler = tensor(math.log(0.2), math.log(0.3), math.log(0.1), math.log(0.2))
    given_ = LossInputs(old, old, torch.ones(4).double(), [3, 1], sampler)
    weights, cut = importance_weights(given_, "token", 3.0)
    assert weights.tolist() == pytest.approx([2, 1, 3, 0.5]) and cut.tolist() == [False, False, True, False]
    weights, cut = importance_weights(given_, "sequence_mask", 10.0)
    assert weights.tolist() == pytest.approx([8, 8, 8, 0.5]) and not cut.any()
    weights, cut = importance_weights(given_, "sequence_mask", 3.0)
    assert weights.tolist() == pytest.approx([0, 0, 0, 0.5]) and cut.tolist() == [True, True, True, False]
    weights, cut = importance_weights(given_, "geometric_mask", 2.1)  # means 2 and 0.5
    assert weights.tolist() == [1, 1, 1, 1] and not cut.any()
    weights, cut = importance_weights(given_, "geometric_mask", 1.9)
    assert weights.tolist() == [0, 0, 0, 0] and cut.all()


def test_caps_that_are_not_set():
    given_ = LossInputs(tensor(0.0), tensor(0.0), tensor(1.0), [1], tensor(-1.05))  # weight e^1.05 = 2.86
    assert {kind: bool(importance_weights(given_, kind)[1]) for kind in IMPORTANCE_CAPS} == {
        "token": True,
        "sequence_mask": False,
        "geometric_mask": True,
    }
    with pytest.raises(ValueError, match="unknown importance"):
        importance_weights(given_, "icepop")


def test_kl_by_hand_and_its_gradient_is_that_of_the_exact_kl():
    given_ = LossInputs(tensor(-1.0), tensor(-1.0), tensor(0.0), [1], None, tensor(-1.5))
    assert float(reference_kl(given_)) == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    # over all outcomes of a small distribution, weighted by their probability, value and gradient are exact
    logits = tensor(0.3, -0.2, 0.9).requires_grad_()
    policy, other = torch.log_softmax(logits, -1), torch.log_softmax(tensor(-0.4, 0.1, 0.2), -1)
    exact = (policy.exp() * (policy - other)).sum()
    wanted = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    estimate = reference_kl(LossInputs(policy, policy.detach(), policy, [3], None, other))
    mean = (policy.detach().exp() * estimate).sum()
    assert float(mean) == pytest.approx(float(exact), abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "section", [TrainSection(loss="dppo"), TrainSection(importance="token"), TrainSection(kl_beta=0.1)]
)
def test_missing_log_probabilities_are_an_error(section):
    given_ = LossInputs(tensor(-1.0), tensor(-1.0), tensor(1.0), [1])
    with pytest.raises(ValueError, match="log probabilities"):
        policy_loss(given_, Totals(1, 1), section)
    with pytest.raises(ValueError, match="length limit"):
        policy_loss(given_, Totals(1, 1), TrainSection(loss="dr_grpo"))


def trl_inputs():
    lengths, given_ = TRL["lengths"], TRL["inputs"]
    rows = {name: flat(given_[name], lengths) for name in ("logprobs", "old", "sampler", "reference")}
    advantages = spread_out(given_["advantages"], lengths)
    return LossInputs(
        rows["logprobs"].requires_grad_(), rows["old"], advantages, lengths, rows["sampler"], rows["reference"]
    )


def agrees_with_trl(case, **section):
    given_ = trl_inputs()
    clip_high = TRL["cispo_cap"] - 1 if section["loss"] == "cispo" else TRL["clip_high"]
    totals = Totals(sum(TRL["lengths"]), len(TRL["lengths"]), TRL["max_tokens"])
    out = policy_loss(given_, totals, TrainSection(clip_low=TRL["clip_low"], clip_high=clip_high, **section))
    out.loss.backward()
    assert float(out.loss) == pytest.approx(case["loss"], rel=1e-6)
    torch.testing.assert_close(given_.logprobs.grad, flat(case["gradient"], TRL["lengths"]), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", sorted(TRL["losses"]))
def test_trl_computes_the_same(loss):
    agrees_with_trl(TRL["losses"][loss], loss=loss)


@pytest.mark.parametrize("loss", sorted(TRL["losses_with_kl"]))
def test_trl_computes_the_same_with_a_reference(loss):
    agrees_with_trl(TRL["losses_with_kl"][loss], loss=loss, kl_beta=TRL["kl_beta"])


@pytest.mark.parametrize(("mode", "ours"), [("token_truncate", "token"), ("sequence_mask", "sequence_mask")])
def test_trl_computes_the_same_importance_weights(mode, ours):
    case = TRL["importance"][mode]
    weights, cut = importance_weights(trl_inputs(), ours, case["cap"])
    torch.testing.assert_close(weights.detach(), flat(case["weights"], TRL["lengths"]), rtol=1e-6, atol=1e-9)
    assert 0 < int(cut.sum()) < len(cut)
    agrees_with_trl(case, loss="dapo", importance=ours, importance_cap=case["cap"])
