"""Which of the processes of one run this process is, as its environment says.

`torchrun` sets RANK, WORLD_SIZE and LOCAL_RANK for each process; so does a launch that starts its own, and names the
file in which they find each other beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.core.errors import UsageError

STORE = "HARNESS_STORE"
_TORCHRUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, slots=True)
class Seat:
    """One process among several of a run.

    Args:
        rank: 0 decides and writes, the others work for it.
        size: processes in all, at least 1.
        local: place on the machine; names the GPU.
        store: file in which the processes find each other; None asks torchrun's store.
    """

    rank: int
    size: int
    local: int
    store: str | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that tell a new process of this seat."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local}
        return {name: str(number) for name, number in numbers.items()} | ({STORE: self.store} if self.store else {})


def seat_of(environment: Mapping[str, str]) -> Seat | None:
    """Return the seat that was given to this process; None when it was started alone.

    Raises:
        UsageError: the variables make no sense.
    """
    if STORE not in environment and _TORCHRUN not in environment:
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        seat = Seat(rank, size, int(environment.get("LOCAL_RANK", rank)), environment.get(STORE))
    except (KeyError, ValueError):
        seat = Seat(-1, 0, 0)
    if not 0 <= seat.rank < seat.size or seat.local < 0:
        raise UsageError(
            "RANK, WORLD_SIZE and LOCAL_RANK in the environment name no process",
            "unset them, or start with `torchrun --standalone --nproc-per-node 2 -m harness launch run-002`",
        )
    return seat
