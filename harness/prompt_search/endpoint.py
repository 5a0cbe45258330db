"""A reflection model behind an OpenAI-compatible chat endpoint: retries, accounting, and no request over the budget.

The key comes from an environment variable and leaves this process only in the header of a request. What the
endpoint says is cleaned before it enters a message, and the key is cut out even where the endpoint repeats it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from harness.core.errors import ConfigError, RefusedError, ToolError, UsageError
from harness.core.redact import MARK, MIN_LENGTH, redact
from harness.core.text import one_line
from harness.prompt_search.budget import BudgetSpentError
from harness.prompt_search.wire import AnswerError, Received, check_url, is_local, post

KEY_VARIABLE = "OPENAI_API_KEY"
URL_VARIABLE = "OPENAI_BASE_URL"
BACKOFF_S = 1.0
LONGEST_WAIT_S = 300.0
_MILLION = 1_000_000
_TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around one message."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where the reflection model is, and what asking it may cost.

    Args:
        base_url: up to and without `/chat/completions`.
        model: its name there.
        key_variable: name of the environment variable with the key.
        timeout_s: seconds until an answer must be there, whole.
        attempts: requests per answer at most, the first included.
        max_tokens: tokens of an answer at most.
        price_in: money per million tokens of prompts, in USD; None: not known.
        price_out: money per million tokens of answers, in USD; None: not known.
    """

    base_url: str
    model: str
    key_variable: str = KEY_VARIABLE
    timeout_s: float = 180.0
    attempts: int = 6
    max_tokens: int = 4096
    price_in: float | None = None
    price_out: float | None = None


