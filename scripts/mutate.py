"""Change the code a little, many times over, and see whether the tests notice.

    python scripts/mutate.py [--sample 40] [--seed 0] [--json mutants.json] [MODULE…]

Every mutant is one small edit of one module: a comparison, a constant, a condition, a returned value or
a whole statement. It lives only in a forked child, whose import system is given the edited source, so
the working tree is never touched. A mutant is killed when a test fails, an import fails or the time is
up; the rest survive and are listed. `docs/evidence/mutation.md` has the last results and says of every
survivor why it stands.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_LEDGER = "tests/ledger/test_ledger_"
TESTS = {
    "harness.ledger.events": [f"{_LEDGER}{name}.py" for name in ("events", "store", "verify", "machine")],
    "harness.ledger.fold": [
        f"{_LEDGER}{name}.py" for name in ("fold", "numbering", "life", "store", "index", "machine")
    ],
    "harness.ledger.store": [
        f"{_LEDGER}{name}.py"
        for name in ("store", "faults", "powerloss", "index", "sweeps", "numbering", "renumber", "machine")
    ],
    "harness.ledger.verify": [f"{_LEDGER}{name}.py" for name in ("verify", "merge", "renumber", "store", "sweeps")],
    "harness.ledger.index": [f"{_LEDGER}{name}.py" for name in ("index", "machine")],
    "harness.ledger.heads": [f"{_LEDGER}{name}.py" for name in ("index", "machine")],
    "harness.ledger.merge": [f"{_LEDGER}merge.py"],
    "harness.ledger.numbering": [f"{_LEDGER}{name}.py" for name in ("numbering", "verify", "renumber", "store")],
    "harness.config.changes": ["tests/config/test_config_changes.py"],
}
"""The modules that must not be wrong, each with the tests that must notice, the quickest first."""
# What starts processes of its own would import the unchanged code there.
_DESELECT = "not processes and not kills and not disk and not limit and not allocations and not script"
_SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


_PATIENCE = 20
"""How many times its limit of processor time a mutant may take by the clock."""


class Mutant(NamedTuple):
    """One edit: in which line, what it does, and the whole edited tree."""

    line: int
    what: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module; docstrings, annotations, messages and imports are left alone."""
    tree = ast.parse(source)
    count = sum(1 for _ in _edits(tree))
    for number in range(count):
        edited = copy.deepcopy(tree)
        for position, (line, what, apply) in enumerate(_edits(edited)):
            if position == number:
                apply()
                yield Mutant(line, what, ast.fix_missing_locations(edited))
                break


def _edits(tree: ast.AST) -> Iterator[tuple[int, str, Any]]:
    """Yield line, words and a function that makes the edit in this tree, always in one order."""
    for node in _code(tree):
        line = getattr(node, "lineno", 0)
        text = " ".join(ast.unparse(node).split())[:70] if hasattr(node, "lineno") else ""
        if isinstance(node, ast.Compare):
            swap = _SWAPS[type(node.ops[0])]
            yield line, f"{text}: {type(node.ops[0]).__name__} to {swap.__name__}", _set(node.ops, 0, swap())
        elif isinstance(node, ast.BoolOp):
            yield line, f"{text}: and to or, or to and", _attr(node, "op", _other(node.op))
            yield line, f"{text}: without its last part", _drop(node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield line, f"{text}: without not", _negate(node)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            yield line, f"{text}: other operator", _attr(node, "op", _ARITHMETIC[type(node.op)]())
        elif isinstance(node, ast.Constant):
            if (changed := _changed(node.value)) is not None:
                yield line, f"{text} to {changed!r}", _attr(node, "value", changed)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield (
                line,
                f"{ast.unparse(node.test)[:70]}: negated",
                _attr(node, "test", ast.UnaryOp(ast.Not(), node.test)),
            )
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield line, f"{text}: None instead", _attr(node, "value", ast.Constant(None))
        elif isinstance(node, ast.Expr | ast.Raise | ast.AugAssign | ast.Continue):
            yield line, f"{text}: left out", _blank(node)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: no docstrings, decorators, annotations, imports, messages or `__repr__`."""
    for node in _children(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "TypeVar"):
            continue
        yield node
        yield from _code(node)


def _children(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef):
        return [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
    if isinstance(node, ast.ClassDef):
        return [*node.body]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    return list(ast.iter_child_nodes(node))


def _changed(value: object) -> object | None:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str) and value and " " not in value:  # text with spaces is for people
        return value + "~"
    if isinstance(value, bytes) and value:
        return value + b"~"
    return None


def _other(operator: ast.boolop) -> ast.boolop:
    return ast.Or() if isinstance(operator, ast.And) else ast.And()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _set(items: list[Any], index: int, value: object) -> Any:
    return lambda: items.__setitem__(index, value)


def _attr(node: ast.AST, name: str, value: object) -> Any:
    return lambda: setattr(node, name, value)


def _drop(values: list[ast.expr]) -> Any:
    return lambda: values.__setitem__(-1, values[0])


def _negate(node: ast.UnaryOp) -> Any:
    return lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))


def _blank(node: ast.AST) -> Any:
    """Turn a statement into one that does nothing, in place."""

    def apply() -> None:
        node.__dict__.clear()
        node.__class__ = ast.Pass
        node.lineno, node.col_offset = 1, 0  # type: ignore[attr-defined]

    return apply


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, code: CodeType, path: Path) -> None:
        self.code, self.path = code, path

    def get_code(self, fullname: str) -> CodeType:
        return self.code

    def get_source(self, fullname: str) -> str:
        return self.path.read_text(encoding="utf-8")

    def is_package(self, fullname: str) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, loader: _Loader) -> None:
        self.name, self.loader = name, loader

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.loader.path, loader=self.loader)


def survives(name: str, mutant: Mutant | None, seconds: int) -> bool:
    """Run the tests of a module in a forked child with the edited source; None runs it as it is."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        # An edit can make a loop endless. Processor time is counted: a busy or halted machine kills no mutant.
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        _run_child(name, mutant)
    deadline = time.monotonic() + _PATIENCE * seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        if time.monotonic() > deadline:  # it waits for what never comes
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.02)


