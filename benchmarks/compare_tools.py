"""What `ledger_compare.py` asks of each tool, run by the interpreter that has the tool and nothing of the others.

    PYTHON benchmarks/compare_tools.py TOOL prepare|create|write|list FOLDER [--runs N] [--first N]

`prepare` makes an empty store, `create` and `write` record runs (`write` waits for a line on standard input
first, so that several begin together), `list` reads them all. A run is one config of eight keys, three
metrics and an end, through the calls that the tool's own documentation shows. The last line printed is the
result as JSON. Imports are never timed; this file imports only the standard library before it knows its tool.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

RESULT = "RESULT "
PROJECT = "compare"
METRICS = ("reward", "accuracy", "valid")


def config_of(number: int) -> dict[str, Any]:
    """Return the eight keys of a run's config."""
    return {
        "hypothesis": f"Setting {number} raises the held-out reward without hurting validity",
        "learning_rate": 1e-5 * (1 + number % 7),
        "lora_rank": 16,
        "lora_alpha": 32.0 + number,
        "targets": "all-linear",
        "steps": 30,
        "group_size": 8,
        "seed": number,
    }


def metrics_of(number: int) -> dict[str, float]:
    """Return the three metrics of a run, each in [0, 1)."""
    return {name: (number * 37 + place * 11) % 100 / 100 for place, name in enumerate(METRICS)}


class Tool(Protocol):
    """A store of runs, opened in a folder."""

    def create(self, name: str, number: int) -> str:
        """Record one whole run; return the id by which the tool lists it, once the tool says that it is stored."""

    def runs(self) -> list[tuple[str, int, int]]:
        """Return id, number of config keys and number of metrics of every run, read by the tool's own call."""


class Harness:
    """The ledger of this repository: four events a run, each flushed to the disk before it is acknowledged."""

    package = "post-training-harness"

    def __init__(self, folder: Path) -> None:
        from harness.ledger import Actor, Ledger, NewEvent

        self.path = folder / "runs.jsonl"
        self.ledger = Ledger(self.path, wait_s=600)
        self.new, self.actor = NewEvent, Actor("agent", "benchmark")

    @staticmethod
    def prepare(folder: Path) -> None:
        """Make a program that `harness list` finds."""
        for name in ("GOAL.md", "CONTEXT.md", "PLAN.md"):
            (folder / name).write_text("not read by list\n")
        (folder / "rl").mkdir()

    def create(self, name: str, number: int) -> str:
        """Record a run as a launch does: created under the next free number, started, evaluated, finished."""
        from harness.core.ids import run_id, run_number

        config, metrics = config_of(number), metrics_of(number)

        def build(state: Any) -> list[Any]:
            run = run_id(max(map(run_number, state.runs), default=0) + 1)
            data = {"type": "training", "hypothesis": config["hypothesis"], "parent": None, "key": name}
            return [self.new(run, "created", data | {"changes": [], "basis": {"config": config}}, actor=self.actor)]

        run = self.ledger.append_locked(build)[0].run
        means = {key: {"mean": mean, "low": mean / 2, "high": (1 + mean) / 2} for key, mean in metrics.items()}
        evaluated = {"attempt": 1, "subject": "policy", "step": 30, "env": "drugprot", "n": 120, "means": means}
        for kind, data in (
            ("started", {"attempt": 1, "host": "elsewhere", "pid": 1, "pid_start": "1"}),
            ("evaluated", evaluated),
            ("finished", {"attempt": 1, "outcome": "completed", "step": 30}),
        ):
            self.ledger.append(run, kind, data, actor=self.actor)
        return run

    def runs(self) -> list[tuple[str, int, int]]:
        """Read the state, and config and means of every run, as `harness list` with such columns does."""
        from harness.ledger.index import read_state

        state = read_state(self.path).state
        rows = []
        for run in state.runs.values():
            means = run.evals[-1]["means"] if run.evals else {}
            rows.append((run.run, len(run.created["basis"]["config"]), len(means)))
        return rows


class MLflow:
    """MLflow on its SQLite backend, through the fluent calls of its tracking guide."""

    package = "mlflow"

    def __init__(self, folder: Path) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        mlflow.set_experiment(PROJECT)

    @staticmethod
    def prepare(folder: Path) -> None:
        """Create the schema, which takes seconds, and the experiment."""
        MLflow(folder)

    def create(self, name: str, number: int) -> str:
        """Start a run, log its parameters and metrics, end it."""
        with self.mlflow.start_run(run_name=name) as run:
            self.mlflow.log_params(config_of(number))
            self.mlflow.log_metrics(metrics_of(number))
        return str(run.info.run_id)

    def runs(self) -> list[tuple[str, int, int]]:
        """Search all runs of the experiment."""
        found = self.mlflow.search_runs(experiment_names=[PROJECT], output_format="list", max_results=50_000)
        return [(run.info.run_id, len(run.data.params), len(run.data.metrics)) for run in found]


