"""Write the README's table of the quickstart's seeds from this repository's ledger.

    python scripts/seeds_table.py           # rewrites the block between the three-seeds marks
    python scripts/seeds_table.py --check   # exits 1 when the block differs, and changes nothing

The rows are the completed runs that trained the quickstart's config: the defaults of this version, seeds aside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import quickstart_checks as checks

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- three-seeds:begin -->\n", "<!-- three-seeds:end -->"
HEAD = ("seed", "run", *checks.SHOWN, "largest letter", "groups without spread, last 5 steps", "checks")


def shown(run: str) -> dict[str, Any]:
    """Return the document of `harness show RUN --json` in this repository."""
    command = [sys.executable, "-m", "harness", "show", run, "--json"]
    return dict(json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout))


def learning(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a resolved config trains, without its seed: two runs with the same value are two seeds of one."""
    parts = {key: config[key] for key in ("model", "lora", "optimizer", "sampling", "env")}
    return {**parts, "train": {key: value for key, value in config["train"].items() if key != "seed"}}


def row(seed: int, run: str, evidence: checks.Evidence) -> str:
    """Return one line of the table: base → trained and the paired difference of every metric shown."""
    cells = [str(seed), run]
    for name in checks.SHOWN:
        before, after = evidence.base[name].mean, evidence.policy[name].mean
        cells.append(f"{before:.3f} → {after:.3f}, {checks.span(evidence.gain[name])}")
    letter, share = checks.top_letter(evidence.letters)
    failed = [check.name for check in checks.checks(evidence) if not check.ok]
    cells += [
        f"{letter}, {share:.0%}",
        f"{evidence.zero_spread:.0%}",
        ", ".join(failed) + " failed" if failed else "pass",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table over every completed run of the ledger that trained the quickstart's config, by seed."""
    from harness.backends.planning import first_config
    from harness.config.load import config_from, resolved
    from harness.ledger import Ledger
    from harness.program import Program, read_context

    program = Program.find(ROOT)
    quickstart = learning(resolved(first_config(read_context(program), "the quickstart")))
    rows = []
    for run, state in Ledger(program.ledger).state().runs.items():
        config = state.created["basis"]["config"]
        # keys that came later have in an old run the value that keeps what it did: their default
        if state.status == "completed" and learning(resolved(config_from(config, run))) == quickstart:
            rows.append((config["train"]["seed"], run))
    head = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    return "\n".join([*head, *(row(seed, run, checks.gather(shown(run))) for seed, run in sorted(rows))])


def main() -> int:
    """Rewrite the block, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when the block is stale")
    options = parser.parse_args()
    text = README.read_text()
    before, rest = text.split(BEGIN, 1)
    old, after = rest.split(END, 1)
    start = old.index("| seed ")
    end = old.index("\n\n", start) + 1
    new = f"{before}{BEGIN}{old[:start]}{table()}\n{old[end:]}{END}{after}"
    if options.check:
        print("README.md: the table of seeds is " + ("current" if new == text else "stale; run this without --check"))
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
