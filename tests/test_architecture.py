"""The rules of docs/architecture.md, held by reading the source: direction, tiers, sizes, banned calls."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    {"core"},
    {"config"},
    {"ledger"},
    {"program"},
    {"envs", "inference"},
    {"rollouts"},
    {"evaluation"},
    {"training", "prompt_search"},
    {"backends"},
    {"promotion"},
    {"reports"},
    {"imports"},
    {"cli"},
)
TIER_0 = {"core", "config", "ledger", "program", "cli"}
TIER_2 = {"inference", "rollouts", "training", "prompt_search"}
TIER_2 |= {
    "evaluation.heldout",
    "evaluation.crossed",
    "backends.local",
    "backends.estimate",
    "backends.processes",
    "backends.search",
}
TIER_0_PACKAGES = {"typer", "pydantic", "pydantic_core", "tomlkit", "rich"}
TIER_1_PACKAGES = TIER_0_PACKAGES | {"numpy", "scipy", "pandas", "matplotlib", "jinja2", "markupsafe"}
HEAVY = ("torch", "numpy", "scipy", "pandas", "matplotlib", "transformers", "peft", "jinja2", "duckdb")
BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec", "Markup", "torch.load", "yaml.load", "os.system", "os.popen", "numpy.load", "np.load"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


MODULES = sources("harness")
CODE = sources("harness", "scripts", "benchmarks")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(node: ast.AST) -> list[str]:
    """Return the dotted names an import statement may load; `from a import b` may load a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def runtime_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield what runs at import, leaving out functions and `if TYPE_CHECKING` blocks."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from runtime_statements(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from runtime_statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from runtime_statements(handler.body)


def direction_violations(name: str, tree: ast.Module) -> list[str]:
    """Return every import, lazy ones too, that points from a module to a layer above or beside its own."""
    rank = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    parts = name.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return []
    own = parts[1]
    bad = []
    for node in ast.walk(tree):
        for target in imported(node):
            top, _, rest = target.partition(".")
            package = rest.partition(".")[0]
            known = top == "harness" and package in rank and package != own
            if known and rank[package] >= rank[own]:
                bad.append(f"{name}:{getattr(node, 'lineno', 0)} imports {target}")
    return bad


