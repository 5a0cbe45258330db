"""The ledger: events, the file that holds them, and the state they fold to."""

from harness.ledger.events import PROGRAM, Actor, Event, NewEvent, UnknownEventError
from harness.ledger.fold import RunState, State, fold
from harness.ledger.process import is_alive, this_process
from harness.ledger.store import Ledger

__all__ = [
    "PROGRAM",
    "Actor",
    "Event",
    "Ledger",
    "NewEvent",
    "RunState",
    "State",
    "UnknownEventError",
    "fold",
    "is_alive",
    "this_process",
]
