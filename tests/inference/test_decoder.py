"""The decoder of few operations computes what the model's own modules compute."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from harness.inference import engine as engine_module  # noqa: E402
from harness.inference.decoder import Decoder, supports  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402


def tiny_qwen(version, dtype):
    """Return a random Qwen2 (biases in attention) or Qwen3 (norms of queries and keys)."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"Qwen{version}Config")(
        vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = getattr(transformers, f"Qwen{version}ForCausalLM")(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # born as ones and zeros, which would hide a missing one
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.requires_grad_(False)


MODELS = {
    "llama": tiny_llama,
    "qwen2": lambda dtype: tiny_qwen(2, dtype),
    "qwen3": lambda dtype: tiny_qwen(3, dtype),
}


def sample(model, monkeypatch, few_operations, shared):
    """Return completions of prompts of several lengths, some of which end early."""
    if not few_operations:
        monkeypatch.setattr(engine_module, "supports", lambda causal_lm: False)
    source = random.Random(4)
    root = [source.randrange(3, 128) for _ in range(shared)]
    prompts = [root + [10 + i] + [source.randrange(3, 128) for _ in range(size)] for i, size in enumerate((2, 7, 4))]
    engine = TransformersEngine(loaded(model, eos=range(100, 128)), model if hasattr(model, "get_base_model") else None)
    seeds = [[7 * p + g for g in range(4)] for p in range(3)]
    return [row for rows in engine.generate(prompts, 4, 24, 1.2, seeds) for row in rows]


@pytest.mark.parametrize("shared", [0, 9])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_it_samples_what_the_modules_sample(family, adapted, shared, monkeypatch):
    def build():
        model = MODELS[family](torch.float64)
        return with_adapter(model) if adapted else model

    model = build()
    assert supports(model.get_base_model() if adapted else model)
    ours = sample(model, monkeypatch, True, shared)
    theirs = sample(build(), monkeypatch, False, shared)
    assert [row.token_ids for row in ours] == [row.token_ids for row in theirs]
    assert len({len(row.token_ids) for row in ours}) > 1  # some ended early, so rows left the batch
    gaps = [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)]
    assert max(gaps) < 1e-5  # norms are computed in float32


def test_it_is_used_where_it_applies_and_only_there(monkeypatch):
    used = []

    class Spy(Decoder):
        def __call__(self, *arguments):
            used.append(len(arguments[0]))
            return super().__call__(*arguments)

    monkeypatch.setattr(engine_module, "Decoder", Spy)
    sample(tiny_llama(), monkeypatch, True, 0)
    assert used and used[0] == 12
    assert not supports(tiny_llama(torch.bfloat16))  # there an adapter is not folded in
    odd = tiny_llama()
    odd.config.hidden_act = "gelu"
    assert not supports(odd)
