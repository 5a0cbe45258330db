"""Events: the lines of the ledger, written and read byte for byte.

A line carries the SHA-256 of its own bytes, so no rule of number or key spelling is needed to
check it, and an event keeps its line: what was read is what is written again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from harness.core.canonical import MAX_DEPTH, canonical_json, encode_non_finite, strict_loads
from harness.core.errors import HarnessError, LedgerCorruptError, UsageError
from harness.core.ids import NAME_PATTERN, run_number
from harness.core.redact import redactor

VERSION = 1
PROGRAM = "program"
"""The `run` of events that concern the whole program (an amendment, a note)."""
MAX_LINE_BYTES = 1 << 20
RENUMBERED = "renumbered"
"""The kind that gives a run another number; see `numbering`."""
KINDS = frozenset(
    [
        *("created", "started", "evaluated", "finished", "gated", "decided", "promoted", "noted", "imported"),
        *("amended", "tagged", "proposed", "prompt_effect", RENUMBERED),
    ]
)
FIRST_KINDS = frozenset(["created", "imported"])
"""Kinds a run may begin with."""
ACTOR_KINDS = frozenset(["person", "agent", "ci"])

_TAIL = 74  # `,"sha":"` + 64 hex digits + `"}`
_HEAD = re.compile(
    r'\{"v":1,"id":"([0-7][0-9A-HJKMNP-TV-Z]{25})"'
    r',"run":"([A-Za-z0-9][A-Za-z0-9._-]{0,127})"'
    r',"kind":"([a-z][a-z0-9_]{0,63})"(,"critical":true)?'
    r',"at":"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z)"'
    r',"actor":(\{"kind":"[a-z]{1,16}","name":"(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-f]{4})*+"\})'
    r',"prev":\[((?:"[0-9a-f]{64}"(?:,"[0-9a-f]{64}")*)?)\],"data":(?=\{)'
)
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA = re.compile(r"[0-9a-f]{64}")
# JSON already escapes C0; these would still split lines in other tools or reorder text on a terminal.
_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


class UnknownEventError(HarnessError):
    """An event of a newer format, or a critical one of an unknown kind: state would be wrong without it."""

    code = "ledger_too_new"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who caused an event; `kind` is person, agent or ci."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event before it has an id, a time and a place in the ledger.

    Args:
        run: run id, or `program`.
        kind: one of `KINDS`.
        data: JSON object; NaN and infinities are stored as typed values.
        critical: readers that do not know the kind must refuse the ledger.
        actor: who; the ledger fills in `current_actor()` when None.
        follows: hashes of the events it follows; the ledger fills in the last ones of the run when None.
    """

    run: str
    kind: str
    data: Mapping[str, Any]
    critical: bool = False
    actor: Actor | None = None
    follows: tuple[str, ...] | None = None


@dataclass(slots=True)
class Event:
    """One line of the ledger. `data` is parsed on first use: the hash already vouches for its bytes."""

    id: str
    run: str
    kind: str
    critical: bool
    at: str
    actor: Actor
    prev: tuple[str, ...]
    sha: str
    line: bytes = field(repr=False)
    start: int = field(repr=False, compare=False)
    _data: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def data(self) -> dict[str, Any]:
        """The event's own members; non-finite numbers stay typed (see `core.canonical.decode_number`).

        Raises:
            LedgerCorruptError: when the data are no strict JSON object, which takes another writer than this one.
        """
        if self._data is None:
            try:
                self._data = strict_loads(self.line[self.start : -_TAIL])
            except ValueError as error:
                raise LedgerCorruptError(
                    f"the data of event {self.id} ({self.kind} of {self.run}) are no strict JSON object: {error}",
                    "`harness ledger verify` names the line",
                ) from error
        return self._data

    def let_go(self) -> None:
        """Drop the parsed data where they can be parsed again when asked for."""
        if self.start:  # else the line is spelt in another way, and its data are known from all of it
            self._data = None


def format_time(now_ns: int) -> str:
    """Return Unix time in nanoseconds as RFC 3339 UTC with milliseconds and `Z`."""
    seconds, rest = divmod(now_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1_000_000:03d}Z"


def line_sha(line: bytes) -> str:
    """Return the SHA-256 of a line (without its newline) with its last member, `sha`, cut out."""
    return sha256(line[:-_TAIL] + b"}").hexdigest()


def make_event(
    new: NewEvent, *, id: str, at: str, prev: Sequence[str] = (), kinds: frozenset[str] | None = KINDS
) -> Event:
    """Build an event and its line; a secret in a text of the data is replaced, since no line is ever taken back.

    Args:
        new: what happened; needs its actor.
        id: ULID.
        at: RFC 3339 UTC with milliseconds.
        prev: hashes of the last events of the run.
        kinds: allowed kinds; None allows every well-formed one.

    Raises:
        UsageError: when a member breaks the format; nothing can then be written.
    """
    who = _check_members(new, kinds)
    check_json(new.data)
    members: dict[str, Any] = {"v": VERSION, "id": id, "run": new.run, "kind": new.kind}
    if new.critical:
        members["critical"] = True
    members |= {"at": at, "actor": {"kind": who.kind, "name": who.name}, "prev": list(prev)}
    members["data"] = encode_non_finite(redactor().data(new.data))
    try:
        text = canonical_json(members, sort=False)
        body = (text if text.isascii() else _UNSAFE.sub(_escape, text)).replace("\x7f", "\\u007f").encode()
        line = body[:-1] + b',"sha":"' + sha256(body).hexdigest().encode() + b'"}'
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"{len(line)} bytes, more than {MAX_LINE_BYTES}; put large content in a file and its hash here"
            )
        strict_loads(line)
        return parse_line(line)
    except ValueError as error:
        raise UsageError(f"event {new.kind!r} of {new.run} cannot be stored: {error}") from error


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _check_members(new: NewEvent, kinds: frozenset[str] | None) -> Actor:
    if new.run != PROGRAM:
        run_number(new.run)
    if not _KIND.fullmatch(new.kind) or (kinds is not None and new.kind not in kinds):
        raise UsageError(f"unknown event kind {new.kind[:80]!r}", f"known kinds: {', '.join(sorted(KINDS))}")
    actor = new.actor
    if actor is None or actor.kind not in ACTOR_KINDS or not actor.name.strip():
        raise UsageError(
            f"event {new.kind!r} has no valid actor: {actor}",
            'set HARNESS_ACTOR="agent:NAME", "person:NAME" or "ci:NAME"',
        )
    if not isinstance(new.data, Mapping):
        raise UsageError(f"the data of event {new.kind!r} must be a JSON object, not {type(new.data).__name__}")
    return actor