class Trackio:
    """Trackio on its local SQLite file, through `init`, `log` and `finish`."""

    package = "trackio"

    def __init__(self, folder: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        import trackio

        self.trackio = trackio

    @staticmethod
    def prepare(folder: Path) -> None:
        """Make the folder; the first run makes the file."""
        (folder / "trackio").mkdir()

    def create(self, name: str, number: int) -> str:
        """Begin a run, log its metrics, and finish, which waits until the queue is stored."""
        run = self.trackio.init(project=PROJECT, name=name, config=config_of(number), embed=False)
        self.trackio.log(metrics_of(number))
        self.trackio.finish()
        return str(run.name)

    def runs(self) -> list[tuple[str, int, int]]:
        """Read config and metrics of every run with the two queries that `trackio query` would run."""
        from trackio.sqlite_storage import SQLiteStorage

        queries = "SELECT run_name, config AS found FROM configs", "SELECT run_name, metrics AS found FROM metrics"
        answers = [SQLiteStorage.query_project(PROJECT, query)["rows"] for query in queries]
        keys: list[dict[str, int]] = [{}, {}]
        for place, rows in enumerate(answers):
            for row in rows:
                named = {key for key in json.loads(row["found"]) if not key.startswith("_")}
                keys[place][row["run_name"]] = keys[place].get(row["run_name"], 0) + len(named)
        # A row a run, since each logs once: one that is stored twice shows as six metrics.
        return [(row["run_name"], keys[0][row["run_name"]], keys[1].get(row["run_name"], 0)) for row in answers[0]]


class AgenticExperiments:
    """agentic-experiments (`aexp`): a signac job per run, its metrics in the job document."""

    package = "agentic-experiments"

    def __init__(self, folder: Path) -> None:
        self.root = folder
        from aexp import runs

        self.api = runs

    @staticmethod
    def prepare(folder: Path) -> None:
        """Install the scaffold in a git repository, with one hypothesis and one experiment."""
        from aexp.artifacts import new_experiment, new_hypothesis
        from aexp.install import install_scaffold

        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        install_scaffold(folder)
        new_hypothesis(title="Settings matter", artifact_id="H001", repo_root=folder)
        new_experiment(title="Settings", hypothesis_id="H001", artifact_id="E001", repo_root=folder)

    def create(self, name: str, number: int) -> str:
        """Create the run with its config, walk through its life, and store its metrics.

        Without the commit in the config, which costs a git process a run and is no part of storing it.
        """
        job = self.api.create_run(
            experiment_id="E001",
            hypothesis_id="H001",
            statepoint={key: value for key, value in config_of(number).items() if key != "hypothesis"} | {"name": name},
            repo_root=self.root,
            include_commit=False,
        )
        with self.api.run_lifecycle(job, heartbeat_s=0):
            job.doc["summary"] = metrics_of(number)
        return str(job.id)

    def runs(self) -> list[tuple[str, int, int]]:
        """Find all runs of the experiment and read config and metrics of each."""
        links = {"experiment_id", "hypothesis_id"}
        rows = []
        for job in self.api.find_runs(experiment_id="E001", repo_root=self.root):
            rows.append((job.id, len(set(job.sp) - links), len(job.doc.get("summary", {}))))
        return rows


TOOLS: dict[str, Any] = {
    "harness": Harness,
    "mlflow": MLflow,
    "trackio": Trackio,
    "agentic-experiments": AgenticExperiments,
}


def record(tool: Tool, prefix: str, count: int, first: int) -> dict[str, Any]:
    """Record runs one after the other; an exception is counted and the next run goes on."""
    acknowledged, errors, times = [], [], []
    began = time.monotonic()
    for number in range(first, first + count):
        start = time.monotonic()
        try:
            acknowledged.append(tool.create(f"{prefix}-{number}", number))
        except Exception as error:
            errors.append(type(error).__name__)
        times.append(time.monotonic() - start)
    return {"began": began, "ended": time.monotonic(), "ids": acknowledged, "errors": errors, "times": times}


def main() -> int:
    """Do one job and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=sorted(TOOLS))
    parser.add_argument("job", choices=("prepare", "create", "write", "list"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="number of the first run")
    options = parser.parse_args()
    if options.tool == "harness":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it need not be installed
    kind = TOOLS[options.tool]
    result: dict[str, Any]
    if options.job == "prepare":
        kind.prepare(options.folder)
        result = {"version": _version(kind.package), "python": sys.version.split()[0]}
    else:
        tool = kind(options.folder)
        if options.job == "write":
            print("READY", flush=True)
            sys.stdin.readline()
        if options.job == "list":
            began = time.monotonic()
            rows = tool.runs()
            result = {"seconds": time.monotonic() - began, "rows": rows}
        else:
            result = record(tool, f"w{options.first}", options.runs, options.first)
    print(RESULT + json.dumps(result), flush=True)
    return 0


def _version(package: str) -> str:
    if package == Harness.package:
        from harness import __version__

        return __version__
    return version(package)


if __name__ == "__main__":
    sys.exit(main())
