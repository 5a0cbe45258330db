"""Muon on LoRA factors, SGD, and learning rates of their own for B."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import LoraSection, OptimizerSection  # noqa: E402
from harness.inference.lora import attach_lora, trainable  # noqa: E402
from harness.training.checkpoints import Numerics, Progress, load_checkpoint, save_checkpoint  # noqa: E402
from harness.training.optimizer import (  # noqa: E402
    UPDATE_RMS,
    build_optimizer,
    factors,
    orthogonalise,
    set_learning_rate,
)
from tests.torch_support import tiny_llama  # noqa: E402

NUMERICS = Numerics(1, "AVX2", "cpu", "torch.float32", "2")


def matrix(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(16, 96), (96, 16), (8, 8), (1, 30), (30, 1)])
def test_singular_values_move_to_one_and_directions_stay(shape):
    gradient = matrix(*shape)
    result = orthogonalise(gradient[None])[0]
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    inside = u.T @ result @ v.T
    values = inside.diagonal()
    assert values.min() > 0.6 and values.max() < 1.3
    assert (inside - torch.diag(values)).abs().max() < 1e-4
    assert torch.equal(orthogonalise(torch.zeros(1, *shape)), torch.zeros(1, *shape))


def test_scale_of_the_gradient_does_not_matter():
    gradient = matrix(1, 16, 64)
    reference = orthogonalise(gradient)
    for factor in (1e-12, 1e6):
        torch.testing.assert_close(orthogonalise(factor * gradient), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 576), (1536, 16)])
def test_the_update_has_the_root_mean_square_of_adamw(shape):
    """Both move a weight by about 0.2 learning rates; singular values of 0.7 to 1.2 let Muon's vary by as much."""
    moved = {}
    for name in ("muon", "adamw"):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        optimizer = build_optimizer([parameter], OptimizerSection(name=name, learning_rate=0.1))
        for step in range(30):
            parameter.grad = matrix(*shape, seed=step)
            before = parameter.detach().clone()
            optimizer.step()
        moved[name] = float((parameter.detach() - before).pow(2).mean().sqrt()) / 0.1
    assert 0.7 * UPDATE_RMS < moved["muon"] < 1.2 * UPDATE_RMS
    assert 0.5 < moved["adamw"] / moved["muon"] < 2


def test_torch_has_the_same_muon_up_to_bfloat16():
    """Its Newton-Schulz runs in bfloat16, hence the tolerance; the momentum is equal to the last bit."""
    ours, theirs = (torch.nn.Parameter(matrix(12, 40, seed=9)) for _ in range(2))
    section = OptimizerSection(name="muon", learning_rate=0.01, weight_decay=0.1, momentum=0.9)
    own = build_optimizer([ours], section)
    other = torch.optim.Muon(
        [theirs], lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        ours.grad = matrix(12, 40, seed=step)
        theirs.grad = ours.grad.clone()
        own.step()
        other.step()
    assert torch.equal(own.state[ours]["momentum_buffer"], other.state[theirs]["momentum_buffer"])
    start = matrix(12, 40, seed=9)
    difference = (ours - theirs).norm() / (theirs - start).norm()
    assert difference < 0.03


def test_stacked_experts_are_orthogonalised_one_by_one():
    rank, experts, inputs, outputs = 4, 3, 20, 24
    per_expert = [(matrix(rank, inputs, seed=e), matrix(outputs, rank, seed=10 + e)) for e in range(experts)]
    a = torch.cat([pair[0] for pair in per_expert])  # (experts * rank, in), expert by expert
    b = torch.stack([pair[1] for pair in per_expert], dim=-1).reshape(outputs, rank * experts)  # experts fastest
    stacked = {"m.experts.lora_A.default.weight": a, "m.experts.lora_B.default.weight": b}
    for place, name in enumerate(stacked):
        for expert in range(experts):
            assert torch.equal(factors(name, stacked[name], rank)[expert], per_expert[expert][place])
    parameters = {name: torch.nn.Parameter(torch.zeros_like(value)) for name, value in stacked.items()}
    section = OptimizerSection(name="muon", learning_rate=1.0, momentum=0.0)
    optimizer = build_optimizer(parameters, section, rank)
    for name, parameter in parameters.items():
        parameter.grad = stacked[name].clone()
    optimizer.step()
    for place, (name, parameter) in enumerate(parameters.items()):
        for expert in range(experts):
            single = per_expert[expert][place]
            expected = -UPDATE_RMS * math.sqrt(max(single.shape)) * orthogonalise(single[None])[0]
            torch.testing.assert_close(factors(name, parameter.detach(), rank)[expert], expected)


def test_peft_stacks_experts_as_it_is_read_here():
    """The layout is PEFT's own: its delta weight of expert e is B_e A_e of the views."""
    from peft import LoraConfig, get_peft_model
    from torch import nn

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 20, 24))  # (experts, in, out)

        def forward(self, x):
            return torch.einsum("ti,eio->teo", x, self.weight)

    model = torch.nn.Sequential()
    model.experts = Experts()
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_parameters=["experts.weight"]))
    named = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for seed, parameter in enumerate(named.values()):
            parameter.copy_(matrix(*parameter.shape, seed=seed))
    views = [factors(name, parameter.detach(), 4) for name, parameter in named.items()]
    names = list(named)
    a, b = (views[next(i for i, n in enumerate(names) if part in n)] for part in (".lora_A.", ".lora_B."))
    experts: Any = wrapped.base_model.model.experts
    delta = experts.get_delta_weight("default").detach()
    expected = torch.stack([b[e] @ a[e] for e in range(3)])
    assert torch.allclose(delta, expected, atol=1e-5) or torch.allclose(delta, expected.mT, atol=1e-5)


