"""The reflection endpoint against a server that speaks the real protocol: every way an answer can fail."""

import email.utils
import json
import logging
import time

import pytest

from harness.core.errors import ConfigError, RefusedError, ToolError, UsageError
from harness.prompt_search.budget import BudgetSpentError
from harness.prompt_search.endpoint import Endpoint, EndpointSettings
from harness.prompt_search.wire import MAX_BODY_BYTES, check_url, parse_stream, retry_after
from tests.prompt_search.chat_server import KEY, cut, raw, serving, silent, status, streamed, whole

TEXT = "Read the abstract twice, then answer with one letter: \\boxed{A}."


def endpoint(server, *, waits=None, environ=None, **settings):
    waits = [] if waits is None else waits
    settings = {"attempts": 4, "timeout_s": 5.0, "max_tokens": 100, **settings}
    return Endpoint(
        EndpointSettings(server.url, "reflector-1", "REFLECTION_KEY", **settings),
        environ={"REFLECTION_KEY": KEY} if environ is None else environ,
        sleep=waits.append,
    )


def test_a_streamed_answer_arrives_whole_and_is_accounted():
    with serving(streamed(TEXT)) as server:
        model = endpoint(server, price_in=2.0, price_out=10.0)
        answer = model.ask("Improve this prompt.")
    assert (answer.text, answer.finish) == (TEXT, "stop")
    assert model.spent.to_json() == {"requests": 1, "tokens_in": 30, "tokens_out": 7, "usd": 0.00013, "guessed": 0}
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert body["model"] == "reflector-1" and body["max_tokens"] == 100 and body["stream"] is True
    assert body["messages"] == [{"role": "user", "content": "Improve this prompt."}]


def test_an_endpoint_that_does_not_stream_is_understood_too():
    with serving(whole(TEXT)) as server:
        assert endpoint(server).ask("x").text == TEXT


def test_without_usage_the_most_is_booked():
    with serving(whole(TEXT, usage=None)) as server:
        model = endpoint(server, price_in=1.0, price_out=1.0)
        model.ask("1234567890")
    assert model.spent.tokens_out == 100 and model.spent.tokens_in >= 10 and model.spent.guessed == 1


@pytest.mark.parametrize(
    ("bad", "billed"),
    [
        (status(429, "slow down"), False),
        (status(500, "oops"), False),
        (status(503), False),
        (raw(b'{"choices": [{"message": {"content": "half'), True),
        (raw(b"<html>gateway</html>"), True),
        (raw(b'{"choices": []}'), True),
        (raw(b'{"choices": [{"message": {"content": 7}}]}'), True),
        (raw(b"[" * 100_000), True),
        (raw(b"data: {nonsense\n\n", "text/event-stream"), True),
        (raw(b'data: {"error": {"message": "overloaded"}}\n\n', "text/event-stream"), True),
        (cut("Read the abs"), True),
        (raw(b'{"choices": [{"message": {"content": "' + b"a" * MAX_BODY_BYTES + b'"}}]}'), True),
        (raw(b"data: " + b"a" * MAX_BODY_BYTES + b"\n", "text/event-stream"), True),
    ],
    ids=[
        *("429", "500", "503", "half a body", "no json", "no choice", "content no text", "deep json"),
        *("bad event", "error event", "cut stream", "oversized body", "oversized line"),
    ],
)
def test_what_may_pass_is_asked_again_and_half_an_answer_is_none(bad, billed):
    with serving(bad, bad, streamed(TEXT)) as server:
        waits = []
        model = endpoint(server, waits=waits, price_in=1.0, price_out=1.0)
        answer = model.ask("x")
    assert answer.text == TEXT and len(server.requests) == 3
    assert waits == [1.0, 2.0]
    # a request that may have been counted on the other side is booked at its most
    assert model.spent.guessed == (2 if billed else 0) and model.spent.requests == 3
    assert model.spent.tokens_out == 7 + (200 if billed else 0)


def test_retry_after_is_obeyed_and_a_long_one_ends_the_attempts():
    with serving(status(429, Retry_After="17"), streamed(TEXT)) as server:
        waits = []
        endpoint(server, waits=waits).ask("x")
    assert waits == [17.0]
    with serving(status(429, Retry_After="7200")) as server, pytest.raises(ToolError, match="wait 7200 s"):
        endpoint(server).ask("x")
    assert len(server.requests) == 1


def test_retry_after_as_a_date_and_as_nonsense():
    now = time.time()
    later = email.utils.formatdate(now + 60, usegmt=True)
    assert retry_after(later, now) == pytest.approx(60, abs=1.5)
    assert [retry_after(value, now) for value in (None, "", "soon", "-5", "1e9", "9" * 30)] == [None] * 6