@functools.cache
def import_graph() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Map each module to (harness modules, outside packages) that importing it loads directly."""
    names = {module_name(path) for path in MODULES}
    graph = {}
    for path in MODULES:
        targets = {t for node in runtime_statements(parse(path).body) for t in imported(node)}
        inside = {t for t in targets if t in names}
        parents = {t.rsplit(".", depth)[0] for t in inside for depth in range(1, t.count(".") + 1)}
        outside = {t.partition(".")[0] for t in targets} - {"harness", ""}
        graph[module_name(path)] = (
            frozenset(inside | parents),
            frozenset(outside - set(sys.stdlib_module_names)),
        )
    return graph


def loaded_packages(name: str) -> dict[str, str]:
    """Return the outside packages that importing `name` loads, each with the module that names it."""
    graph, seen, queue, found = import_graph(), set(), [name], {}
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        inside, outside = graph[current]
        queue += inside
        found |= dict.fromkeys(outside, current)
    return found


def tier(name: str) -> int:
    below = name.partition(".")[2]
    package = below.partition(".")[0]
    if package in TIER_2 or below in TIER_2:
        return 2
    return 0 if package in TIER_0 or name in ("harness", "harness.__main__") else 1


def banned(tree: ast.Module) -> list[str]:
    """Return calls and imports that would run code from data, with their lines."""
    bad = []
    for node in ast.walk(tree):
        names = [n for n in imported(node) if n.partition(".")[0] in BANNED_MODULES]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            names += [called] if called in BANNED_CALLS or called.endswith(".Markup") else []
            for keyword in node.keywords:
                false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and not false:
                    names.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
        bad += [f"line {getattr(node, 'lineno', 0)}: {name}" for name in names]
    return bad


def test_layers_name_every_package():
    packages = {p.name for p in (ROOT / "harness").iterdir() if (p / "__init__.py").exists()}
    assert packages <= set().union(*LAYERS), "a new package needs its place in LAYERS and in docs/architecture.md"


def test_imports_point_one_way():
    bad = [line for path in MODULES for line in direction_violations(module_name(path), parse(path))]
    assert bad == []


@pytest.mark.parametrize(
    ("name", "source", "caught"),
    [
        ("harness.core.x", "def f():\n    from harness.cli import main", True),
        ("harness.envs.x", "import harness.inference.engine", True),
        ("harness.reports.x", "from harness import cli", True),
        ("harness.cli.x", "from harness.reports import write", False),
        ("harness.envs.x", "from harness.envs.base import Environment", False),
    ],
)
def test_direction_check_catches_a_planted_import(name, source, caught):
    assert bool(direction_violations(name, ast.parse(source))) is caught


@pytest.mark.parametrize("path", [p for p in MODULES if tier(module_name(p)) < 2], ids=module_name)
def test_tiers(path):
    name = module_name(path)
    allowed = (TIER_0_PACKAGES, TIER_1_PACKAGES)[tier(name)]
    found = loaded_packages(name)
    heavy = {package: where for package, where in found.items() if package not in allowed}
    assert heavy == {}, (
        f"importing {name} (tier {tier(name)}) loads these; import them inside the function that needs them"
    )


def test_type_checking_and_function_imports_are_not_loaded():
    source = (
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
        "def f():\n    import numpy\ntry:\n    import rich\nexcept ImportError:\n    import typer"
    )
    names = [name for node in runtime_statements(ast.parse(source).body) for name in imported(node)]
    assert names == ["json", "rich", "typer"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list", "--help"]], ids=" ".join)
def test_command_line_loads_nothing_heavy(arguments):
    program = (
        "import sys\nfrom harness.cli.main import main\ntry:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        f"print(code or 0, sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().splitlines()[-1] == "0 []"
    assert "harness" in done.stdout or arguments == ["--version"]


def test_registry_and_command_names_are_unique():
    from harness.cli.root import COMMANDS, SECTIONS
    from harness.envs.registry import ENVIRONMENTS

    assert len(COMMANDS) == sum(len(section) for section in SECTIONS.values())
    assert [spec.id for spec in ENVIRONMENTS.values()] == list(ENVIRONMENTS)
    for path in MODULES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Dict):
                keys = [ast.unparse(key) for key in node.keys if isinstance(key, ast.Constant)]
                assert len(keys) == len(set(keys)), f"{path}:{node.lineno} names a key twice"


def test_every_command_has_its_module():
    from harness.cli.root import COMMANDS

    missing = {entry.module for entry in COMMANDS.values()} - {path.stem for path in sources("harness/cli")}
    assert missing == set()


def test_every_module_has_a_docstring():
    assert [str(path) for path in CODE if not ast.get_docstring(parse(path))] == []


def test_sizes():
    bad = []
    for path in CODE:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        bad += [f"{path}: {lines} lines"] * (lines > MAX_FILE_LINES)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                bad += [f"{path}:{node.lineno} {node.name}: {length} lines"] * (length >= MAX_FUNCTION_LINES)
    assert bad == []


def test_nothing_runs_code_from_data():
    assert {str(path): found for path in CODE if (found := banned(parse(path)))} == {}
    templates = [p for p in (ROOT / "harness").rglob("*") if p.suffix in (".j2", ".html", ".jinja")]
    assert [str(p) for p in templates if re.search(r"\|\s*safe\b", p.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "eval('1')",
        "torch.load(path)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "markupsafe.Markup(text)",
    ],
)
def test_banned_check_catches_a_planted_call(source):
    assert banned(ast.parse(source))


def test_banned_check_lets_good_code_pass():
    assert banned(ast.parse("model.eval()\nnp.load(path, allow_pickle=False)\nrun(line, shell=False)")) == [
        "line 2: np.load"
    ]


def test_no_file_names_one_machine_or_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    hosts = (
        "pypi" + ".org",
        "files.python" + "hosted",
        "registry." + "npmjs",
        "download.py" + "torch",
        "deb." + "debian",
    )
    pattern = re.compile(
        r"(?<![\w./-])/(?:wor" + r"k|far" + r"m|roo" + r"t|opt/h" + r"v)/|" + "|".join(map(re.escape, hosts))
    )
    bad = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in (".png", ".safetensors") or not path.is_file() or path.stat().st_size > 2_000_000:
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        bad += [f"{name}:{number}: {line[:80]}" for number, line in enumerate(lines, 1) if pattern.search(line)]
    assert bad == []


def test_every_folder_of_tests_is_a_package():
    """Two files may then have one name, and tests import helpers as `tests.…` whatever the folder they run from."""
    folders = {path.parent for path in sources("tests")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
