"""Search the prompt of DrugProt on the embedded model, one program per seed, and say what was gained.

    python benchmarks/prompt_search.py --seeds 0 1 2 --budget 600

Every gain is the paired difference of reward to the found prompt on training items that the selection never saw, with
its 95 % interval. The clock is that of the search: evaluations and proposals, without loading and final scoring.
With `--plain` the search begins with a prompt without demonstrations instead of the shipped one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAIN = '[components]\ndemonstrations = ""\n'
BASELINES = ("seed", "random", "random_in_seed")


def harness(program: Path | None, *argv: str) -> dict[str, Any]:
    """Run a command of this checkout, in a program where one is given, and return its JSON document."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"HARNESS_PROGRAM": str(program)} if program else {}
    command = [sys.executable, "-m", "harness", *argv, "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"harness {' '.join(argv)} ended with {done.returncode}: {done.stdout[-2000:]}")
    return dict(json.loads(done.stdout))


def search(folder: Path, seed: int, budget: int, plain: bool) -> dict[str, Any]:
    """Search in a program of its own, which is kept: the same call resumes or shows it."""
    program = folder / f"{'plain' if plain else 'shipped'}-{seed}"
    if not program.exists():
        harness(None, "init", str(program))
    own = program / "plain.toml"
    own.write_text(PLAIN)
    begin = ["--seed-prompt", str(own)] if plain else []
    found = harness(
        program, "search-prompt", "drugprot", "--budget", str(budget), "--seed", str(seed), "--wait", *begin
    )
    return dict(found["detail"]["result"])


def row(seed: int, result: dict[str, Any]) -> str:
    """Return one line of the table."""
    scoring, spent = result["scoring"], result["spent"]

    def spell(name: str) -> str:
        gain = scoring["gain"].get(name, {}).get("reward")
        return f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]" if gain else "-"

    reward, right = scoring["found"]["reward"]["mean"], scoring["found"]["accuracy"]["mean"]
    cells = [str(seed), f"{spent['evaluations']}", f"{spent['seconds']:.0f}", str(result["candidates"])]
    cells += [str(result["demonstrations"]), f"{reward:.3f}", f"{right:.3f}", *map(spell, BASELINES)]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Search with every seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=600)
    parser.add_argument("--plain", action="store_true", help="begin with a prompt without demonstrations")
    parser.add_argument("--folder", type=Path, help="where the programs stand; a temporary folder when left out")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="prompt-search-"))
    folder.mkdir(parents=True, exist_ok=True)
    head = ["seed", "evaluations", "search s", "candidates", "demonstrations", "reward", "accuracy"]
    head += ["gain over the seed prompt", "over random, else as found", "over random in the seed prompt"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for seed in asked.seeds:
        print(row(seed, search(folder, seed, asked.budget, asked.plain)), flush=True)


if __name__ == "__main__":
    main()
