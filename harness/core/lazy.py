"""Members that are computed when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """Compute a member once and keep it in the object, as `functools.cached_property` does.

    Python 3.11's own takes a lock at every first access, which costs more than most members of a run, and 10,000 runs
    have 90,000 of them.
    """

    def __init__(self, compute: Callable[[Any], T], name: str = "") -> None:
        """Wrap the method that computes the value; its name is the member's unless another one is given."""
        self._compute = compute
        self._name = name or compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        """Return the value; the next access finds it in the object itself."""
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
