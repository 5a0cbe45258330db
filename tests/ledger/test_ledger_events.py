"""The line format: golden bytes, round trips, and what may not be stored."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.canonical import decode_number, encode_non_finite
from harness.core.errors import LedgerCorruptError, UsageError
from harness.ledger import Actor, NewEvent, UnknownEventError
from harness.ledger.events import MAX_LINE_BYTES, line_sha, make_event, parse_line

ADA = Actor("person", "Ada")
AT = "2026-01-02T03:04:05.678Z"
ULID = "01JGJ4QK5E0123456789ABCDEF"
GOLDEN = (
    '{"v":1,"id":"01JGJ4QK5E0123456789ABCDEF","run":"run-120","kind":"decided","critical":true,'
    '"at":"2026-01-02T03:04:05.678Z","actor":{"kind":"agent","name":"Zoë"},'
    '"prev":["' + "0" * 64 + '"],'
    '"data":{"decision":"keep","reason":"µ \\u2028 ok","value":{"$non_finite":"nan"},"x":1e-07}'
)


def make(data, **members):
    return make_event(NewEvent("run-120", "noted", data, actor=ADA), id=ULID, at=AT, **members)


def rehash(body: str) -> bytes:
    """Give a line without `sha` its right hash."""
    return body[:-1].encode() + f',"sha":"{hashlib.sha256(body.encode()).hexdigest()}"}}'.encode()


def test_golden_line() -> None:
    """The format is final: these bytes must be written and read for ever."""
    data = {"decision": "keep", "reason": "µ \u2028 ok", "value": math.nan, "x": 1e-7}
    event = make_event(
        NewEvent("run-120", "decided", data, critical=True, actor=Actor("agent", "Zoë")),
        id=ULID,
        at=AT,
        prev=["0" * 64],
    )
    sha = "9b3881b28d1b56f06e89b9e8e1d24221052f29d9dcd7441a990feff8b9b15932"
    assert event.line.decode() == GOLDEN + f',"sha":"{sha}"}}'
    assert hashlib.sha256((GOLDEN + "}").encode()).hexdigest() == sha
    read = parse_line(event.line)
    assert read == event
    assert (read.run, read.kind, read.critical, read.at) == ("run-120", "decided", True, AT)
    assert (read.id, read.actor, read.prev, read.sha) == (ULID, Actor("agent", "Zoë"), ("0" * 64,), sha)
    assert read.data == {**data, "value": {"$non_finite": "nan"}}
    assert list(json.loads(event.line))[-1] == "sha"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(
    data=st.dictionaries(st.text(), JSON, max_size=5),
    name=st.text(min_size=1).filter(str.strip),
    critical=st.booleans(),
)
def test_what_is_written_is_read_and_written_again(data, name, critical) -> None:
    actor = Actor("ci", name)
    event = make_event(NewEvent("run-120", "noted", data, critical, actor), id=ULID, at=AT, prev=["a" * 64, "b" * 64])
    assert b"\n" not in event.line
    assert len(event.line.decode().splitlines()) == 1
    read = parse_line(event.line)
    assert read.data == encode_non_finite(data)
    assert read.actor == actor
    assert line_sha(read.line) == read.sha
    again = make_event(
        NewEvent(read.run, read.kind, read.data, read.critical, read.actor), id=read.id, at=read.at, prev=read.prev
    )
    assert again.line == event.line


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_every_float_comes_back(number) -> None:
    back = decode_number(parse_line(make({"deep": [{"n": number}]}).line).data["deep"][0]["n"])
    assert (math.isnan(back) and math.isnan(number)) or (back == number and str(back) == str(number))


@pytest.mark.parametrize(
    "char", ["\u2028", "\u2029", "\x85", "\x9b", "\x7f", "\u202e", "\u2066", "\ufeff", "\x1b", "\r"]
)
def test_line_ends_and_terminal_controls_are_escaped(char) -> None:
    event = make({"text": f"é{char}", "plain": char})
    assert char not in event.line.decode()
    assert parse_line(event.line).data == {"text": f"é{char}", "plain": char}


def nested(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"a": value}
    return value


class Foreign:
    pass


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"text": "\ud800"}, "surrogates"),
        ({"\udfff": 1}, "surrogates"),
        ({"n": 10**5000}, "64 bits"),
        ({"n": 2**63}, "64 bits"),
        ({1: "a", "1": "b"}, "no text"),
        ({"a": {None: 1}}, "no text"),
        (nested(63), "nested deeper"),
        (nested(100_000), "nested deeper"),
        ({"a": {1, 2}}, "set"),
        ({"a": b"x"}, "bytes"),
        ({"a": [Foreign()]}, "Foreign"),
        ({"a": "x" * MAX_LINE_BYTES}, "put large content in a file"),
        ([1], "must be a JSON object"),
    ],
)
def test_what_json_would_change_is_refused(data, reason) -> None:
    with pytest.raises(UsageError, match=reason):
        make(data)


def test_limits_are_exact() -> None:
    for number in (-(2**63), 2**63 - 1):
        assert parse_line(make({"n": number}).line).data == {"n": number}
    for number in (-(2**63) - 1, 2**63):
        with pytest.raises(UsageError, match="64 bits"):
            make({"n": number})
    room = MAX_LINE_BYTES - len(make({"text": ""}).line)
    largest = make({"text": "x" * room})
    assert len(largest.line) == MAX_LINE_BYTES and parse_line(largest.line).data == {"text": "x" * room}
    with pytest.raises(UsageError, match="put large content in a file"):
        make({"text": "x" * (room + 1)})
    data = '{"text":"' + "x" * (room + 1000) + '"}'
    with pytest.raises(ValueError, match="more than"):
        parse_line(rehash(body(data=0).replace('"data":0', f'"data":{data}')))


def test_deepest_allowed_nesting_is_stored() -> None:
    assert parse_line(make(nested(61)).line).data == nested(61)


@pytest.mark.parametrize(
    "new",
    [
        NewEvent("run-7", "noted", {}, actor=ADA),
        NewEvent("../run-007", "noted", {}, actor=ADA),
        NewEvent("run-007\n", "noted", {}, actor=ADA),
        NewEvent("run-007", "surprise", {}, actor=ADA),
        NewEvent("run-007", "noted", {}),
        NewEvent("run-007", "noted", {}, actor=Actor("robot", "x")),
        NewEvent("run-007", "noted", {}, actor=Actor("person", " ")),
    ],
)
def test_bad_members_are_refused(new) -> None:
    with pytest.raises(UsageError):
        make_event(new, id=ULID, at=AT)


def body(**changes: object) -> str:
    members: dict[str, object] = {
        "v": 1, "id": ULID, "run": "run-001", "kind": "noted", "critical": ..., "at": AT,
        "actor": {"kind": "person", "name": "Ada"}, "prev": [], "colour": ..., "data": {"text": "x"},
    }  # fmt: skip
    members.update(changes)
    return json.dumps({key: value for key, value in members.items() if value is not ...}, separators=(",", ":"))


def test_unknown_members_and_other_spellings_are_read_and_kept() -> None:
    """A later version may add members, another writer may space its JSON differently."""
    line = rehash(body(colour="blue").replace('"data":', '"data": '))
    event = parse_line(line)
    assert event.data == {"text": "x"}
    assert event.line == line


@pytest.mark.parametrize(
    "changes",
    [
        {"v": True}, {"v": 0}, {"v": "1"}, {"v": ...}, {"id": "x"}, {"id": 5}, {"run": "a/b"}, {"run": ...},
        {"kind": "No"}, {"critical": "yes"}, {"at": "yesterday"}, {"at": "2026-01-02T03:04:05Z"}, {"actor": "Ada"},
        {"actor": {"kind": "person"}}, {"prev": ["x"]}, {"prev": None}, {"data": [1]}, {"data": ...},
    ],
)  # fmt: skip
def test_malformed_members_with_a_right_hash_are_damage(changes) -> None:
    with pytest.raises(ValueError, match="malformed"):
        parse_line(rehash(body(**changes)))


def test_a_newer_format_version_is_named() -> None:
    with pytest.raises(UnknownEventError, match="version 2"):
        parse_line(rehash(body(v=2)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ('{"a":1,"a":2}', "duplicate key 'a'"),
        ('{"a":NaN}', "NaN"),
        ('{"a":1e400}', "overflows"),
        ('{"a":' + "[" * 70 + "]" * 70 + "}", "nested deeper"),
        ('{"a":' + "1" * 5000 + "}", "digits"),
        ("{'a':1}", "double quotes"),
        ('{},"critical":true', "Extra data"),
    ],
)
def test_data_that_is_no_strict_json_is_refused_when_used(data, reason) -> None:
    event = parse_line(rehash(body(data=0).replace('"data":0', f'"data":{data}')))
    with pytest.raises(LedgerCorruptError, match=reason):
        _ = event.data


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"<<<<<<< HEAD", "conflict marker"),
        (b"=======", "conflict marker"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"{}", "does not end in"),
        (b"[1]", "does not end in"),
        (b'{"a":1,"sha":"' + b"0" * 64 + b'"}', "hash does not match"),
    ],
)
def test_damage_is_explained(line, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_line(line)


def test_crlf_is_explained() -> None:
    with pytest.raises(ValueError, match="CR LF"):
        parse_line(make({}).line + b"\r")


def test_every_changed_byte_of_a_line_is_noticed() -> None:
    line = make({"text": "größer", "n": 1.5}).line
    for position in range(len(line)):
        for flip in (0x01, 0x20, 0x80):
            damaged = line[:position] + bytes([line[position] ^ flip]) + line[position + 1 :]
            with pytest.raises(ValueError, match=r"."):
                parse_line(damaged)
