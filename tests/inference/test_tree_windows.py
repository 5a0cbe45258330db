"""Sliding-window layers in the tree: a window counts positions on a token's own path, not places in the layout."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from harness.inference import prefixes, tree  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from harness.inference.tree import ATTENTION, build_tree  # noqa: E402
from harness.training.policy import tree_logprobs  # noqa: E402
from tests.torch_support import loaded  # noqa: E402
from tests.training.reference import naive_logprobs  # noqa: E402

WINDOWS = (2, 5, 13, 27, 400)  # within a completion, over the suffix, over the root, longer than everything


def windowed(window, dtype=torch.float64):
    """Return a random Qwen2 whose layers alternate between full and sliding attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=window,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen2ForCausalLM(config).to(dtype).eval().requires_grad_(False)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, window] * 2
    return model


def case(shared=12):
    source = random.Random(4)
    root = [source.randrange(10, 128) for _ in range(shared)]
    prompts = [root + [20 + i] + [source.randrange(10, 128) for _ in range(3 + 2 * i)] for i in range(3)]
    rows = [[[source.randrange(10, 128) for _ in range(n)] for n in (9, 1, 6)] for _ in prompts]
    return prompts, rows


def two_prefixes():
    """Return prompts of two environments in turn, with a deeper prefix that two of them share, and completions."""
    source = random.Random(6)
    common, first, second, more = ([source.randrange(10, 128) for _ in range(n)] for n in (2, 14, 9, 4))
    tails = [[*first, 10, 11], [*second, 12], [*first, 13], [*second, *more, 14], [*second, *more, 15, 16]]
    rows = [[[source.randrange(10, 128) for _ in range(n)] for n in (9, 1, 6)] for _ in tails]
    return [common + tail for tail in tails], rows


def in_the_tree(model, prompts, rows):
    model.set_attn_implementation(ATTENTION)
    flat = build_tree(prompts, rows, torch.device("cpu"))
    ones = torch.ones(len(flat.target_ids()), dtype=torch.float64)
    return tree_logprobs(model, flat, ones)[0]


def one_by_one(model, prompts, rows):
    pairs = [(prompt, row) for prompt, own in zip(prompts, rows, strict=True) for row in own]
    return torch.cat([naive_logprobs(model, prompt, row) for prompt, row in pairs])


@pytest.mark.parametrize("shared", [0, 12, None])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_tree_pass_equals_each_sequence_alone(window, shared):
    model = windowed(window)
    prompts, rows = two_prefixes() if shared is None else case(shared)
    expected = one_by_one(model, prompts, rows)
    assert (in_the_tree(model, prompts, rows) - expected).abs().max() < 1e-6


def test_a_window_by_place_in_the_layout_is_noticed(monkeypatch):
    """Guards the test above: the second completion stands behind the first in the layout, yet sees the whole prompt."""
    model = windowed(13)
    prompts, rows = case()
    expected = one_by_one(model, prompts, rows)
    places = build_tree(prompts, rows, torch.device("cpu"))
    real = tree.TreeBatch.bias

    def by_place(self, place, window, dtype):
        kept, self.position_ids = self.position_ids, torch.arange(places.tokens)[None]
        try:
            return real(self, place, window, dtype)
        finally:
            self.position_ids = kept

    monkeypatch.setattr(tree.TreeBatch, "bias", by_place)
    assert (in_the_tree(model, prompts, rows) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("least", [256, 1])
@pytest.mark.parametrize("window", WINDOWS)
def test_sampling_sees_the_same_window(window, least, monkeypatch):
    monkeypatch.setattr(prefixes, "FAMILY_TOKENS", least)
    model = windowed(window)
    prompts, _ = case() if least > 1 else two_prefixes()
    assert len(prefixes.families(prompts)) == (1 if least > 1 else 2)
    engine = TransformersEngine(loaded(model, eos=(2, 5, 77, 90)))
    results = engine.generate(prompts, 4, 16, 0.9, [[10 * i + j for j in range(4)] for i in range(len(prompts))])
    assert len({len(completion.token_ids) for row in results for completion in row}) > 2  # tasks left the batch
    for prompt, row in zip(prompts, results, strict=True):
        for completion in row:
            expected = naive_logprobs(model, prompt, completion.token_ids, 0.9)
            assert (torch.tensor(completion.logprobs).double() - expected).abs().max() < 2e-6


@pytest.mark.parametrize("window", [5, 400])
def test_without_a_tree_the_window_holds_too(window):
    model = windowed(window)
    ids = torch.tensor([case()[0][0]])
    model.set_attn_implementation(ATTENTION)
    ours = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation("eager")
    assert (ours - model(input_ids=ids, use_cache=False).logits).abs().max() < 1e-6
