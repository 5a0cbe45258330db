"""The same jobs through the ledger, MLflow, Trackio and agentic-experiments, side by side.

    python benchmarks/ledger_compare.py --peers compare --json docs/evidence/ledger-compare.json
        [--python TOOL=PATH ...] [--runs 1000] [--writers 8] [--rounds 3]
    python benchmarks/ledger_compare.py --docs

Creates runs in one process, lists them, starts each command, and lets eight processes create runs at once; what
they then lost or doubled is told by the tool's own list. Tools take turns within every round, in another order
each time, and a figure is the median over the rounds. `compare-requirements.txt` says how to install the peers,
`compare_tools.py` what each is asked to do. A peer without an interpreter in `--peers` or `--python` is left out.
`--docs` writes the table of docs/comparison.md from the JSON file and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("compare_tools.py")
PAGE = ROOT / "docs" / "comparison.md"
EVIDENCE = ROOT / "docs" / "evidence" / "ledger-compare.json"
BEGIN, END = "<!-- written by benchmarks/ledger_compare.py --docs -->", "<!-- end of the written part -->"
RESULT = "RESULT "
WRITERS = 8
TRACED = 10  # runs whose flushes are counted
TOOLS = ("harness", "mlflow", "trackio", "agentic-experiments")
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "harness": (["harness", "--help"], ["harness", "list", "--json"]),
    "mlflow": (["mlflow", "--help"], ["mlflow", "runs", "list", "--experiment-id", "1"]),
    "trackio": (["trackio", "--help"], ["trackio", "list", "runs", "--project", "compare", "--json"]),
    "agentic-experiments": (["aexp", "--help"], ["aexp", "list-runs"]),
}
"""Of each tool, the commands whose start is timed: its help, and the list of all runs."""

Row = tuple[str, str, Callable[[float], str]]
ROWS: tuple[Row, ...] = (
    ("create_s", "create {runs} runs, one process, s", "{:.1f}".format),
    ("flushes", "`fsync` and `fdatasync` a run", "{:.1f}".format),
    ("list_s", "list {runs} runs with config and metrics, Python, s", "{:.2f}".format),
    ("help_ms", "`--help`, ms", "{:.0f}".format),
    ("command_ms", "list {runs} runs by command, ms", "{:.0f}".format),
    ("rate", "{writers} writers, runs a second together", "{:.0f}".format),
    ("slowest_ms", "{writers} writers, slowest run, ms", "{:.0f}".format),
    ("errors", "{writers} writers, runs that ended in an exception", "{:.0f}".format),
    ("lost", "{writers} writers, acknowledged runs that are not whole in the list", "{:.0f}".format),
    ("doubled", "{writers} writers, ids given twice", "{:.0f}".format),
    ("mib", "{runs} runs on disk, MiB", "{:.1f}".format),
    ("files", "{runs} runs on disk, files more than an empty store has", "{:.0f}".format),
)
WORST = ("errors", "lost", "doubled")  # counted over all rounds; the others are medians


class WorkerError(Exception):
    """A job of a tool that did not end with a result."""


def environment(folder: Path, tool: str) -> dict[str, str]:
    """Return the variables of a tool's processes: its store, no network, bytecode of its own."""
    named = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "TRACKIO_DIR": str(folder / "trackio"),
        **dict.fromkeys(("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "HF_HUB_OFFLINE"), "true"),
        "HARNESS_ACTOR": "agent:benchmark",
        "COLUMNS": "200",
    }
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MLFLOW_"))}
    if tool == "harness":
        named["PYTHONPATH"] = str(ROOT)
    return variables | named


def argv_of(python: str, tool: str, job: str, folder: Path, **options: int) -> list[str]:
    """Return the command line of a job; `-P` keeps this folder's modules out of the tool's sight."""
    more = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [python, "-P", str(WORKER), tool, job, str(folder), *more]


def result_of(output: str, problem: str) -> dict[str, Any]:
    """Return the result that a worker printed last.

    Raises:
        WorkerError: when it printed none.
    """
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise WorkerError(problem.strip()[-2000:] or "no result")
    result: dict[str, Any] = json.loads(lines[-1][len(RESULT) :])
    return result


def job(argv: Sequence[str], folder: Path, tool: str) -> dict[str, Any]:
    """Run one job of a worker to its end and return its result."""
    done = subprocess.run(argv, cwd=folder, env=environment(folder, tool), capture_output=True, text=True, timeout=3600)
    return result_of(done.stdout, f"{' '.join(argv[3:5])}: {done.stderr}")


def flushes(python: str, tool: str, folder: Path) -> float | None:
    """Return how often a run is flushed to the disk, counted by strace; None where that is missing."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    counts = []
    for runs in (1, 1 + TRACED):  # the difference leaves out what opening the store costs
        log = folder / f"trace-{runs}"
        trace = [strace, "-f", "-qq", "-e", "trace=fsync,fdatasync,sync_file_range,msync", "-o", str(log)]
        job([*trace, *argv_of(python, tool, "create", folder, runs=runs, first=1_000_000 * runs)], folder, tool)
        counts.append(len(re.findall(r"^\d+\s+(?:fsync|fdatasync)\(", log.read_text(), re.M)))
        log.unlink()
    return (counts[1] - counts[0]) / TRACED


def command_ms(python: str, command: Sequence[str], folder: Path, tool: str) -> tuple[float, str]:
    """Return the wall-clock milliseconds of a command and what it printed.

    Raises:
        WorkerError: when it fails.
    """
    name = str(Path(python).with_name(command[0]))
    argv = [python, "-m", "harness", *command[1:]] if tool == "harness" else [name, *command[1:]]
    start = time.perf_counter()
    done = subprocess.run(argv, cwd=folder, env=environment(folder, tool), capture_output=True, text=True, timeout=600)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise WorkerError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return seconds * 1000, done.stdout


def write_together(python: str, tool: str, folder: Path, runs: int, writers: int) -> list[dict[str, Any]]:
    """Let several processes record `runs` runs in one store, beginning together; return their results."""
    share = runs // writers
    processes = [
        subprocess.Popen(
            argv_of(python, tool, "write", folder, runs=share, first=1 + writer * share),
            cwd=folder,
            env=environment(folder, tool),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for writer in range(writers)
    ]
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline()) not in ("READY\n", ""):
            pass
        if not line:
            raise WorkerError(f"{tool}: a writer ended before it began")
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [result_of(process.communicate(timeout=3600)[0], f"{tool}: a writer ended early") for process in processes]


def judge(written: Sequence[Mapping[str, Any]], listed: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Compare what writers were told with what the list then shows.

    Args:
        written: per writer, `ids` it was told, `errors`, `times` of its runs, when it `began` and `ended`, in seconds.
        listed: id, number of config keys and of metrics of every run that the tool lists.
    """
    told = [id for result in written for id in result["ids"]]
    whole = {id for id, config, metrics in listed if config >= 7 and metrics == 3}
    names = [id for id, _, _ in listed]
    seconds = max(result["ended"] for result in written) - min(result["began"] for result in written)
    return {
        "rate": len(told) / seconds,
        "slowest_ms": max(time for result in written for time in result["times"]) * 1000,
        "errors": sum(len(result["errors"]) for result in written),
        "lost": len([id for id in told if id not in whole]),
        "doubled": len(told) - len(set(told)) + len(names) - len(set(names)),
    }


def size_of(folder: Path) -> tuple[float, int]:
    """Return MiB and number of the files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files) / 2**20, len(files)


def measure(python: str, tool: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Do every job of one round for one tool, in two new stores; return its figures."""
    stores = folder / "alone", folder / "together"
    for store in stores:
        store.mkdir(parents=True)
        made = job(argv_of(python, tool, "prepare", store), store, tool)
    alone, together = stores
    empty_mib, empty_files = size_of(alone)
    created = job(argv_of(python, tool, "create", alone, runs=options.runs), alone, tool)
    if created["errors"]:
        raise WorkerError(f"{tool}: {created['errors'][0]} while one process wrote alone")
    mib, files = size_of(alone)
    listed = job(argv_of(python, tool, "list", alone), alone, tool)
    alone_counts = judge([created], listed["rows"])
    if len(listed["rows"]) != options.runs or alone_counts["lost"]:
        raise WorkerError(
            f"{tool}: lists {len(listed['rows'])} runs of {options.runs}, {alone_counts['lost']} not whole"
        )
    help_ms, command = _commands(python, tool, alone, options)
    written = write_together(python, tool, together, options.runs, options.writers)
    found = {
        **{"create_s": created["ended"] - created["began"], "list_s": listed["seconds"]},
        **{"help_ms": help_ms, "command_ms": command, "mib": mib - empty_mib, "files": files - empty_files},
        **judge(written, job(argv_of(python, tool, "list", together), together, tool)["rows"]),
        "flushes": flushes(python, tool, together),
        "kinds": sorted({name for result in written for name in result["errors"]}),
    }
    return found | {"version": made["version"], "python": made["python"]}


def _commands(python: str, tool: str, folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the median milliseconds of `--help` and of the listing command; the first of each warms the file cache."""
    medians = []
    for command in COMMANDS[tool]:
        times = [command_ms(python, command, folder, tool)[0] for _ in range(options.repeats + 1)]
        medians.append(statistics.median(times[1:]))
    return medians[0], medians[1]


def summarise(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one tool: medians over the rounds, and sums of what went wrong in any of them."""
    figures: dict[str, Any] = {}
    for key, _, _ in ROWS:
        values = [found[key] for found in rounds if found[key] is not None]
        figures[key] = (sum if key in WORST else statistics.median)(values) if values else None
    kinds = sorted({kind for found in rounds for kind in found["kinds"]})
    return {"version": rounds[0]["version"], "python": rounds[0]["python"], "kinds": kinds, "figures": figures}


def table(document: Mapping[str, Any]) -> str:
    """Return the Markdown table of a measured document, with its date and machine below it."""
    tools = document["tools"]
    words = {"runs": f"{document['runs']:,}", "writers": document["writers"]}
    lines = ["| | " + " | ".join(f"{name} {found['version']}" for name, found in tools.items()) + " |"]
    lines.append("|---|" + "---:|" * len(tools))
    for key, title, spell in ROWS:
        values = [found["figures"][key] for found in tools.values()]
        cells = ["–" if value is None else spell(value) for value in values]
        lines.append(f"| {title.format(**words)} | " + " | ".join(cells) + " |")
    kinds = [f"{name}: {', '.join(found['kinds'])}" for name, found in tools.items() if found["kinds"]]
    note = (
        f"{document['date']}, {document['machine']}; load average {document['load'][0]:.1f} before and "
        f"{document['load'][1]:.1f} after. Medians of {document['rounds']} round(s); "
        "exceptions, losses and doubled ids are summed over them."
        + (f" Exceptions: {'; '.join(kinds)}." if kinds else "")
    )
    return "\n".join([*lines, "", note])


def page(text: str, document: Mapping[str, Any]) -> str:
    """Return the page with its written part replaced.

    Raises:
        ValueError: when the page lacks the markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table(document)}\n\n{END}{after}"


def compare(pythons: Mapping[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure every tool in every round; return the document, which is also written after each round."""
    load = [os.getloadavg()[0]]
    rounds: dict[str, list[dict[str, Any]]] = {tool: [] for tool in pythons}
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds):
            turn = number % len(pythons)
            for tool in [*list(pythons)[turn:], *list(pythons)[:turn]]:
                place = Path(folder) / f"{number}-{tool}"
                found = measure(pythons[tool], tool, place, options)
                rounds[tool].append(found)
                shutil.rmtree(place)
                print(f"round {number + 1} {tool}: {json.dumps(found)}", file=sys.stderr, flush=True)
            document = describe(rounds, [*load, os.getloadavg()[0]], options)
            if options.json:
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def describe(
    rounds: Mapping[str, Sequence[Mapping[str, Any]]], load: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    """Return what was measured with its medians, date and machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB, {sys.platform}",
        "load": load,
        **{"runs": options.runs, "writers": options.writers, "rounds": len(next(iter(rounds.values())))},
        "tools": {tool: summarise(found) for tool, found in rounds.items()},
        "measured": dict(rounds),
    }


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with a virtual environment for each peer, by its name")
    parser.add_argument("--python", action="append", default=[], metavar="TOOL=PATH", help="one tool's interpreter")
    parser.add_argument("--runs", type=int, default=1000, help="runs of a store; a multiple of --writers")
    parser.add_argument("--writers", type=int, default=WRITERS, help="processes that write at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="starts of each command in a round")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--json", type=Path, default=None, help="where to write everything measured")
    parser.add_argument("--docs", action="store_true", help=f"only write the table of {PAGE.name} from --json")
    options = parser.parse_args()
    unknown = [entry for entry in options.python if entry.partition("=")[0] not in TOOLS or "=" not in entry]
    if unknown or options.runs % options.writers:
        parser.error(f"--python takes TOOL=PATH with one of {', '.join(TOOLS)}; --runs is a multiple of --writers")
    return options


def main() -> int:
    """Measure and print, or write the page; exit code 1 when the ledger lost, doubled or refused a run."""
    options = arguments()
    if options.docs:
        document = json.loads((options.json or EVIDENCE).read_text(encoding="utf-8"))
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), document), encoding="utf-8")
        return 0
    found = {tool: options.peers / tool / "bin" / "python" for tool in TOOLS[1:]} if options.peers else {}
    given = {tool: str(path) for tool, path in found.items() if path.exists()} | {"harness": sys.executable}
    given |= dict(entry.split("=", 1) for entry in options.python)
    # Not resolved: a link into a virtual environment is what makes Python use it.
    pythons = {tool: os.path.abspath(given[tool]) for tool in TOOLS if tool in given}
    document = compare(pythons, options)
    print(table(document))
    return int(any(document["tools"]["harness"]["figures"][key] for key in WORST))


if __name__ == "__main__":
    sys.exit(main())
