"""A ledger of a million events: open and filter it, with and without its index, and append to it.

    python benchmarks/ledger_million.py [--events 1000000] [--json]

Commands run in processes of their own; their time and their largest resident memory are measured. The ledger takes
about 700 MB of disk, and a minute or two to make. Exit code 1 when a figure with a bar misses it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ledger import PER_RUN, ROOT, Figure, first_append, make_program

from harness.ledger import cache

QUESTION = ["list", "--decision", "keep", "--json"]


def measured(path: Path) -> tuple[float, float]:
    """Return the seconds and the peak megabytes of one command that opens the ledger and filters its runs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "harness", *QUESTION], cwd=path.parent, env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"harness {' '.join(QUESTION)} ended with {child.returncode}")
    return seconds, usage.ru_maxrss / (1 << 10 if sys.platform == "linux" else 1 << 20)


def figures(path: Path, count: int) -> list[Figure]:
    """Measure one ledger: without an index, with the one that made, and a first append."""
    runs = f"{count:,} events of {-(-count // PER_RUN):,} runs"
    cache.location(path).unlink(missing_ok=True)
    cold_s, cold_mb = measured(path)
    time.sleep(4)  # a file is believed to be unchanged once it has rested
    measured(path)
    warm_s, warm_mb = measured(path)
    return [
        Figure(f"open and filter {runs}, no index", cold_s, "s"),
        Figure("  peak memory", cold_mb, "MB"),
        Figure(f"open and filter {runs}, index", warm_s, "s", 5.0),
        Figure("  peak memory", warm_mb, "MB", 300.0),
        Figure(f"first append of a process to {count:,} events, index", first_append(path, 9), "ms"),
    ]


def main() -> int:
    """Print the figures; exit code 1 when one is above its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = figures(make_program(Path(folder) / "million", options.events), options.events)
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    if options.json:
        rows = [figure._asdict() | {"holds": figure.holds} for figure in found]
        print(json.dumps({"figures": rows, "machine": load}, indent=2))
    else:
        print(*found, load, sep="\n")
    return int(any(figure.holds is False for figure in found))


if __name__ == "__main__":
    sys.exit(main())
