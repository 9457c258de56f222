"""Which fault is on, and for how many requests still."""

from collections.abc import Mapping
from typing import Any

from gateway.simulator.options import Fault, FaultOrder

OF_THE_SERVER = frozenset({Fault.REFUSE, Fault.HANG, Fault.CRASH, Fault.RESTART})
"""Faults that happen to the whole server, once; the others happen to requests, one by one."""

NONSENSE = frozenset({Fault.CHANNEL_MARKERS, Fault.EMPTY_ANSWER, Fault.WRONG_TEXT})
"""Faults of what the model says; the wire is in order."""


class Faults:
    """The fault that requests meet, until its count is used up or it is lifted."""

    def __init__(self) -> None:
        self._order: FaultOrder | None = None
        self._left: int | None = None

    @property
    def order(self) -> FaultOrder | None:
        """The order in force."""
        return self._order

    def set(self, order: FaultOrder | None) -> None:
        """Replace the order in force; None lifts it."""
        self._order = order
        self._left = order.count if order is not None else None

    def take(self) -> FaultOrder | None:
        """Return what the next request shall meet, and count it."""
        order = self._order
        if order is None or order.fault in OF_THE_SERVER:
            return None
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self._order = None
        return order


def order_from(data: Mapping[str, Any]) -> FaultOrder | None:
    """Return the order a `POST /simulator/fault` body gives; `{"fault": null}` lifts what is on.

    Raises:
        ValueError: it cannot be read; the message says what would do.
    """
    name = data.get("fault")
    if name is None:
        return None
    if name not in tuple(Fault):
        raise ValueError(f"unknown fault {name!r}; there are {', '.join(Fault)}")
    count, for_s, after = data.get("count"), data.get("for_s"), data.get("after_chunks", 3)
    if not isinstance(count, int | None) or not isinstance(for_s, int | float | None):
        raise ValueError("count is a whole number or null, for_s a number or null")
    if not isinstance(after, int):
        raise ValueError("after_chunks is a whole number")
    return FaultOrder(Fault(name), count=count, for_s=for_s, after_chunks=after)
