"""The tree-shared step gives the gradient of the naive step, whatever is shared or split."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import ModelSection, TrainSection  # noqa: E402
from harness.core.errors import HarnessError  # noqa: E402
from harness.inference import engine, tree  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.inference.models import load_model  # noqa: E402
from harness.inference.prefix_attention import Part  # noqa: E402
from harness.training.policy import StepStats, accumulate_gradient, checkpoint_activations  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import naive_gradient, random_group, relative_difference  # noqa: E402


def tree_gradient(wrapped, groups, **settings):
    parameters = trainable(wrapped)
    for parameter in parameters.values():
        parameter.grad = None
    accumulate_gradient(wrapped.get_base_model(), groups, TrainSection(entropy_beta=0.0, **settings), StepStats())
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def some_groups(vocabulary=128, shared=20, seed=3, temperatures=(1.0, 0.7, 1.3)):
    source = random.Random(seed)
    root = [source.randrange(10, vocabulary) for _ in range(shared)]
    groups = []
    for index, temperature in enumerate(temperatures):
        prompt = root + [10 + index] + [source.randrange(10, vocabulary) for _ in range(3 + index)]
        advantages = [0.5, -0.25, 0.0, -0.25]
        groups.append(
            random_group(f"t{index}", prompt, [5, 1, 7, 3], advantages, vocabulary, seed + index, temperature)
        )
    return groups


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_tree_step_has_the_naive_gradient(dtype, bound):
    wrapped = with_adapter(tiny_llama(dtype))
    groups = some_groups()
    shared = tree_gradient(wrapped, groups)
    naive = naive_gradient(wrapped.get_base_model(), trainable(wrapped), groups)
    assert relative_difference(shared, naive) < bound
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in shared.values())


@pytest.mark.parametrize("budget", [1, 40, 60])
def test_micro_batches_of_one_batch_have_one_gradient(budget):
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = some_groups()
    whole = tree_gradient(wrapped, groups, microbatch_tokens=100_000)
    parts = tree_gradient(wrapped, groups, microbatch_tokens=budget)
    # RMSNorm computes in float32 whatever the model is in, hence not 1e-12
    assert relative_difference(parts, whole) < 1e-6


def test_prompts_that_share_nothing_work_too():
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = some_groups(shared=0)
    naive = naive_gradient(wrapped.get_base_model(), trainable(wrapped), groups)
    assert relative_difference(tree_gradient(wrapped, groups), naive) < 1e-6


def two_environments(vocabulary=128, seed=5):
    """Return groups of two environments in turn; two of the second share more than their environment's prefix."""
    source = random.Random(seed)
    common, first, second, more = ([source.randrange(10, vocabulary) for _ in range(n)] for n in (2, 14, 9, 4))
    prompts = [[*first, 10, 11], [*second, 12], [*first, 13], [*second, *more, 14], [*second, *more, 15, 16]]
    rows = zip(prompts, ([3, 8], [5, 1], [9], [2, 2, 6], [4]), strict=True)
    return [
        random_group(f"t{i}", common + prompt, lengths, [0.5, -0.25, 1.0][: len(lengths)], vocabulary, seed + i)
        for i, (prompt, lengths) in enumerate(rows)
    ]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize(("budget", "tokens"), [(1000, 76), (50, 78)])
def test_prompts_of_two_environments_share_both_prefixes(budget, tokens, dtype, bound):
    """2 + 14 + 2 + 1 tokens of prompts of the first, 9 + 1 + 4 + 1 + 2 of the second, 40 behind them; 2 twice."""
    wrapped = with_adapter(tiny_llama(dtype))
    groups, stats = two_environments(), StepStats()
    base, parameters = wrapped.get_base_model(), trainable(wrapped)
    naive = naive_gradient(base, parameters, groups)
    for parameter in parameters.values():
        parameter.grad = None
    accumulate_gradient(base, groups, TrainSection(entropy_beta=0.0, microbatch_tokens=budget), stats)
    assert stats.computed_tokens == tokens
    assert relative_difference({name: parameter.grad for name, parameter in parameters.items()}, naive) < bound


def test_a_wrong_mask_is_noticed(monkeypatch):
    """Guards the test itself: letting siblings see each other must break the equality."""
    wrapped = with_adapter(tiny_llama(torch.float64))
    groups = two_environments()

    def blind(spans):
        return [Part(slice(0, spans[-1][1]), slice(0, spans[-1][1]), True)]

    monkeypatch.setattr(tree, "tree_parts", blind)
    broken = tree_gradient(wrapped, groups)
    assert relative_difference(broken, naive_gradient(wrapped.get_base_model(), trainable(wrapped), groups)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_computed_twice_have_the_same_gradient(dtype):
    """Not reentrant, so every adapter tensor has one (TRL#2671); and each layer really runs again."""
    wrapped = with_adapter(tiny_llama(dtype))
    base, calls = wrapped.get_base_model(), []
    # before, since computing again stops inside the layer once everything that is needed is there
    base.get_decoder().layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    base.train()
    plain = tree_gradient(wrapped, some_groups(), microbatch_tokens=60)
    once = len(calls)
    checkpoint_activations(base, True)
    twice = tree_gradient(wrapped, some_groups(), microbatch_tokens=60)
    assert once > 1 and len(calls) == 3 * once
    checkpoint_activations(base, False)
    tree_gradient(wrapped, some_groups(), microbatch_tokens=60)
    assert len(calls) == 4 * once
    assert relative_difference(twice, plain) < 1e-7
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in twice.values())


def test_sampling_keeps_no_activations_and_computes_once(monkeypatch):
    monkeypatch.setattr(engine, "supports", lambda causal_lm: False)  # through the layers' own modules
    wrapped = with_adapter(tiny_llama())
    base, calls = wrapped.get_base_model(), []
    checkpoint_activations(base, True)
    base.get_decoder().layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    TransformersEngine(loaded(base, eos=()), wrapped).generate([[3, 4, 5]], 2, 4, 1.0, [[1, 2]])
    assert len(calls) == 4  # one prefill and three steps


def embedded(dtype):
    try:
        return load_model(ModelSection(dtype=dtype)).model
    except HarnessError as error:
        pytest.skip(f"the embedded model is not here: {error}")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-6)])
def test_embedded_model_600_plus_8_times_64(dtype, bound):
    wrapped = with_adapter(embedded(dtype), rank=16, scale=0.01)
    source = random.Random(0)
    prompt = [source.randrange(1000, 40000) for _ in range(600)]
    advantages = [source.uniform(-1, 1) for _ in range(8)]
    group = random_group("t", prompt, [64] * 8, advantages, 40000, 7)
    shared = tree_gradient(wrapped, [group])
    naive = naive_gradient(wrapped.get_base_model(), trainable(wrapped), [group])
    difference = relative_difference(shared, naive)
    print(f"embedded model, {dtype}: relative gradient difference {difference:.2e}")
    assert difference < bound


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 4])
def test_embedded_model_micro_batches(parts):
    wrapped = with_adapter(embedded("float32"), rank=16, scale=0.01)
    source = random.Random(1)
    root = [source.randrange(1000, 40000) for _ in range(200)]
    groups = [
        random_group(f"t{i}", root + [500 + i] * 20, [32] * 4, [0.5, -0.5, 1.0, -1.0], 40000, i) for i in range(4)
    ]
    whole = tree_gradient(wrapped, groups, microbatch_tokens=100_000)
    split = tree_gradient(wrapped, groups, microbatch_tokens=200 + (4 // parts) * (20 + 128))
    assert relative_difference(split, whole) < 1e-5
