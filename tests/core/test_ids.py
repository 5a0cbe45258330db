"""Names that become paths: an allow-list, tried with everything that has got past a deny-list somewhere."""

from pathlib import Path

import pytest

from harness.core.errors import UsageError
from harness.core.ids import check_name, new_ulid, run_id, run_number
from harness.program import Program

EVIL = [
    "", ".", "..", "...", "../x", "x/../y", "..%2fx", "%2e%2e%2fx", "%252e%252e%252fx", "%252e%252e", "..\\x", "x\\y",
    "/", "/etc/passwd", "//host/share", "\\\\host\\share", "C:\\x", "C:x", "c:/x", "file:///etc/passwd", "file:x",
    "http://x/y", "a/b", "a//b", "./a", "a/", "/a", "~", "~root", "$HOME", "${HOME}", "$(id)", "`id`", "a;b", "a|b",
    "a&b", "a b", " a", "a ", "\ta", "a\n", "a\r\n", "a\0b", "\0", "a?b", "a#b", "a*b", "a[b]", "a:b", "a,b", "a'b",
    'a"b', "-a", "--help", "_a", ".a", ".git", "a..b", "a..", "con", "CON", "nul", "NUL.txt", "com1", "LPT9.log", "aux",
    "PRN", "\u202eevil", "a\u202eb", "a\u200bb", "ａ", "é", "run\u2024x", "a\u2215b", "a\u2044b", "\ufeffa", "x" * 129,
    "a\x1b[31m", "a\x7f", "\udcff",
]  # fmt: skip


def test_the_corpus_is_large_enough():
    assert len(set(EVIL)) == len(EVIL) >= 60


@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_evil_names_are_refused(name):
    with pytest.raises(UsageError) as caught:
        check_name(name, "prompt")
    assert len(str(caught.value)) < 600
    with pytest.raises(UsageError):
        run_number(name)


@pytest.mark.parametrize("name", ["a", "A", "0", "v0.1", "drug-prot_2", "x" * 128, "con1", "console", "a.b.c"])
def test_plain_names_are_taken(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_no_path_of_a_program_leaves_it(name):
    program = Program(Path("/somewhere/program"))
    for path in (
        program.config_path,
        program.run_dir,
        program.analysis_dir,
        lambda n: program.prompt_path("drugprot", n),
    ):
        with pytest.raises(UsageError):
            path(name)
    with pytest.raises(UsageError):
        program.prompt_path(name, "ok")


@pytest.mark.parametrize(
    "name", ["run-1", "run-01", "run-0001", "Run-001", "RUN-001", "run-001 ", "run-٠٠١", "run-1e3"]
)
def test_a_run_has_one_spelling(name):
    with pytest.raises(UsageError):
        run_number(name)


def test_numbers_and_ids_are_each_others_inverse():
    for number in (1, 9, 10, 999, 1000, 123_456_789):
        assert run_number(run_id(number)) == number


def test_ulids_sort_by_time():
    assert new_ulid(1, b"\xff" * 10) < new_ulid(2, bytes(10))
    assert len(new_ulid()) == 26
