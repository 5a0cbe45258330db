"""The processes of one run on one machine: process 0 decides and writes, the others work for it.

They exchange JSON and flat tensors through gloo on the processor, never pickled objects. Adapters are small, so what
goes over in a step is small too, and the same code runs on one GPU each. Waiting is a poll, so that signals get
through and the end of another process is noticed while it has not closed its connections.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from harness.core.errors import InfraError
from harness.core.seat import Seat
from harness.ledger.process import is_alive, this_process

PATIENCE = timedelta(hours=24)
"""A process that lives is waited for; one that ended is noticed at once."""
_LOOK_S = 0.5
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class LostProcessError(InfraError):
    """Another process of the run is gone."""


class Ranks:
    """The processes of a run; alone, every call does nothing.

    Args:
        rank: of this process.
        size: processes in all.
        peers: host, pid and start of each.

    Attributes:
        lost: processes that had ended when the run failed here.
    """

    def __init__(self, rank: int = 0, size: int = 1, peers: Sequence[Mapping[str, Any]] = ()) -> None:
        self.rank, self.size, self.peers = rank, size, list(peers)
        self.lost: list[int] = []

    @property
    def is_main(self) -> bool:
        """Whether this process decides and writes."""
        return self.rank == 0

    @classmethod
    def join(cls, seat: Seat, waiting: Callable[[], None] = lambda: None) -> Ranks:
        """Meet the other processes; returns when all are there.

        Args:
            seat: this process.
            waiting: called while others are missing; raises when they will not come.
        """
        interface = _LOOPBACK.get(sys.platform)
        if interface:  # all processes are on this machine: nothing listens to the outside
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        place = f"file://{seat.store}" if seat.store else "env://"
        store, _, _ = next(rendezvous(place, seat.rank, seat.size, timeout=PATIENCE))
        store.set(f"here/{seat.rank}", json.dumps(this_process()))
        keys = [f"here/{rank}" for rank in range(seat.size)]
        while not store.check(keys):
            waiting()
            time.sleep(0.05)
        peers = [json.loads(store.get(key)) for key in keys]
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)
        return cls(seat.rank, seat.size, peers)

    def leave(self) -> None:
        """Close the connections; the others notice."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def dead(self) -> list[int]:
        """Return the processes that have ended."""
        return [rank for rank, peer in enumerate(self.peers) if rank != self.rank and is_alive(peer) is False]

    def follow_main(self) -> None:
        """End this process at once when process 0 is gone, also in the middle of a computation."""

        def watch() -> None:
            while is_alive(self.peers[0]) is not False:
                time.sleep(_LOOK_S)
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a JSON object from process 0 to the others."""
        if self.size > 1:
            self._broadcast(json.dumps(message).encode())

    def hear(self) -> Any:
        """Return what process 0 tells.

        Raises:
            LostProcessError: it is gone.
        """
        return json.loads(self._broadcast(b""))

    def gather(self, value: Any) -> list[Any]:
        """Collect a JSON value of every process at process 0, by rank; elsewhere the list is empty.

        Raises:
            LostProcessError: a process is gone.
        """
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(lengths, torch.tensor([len(data)]), async_op=True))
        longest = max(int(length) for length in lengths)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)] if self.is_main else None
        self._wait(lambda: dist.gather(own, rows, dst=0, async_op=True))
        found = zip(rows or [], lengths, strict=False)
        return [json.loads(row[: int(length)].numpy().tobytes()) for row, length in found]

    @torch.no_grad()
    def share(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give every process the values that process 0 has.

        Raises:
            LostProcessError: a process is gone.
        """
        if self.size == 1:
            return
        own = list(parameters)
        flat = _flat(own)
        self._wait(lambda: dist.broadcast(flat, src=0, async_op=True))
        if not self.is_main:
            for parameter, piece in zip(own, flat.split([p.numel() for p in own]), strict=True):
                parameter.copy_(piece.view_as(parameter))

    @torch.no_grad()
    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give process 0 the sum of all processes' gradients; a missing one counts as zero.

        Raises:
            LostProcessError: a process is gone.
        """
        if self.size == 1:
            return
        own = list(parameters)
        flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in own])
        self._wait(lambda: dist.reduce(flat, dst=0, async_op=True))
        if self.is_main:
            for parameter, piece in zip(own, flat.split([p.numel() for p in own]), strict=True):
                parameter.grad = piece.view_as(parameter).to(parameter.device, parameter.dtype)

    def _broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)])
        self._wait(lambda: dist.broadcast(length, src=0, async_op=True))
        body = torch.frombuffer(bytearray(data or bytes(int(length))), dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(body, src=0, async_op=True))
        return body.numpy().tobytes()

    def _wait(self, start: Callable[[], Any]) -> None:
        pause, looked = 0.0002, time.monotonic()
        try:
            work = start()
            while not work.is_completed():
                time.sleep(pause)
                pause = min(pause * 1.5, 0.02)
                if time.monotonic() - looked > _LOOK_S:
                    self._check()
                    looked = time.monotonic()
            work.wait()
        except RuntimeError as error:  # how gloo says that a connection was closed
            said = " ".join(str(error).split())[:200]
            raise LostProcessError(f"the connection to another process of the run is lost: {said}", "") from error

    def _check(self) -> None:
        gone = self.dead()
        if gone:
            raise LostProcessError(f"process {gone[0]} of the run ended")


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers of some tensors as one vector on the processor, a copy."""
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


ALONE = Ranks()
"""A run of one process."""
