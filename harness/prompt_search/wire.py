"""One request to an OpenAI-compatible chat endpoint: what is sent, and what an answer may look like.

The other side is not trusted: redirects are not followed (they would carry the key to another host), bodies and
waiting times are bounded, and an answer that did not arrive whole is a failure, never a shorter text.
"""

from __future__ import annotations

import email.utils
import http.client
import ipaddress
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from harness.core.canonical import strict_loads
from harness.core.errors import UsageError

MAX_BODY_BYTES = 4 << 20
MAX_ERROR_BYTES = 16 << 10
RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
QUOTA_WORDS = ("insufficient_quota", "billing_hard_limit_reached")
"""Codes that come with 429 and do not go away by waiting."""


class AnswerError(Exception):
    """An answer that cannot be used, or none; whether asking again can help is in `again`.

    Args:
        message: what came back, in words; never cleaned here.
        status: of HTTP; 0 when the answer did not arrive whole.
        again: whether the same request may succeed later.
        billed: whether the other side may have counted tokens for it.
        wait_s: what the other side asks to wait, in seconds.
    """

    def __init__(
        self, message: str, *, status: int = 0, again: bool, billed: bool = False, wait_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.again, self.billed, self.wait_s = status, again, billed, wait_s


@dataclass(frozen=True, slots=True)
class Received:
    """A whole answer.

    Args:
        text: what the model wrote.
        finish: why it ended, as the endpoint says (`stop`, `length`, ...).
        tokens_in: tokens of the prompt; None when the endpoint does not say.
        tokens_out: tokens of the answer; None likewise.
    """

    text: str
    finish: str
    tokens_in: int | None
    tokens_out: int | None


class Body(Protocol):
    """What is read of a response."""

    def readline(self, limit: int = ..., /) -> bytes:
        """Return the next line, at most `limit` bytes of it."""
        ...

    def read(self, amount: int | None = ..., /) -> bytes:
        """Return at most `amount` bytes."""
        ...


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def check_url(base_url: str, *, with_key: bool) -> str:
    """Return the address of chat completions below a base URL.

    Raises:
        UsageError: no http(s) address, one with a user or a query, or a key over http to another machine.
    """
    parts = urllib.parse.urlsplit(base_url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("the base URL of the endpoint is no http or https address", "for example https://HOST/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "the base URL of the endpoint holds a user, a query or a fragment", "the key belongs in a variable"
        )
    if with_key and parts.scheme == "http" and not is_local(parts.hostname):
        raise UsageError("the key would cross the network unencrypted", "use https, or an endpoint on this machine")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/chat/completions", "", ""))


def is_local(host: str) -> bool:
    """Whether a host name is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def post(url: str, key: str, body: Mapping[str, Any], timeout_s: float, clock: Callable[[], float]) -> Received:
    """Send one request and return the whole answer, streamed or not.

    Args:
        url: from `check_url`.
        key: sent as a bearer token; empty sends none.
        body: of the request.
        timeout_s: seconds from the start until the answer must be there.
        clock: monotonic seconds.

    Raises:
        AnswerError: anything but a whole, well-formed answer.
    """
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - check_url allows http(s)
    local = is_local(urllib.parse.urlsplit(url).hostname or "")
    proxies = [urllib.request.ProxyHandler({})] if local else []
    opener = urllib.request.build_opener(_NoRedirect, *proxies)
    deadline = clock() + timeout_s
    try:
        with opener.open(request, timeout=timeout_s) as response:
            if "text/event-stream" in (response.headers.get("Content-Type") or ""):
                return parse_stream(_lines(response, deadline, clock))
            return parse_body(_whole(response, deadline, clock))
    except urllib.error.HTTPError as error:
        raise _refusal(error) from None  # its headers and body are the other side's
    except TimeoutError:
        raise AnswerError(f"no whole answer within {timeout_s:g} s", again=True, billed=True) from None
    except urllib.error.URLError as error:
        late = isinstance(error.reason, TimeoutError)
        raise AnswerError(f"the endpoint cannot be reached: {error.reason}", again=True, billed=late) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise AnswerError(f"the answer was cut or damaged: {error}", again=True, billed=True) from None


def _lines(body: Body, deadline: float, clock: Callable[[], float]) -> Iterator[bytes]:
    """Yield the lines of a stream.

    Raises:
        TimeoutError: past the deadline, however steadily bytes arrive.
        ValueError: more than the allowed bytes.
    """
    left = MAX_BODY_BYTES
    while line := body.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise ValueError(f"more than {MAX_BODY_BYTES} bytes")
        if clock() > deadline:
            raise TimeoutError
        yield line


def _whole(body: Body, deadline: float, clock: Callable[[], float]) -> bytes:
    """Return a whole body, bounded like `_lines`."""
    parts, size = [], 0
    while part := body.read(64 << 10):
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ValueError(f"more than {MAX_BODY_BYTES} bytes")
        if clock() > deadline:
            raise TimeoutError
    return b"".join(parts)


def parse_body(data: bytes) -> Received:
    """Return the answer in a JSON body.

    Raises:
        ValueError: it is not the JSON of a chat completion.
    """
    message = _object(_loads(data))
    choice = _choice(message)
    if choice is None:
        raise ValueError("an answer without a choice")
    content = _object(choice.get("message")).get("content")
    if not isinstance(content, str | None):
        raise ValueError("an answer whose content is no text")
    return Received(content or "", str(choice.get("finish_reason") or "unknown"), *_usage(message))


def parse_stream(lines: Iterator[bytes]) -> Received:
    """Return the answer in a stream of server-sent events.

    Whole means that the stream said so: by `[DONE]` or by a finish reason.

    Raises:
        ValueError: an event is not JSON, reports an error, or the stream ended without saying so.
    """
    texts: list[str] = []
    finish, done = "", False
    usage: tuple[int | None, int | None] = (None, None)
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        if name != b"data":
            continue  # comments keep a connection alive; names and ids of events mean nothing here
        if value.strip() == b"[DONE]":
            done = True
            break
        event = _object(_loads(value))
        if error := event.get("error"):
            raise ValueError(f"the endpoint gave up in the middle: {json.dumps(error)}")
        if (choice := _choice(event)) is not None:
            content = _object(choice.get("delta")).get("content")
            if not isinstance(content, str | None):
                raise ValueError("an event whose content is no text")
            texts.append(content or "")
            finish = str(choice.get("finish_reason") or finish)
        said = _usage(event)
        usage = said if said != (None, None) else usage
    if not done and not finish:
        raise ValueError("the stream ended in the middle of the answer")
    return Received("".join(texts), finish or "unknown", *usage)


def _loads(data: bytes) -> Any:
    return strict_loads(data.decode("utf-8"))


def _object(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"an object was expected, not {type(value).__name__}")
    return value


def _choice(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = message.get("choices")
    if not isinstance(choices, list | None):
        raise ValueError("choices are no list")
    return _object(choices[0]) if choices else None


def _usage(message: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = message.get("usage")
    if not isinstance(usage, dict):
        return (None, None)
    found = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    counts = [n if isinstance(n, int) and not isinstance(n, bool) and n >= 0 else None for n in found]
    return (counts[0], counts[1])


def _refusal(error: urllib.error.HTTPError) -> AnswerError:
    """Return what an HTTP status other than 2xx means."""
    try:
        said = error.read(MAX_ERROR_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        said = ""
    finally:
        error.close()
    again = error.code in RETRIED_STATUSES and not any(word in said for word in QUOTA_WORDS)
    wait_s = retry_after(error.headers.get("Retry-After"), time.time())
    return AnswerError(f"HTTP {error.code}: {said or error.reason}", status=error.code, again=again, wait_s=wait_s)


def retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds of a Retry-After header, given in seconds or as a date; None when there is none.

    Args:
        value: of the header.
        now: seconds since the epoch.

    Source: RFC 9110, section 10.2.3.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now) if text else None
    except (ValueError, OverflowError, OSError):
        return None
