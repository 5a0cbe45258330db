"""Several processes for one run: start them, meet them, and what all but the first one do.

Process 0 is the launch itself. It starts the others by the same command with other variables, or `torchrun` has
started all. The others read neither the program nor the ledger: they are told the config and what to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import harness
from harness.config.load import config_from, resolved
from harness.config.schema import RunConfig
from harness.core.errors import ConfigError, InfraError
from harness.core.seat import Seat, seat_of
from harness.envs.registry import load_environment
from harness.inference.engine import TransformersEngine
from harness.inference.lora import attach_lora, trainable
from harness.inference.models import load_model, pick_device
from harness.program.documents import ContextEnv
from harness.training.crew import Crew, Site, eval_site, training_site
from harness.training.fused import fuse_adapters
from harness.training.ranks import ALONE, LostProcessError, Ranks
from harness.training.room import Room

GRACE_S = 10.0
"""Seconds that a process has to end by itself after the run."""


def threads_each(config: RunConfig) -> int:
    """Return the processor threads of each process; 0 takes what torch takes by itself."""
    if config.backend.threads or config.backend.processes == 1:
        return config.backend.threads
    return max(1, (os.cpu_count() or 1) // config.backend.processes)


def check_seat(config: RunConfig) -> None:
    """Check that torchrun and the config mean the same number of processes, and that there are GPUs for them.

    Raises:
        ConfigError: they do not.
    """
    wanted, seat = config.backend.processes, seat_of(os.environ)
    if seat is not None and seat.size != wanted:
        raise ConfigError(
            f"torchrun has started {seat.size} processes, but backend.processes is {wanted}",
            f"torchrun --nproc-per-node {wanted}, or a run with --set backend.processes={seat.size}",
        )
    if wanted > 1 and pick_device(config.model.device).type == "cuda" and torch.cuda.device_count() < wanted:
        raise ConfigError(
            f"backend.processes is {wanted}, but {torch.cuda.device_count()} GPUs are here", "use one process a GPU"
        )


@contextmanager
def joined(config: RunConfig, run: str, logs: Path) -> Iterator[Ranks]:
    """Yield the processes of a run, met, at process 0; afterwards the others end.

    Args:
        config: the run's.
        run: its id.
        logs: folder for what the others write.

    Raises:
        InfraError: one of them does not start.
    """
    if config.backend.processes == 1:
        yield ALONE
        return
    seat = seat_of(os.environ)
    started: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        if seat is None:
            folder = Path(tempfile.mkdtemp(prefix="harness-ranks-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            seat = Seat(0, config.backend.processes, 0, str(folder / "store"))
            started = [_start(Seat(rank, seat.size, rank, seat.store), run, logs) for rank in range(1, seat.size)]
            stack.callback(_kill, started)
        _take_device(seat)

        def waiting() -> None:
            for rank, process in enumerate(started, 1):
                if process.poll() is not None:
                    raise InfraError(
                        f"process {rank} of the run ended before it began, exit status {process.returncode}",
                        f"its output is in {_log(logs, rank)}",
                    )

        ranks = Ranks.join(seat, waiting)
        stack.callback(ranks.leave)
        try:
            yield ranks
        except BaseException as error:
            ranks.lost = _gone(ranks, error)  # now: the others end when this one does
            raise
        with suppress(LostProcessError, subprocess.TimeoutExpired):
            ranks.tell({"do": "end"})
            for process in started:
                process.wait(GRACE_S)


def _gone(ranks: Ranks, error: BaseException) -> list[int]:
    """Return the processes that have ended; one that dies closes its connections a moment before it is gone."""
    deadline = time.monotonic() + (2.0 if isinstance(error, LostProcessError) else 0.0)
    while not (found := ranks.dead()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def hello(config: RunConfig, evals: Sequence[ContextEnv]) -> dict[str, Any]:
    """Return what process 0 tells the others first.

    Args:
        config: the run's.
        evals: the protocol's environments.
    """
    sites = {training_site(section.id): (section.id, section.args, "train") for section in config.env}
    sites |= {eval_site(i): (item.id, item.args, item.split) for i, item in enumerate(evals)}
    return {"config": resolved(config), "sites": sites, "threads": torch.get_num_threads()}


def serve(seat: Seat) -> None:
    """Work for process 0 until the run has ended, or that process is gone.

    Signals that ask to stop are its affair: torchrun and terminals send them to all.
    """
    met: list[Ranks] = []
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None if met else os._exit(0))
    parent = os.getppid()

    def waiting() -> None:
        if os.getppid() != parent:  # who started this process is gone
            os._exit(0)

    ranks = Ranks.join(seat, waiting)
    met.append(ranks)
    ranks.follow_main()
    with suppress(LostProcessError):
        told = ranks.hear()
        _crew(ranks, told, seat).serve()
    ranks.leave()


def _crew(ranks: Ranks, told: Mapping[str, Any], seat: Seat) -> Crew:
    config = config_from(told["config"], "the config of process 0")
    _take_device(seat)
    torch.set_num_threads(told["threads"])
    sites = {name: Site.of(load_environment(env, args), split) for name, (env, args, split) in told["sites"].items()}
    loaded = load_model(config.model)
    model = attach_lora(loaded.model, config.lora, config.train.seed)
    fuse_adapters(model)
    weights = list(trainable(model).values())
    room = Room(config.train.microbatch_tokens)
    return Crew(ranks, config, loaded, model, weights, TransformersEngine(loaded, model), sites, room)


def _take_device(seat: Seat) -> None:
    if torch.cuda.is_available():  # torchrun may have hidden all but one
        torch.cuda.set_device(seat.local % torch.cuda.device_count())


def _log(logs: Path, rank: int) -> Path:
    return logs / f"process_{rank}.log"


def _start(seat: Seat, run: str, logs: Path) -> subprocess.Popen[bytes]:
    logs.mkdir(parents=True, exist_ok=True)
    package = str(Path(harness.__file__).parents[1])
    paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    with _log(logs, seat.rank).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "harness", "launch", run],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | seat.environment() | {"PYTHONPATH": paths, "HARNESS_NO_INPUT": "1"},
            start_new_session=True,
        )


def _kill(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes that have nothing to lose."""
    for process in started:
        process.kill()
        process.wait()