def adapters():
    return trainable(attach_lora(tiny_llama(), LoraSection(rank=4, alpha=8.0), seed=1))


def learn(parameters, optimizer, steps):
    for step in steps:
        for index, parameter in enumerate(parameters.values()):
            parameter.grad = matrix(*parameter.shape, seed=1000 * step + index)
        set_learning_rate(optimizer, 0.01 / (step + 1))
        optimizer.step()


@pytest.mark.parametrize("b_scale", [1.0, 4.0])
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_training_goes_on_bit_for_bit_with_every_optimizer(tmp_path, name, b_scale):
    section = OptimizerSection(name=name, learning_rate=0.01, b_scale=b_scale, weight_decay=0.01)
    whole = adapters()
    optimizer = build_optimizer(whole, section, 4)
    learn(whole, optimizer, range(3))
    save_checkpoint(tmp_path, Progress(3, 30), whole, optimizer, NUMERICS, "c", 2)
    learn(whole, optimizer, range(3, 6))

    resumed = adapters()
    again = build_optimizer(resumed, section, 4)
    assert load_checkpoint(tmp_path, 3, resumed, again, NUMERICS, "c").step == 3
    assert again.state  # every optimizer here has one
    learn(resumed, again, range(3, 6))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_b_has_a_rate_of_its_own():
    parameters = adapters()
    plain = build_optimizer(parameters, OptimizerSection())
    assert len(plain.param_groups) == 1 and plain.param_groups[0]["lr"] == 2e-4
    optimizer = build_optimizer(parameters, OptimizerSection(b_scale=16.0))
    set_learning_rate(optimizer, 0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        assert rates[id(parameter)] == (8.0 if ".lora_B." in name else 0.5)
    assert len(rates) == len(parameters)


def test_sgd_by_hand():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = build_optimizer(
        [parameter], OptimizerSection(name="sgd", learning_rate=0.1, momentum=0.5, weight_decay=0.2)
    )
    value, velocity = [1.0, -2.0], [0.0, 0.0]
    for gradient in ([0.5, -1.0], [0.1, 2.0]):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(gradient):
            velocity[i] = 0.5 * velocity[i] + g + 0.2 * value[i]
            value[i] -= 0.1 * velocity[i]
    assert parameter.tolist() == pytest.approx(value, abs=1e-12)


def test_muon_leaves_a_parameter_without_gradient_alone():
    still, moving = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(3, 4))
    optimizer = build_optimizer([still, moving], OptimizerSection(name="muon", weight_decay=0.5))
    moving.grad = matrix(3, 4)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(3, 4)) and not torch.equal(moving.detach(), torch.ones(3, 4))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
