"""What proposes new texts: the interface that every proposer fulfils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

ReflectiveDataset = Mapping[str, Sequence[Mapping[str, Any]]]
"""By component, records of `Inputs`, `Generated Outputs`, `Feedback` and `Score`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What proposals took: tokens in both directions, money, seconds."""

    tokens: int = 0
    money: float = 0.0
    seconds: float = 0.0


class Proposer(Protocol):
    """Turns a candidate and what went wrong with it into new texts.

    `name` says in records what proposed: `offline`, or the reflection model. `paid` proposals are stored and replayed
    on resume, others are computed again, so an unpaid proposer must be a function of its arguments and its own
    earlier calls. `selector` is GEPA's: `round_robin` asks for one component at a time, `all` for any of them.
    """

    name: str
    paid: bool
    selector: str

    def propose(
        self, candidate: Mapping[str, str], reflective_dataset: ReflectiveDataset, components: Sequence[str]
    ) -> dict[str, str]:
        """Return new texts for some of `components`; empty when there is nothing to propose.

        Raises:
            HarnessError: what ends the search; it can be resumed.
        """
        ...

    def usage(self) -> Usage:
        """Return what the last call of `propose` took."""
        ...
