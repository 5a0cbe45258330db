"""What vLLM is asked and what it answers, as plain values: no vLLM is imported here.

A row is one completion of one prompt with a seed of its own, so that what a row draws depends on nothing but its
seed and the policy. The rows of a prompt share its keys and values through vLLM's prefix cache, which is salted with
the version of the adapter: keys and values of an old policy are never read again (vllm#42125, vllm#48352).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.core.errors import ConfigError, InfraError
from harness.core.types import Completion, FinishReason

BASE = "base"
"""The model without an adapter, as a server names it, and the salt of its prefix cache."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one, and the log probabilities would be of another distribution."""
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Row(NamedTuple):
    """One completion to draw.

    Args:
        prompt: token ids.
        seed: 0 to 2^63 - 1; decides the row's random numbers alone.
    """

    prompt: tuple[int, ...]
    seed: int


def rows_of(prompts: Sequence[Sequence[int]], n: int, seeds: Sequence[Sequence[int]]) -> list[Row]:
    """Return `n` rows for each prompt, prompt by prompt.

    Raises:
        ValueError: when the seeds are not `n` for each prompt.
    """
    if len(seeds) != len(prompts) or any(len(own) != n for own in seeds):
        raise ValueError(f"{n} seeds for each of {len(prompts)} prompts are needed")
    return [Row(tuple(prompt), seed) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]


def check_request(prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, context: int) -> None:
    """Refuse what vLLM would answer otherwise than it was asked.

    Args:
        context: tokens of the longest conversation that the engine was started for.

    Raises:
        ConfigError: a prompt with its reply does not fit, or the temperature is lower than vLLM goes.
    """
    longest = max(map(len, prompts))
    if longest + max_tokens > context:
        raise ConfigError(
            f"{longest} prompt tokens and {max_tokens} for the reply exceed the {context} that vLLM was started for",
            "raise backend.vllm.context in the run's file",
        )
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ConfigError(
            f"vLLM samples at a temperature of at least {LOWEST_TEMPERATURE:g}, not at {temperature:g}",
            "use temperature 0 (greedy) or a higher one",
        )


def sampling_fields(seed: int, max_tokens: int, temperature: float, eos_ids: frozenset[int]) -> dict[str, Any]:
    """Return the sampling parameters of a row, under the names that vLLM's class and its server share.

    Everything that would bend the distribution is said to be off, since a model's own files may ask for it.
    """
    return {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(eos_ids),
        "ignore_eos": True,  # the harness's end ids are the complete ones, and they alone decide
        "logprobs": 0,  # of the sampled token only
    }


def completion_body(row: Row, fields: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the JSON body of `POST /v1/completions` for one row.

    Args:
        fields: of `sampling_fields`.
        version: name of the adapter, or `BASE`; also the salt of the prefix cache.
    """
    ids = {"prompt": list(row.prompt), "add_special_tokens": False, "return_token_ids": True}
    return {"model": version, "cache_salt": version, **ids, **fields}


def read_completion(answer: Any, prompt: Sequence[int], temperature: float, version: str) -> Completion:
    """Return the completion in a server's answer to `completion_body`.

    Raises:
        InfraError: the answer is not of the form that vLLM documents, or speaks of another prompt or policy.
    """
    try:
        (choice,), model = answer["choices"], answer["model"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        told, reason = choice["prompt_token_ids"], choice["finish_reason"]
        if not (isinstance(ids, list) and isinstance(logprobs, list) and isinstance(told, list)):
            raise TypeError("a list is missing")
    except (KeyError, TypeError, ValueError) as error:
        raise InfraError(f"vLLM's answer is not what it documents: {type(error).__name__} {error}", _VERSION) from error
    if told != list(prompt):
        raise InfraError("vLLM sampled from another prompt than it was given", _VERSION)
    if model != version:
        raise InfraError(f"vLLM sampled from {str(model)[:100]!r} and not from {version}", _VERSION)
    return completion_of(ids, logprobs, reason, temperature)


def completion_of(
    ids: Sequence[int], logprobs: Sequence[float | None], reason: str | None, temperature: float
) -> Completion:
    """Return a completion, everything checked.

    Args:
        ids: sampled token ids.
        logprobs: natural log probability of each under the tempered distribution.
        reason: vLLM's finish reason.
        temperature: at 0 the whole probability lies on the chosen token, whatever vLLM reports.

    Raises:
        InfraError: nothing was sampled, a log probability is missing or not finite, or the row did not end by itself.
    """
    if reason not in _REASONS:
        raise InfraError(f"vLLM ended a completion with {reason!r}", "read the engine's log, then launch with --resume")
    values = [math.nan if value is None else float(value) for value in logprobs]
    if not ids or len(values) != len(ids) or not all(map(math.isfinite, values)):
        raise InfraError(
            f"vLLM gave {len(ids)} tokens with {sum(map(math.isfinite, values))} finite log probabilities", _VERSION
        )
    return Completion(tuple(ids), (0.0,) * len(ids) if temperature == 0 else tuple(values), _REASONS[reason])


_VERSION = "install the version of vLLM that requirements-vllm.lock names"
