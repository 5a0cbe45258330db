"""Fused layers and the chunked head give what the plain ones give."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from harness.inference.lora import trainable  # noqa: E402
from harness.training import fused, head  # noqa: E402
from harness.training.fused import fuse_adapters  # noqa: E402
from harness.training.head import token_statistics  # noqa: E402
from tests.torch_support import tiny_llama, with_adapter  # noqa: E402

IDS = torch.arange(3, 40)[None]


def gradients(model):
    weights = torch.linspace(-1, 1, IDS.shape[1])
    logits = model(input_ids=IDS, use_cache=False).logits
    (logits.log_softmax(-1)[0, :, 5] * weights).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in trainable(model).values()])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_fused_layers_have_the_plain_gradient(dtype, bound):
    plain = gradients(with_adapter(tiny_llama(dtype)))
    model = with_adapter(tiny_llama(dtype))
    assert fuse_adapters(model) == (21, 3)
    ours = gradients(model)
    assert float((ours - plain).norm() / plain.norm()) < bound


def test_single_layers_are_fused_where_there_is_no_gated_mlp(monkeypatch):
    monkeypatch.setattr(fused, "_is_gated_mlp", lambda module: False)
    model = with_adapter(tiny_llama(torch.float64))
    assert fuse_adapters(model) == (21, 0)
    plain = gradients(with_adapter(tiny_llama(torch.float64)))
    assert torch.allclose(gradients(model), plain, rtol=0, atol=1e-12)


def test_fused_layers_are_used_and_keep_less():
    def kept(model):
        found = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: found.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        )
        fixed = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with hooks:
            model(input_ids=IDS, use_cache=False)
        return sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in fixed)

    plain, ours = with_adapter(tiny_llama()), with_adapter(tiny_llama())
    fuse_adapters(ours)
    assert kept(ours) < 0.8 * kept(plain)


@pytest.mark.parametrize("change", ["dropout", "disabled", "no_grad", "dtype"])
def test_what_is_not_plain_stays_with_peft(change, monkeypatch):
    model = with_adapter(tiny_llama(), dropout=0.5 if change == "dropout" else 0.0)
    model.train()
    fuse_adapters(model)

    def never(*_):
        raise AssertionError("fused")

    monkeypatch.setattr(fused._AdaptedLinear, "apply", never)
    monkeypatch.setattr(fused._AdaptedMlp, "apply", never)
    if change == "dtype":
        for name, parameter in trainable(model).items():
            if "lora_A" in name or "lora_B" in name:
                parameter.data = parameter.data.double()
    if change == "disabled":
        with model.disable_adapter():
            model(input_ids=IDS, use_cache=False)
    elif change == "no_grad":
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)
    else:
        model(input_ids=IDS, use_cache=False)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_token_statistics_equal_autograd_over_all_logits(with_entropy, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 7)
    torch.manual_seed(0)
    hidden = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    weight, targets = torch.randn(50, 8, dtype=torch.float64), torch.randint(0, 50, (40,))
    temperatures = torch.rand(40, dtype=torch.float64) + 0.5
    upstream = torch.randn(2, 40, dtype=torch.float64)
    logprobs, entropies = token_statistics(hidden, targets, weight, temperatures, with_entropy)
    assert entropies.requires_grad == with_entropy
    ((logprobs * upstream[0]).sum() + (entropies * upstream[1]).sum()).backward()
    ours, hidden.grad = hidden.grad, None
    logs = (hidden @ weight.T / temperatures[:, None]).log_softmax(-1)
    plain, entropy = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    ((plain * upstream[0]).sum() + (entropy * upstream[1] * with_entropy).sum()).backward()
    assert torch.allclose(logprobs, plain, atol=1e-12) and torch.allclose(entropies, entropy, atol=1e-12)
    assert torch.allclose(ours, hidden.grad, atol=1e-12)


def test_token_statistics_of_nothing_and_without_gradient():
    hidden, weight = torch.randn(3, 8), torch.randn(50, 8)
    nothing = torch.zeros(0, dtype=torch.long)
    logprobs, entropies = token_statistics(hidden[:0], nothing, weight, torch.ones(0), True)
    assert logprobs.shape == entropies.shape == (0,)
    with torch.no_grad():
        logprobs, _ = token_statistics(hidden, torch.tensor([1, 2, 3]), weight, torch.ones(3), True)
    assert not logprobs.requires_grad
