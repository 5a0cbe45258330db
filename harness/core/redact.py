"""Keep secrets out of everything that is written: ledger, logs, captures, crash reports, rollouts.

Two grades. What is certainly a secret (the value of a variable such as HF_TOKEN, a key of a known
format, a password in a URL) is replaced wherever text is written. What only looks like one
(`password=…` in an exception, a diff or a command line) is replaced there too, but not in what a
model wrote, where a false alarm would change evidence.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MARK = "[redacted]"
MIN_LENGTH = 8
"""Shorter values of secret variables are left alone: they would be found inside ordinary words."""

_NAME = (
    r"(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|auth[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
)
_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|APIKEY|SECRET|PAT|CREDENTIALS?|DSN)(?:_|$)|PASSW(?:OR)?D|PASSPHRASE|(?:TOKEN|APIKEY|SECRET)$",
    re.IGNORECASE,
)
_FORMATS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
    r"|(?<=Bearer )(?=[A-Za-z._~+/-]*[0-9])[A-Za-z0-9._~+/-]{16,}=*"
    r")"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_BEGINNINGS = (
    *("sk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("AKIA", "ASIA", "AIza", "xox", "eyJ", "Bearer ", "-----BEGIN "),
)
"""One of them stands in every text that `_FORMATS` matches; looking for them first is much faster."""
_URL = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{1,20}://)(?P<user>[^/\s@'\"<>]{1,512})@")
# Special tokens of tokenizers (`eos_token`) and counts (`per_token`) are no secrets.
_ASSIGNED = re.compile(
    r"(?<![A-Za-z0-9_-])(?!(?:eos|bos|pad|unk|sep|cls|mask|image|special|stop|per|next|last|first)[_-]token)"
    rf"(?P<head>(?:[A-Za-z0-9]+[_-])*{_NAME}[\"']?(?:\s*[=:]\s*|\s+is\s+)[\"']?)(?P<value>[^\s\"',;&<>{{}}()\[\]]{{8,}})",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"--?(?:[A-Za-z0-9]+[_-])*{_NAME}", re.IGNORECASE)
_KEY = re.compile(rf"(?:[A-Za-z0-9]+[_-])*{_NAME}", re.IGNORECASE)


class Redactor:
    """Knows the secrets of a process environment and cuts them out of text.

    Args:
        environ: environment variables; the process's own when None.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._values = secret_values(os.environ if environ is None else environ)

    def text(self, text: str, *, guess: bool = True) -> str:
        """Return `text` with secrets replaced by `[redacted]`.

        Args:
            text: anything.
            guess: also replace what only looks like a secret by the name before it.
        """
        for value in self._values:
            if value in text:
                text = text.replace(value, MARK)
        if "://" in text:
            text = _URL.sub(_without_user, text)
        if any(beginning in text for beginning in _BEGINNINGS):
            text = _FORMATS.sub(MARK, text)
        return _ASSIGNED.sub(_without_value, text) if guess else text

    def data(self, value: Any) -> Any:
        """Return a JSON value with every certain secret in its texts replaced; keys and numbers stay."""
        if isinstance(value, str):
            return self.text(value, guess=False)
        if isinstance(value, Mapping):
            return {key: self.data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item) for item in value]
        return value

    def finds(self, text: str, key: str = "") -> str:
        """Say what secret a text holds, in words without its value; empty when it holds none.

        Args:
            text: for example a value of a config.
            key: the key it stands under.
        """
        if any(value in text for value in self._values):
            return "the value of a secret environment variable"
        if any(match[0] != _without_user(match) for match in _URL.finditer(text)):
            return "a URL with a password"
        if _FORMATS.search(text):
            return "what looks like an access key"
        if _KEY.fullmatch(key.rpartition(".")[2]) and len(text) >= MIN_LENGTH:
            return "what its key calls a secret"
        return ""


@functools.cache
def redactor() -> Redactor:
    """Return the redactor of this process; its environment is read once."""
    return Redactor()


def redact(text: str) -> str:
    """Return `text` with secrets, and what looks like one, replaced by `[redacted]`."""
    return redactor().text(text)


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables that hold secrets, longest first.

    A variable counts by its name (HF_TOKEN, WANDB_API_KEY, PGPASSWORD), or because its value is a URL
    with a password. Paths, switches and plain words are no secrets.
    """
    found = set()
    for name, value in environ.items():
        if "://" in value:
            found |= {match["user"].partition(":")[2] for match in _URL.finditer(value)}
        elif _VARIABLE.search(name) and not value.startswith(("/", "~", ".")):
            found.add(value.strip())
    return tuple(sorted(filter(_is_telling, found), key=lambda value: (-len(value), value)))


def _is_telling(value: str) -> bool:
    """Whether a value is long and varied enough to be looked for in every text."""
    plain = value.isalpha() and value.islower() and len(value) < 16
    return len(value) >= MIN_LENGTH and len(set(value)) >= 5 and not plain


def _without_user(match: re.Match[str]) -> str:
    user = match["user"]
    return match[0] if user == "git" or user == MARK else f"{match['scheme']}{MARK}@"


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    harmless = value == MARK or value.startswith(MARK) or value.replace(".", "").replace("_", "").isdigit()
    return match[0] if harmless else f"{match['head']}{MARK}"


def redact_argv(arguments: Iterable[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a command line without secrets: `--token X`, `--api-key=X`, `PASSWORD=X`, URLs, known formats.

    Args:
        arguments: the command and its arguments.
        environ: environment variables; the process's own when None.
    """
    known, hide, shown = Redactor(environ), False, []
    for argument in arguments:
        if hide and not argument.startswith("-"):
            shown.append(MARK)
        else:
            shown.append(known.text(_short_assignment(argument)))
        hide = _FLAG.fullmatch(argument) is not None
    return shown


def _short_assignment(argument: str) -> str:
    """Hide also a short value here, where what stands after `=` cannot be a sentence."""
    key, equals, value = argument.partition("=")
    named = _FLAG.fullmatch(key) or _KEY.fullmatch(key.rpartition(".")[2])
    return f"{key}={MARK}" if equals and value and named else argument


def find_secrets(texts: Mapping[str, str]) -> list[str]:
    """Return a sentence for every named text that holds a secret; the value itself is never in it."""
    return [f"{name} holds {what}" for name, text in texts.items() if (what := redactor().finds(text, name))]


def redact_bytes(data: bytes) -> bytes:
    """Return bytes, such as a diff, with secrets replaced; bytes that are no UTF-8 stay as they are."""
    return redact(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
