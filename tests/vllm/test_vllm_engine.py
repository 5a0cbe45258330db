"""The engine's contract, adapters by version and the prefix cache, with the real vLLM in both forms."""

from __future__ import annotations

import pytest
import torch

from harness.core.errors import ConfigError, InfraError
from harness.core.types import FinishReason
from harness.inference.agreement import TOLERANCE
from tests.vllm.subjects import DEVICE, EOS, PROMPTS, reported, seeds, tokens


@pytest.fixture(params=["colocated", "served"])
def engine(request):
    return request.getfixturevalue(request.param)


def draw(engine, n=3, length=24, temperature=0.9, name="t", prompts=PROMPTS):
    return engine.generate(prompts, n, length, temperature, seeds(n, prompts, name))


def test_n_completions_for_each_prompt_with_exact_lengths_and_reasons(engine):
    drawn = draw(engine, n=8, length=40)
    assert [len(rows) for rows in drawn] == [8, 8, 8]
    reasons = set()
    for row in (row for rows in drawn for row in rows):
        assert len(row.logprobs) == len(row.token_ids)
        ended = row.token_ids[-1] in EOS
        assert row.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert len(row.token_ids) == 40 or ended
        assert not EOS & set(row.token_ids[:-1])
        reasons.add(row.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_both_end_ids_end_a_row_and_the_last_token_may_be_one(engine):
    drawn = draw(engine, n=32, length=12, temperature=1.5)
    last = {row.token_ids[-1] for rows in drawn for row in rows if row.finish_reason is FinishReason.STOP}
    assert last == EOS


def test_a_row_depends_on_its_seed_alone(engine):
    drawn = draw(engine, n=4)
    again = engine.generate([PROMPTS[1]], 1, 24, 0.9, [[seeds(4)[1][2]]])
    assert again[0][0].token_ids == drawn[1][2].token_ids
    assert torch.allclose(torch.tensor(again[0][0].logprobs), torch.tensor(drawn[1][2].logprobs), atol=1e-5)
    assert tokens(draw(engine, n=4, name="other")) != tokens(drawn)
    assert len({row.token_ids for row in drawn[0]}) == 4


def test_temperature_zero_is_greedy_with_probability_one(engine):
    drawn = draw(engine, n=2, temperature=0)
    assert tokens(drawn)[0][0] == tokens(drawn)[0][1]
    assert set(drawn[0][0].logprobs) == {0.0}


def test_what_vllm_would_bend_is_refused(engine):
    with pytest.raises(ConfigError, match="exceed the 256"):
        engine.generate([[5] * 250], 1, 16, 1.0, [[1]])
    with pytest.raises(ConfigError, match=r"at least 0\.01"):
        draw(engine, temperature=0.001)


def test_the_distribution_is_the_tempered_one(llama, colocated):
    before, colocated.version = colocated.version, None
    drawn = colocated.generate([PROMPTS[0]], 4000, 1, 1.3, seeds(4000, PROMPTS[:1]))
    colocated.version = before
    with torch.no_grad(), llama.model.disable_adapter():
        logits = llama.model(input_ids=torch.tensor([PROMPTS[0]], device=DEVICE)).logits[0, -1].cpu() / 1.3
    expected = torch.softmax(logits.double(), -1)
    found = torch.bincount(torch.tensor([row.token_ids[0] for row in drawn[0]]), minlength=260) / 4000
    error = (expected * (1 - expected) / 4000).sqrt()
    assert ((found - expected).abs() < 5 * error + 1e-3).all()


def test_adapters_follow_one_another_and_no_cache_of_an_old_one_is_read(llama, colocated, served):
    """The server first meets the second version, so it is the fresh engine that has no older cache."""
    drawn, folders = {}, []
    for number, factor in enumerate((1.0, 3.0)):
        llama.scale(factor)
        folders.append(llama.save(f"cached-{number}"))
        colocated.sync(f"cached-{number}", folders[-1])
        drawn[number] = draw(colocated)
        assert (reported(drawn[number]) - llama.plain(PROMPTS, drawn[number], 0.9)).abs().max() <= TOLERANCE
    assert tokens(drawn[0]) != tokens(drawn[1])
    served.sync("cached-1", folders[1])
    fresh = draw(served)
    assert tokens(fresh) == tokens(drawn[1])
    assert (reported(fresh) - reported(drawn[1])).abs().max() <= 1e-5
    colocated.sync("cached-0-again", folders[0])  # and back
    assert tokens(draw(colocated)) == tokens(drawn[0])
    llama.scale(1 / 3)


def test_old_versions_are_forgotten_and_names_are_not_used_twice(llama, engine):
    folder = llama.save("named")
    engine.sync("first", folder)
    engine.sync("second", folder)
    assert engine._loaded() - {"base"} == {"second"}
    with pytest.raises(ValueError, match="a name of its own"):
        engine.sync("second", folder)


def test_an_adapter_that_cannot_be_read_is_a_failure_of_the_engine(llama, engine, tmp_path):
    with pytest.raises(InfraError, match="absent"):
        engine.sync("absent", tmp_path / "absent")
    folder = llama.save("after-absent")
    engine.sync(f"after-absent-{type(engine).__name__}", folder)
    drawn = draw(engine)
    assert (reported(drawn) - llama.plain(PROMPTS, drawn, 0.9)).abs().max() <= TOLERANCE
