"""The ledger: events, the file that holds them, and the state they fold to."""

from harness.ledger.events import PROGRAM, Actor, Event, NewEvent, UnknownEventError
from harness.ledger.fold import RunState, State, fold
from harness.ledger.store import Ledger

__all__ = ["PROGRAM", "Actor", "Event", "Ledger", "NewEvent", "RunState", "State", "UnknownEventError", "fold"]