def _run_child(name: str, mutant: Mutant | None) -> None:
    """Import the edited module, run its tests, leave with 0 when all of them pass."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 1
    try:
        path = ROOT / (name.replace(".", "/") + ".py")
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(name, _Loader(compile(mutant.tree, str(path), "exec"), path)))
        import pytest

        found = list(dict.fromkeys(str(ROOT / test) for test in TESTS[name] if (ROOT / test).exists()))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", _DESELECT, "--rootdir", str(ROOT)]
        code = int(pytest.main([*options, *found]))
    finally:
        os._exit(code)


def _preload() -> None:
    """Import what every child needs, except the package itself."""
    import hypothesis.stateful
    import pydantic
    import pytest
    import tomlkit
    import typer

    assert not any(name.startswith("harness") for name in sys.modules), (hypothesis, pydantic, pytest, tomlkit, typer)


def measure(name: str, sample: int, seed: int, seconds: int) -> dict[str, Any]:
    """Return how many mutants of a module were killed, and the survivors."""
    source = (ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    every = list(mutants(source))
    draw = random.Random(f"{seed} {name}")  # noqa: S311 - which mutants are tried is no secret
    chosen = every if sample <= 0 or sample >= len(every) else draw.sample(every, sample)
    if not survives(name, None, seconds * 3):
        raise SystemExit(f"the tests of {name} do not pass on the code as it is")
    lines = source.splitlines()
    survivors = []
    for number, mutant in enumerate(sorted(chosen, key=lambda m: m.line), 1):
        alive = survives(name, mutant, seconds)
        if alive:
            survivors.append({"line": mutant.line, "what": mutant.what, "code": lines[mutant.line - 1].strip()})
        print(f"{name} {number}/{len(chosen)} line {mutant.line} {'SURVIVES' if alive else 'killed'}  {mutant.what}")
        sys.stdout.flush()
    return {"module": name, "mutants": len(every), "tried": len(chosen), "survivors": survivors}


def main(argv: Sequence[str] | None = None) -> int:
    """Print every mutant and the scores; exit code 1 when a score is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}; all by default")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module, drawn at random; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=int, default=120, help="processor time for one mutant")
    parser.add_argument("--bar", type=float, default=0.85, help="lowest score")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGTERM, _stop)
    _preload()
    results = []
    for name in options.modules or TESTS:
        if name not in TESTS:
            parser.error(f"unknown module {name}; known: {', '.join(TESTS)}")
        results.append(measure(name, options.sample, options.seed, options.seconds))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    below = False
    for result in results:
        score = 1 - len(result["survivors"]) / max(result["tried"], 1)
        below = below or score < options.bar
        print(f"{result['module']:<26} {result['tried']:>4} of {result['mutants']:>4} mutants, {score:6.1%} killed")
    return int(below)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
