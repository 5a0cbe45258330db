"""Fused layers and the chunked head give what the plain ones give."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

from harness.inference.lora import trainable  # noqa: E402
from harness.inference.tree import ATTENTION, build_tree  # noqa: E402
from harness.training import fused, head  # noqa: E402
from harness.training.fused import fuse_adapters  # noqa: E402
from harness.training.head import token_statistics  # noqa: E402
from harness.training.policy import tree_logprobs  # noqa: E402
from tests.torch_support import tiny_llama, tiny_qwen, with_adapter  # noqa: E402

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


def tree_gradients(model):
    prompts = [[5, 6, 7, 8], [5, 6, 9], [40, 41]]
    rows = [[list(range(50 + i, 53 + 4 * i + place)) for i in range(2)] for place in range(3)]
    batch = build_tree(prompts, rows, torch.device("cpu"))
    model.get_base_model().set_attn_implementation(ATTENTION)
    for parameter in trainable(model).values():
        parameter.grad = None
    count = len(batch.target_ids())
    logprobs, _ = tree_logprobs(model.get_base_model(), batch, torch.ones(count), False)
    (logprobs * torch.linspace(-1, 1, count)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in trainable(model).values()])


@pytest.mark.parametrize(("family", "rotations"), [("llama", 6), ("qwen2", 4), ("qwen3", 0)])
def test_fused_norms_and_rotations_have_the_plain_gradient(family, rotations, monkeypatch):
    def build():
        return with_adapter(tiny_llama() if family == "llama" else tiny_qwen(int(family[-1])))

    used = []
    for kind in (fused._Norm, fused._Rotation):

        def noted(*tensors, kind=kind, real=kind.apply):
            used.append(kind)
            return real(*tensors)

        monkeypatch.setattr(kind, "apply", noted)
    plain = tree_gradients(build())
    assert not used
    model = build()
    fuse_adapters(model)
    ours = tree_gradients(model)
    assert used.count(fused._Rotation) == rotations and used.count(fused._Norm) >= 4
    assert float((ours - plain).norm() / plain.norm()) < 1e-5


def test_norm_and_rotation_have_the_gradient_of_their_values():
    torch.manual_seed(0)
    inputs = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(8, dtype=torch.float64) + 0.5
    assert torch.autograd.gradcheck(lambda x: fused._Norm.apply(x, weight, 1e-5), inputs)
    expected = torch.nn.functional.rms_norm(inputs, (8,), weight, 1e-5)
    assert torch.allclose(fused._Norm.apply(inputs, weight, 1e-5), expected, rtol=0, atol=1e-12)
    angles = torch.rand(5, 4, dtype=torch.float64)
    cosine, sine = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    assert torch.autograd.gradcheck(lambda x: fused._Rotation.apply(x, cosine, sine), inputs)
    theirs, _ = apply_rotary_pos_emb(inputs, inputs, cosine, sine, unsqueeze_dim=0)
    assert torch.allclose(fused._Rotation.apply(inputs, cosine, sine), theirs, rtol=0, atol=1e-12)


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
