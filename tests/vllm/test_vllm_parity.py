"""Sampler and plain transformers give one number, for base models and adapters of every type, in float32."""

from __future__ import annotations

import pytest

from harness.inference.agreement import TOLERANCE
from tests.vllm.subjects import DEVICE, PROMPTS, reported, seeds, tokens


def largest_gap(subject, drawn, **options):
    return (reported(drawn) - subject.plain(PROMPTS, drawn, 0.7, **options)).abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_base_and_adapter_agree_with_transformers(kind, fleet):
    subject, engine = fleet[kind]
    if kind != "llama":  # that one has adapters already
        base = engine.generate(PROMPTS, 3, 24, 0.7, seeds(3))
        assert largest_gap(subject, base, adapter=False) <= TOLERANCE
    engine.sync(f"parity-{kind}", subject.save("parity"))
    adapted = engine.generate(PROMPTS, 3, 24, 0.7, seeds(3))
    assert largest_gap(subject, adapted) <= TOLERANCE
    assert largest_gap(subject, adapted, adapter=False) > 100 * TOLERANCE  # or equality would say nothing


def test_the_base_of_a_colocated_llama_agrees_with_transformers(llama, colocated):
    before, colocated.version = colocated.version, None
    drawn = colocated.generate(PROMPTS, 3, 24, 0.7, seeds(3))
    colocated.version = before
    assert largest_gap(llama, drawn, adapter=False) <= TOLERANCE


def test_the_base_of_a_mixture_agrees_with_transformers(fleet):
    """Prompts and replies here leave the sliding window of 8 tokens."""
    subject, engine = fleet["afmoe"]
    drawn = engine.generate(PROMPTS, 3, 24, 0.7, seeds(3))
    assert len({row for rows in tokens(drawn) for row in rows}) == 9
    assert largest_gap(subject, drawn, adapter=False) <= TOLERANCE


@pytest.mark.skipif(DEVICE == "cpu", reason="vLLM has no kernels for adapters on experts on a processor")
def test_adapters_on_every_matrix_of_a_mixture_agree_with_transformers(fleet):
    subject, engine = fleet["afmoe"]
    engine.sync("parity-afmoe", subject.save("parity"))
    drawn = engine.generate(PROMPTS, 3, 24, 0.7, seeds(3))
    assert largest_gap(subject, drawn) <= TOLERANCE
    assert largest_gap(subject, drawn, adapter=False) > 100 * TOLERANCE
