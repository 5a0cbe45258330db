"""The engine samples what the model says, and reports the log probabilities it sampled from."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from harness.core.types import FinishReason  # noqa: E402
from harness.inference import engine as engine_module  # noqa: E402
from harness.inference import prefixes  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import naive_logprobs  # noqa: E402


def prompts(count=5, shared=12, seed=0):
    source = random.Random(seed)
    root = [source.randrange(10, 128) for _ in range(shared)]
    return [root + [20 + i] + [source.randrange(10, 128) for _ in range(1 + i)] for i in range(count)]


def seeds(count, n):
    return [[1000 * i + j for j in range(n)] for i in range(count)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("shared", [0, 12])
def test_logprobs_are_those_of_the_sampled_sequence(temperature, shared):
    wrapped = with_adapter(tiny_llama(torch.float64))
    engine = TransformersEngine(loaded(wrapped.get_base_model()), wrapped)
    asked = prompts(shared=shared)
    results = engine.generate(asked, 3, 9, temperature, seeds(5, 3))
    model = wrapped.get_base_model()
    for prompt, row in zip(asked, results, strict=True):
        for completion in row:
            expected = naive_logprobs(model, prompt, completion.token_ids, temperature).detach()
            # logprobs are reported in float32
            assert torch.allclose(torch.tensor(completion.logprobs).double(), expected, atol=2e-6)


def naive_sample(model, prompt, seed, max_tokens, temperature, eos):
    """Invert the distribution function one full forward pass per token."""
    uniforms = torch.rand(max_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model.set_attn_implementation("eager")
    ids = list(prompt)
    for step in range(max_tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float() / temperature
        cumulative = torch.softmax(logits, -1).double().cumsum(-1)
        ids.append(int((cumulative < uniforms[step] * cumulative[-1]).sum()))
        if ids[-1] in eos:
            break
    return tuple(ids[len(prompt) :])


def test_sampling_equals_a_naive_loop_token_by_token():
    model = tiny_llama(torch.float64)
    asked = prompts()
    expected = [
        [naive_sample(model, prompt, seed, 8, 1.0, {2, 5, 77}) for seed in row]
        for prompt, row in zip(asked, seeds(5, 4), strict=True)
    ]
    results = TransformersEngine(loaded(model, eos=(2, 5, 77))).generate(asked, 4, 8, 1.0, seeds(5, 4))
    assert [[c.token_ids for c in row] for row in results] == expected


@pytest.mark.parametrize(("least", "count"), [(1, 2), (256, 1)])
@pytest.mark.parametrize("few_operations", [True, False])
def test_prompts_of_two_environments_are_sampled_as_each_alone(few_operations, least, count, monkeypatch):
    """Two prefixes, a deeper one that two prompts share, and rows that end early, in one call."""
    monkeypatch.setattr(prefixes, "FAMILY_TOKENS", least)
    if not few_operations:
        monkeypatch.setattr(engine_module, "supports", lambda causal_lm: False)
    model = tiny_llama(torch.float64)
    first, second = prompts(2, 11, seed=1), prompts(3, 9, seed=2)
    asked = [first[0], second[0], first[1], second[1], [*second[2][:-1], 9, 9], second[2]]
    assert len(prefixes.families(asked)) == count
    expected = [
        [naive_sample(model, prompt, seed, 8, 1.0, set(range(70, 90))) for seed in row]
        for prompt, row in zip(asked, seeds(6, 3), strict=True)
    ]
    for rows in (64, 6):
        engine = TransformersEngine(loaded(model, eos=range(70, 90)), max_rows=rows)
        assert [[c.token_ids for c in row] for row in engine.generate(asked, 3, 8, 1.0, seeds(6, 3))] == expected
    assert len({len(row) for group in expected for row in group}) > 2


def test_every_shared_token_of_a_call_is_computed_once(monkeypatch):
    model = tiny_llama()
    first, second = prompts(2, 11, seed=1), prompts(2, 9, seed=2)
    asked, computed = [first[0], second[0], first[1], second[1]], []
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[1]))
    TransformersEngine(loaded(model, eos=())).generate(asked, 2, 3, 1.0, seeds(4, 2))
    assert computed[0] == 11 + 2 + 3 + 9 + 2 + 3


def test_rows_do_not_depend_on_what_they_are_batched_with():
    model = tiny_llama(torch.float64)
    asked = prompts(count=7)
    together = TransformersEngine(loaded(model), max_rows=64).generate(asked, 2, 12, 1.0, seeds(7, 2))
    apart = TransformersEngine(loaded(model), max_rows=4).generate(asked, 2, 12, 1.0, seeds(7, 2))
    assert [[c.token_ids for c in row] for row in together] == [[c.token_ids for c in row] for row in apart]


def test_item_10_every_end_id_ends_a_row_and_is_reported_as_stop():
    """Several EOS ids: the finish reason comes from the engine, not from one id (TRL#7039)."""
    model = tiny_llama()
    ends = set(range(2, 60))
    results = TransformersEngine(loaded(model, eos=ends)).generate(prompts(), 6, 10, 1.0, seeds(5, 6))
    finished = [c for row in results for c in row]
    for completion in finished:
        inner, last = completion.token_ids[:-1], completion.token_ids[-1]
        assert not ends & set(inner)
        assert (completion.finish_reason is FinishReason.STOP) == (last in ends)
        assert len(completion.logprobs) == len(completion.token_ids)
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(completion.token_ids) == 10
    assert len({c.token_ids[-1] for c in finished if c.finish_reason is FinishReason.STOP}) > 1


def test_sampled_frequencies_match_the_softmax():
    model = tiny_llama(vocabulary=16)
    prompt = [3, 4, 5]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.8, -1)
    rows = TransformersEngine(loaded(model, eos=()), max_rows=4000).generate(
        [prompt], 4000, 1, 0.8, [list(range(4000))]
    )
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in rows[0]]), minlength=16)
    from scipy.stats import chisquare

    assert (
        chisquare(counts.double().numpy(), (expected.double() / expected.double().sum() * 4000).numpy()).pvalue > 1e-3
    )


def test_one_prompt_and_prefix_prompts():
    model = tiny_llama()
    engine = TransformersEngine(loaded(model))
    assert len(engine.generate([[3, 4]], 2, 3, 1.0, [[1, 2]])[0]) == 2
    # one prompt is a prefix of the other: each keeps at least one token of its own
    assert len(engine.generate([[3, 4, 5], [3, 4, 5, 6]], 1, 3, 1.0, [[1], [2]])) == 2
    assert engine.generate([], 1, 3, 1.0, []) == []


def test_temperature_zero_takes_the_largest_logit():
    model = tiny_llama(torch.float64)
    prompt = prompts(1)[0]
    (completion,) = TransformersEngine(loaded(model)).generate([prompt], 1, 6, 0.0, [[1]])[0]
    model.set_attn_implementation("eager")
    ids = list(prompt)
    for token in completion.token_ids:
        assert token == int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(token)
    assert completion.logprobs == (0.0,) * len(completion.token_ids)


def test_adapter_dropout_never_reaches_a_sample():
    wrapped = with_adapter(tiny_llama(torch.bfloat16), dropout=0.5)  # in bfloat16 adapters are not merged
    wrapped.train()
    engine = TransformersEngine(loaded(wrapped.get_base_model()), wrapped)
    first, second = (engine.generate(prompts(), 2, 8, 1.0, seeds(5, 2)) for _ in range(2))
    assert first == second
