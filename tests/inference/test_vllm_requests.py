"""What vLLM is asked and how its answers are read, without vLLM."""

import json

import pytest

from harness.core.errors import ConfigError, InfraError
from harness.core.types import FinishReason

pytest.importorskip("torch")

from harness.inference.vllm_requests import (
    BASE,
    Row,
    check_request,
    completion_body,
    completion_of,
    read_completion,
    rows_of,
    sampling_fields,
)

EOS = frozenset({7, 2})


def test_every_row_has_a_prompt_and_a_seed_of_its_own():
    rows = rows_of([[1, 2], [3]], 2, [[10, 11], [12, 13]])
    assert rows == [Row((1, 2), 10), Row((1, 2), 11), Row((3,), 12), Row((3,), 13)]
    for seeds in ([[10, 11]], [[10], [12]]):
        with pytest.raises(ValueError, match="2 seeds for each of 2 prompts"):
            rows_of([[1, 2], [3]], 2, seeds)


def test_the_distribution_is_not_bent_and_only_our_end_ids_end_a_row():
    fields = sampling_fields(2**63 - 1, 5, 0.7, EOS)
    assert fields["seed"] == 2**63 - 1 and fields["max_tokens"] == 5 and fields["temperature"] == 0.7
    assert (fields["top_p"], fields["top_k"], fields["min_p"]) == (1.0, 0, 0.0)
    assert fields["stop_token_ids"] == [2, 7] and fields["ignore_eos"] is True and fields["logprobs"] == 0


def test_a_request_names_the_adapter_and_salts_the_cache_with_it():
    body = completion_body(Row((1, 2), 3), sampling_fields(3, 5, 1.0, EOS), "policy-1-4-abc")
    assert body["model"] == body["cache_salt"] == "policy-1-4-abc"
    assert body["prompt"] == [1, 2] and body["return_token_ids"] is True and body["add_special_tokens"] is False
    assert "n" not in body
    assert json.loads(json.dumps(body)) == body
    assert completion_body(Row((1,), 3), {}, BASE)["cache_salt"] == BASE


@pytest.mark.parametrize(
    ("length", "tokens", "temperature", "message"),
    [(90, 11, 1.0, "exceed the 100"), (90, 10, 0.009, "at least 0.01"), (90, 10, 1e-9, "at least 0.01")],
)
def test_what_vllm_would_answer_otherwise_is_refused(length, tokens, temperature, message):
    with pytest.raises(ConfigError, match=message):
        check_request([[1], [1] * length], tokens, temperature, 100)


@pytest.mark.parametrize("temperature", [0, 0.01, 1.0, 2.5])
def test_what_fits_is_not_refused(temperature):
    check_request([[1] * 90], 10, temperature, 100)


def answer(**changes):
    choice = {
        "token_ids": [5, 2],
        "logprobs": {"token_logprobs": [-0.5, -1.25]},
        "prompt_token_ids": [1, 2, 3],
        "finish_reason": "stop",
    }
    return {"model": "policy-1", "choices": [choice | changes]}


def test_an_answer_becomes_a_completion():
    found = read_completion(answer(), (1, 2, 3), 1.0, "policy-1")
    assert (found.token_ids, found.logprobs, found.finish_reason) == ((5, 2), (-0.5, -1.25), FinishReason.STOP)
    cut = read_completion(answer(finish_reason="length"), (1, 2, 3), 1.0, "policy-1")
    assert cut.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "documents"),
        ({"token_ids": []}, "0 tokens"),
        ({"logprobs": None}, "documents"),
        ({"logprobs": {"token_logprobs": [-0.5]}}, "2 tokens with 1"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}}, "2 tokens with 1"),
        ({"logprobs": {"token_logprobs": [-0.5, float("-inf")]}}, "2 tokens with 1"),
        ({"prompt_token_ids": [1, 2]}, "another prompt"),
        ({"finish_reason": "abort"}, "abort"),
        ({"finish_reason": None}, "None"),
    ],
)
def test_a_damaged_answer_is_a_failure_of_the_engine(changes, message):
    with pytest.raises(InfraError, match=message):
        read_completion(answer(**changes), (1, 2, 3), 1.0, "policy-1")


def test_an_answer_of_another_policy_is_a_failure_of_the_engine():
    with pytest.raises(InfraError, match="sampled from 'policy-1' and not from policy-2"):
        read_completion(answer(), (1, 2, 3), 1.0, "policy-2")


@pytest.mark.parametrize("whole", [None, {}, {"choices": []}, {"choices": [{}, {}]}, "text", {"error": "no"}])
def test_an_answer_of_another_form_is_a_failure_of_the_engine(whole):
    with pytest.raises(InfraError, match="documents"):
        read_completion(whole, (1,), 1.0, "policy-1")


def test_greedy_rows_have_probability_one_as_with_transformers():
    assert completion_of([5, 6], [-0.1, -3.0], "length", 0).logprobs == (0.0, 0.0)