def check_json(value: Any, where: str = "data", depth: int = 1) -> None:
    """Refuse what JSON would change silently or what another reader could not take.

    Args:
        value: what is about to be stored.
        where: dotted path for the message.
        depth: nesting so far, in levels.

    Raises:
        UsageError: on keys that are no text, integers beyond 64 bits, other types, deep nesting.
    """
    if value is None or isinstance(value, bool | float | str):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:  # other JSON readers would round it
            raise UsageError(f"{where} is an integer beyond 64 bits", "store it as text")
        return
    if depth > MAX_DEPTH:
        raise UsageError(f"{where[:80]}… is nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {key!r}, which is no text")
            check_json(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]", depth + 1)
    else:
        raise UsageError(f"{where} is a {type(value).__name__}, which has no JSON form", "convert it first")


_actors: dict[str, Actor] = {}


def _actor(raw: str) -> Actor:
    members = json.loads(raw.encode("latin-1"))
    return _actors.setdefault(raw, Actor(members["kind"], members["name"]))


def parse_line(line: bytes) -> Event:
    """Parse and check one line, without its newline.

    Raises:
        ValueError: with the reason, when the line is damaged.
        UnknownEventError: when its format version is newer than this reader.
    """
    stored = sha256(line[:-_TAIL] + b"}").hexdigest()
    if stored.encode() != line[-66:-2] or line[-_TAIL:-66] != b',"sha":"':
        raise ValueError(diagnose(line))
    # Latin-1 keeps one character per byte; all members but the actor are ASCII, and the actor is parsed as bytes.
    match = _HEAD.match(line.decode("latin-1"))
    if match is None or len(line) > MAX_LINE_BYTES or line[-2:] != b'"}':
        return _parse_slowly(line)
    id, run, kind, critical, at, actor, prev = match.groups()
    return Event(
        id,
        run,
        kind,
        critical is not None,
        at,
        _actors.get(actor) or _actor(actor),
        tuple(prev[1:-1].split('","')) if prev else (),
        stored,
        line,
        match.end(),
    )


def diagnose(line: bytes) -> str:
    """Say in a few words what is wrong with a line whose hash does not match."""
    if not line.strip():
        return "the line is empty"
    if line.startswith((b"<<<<<<<", b"=======", b">>>>>>>", b"|||||||")):
        return "it is a git conflict marker; `harness ledger install`, then `git checkout -m -- runs.jsonl`"
    if line.endswith(b"\r"):
        return "it ends in CR LF; something converted the line ends"
    if line.startswith(b"\xef\xbb\xbf"):
        return "it starts with a byte order mark"
    try:
        members = strict_loads(line)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON ({str(error)[:120]})"
    if not isinstance(members, dict) or list(members)[-1:] != ["sha"]:
        return "it does not end in the member `sha`"
    return "its hash does not match its bytes"


def _parse_slowly(line: bytes) -> Event:
    """Parse a line whose hash is right but whose members are not spelt as this writer spells them.

    A later writer may add members before `data`; between `data` and `sha` nothing may stand.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it has {len(line)} bytes, more than {MAX_LINE_BYTES}")
    members = strict_loads(line)
    if not isinstance(members, dict):
        raise ValueError("it is no JSON object")
    version = members.get("v")
    if isinstance(version, int) and version > VERSION:
        raise UnknownEventError(
            f"an event has format version {version}; this harness reads version {VERSION}",
            "pip install -U post-training-harness",
        )
    _check_parsed(members)
    actor = members["actor"]
    return Event(
        members["id"],
        members["run"],
        members["kind"],
        members.get("critical", False),
        members["at"],
        Actor(actor["kind"], actor["name"]),
        tuple(members["prev"]),
        members["sha"],
        line,
        0,
        members["data"],
    )


def _check_parsed(members: dict[str, Any]) -> None:
    def matches(name: str, pattern: re.Pattern[str]) -> bool:
        value = members.get(name)
        return isinstance(value, str) and pattern.fullmatch(value) is not None

    actor, prev = members.get("actor"), members.get("prev")
    rules = {
        "v": members.get("v") == VERSION and members.get("v") is not True,
        "id": matches("id", _ULID),
        "run": matches("run", NAME_PATTERN),
        "kind": matches("kind", _KIND),
        "critical": isinstance(members.get("critical", False), bool),
        "at": matches("at", _AT),
        "actor": isinstance(actor, dict) and all(isinstance(actor.get(key), str) for key in ("kind", "name")),
        "prev": isinstance(prev, list) and all(isinstance(sha, str) and _SHA.fullmatch(sha) for sha in prev),
        "data": isinstance(members.get("data"), dict),
        "sha": list(members)[-1] == "sha" and matches("sha", _SHA),
    }
    wrong = [name for name, right in rules.items() if not right]
    if wrong:
        raise ValueError(f"member {', '.join(wrong)} is missing or malformed")
