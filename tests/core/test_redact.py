"""Secrets: what is cut out of text, what is left alone, and how fast a long text is read."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.redact import MARK, Redactor, redact_argv, redact_bytes, secret_values

# Put together here, so that no scanner takes this file for a leak.
KEYS = [
    "sk-" + "abcdef0123456789abcdef",
    "hf_" + "A1b2C3d4E5f6G7h8I9",
    "ghp_" + "0123456789abcdefABCD",
    "github_pat_" + "0123456789abcdefABCD_x",
    "glpat-" + "0123456789abcdefABCD",
    "AKIA" + "0123456789ABCDEF",
    "AIza" + "0123456789abcdefghijklmnopqrstuv-_",
    "xoxb-" + "0123456789-abcdef",
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0NSJ9.abcDEF-_123",
]
PEM = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA " + "PRIVATE KEY-----"
ENVIRON = {
    "MY_SERVICE_TOKEN": "correct-horse-7",
    "PGPASSWORD": "pa55word-of-pg",
    "HTTPS_PROXY": "http://me:proxy-pa55@proxy.example:3128/",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    # None of these is a secret.
    "TOKENIZERS_PARALLELISM": "false",
    "GOOGLE_APPLICATION_CREDENTIALS": "/somewhere/key.json",
    "SECRET_MODE": "training",
    "SHORT_KEY": "abc1",
    "KEYBOARD": "qwertz-105-keys",
}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key[:6])
def test_keys_of_known_formats_go_even_from_what_a_model_wrote(key):
    assert Redactor({}).text(f"answer: {key}, and so on", guess=False) == f"answer: {MARK}, and so on"


def test_a_private_key_goes_as_a_block_even_when_it_is_cut_off():
    assert Redactor({}).text(f"a\n{PEM}\nb") == f"a\n{MARK}\nb"
    assert Redactor({}).text(f"a\n{PEM[:60]}") == f"a\n{MARK}"


def test_values_of_secret_variables_are_known_by_the_name():
    assert set(secret_values(ENVIRON)) == {
        "correct-horse-7",
        "pa55word-of-pg",
        "proxy-pa55",
        "0123456789abcdef0123456789abcdef01234567",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pa55@host.example/x.git", f"https://{MARK}@host.example/x.git"),
        ("https://token-only@host.example/x", f"https://{MARK}@host.example/x"),
        ("ssh://git@host.example/x", "ssh://git@host.example/x"),
        ("git@host.example:a/b.git", "git@host.example:a/b.git"),
        ("mail me@host.example, see https://host.example/a@b", "mail me@host.example, see https://host.example/a@b"),
        ("PASSWORD=hunter22222", f"PASSWORD={MARK}"),
        ("api_key: 'abcdefgh1'", f"api_key: '{MARK}'"),
        ('{"client_secret": "abcdefgh1"}', f'{{"client_secret": "{MARK}"}}'),
        ("the password is correcthorse", f"the password is {MARK}"),
        ("Authorization: Bearer abcdef0123456789abcdef", f"Authorization: Bearer {MARK}"),
    ],
)
def test_what_looks_like_a_secret_goes(text, expected):
    assert Redactor({}).text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "eos_token: <|endoftext|>, pad_token=something_long",
        "tokenizer: LlamaTokenizerFast, max_tokens=40960000, the budget of 100 sampled tokens is spent",
        "sk-learn-is-a-nice-library, a task-based-evaluation of things",
        "0123456789abcdef0123456789abcdef01234567 is a commit, " + "ab" * 32 + " a hash",
        "Alpha 64 learns faster than 32 without hurting the held-out score.",
        "token = 1234567890",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert Redactor({name: ENVIRON[name] for name in list(ENVIRON)[4:]}).text(text) == text


def test_what_a_model_wrote_loses_only_certain_secrets():
    redactor = Redactor(ENVIRON)
    assert redactor.data({"completion": "password=hunter22222", "n": [1, None, 0.5]}) == {
        "completion": "password=hunter22222",
        "n": [1, None, 0.5],
    }
    assert redactor.data(["x correct-horse-7 y", {"k": "proxy-pa55"}]) == [f"x {MARK} y", {"k": MARK}]


@given(st.text(alphabet=string.printable, max_size=300), st.sampled_from(sorted(set(KEYS))))
def test_redacting_twice_is_redacting_once_and_leaves_no_key(text, key):
    redactor = Redactor(ENVIRON)
    once = redactor.text(f"{text} {key}{text}")
    assert redactor.text(once) == once
    for value in secret_values(ENVIRON):
        assert value not in once


def test_command_lines():
    argv = ["harness", "launch", "run-001", "--token", "a", "--api-key=b", "PASSWORD=c", "--json", "--secret", "--wait"]
    argv += ["--set", "env.x.args.secret=zz", "--set", "lora.alpha=64", "--set", "sampling.max_tokens=5", KEYS[0]]
    assert redact_argv(argv, {}) == [
        *("harness", "launch", "run-001", "--token", MARK, f"--api-key={MARK}", f"PASSWORD={MARK}", "--json"),
        *("--secret", "--wait", "--set", f"env.x.args.secret={MARK}", "--set", "lora.alpha=64"),
        *("--set", "sampling.max_tokens=5", MARK),
    ]


def test_what_a_config_must_not_hold_is_named_without_its_value():
    redactor = Redactor(ENVIRON)
    assert redactor.finds("x correct-horse-7", "hypothesis") == "the value of a secret environment variable"
    assert redactor.finds("https://a:b@c/") == "a URL with a password"
    assert redactor.finds(KEYS[1]) == "what looks like an access key"
    assert redactor.finds("something long", "env.x.args.api_key") == "what its key calls a secret"
    assert redactor.finds("/somewhere/tokenizer.json", "model.tokenizer") == ""
    assert redactor.finds("git@host.example:a", "model.name") == ""


def test_bytes_that_are_no_utf8_stay():
    data = b"\xff\xfe" + f"-key = '{KEYS[0]}'\n".encode() + b"\x80"
    assert redact_bytes(data) == b"\xff\xfe" + f"-key = '{MARK}'\n".encode() + b"\x80"


def test_long_hostile_text_is_read_in_linear_time():
    for text in ("a:" * 200_000, "://" * 100_000, "token_" * 60_000, "-----BEGIN " * 40_000, "x@" * 150_000):
        assert len(Redactor(ENVIRON).text(text)) <= len(text)  # a quadratic pattern would take minutes
