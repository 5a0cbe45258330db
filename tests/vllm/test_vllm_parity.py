"""Sampler and plain transformers give one number, for base models and adapters of every type, in float32."""

from __future__ import annotations

import pytest

from harness.inference.agreement import TOLERANCE
from tests.vllm.subjects import PROMPTS, Subject, reported, seeds, start, tokens


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_base_and_adapter_agree_with_transformers(kind, folder, request):
    subject = request.getfixturevalue("llama") if kind == "llama" else Subject(kind, folder)
    engine = request.getfixturevalue("colocated") if kind == "llama" else start(subject)
    try:
        if engine.version is None:
            base = engine.generate(PROMPTS, 3, 24, 0.7, seeds(3))
            assert (reported(base) - subject.plain(PROMPTS, base, 0.7, adapter=False)).abs().max() <= TOLERANCE
        engine.sync(f"parity-{kind}", subject.save("parity"))
        adapted = engine.generate(PROMPTS, 3, 24, 0.7, seeds(3))
        assert (reported(adapted) - subject.plain(PROMPTS, adapted, 0.7)).abs().max() <= TOLERANCE
        effect = subject.plain(PROMPTS, adapted, 0.7, adapter=False) - subject.plain(PROMPTS, adapted, 0.7)
        assert effect.abs().max() > 100 * TOLERANCE  # or equality would say nothing of the adapter
    finally:
        if kind != "llama":
            engine.close()


def test_the_base_of_a_mixture_agrees_with_transformers(folder):
    """Adapters on experts need a GPU; prompts and replies here leave the sliding window of 8 tokens."""
    subject = Subject("afmoe", folder, adapter=False)
    with start(subject) as engine:
        drawn = engine.generate(PROMPTS, 3, 24, 0.7, seeds(3))
        assert len({row for rows in tokens(drawn) for row in rows}) == 9
        assert (reported(drawn) - subject.plain(PROMPTS, drawn, 0.7)).abs().max() <= TOLERANCE
