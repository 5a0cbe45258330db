"""Programs with a tiny model and the toy environment, launched in processes that a test may kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.core.canonical import strict_loads
from harness.core.errors import NotFoundError
from harness.ledger import Ledger
from harness.ledger.superseded import is_superseded
from harness.ledger.verify import verify
from harness.program import Program, init_program

ROOT = Path(__file__).parents[1]
RUN = "run-001"
STEPS, INTERVAL = 8, 4
SETS = {
    "train.steps": STEPS,
    "train.tasks_per_step": 2,
    "train.group_size": 2,
    "sampling.max_tokens": 16,
    "optimizer.learning_rate": 0.001,
    "checkpoint.interval": 2,
}
_TIMED = ("time", "attempt", "perf/tokens_per_s", "perf/peak_memory_mb")


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self):
        """The error of a `--json` envelope."""
        return json.loads(self.out)["error"]


class Finished(NamedTuple):
    program: Program
    seconds: float
    writes: int


class Child:
    """A command in a process of its own."""

    def __init__(self, server, pid, out, err):
        self.server, self.pid, self.out, self.err = server, pid, out, err

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)  # the server has not waited for it yet, so the pid is still this child's

    def wait(self, timeout=900):
        code = self.server.ask({"do": "wait", "pid": self.pid, "timeout": timeout})["code"]
        if code is None:
            pytest.fail(f"still running after {timeout} s: {self.err.read_text()[-2000:]}")
        self.server.children.remove(self)
        return Ended(code, self.out.read_text(), self.err.read_text())


class LaunchServer:
    """A process with every package imported, that forks a child per command."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        self.children = []
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HARNESS_CACHE": str(folder / "cache"),
            "HARNESS_ACTOR": "agent:tester",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }
        for name in ("HARNESS_PROGRAM", "HARNESS_DEBUG", "CI"):
            self.environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch_server"],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the launch server died"
        return json.loads(answer)

    def start(self, root, *argv, faults=(), env=None, argv0="harness"):
        self.count += 1
        out, err = (self.folder / f"{self.count}.{kind}" for kind in ("out", "err"))
        request = {
            "do": "start",
            "argv": [str(part) for part in argv],
            "argv0": argv0,
            "cwd": str(root),
            "env": {"HARNESS_PROGRAM": str(root)} | (env or {}),
            "out": str(out),
            "err": str(err),
            "faults": [dict(fault) for fault in faults],
        }
        self.children.append(Child(self, self.ask(request)["pid"], out, err))
        return self.children[-1]

    def run(self, root, *argv, **options):
        return self.start(root, *argv, **options).wait()

    def launch(self, root, *flags, **options):
        return self.run(root, "launch", RUN, "--json", *flags, **options)

    def kill_leftovers(self):
        for child in list(self.children):
            child.kill()
            child.wait()

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def save_tiny_model(folder):
    """Write a random two-layer Llama with the tokenizer and chat template of the embedded model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from harness.inference.models import resolve_model

    try:
        source = resolve_model("smollm2-135m")
    except NotFoundError as error:
        pytest.skip(f"{error}: {error.hint}")
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _rewrite(path, replacements):
    text = path.read_text()
    for old, new in replacements.items():
        assert old in text, f"{path.name} has no {old!r}"
        text = text.replace(old, new)
    path.write_text(text)


def make_program(server, root, model, sets=None, engine="transformers", flags=()):
    """Write a program that trains on the toy environment, and plan its first run.

    Args:
        engine: what CONTEXT.md freezes as the engine.
        flags: further ones of new-run.
    """
    init_program(root, str(model), git=False)
    _rewrite(root / "GOAL.md", {'id = "drugprot"': 'id = "toy"', '["accuracy"]': '["early"]'})
    context = {
        "interval = 15": f"interval = {INTERVAL}",
        'id = "drugprot"': 'id = "toy"',
        "items = 120": "items = 6",
        "max_tokens = 40": "max_tokens = 8",
        "temperature = 0.7": "temperature = 1.0",
        'args = { source = "embedded", variant = "hardened" }\n': "",
        '"backend.engine" = "transformers"': f'"backend.engine" = "{engine}"',
    }
    _rewrite(root / "CONTEXT.md", context)
    plan_run(server, root, SETS | (sets or {}), flags)
    return Program(root)


def plan_run(server, root, sets, more=()):
    flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    ended = server.run(root, "new-run", "--hypothesis", "The toy run learns", *flags, *more)
    assert ended.code == 0, ended.err


def copy_program(program, folder):
    shutil.copytree(program.root, folder)
    return Program(folder)


def edit_config(program, text):
    path = program.config_path(RUN)
    path.write_text(path.read_text() + text)


def files(folder):
    """Return the bytes of every file below a folder; hidden ones are leftovers of a killed writer."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def merged_metrics(path):
    """Return the rows by step, the last row of a step counts, without what depends on the clock."""
    rows = {}
    for line in path.read_bytes().splitlines():
        try:
            row = strict_loads(line)
        except ValueError:  # torn by a kill
            continue
        rows[row["step"]] = {k: v for k, v in row.items() if k not in _TIMED and not k.startswith("time/")}
    return dict(sorted(rows.items()))


def evidence(program, run=RUN):
    """Return everything a resumed run must have in common with an uninterrupted one."""
    outputs = program.run_dir(run)
    found = Ledger(program.ledger).state().runs[run]
    evals = [data for data in found.evals if not is_superseded(data, found.attempts)]
    return {
        "adapters": files(outputs / "adapters"),
        "rollouts": files(outputs / "rollouts"),
        "full evals": files(outputs / "evals"),
        "compact evals": {k: v for k, v in files(program.analysis_dir(run)).items() if "superseded" not in k},
        "metrics": merged_metrics(outputs / "metrics.jsonl"),
        "evaluated": [{key: value for key, value in data.items() if key != "attempt"} for data in evals],
    }


def assert_same_evidence(left, right):
    for part, expected in right.items():
        found = left[part]
        if isinstance(expected, dict):
            assert found.keys() == expected.keys(), part
            assert [key for key in expected if found[key] != expected[key]] == [], part
        assert found == expected, part


def assert_verifies(program):
    assert [finding for finding in verify(program.ledger, program.root) if finding.severity == "error"] == []


def attempts(program, run=RUN):
    return Ledger(program.ledger).state().runs[run].attempts
