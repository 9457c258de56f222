"""The injected fault, and for how many more requests it applies."""

from collections.abc import Mapping
from typing import Any

from gateway.simulator.options import Fault, FaultOrder

OF_THE_SERVER = frozenset({Fault.REFUSE, Fault.HANG, Fault.CRASH, Fault.RESTART, Fault.SILENT_STOP})
"""Faults of the whole server, which occur once; all others apply to single requests."""

NONSENSE = frozenset({Fault.CHANNEL_MARKERS, Fault.EMPTY_ANSWER, Fault.WRONG_TEXT})
"""Faults of the model's output, sent correctly."""

_MEMBERS = {"fault", "count", "for_s", "after_chunks"}


class Faults:
    """The fault that applies to requests, until its count is used up or it is ended.

    Attributes:
        order: The current order, or None.
    """

    def __init__(self) -> None:
        self.order: FaultOrder | None = None
        self._left: int | None = None

    def set(self, order: FaultOrder | None) -> None:
        """Replace the current order; None ends it."""
        self.order = order
        self._left = order.count if order is not None else None

    def take(self) -> FaultOrder | None:
        """Return the fault for the next request, and count it."""
        order = self.order
        if order is None or order.fault in OF_THE_SERVER:
            return None
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.order = None
        return order


def order_from(data: Mapping[str, Any]) -> FaultOrder | None:
    """Parse the body of `POST /simulator/fault`; `{"fault": null}` ends the current fault.

    Raises:
        ValueError: it is invalid; the message lists valid values.
    """
    if "fault" not in data or not data.keys() <= _MEMBERS:
        raise ValueError('an order is {"fault": NAME}, if need be with count, for_s and after_chunks')
    name = data["fault"]
    if name is None:
        return None
    if name not in tuple(Fault):
        raise ValueError(f"unknown fault {name!r}; there are {', '.join(Fault)}")
    count, for_s, after = data.get("count"), data.get("for_s"), data.get("after_chunks", 3)
    if not isinstance(count, int | None) or not isinstance(for_s, int | float | None):
        raise ValueError("count is a whole number or null, for_s a number or null")
    if count is not None and count < 1:
        raise ValueError("count is at least 1")
    if not isinstance(after, int):
        raise ValueError("after_chunks is a whole number")
    return FaultOrder(Fault(name), count=count, for_s=for_s, after_chunks=after)
