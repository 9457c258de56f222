"""Counts the swaps of a box: from the decision until the other model serves. Pure."""

from enum import StrEnum

from gateway.core.box import Box, State
from gateway.core.swap_policy import Cause
from gateway.core.value import valueclass


class SwapCause(StrEnum):
    """Why a box has swapped models. A closed set: used as a metric label."""

    JOBS = "jobs"  # enough requests were waiting for the other model
    AGE = "age"  # a request had been waiting for it for long enough
    IDLE = "idle"  # the resident model had no demand
    QUARANTINE = "quarantine"  # the resident model is in quarantine

    @classmethod
    def of(cls, planned: Cause) -> "SwapCause":
        """Return the cause of a swap that has been planned, or is under way."""
        return cls.QUARANTINE if planned is Cause.NOTHING else cls(planned.value)


@valueclass(frozen=True, slots=True)
class Swap:
    """A completed swap.

    Attributes:
        backend: Whose model came in.
        cause: See `SwapCause`.
        took_s: From the first request that the other model did not take until this one serves.
    """

    backend: str
    cause: SwapCause
    took_s: float


class SwapTracker:
    """Tracks the swaps of one box."""

    def __init__(self) -> None:
        """Start without a swap in progress."""
        self._under_way: Box | None = None

    def observe(self, box: Box) -> Swap | None:
        """Process the current state of the box; return the swap that has just completed, or None.

        A cancelled swap, or one that ended with a different model, does not count.
        """
        if box.state is State.DRAINING:
            self._under_way = box
        if box.state not in (State.RESIDENT, State.FAILED):
            return None
        began, self._under_way = self._under_way, None
        if began is None or began.target != box.backend:  # a failed box has no backend
            return None
        return Swap(box.backend, SwapCause.of(began.cause), max(0.0, box.since - began.since))