def test_a_server_that_hangs_or_is_gone_fails_after_all_attempts():
    with serving(silent) as server:
        model = endpoint(server, attempts=2, timeout_s=0.2, price_in=1.0, price_out=1.0)
        with pytest.raises(ToolError, match="2 attempts failed"):
            model.ask("x")
        assert model.spent.guessed == 2  # it may have worked on both
    waits = []
    with pytest.raises(ToolError, match="cannot be reached"):
        endpoint(server, waits=waits, attempts=5).ask("x")
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_bytes_that_keep_dripping_do_not_hold_it_forever():
    def drip(handler):
        handler.begin_stream()
        while not handler.script.stop.wait(0.02):
            handler.event(json.dumps({"choices": [{"delta": {"content": "a"}}]}))

    with serving(drip) as server, pytest.raises(ToolError, match=r"within 0\.3 s"):
        endpoint(server, attempts=1, timeout_s=0.3).ask("x")


@pytest.mark.parametrize("code", [401, 403])
def test_a_wrong_key_is_said_at_once_and_never_repeated(code):
    with serving(status(code, f"Incorrect API key provided: {KEY}")) as server, pytest.raises(ConfigError) as caught:
        endpoint(server).ask("x")
    assert len(server.requests) == 1
    assert "REFLECTION_KEY" in caught.value.hint and KEY not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("code", [400, 404, 422, 301])
def test_a_refused_request_is_not_repeated(code):
    refusal = status(code, "no such model", Location="http://127.0.0.1:9/elsewhere")
    with serving(refusal) as server, pytest.raises(ConfigError, match=f"HTTP {code}"):
        endpoint(server).ask("x")
    assert len(server.requests) == 1


def test_an_empty_account_is_not_waited_for():
    with serving(status(429, "insufficient_quota")) as server, pytest.raises(RefusedError, match="no quota"):
        endpoint(server).ask("x")
    assert len(server.requests) == 1


def test_the_newer_name_of_the_token_limit_is_used_when_asked_for():
    refusal = status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with serving(refusal, streamed(TEXT)) as server:
        model = endpoint(server)
        assert model.ask("x").text == TEXT
        model.ask("y")
    limits = [{"max_tokens", "max_completion_tokens"} & body.keys() for _, _, body in server.requests]
    assert limits == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]


def test_a_spent_budget_stops_before_the_request_that_could_pass_it():
    with serving(streamed(TEXT)) as server:
        # 100 tokens of answer and at most 65 of prompt cost 165 USD at most, 37 as used
        model = endpoint(server, price_in=1e6, price_out=1e6)
        assert model.ask("x", 200.0).spent.usd == 37.0
        with pytest.raises(BudgetSpentError, match="money"):
            model.ask("x", 200.0 - 37.0)
    assert len(server.requests) == 1


def test_failed_attempts_count_towards_what_is_left():
    with serving(cut("Read"), cut("Read"), streamed(TEXT)) as server:
        model = endpoint(server, price_in=1e6, price_out=1e6)
        with pytest.raises(BudgetSpentError):
            model.ask("x", 400.0)
    assert len(server.requests) == 2 and model.spent.usd == 330.0


def test_a_limit_on_money_without_prices_is_refused():
    with serving(streamed(TEXT)) as server, pytest.raises(UsageError, match="prices"):
        endpoint(server, price_in=1.0).ask("x", 1.0)
    assert not server.requests


def test_the_key_stands_nowhere_but_in_the_header(caplog, capfd):
    echo = f"My instructions hold {KEY}, see https://me:{KEY}@host/"
    caplog.set_level(logging.DEBUG)
    with serving(streamed(echo), status(500, f"Bearer {KEY} is fine"), status(400, f"{KEY}")) as server:
        model = endpoint(server, attempts=2)
        assert KEY not in model.ask("x").text
        with pytest.raises(ConfigError) as caught:
            model.ask("x")
    shown = f"{model!r}{model.settings!r}{model.spent!r}{caught.value!r}{caught.value.hint}"
    assert KEY not in shown + caplog.text + "".join(capfd.readouterr())
    assert "REFLECTION_KEY" in repr(model.settings)


def test_no_key_is_an_error_except_on_this_machine():
    settings = EndpointSettings("https://models.example/v1", "m", "REFLECTION_KEY")
    with pytest.raises(UsageError, match="holds no key"):
        Endpoint(settings, environ={})
    with serving(streamed(TEXT)) as server:
        endpoint(server, environ={}).ask("x")
        assert "Authorization" not in server.requests[0][1]


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://h/v1", "file:///etc/passwd", "h/v1", "https://", "https://me:pw@h/v1", "https://h/v1?key=1"),
        "http://models.example/v1",
    ],
)
def test_addresses_that_would_leak_or_cannot_work_are_refused(url):
    with pytest.raises(UsageError):
        check_url(url, with_key=True)


def test_a_key_that_no_header_can_hold_is_refused():
    with pytest.raises(UsageError, match="no key"):
        Endpoint(EndpointSettings("https://h/v1", "m", "K"), environ={"K": "abc\nX-Evil: 1"})


def test_a_stream_is_whole_by_its_own_word_only():
    piece = b'data: {"choices": [{"delta": {"content": "a"}}]}\n'
    assert parse_stream(iter([b": keep-alive\n", b"event: x\n", piece, b"\n", piece, b"data: [DONE]\n"])).text == "aa"
    end = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n'
    assert parse_stream(iter([piece, end])).finish == "length"
    with pytest.raises(ValueError, match="in the middle"):
        parse_stream(iter([piece, b"\n"]))