@dataclass(slots=True)
class Spent:
    """What the requests so far have used.

    Args:
        requests: sent, failed ones included.
        tokens_in: of prompts.
        tokens_out: of answers.
        usd: money; 0 while no price is known.
        guessed: requests booked at their most, since the endpoint did not say what they used.
    """

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    guessed: int = 0

    def add(self, other: Spent) -> None:
        """Add what other requests used."""
        for name in ("requests", "tokens_in", "tokens_out", "usd", "guessed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_json(self) -> dict[str, float | int]:
        """Return the numbers by name."""
        return {
            "requests": self.requests,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "usd": round(self.usd, 6),
            "guessed": self.guessed,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reflection model wrote.

    Args:
        text: of the answer, not cleaned.
        finish: why it ended; `length` says that it was cut.
        spent: what it took, failed attempts included.
    """

    text: str
    finish: str
    spent: Spent


@dataclass
class Endpoint:
    """Ask a model behind an endpoint.

    Args:
        settings: where, and what it may cost.
        environ: environment variables, for the key.
        sleep: how to wait, in seconds.
        clock: monotonic seconds.

    Raises:
        UsageError: a wrong address, a missing key, numbers out of range.
    """

    settings: EndpointSettings
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        settings = self.settings
        self._key = read_key(self.environ, settings)
        self._url = check_url(settings.base_url, with_key=bool(self._key))
        self._limit = "max_tokens"
        numbers = [settings.timeout_s, settings.attempts, settings.max_tokens]
        prices = [price for price in (settings.price_in, settings.price_out) if price is not None]
        if not all(number > 0 for number in numbers) or not all(0 <= price < math.inf for price in prices):
            raise UsageError("times, attempts and tokens are above zero, and prices not below", "prices are in USD")

    @property
    def name(self) -> str:
        """The model's name, for the record."""
        return self.settings.model

    @property
    def priced(self) -> bool:
        """Whether it is known what requests cost."""
        return None not in (self.settings.price_in, self.settings.price_out)

    def ask(self, prompt: str, allowance: float | None = None) -> Answer:
        """Return the model's answer to one user message.

        Args:
            prompt: the whole message.
            allowance: money that this may cost with all attempts, in USD; None has no limit.

        Raises:
            UsageError: an allowance, but no prices: nothing says what a request costs.
            BudgetSpentError: the next request could cost more than is left of the allowance; it was not sent.
            ConfigError: the endpoint refuses the key, the model or the request; asking again would not help.
            ToolError: it failed in every attempt, or wants a longer wait than is sensible here.
        """
        if allowance is not None and not self.priced:
            raise prices_needed()
        used = Spent()
        most = self._most(prompt)
        for attempt in range(1, self.settings.attempts + 1):
            if allowance is not None and used.usd + most.usd > allowance:
                raise BudgetSpentError("money")
            try:
                received = self._post(prompt)
            except AnswerError as error:
                self._book(used, Spent(1, most.tokens_in, most.tokens_out, most.usd, 1) if error.billed else Spent(1))
                if not error.again:
                    raise self._refused(error) from None
                self._wait(error, attempt)
                continue
            self._book(used, self._used(received, most))
            return Answer(self._without_key(received.text), received.finish, used)
        raise AssertionError("the last attempt returns or raises")

    def _post(self, prompt: str) -> Received:
        try:
            return self._send(prompt)
        except AnswerError as error:
            if error.status == 400 and self._limit == "max_tokens" and "max_completion_tokens" in str(error):
                self._limit = "max_completion_tokens"  # newer models of some hosts know the limit by this name only
                return self._send(prompt)
            raise

    def _send(self, prompt: str) -> Received:
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": prompt}],
            self._limit: self.settings.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return post(self._url, self._key, body, self.settings.timeout_s, self.clock)

    def _most(self, prompt: str) -> Spent:
        """Return what one request can use at most: no tokeniser makes more tokens than there are bytes."""
        tokens_in, tokens_out = len(prompt.encode("utf-8", "replace")) + _TEMPLATE_TOKENS, self.settings.max_tokens
        return Spent(1, tokens_in, tokens_out, self._cost(tokens_in, tokens_out), 1)

    def _cost(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * (self.settings.price_in or 0) + tokens_out * (self.settings.price_out or 0)) / _MILLION

    def _used(self, received: Received, most: Spent) -> Spent:
        if received.tokens_in is None or received.tokens_out is None:
            return most
        cost = self._cost(received.tokens_in, received.tokens_out)
        return Spent(1, received.tokens_in, received.tokens_out, cost, 0)

    def _book(self, used: Spent, request: Spent) -> None:
        used.add(request)
        self.spent.add(request)

    def _wait(self, error: AnswerError, attempt: int) -> None:
        """Wait before the next attempt, as long as the endpoint asks or else twice as long each time."""
        asked = error.wait_s
        if attempt == self.settings.attempts or (asked or 0) > LONGEST_WAIT_S:
            why = f"it asks to wait {asked:.0f} s" if (asked or 0) > LONGEST_WAIT_S else f"{attempt} attempts failed"
            raise ToolError(
                f"the reflection endpoint gave no answer, {why}; the last: {self._clean(str(error))}",
                "the same command goes on later; what was paid for is kept",
            ) from None
        self.sleep(asked if asked is not None else min(BACKOFF_S * 2 ** (attempt - 1), LONGEST_WAIT_S))

    def _refused(self, error: AnswerError) -> ConfigError | RefusedError:
        said = self._clean(str(error))
        if error.status in (401, 403):
            has = f"the key in {self.settings.key_variable}" if self._key else "a request without a key"
            hint = f"put a valid key into the environment variable {self.settings.key_variable}"
            return ConfigError(f"the reflection endpoint refuses {has}: {said}", hint)
        if error.status == 429:
            return RefusedError(f"the account behind the key has no quota left: {said}", "look at its billing")
        hint = "check --reflection (the model's name there) and --reflection-url"
        return ConfigError(f"the reflection endpoint refuses the request: {said}", hint)

    def _clean(self, said: str) -> str:
        """Return what the endpoint said as one short line without secrets."""
        return one_line(redact(self._without_key(said)), 300)

    def _without_key(self, text: str) -> str:
        # a short one, such as the EMPTY of a server that wants none, would be found inside ordinary words
        return text.replace(self._key, MARK) if len(self._key) >= MIN_LENGTH else text


def prices_needed() -> UsageError:
    """Return the error of a limit on money without prices."""
    return UsageError(
        "a limit on money needs the reflection model's prices, or nothing says what a request costs",
        "`--price-in` and `--price-out` give them, in USD per million tokens",
    )


def read_key(environ: Mapping[str, str], settings: EndpointSettings) -> str:
    """Return the key; empty for an endpoint on this machine that needs none.

    Raises:
        UsageError: no key is set, or it holds characters that no header can.
    """
    key = environ.get(settings.key_variable, "").strip()
    if not key:
        if is_local(urlsplit(settings.base_url).hostname or ""):
            return ""
        hint = f"put the key into {settings.key_variable}, or name another variable with --reflection-key-env"
        raise UsageError(f"the environment variable {settings.key_variable} holds no key for the endpoint", hint)
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"the value of {settings.key_variable} is no key: it holds blanks or other characters")
    return key
