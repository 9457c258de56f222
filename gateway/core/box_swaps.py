"""Swaps of a box as an operator counts them: from the decision until the other model serves. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from gateway.core.box import Box, State
from gateway.core.swap_policy import Cause


class SwapCause(StrEnum):
    """Why a box has changed models. Few and fixed: a metric label."""

    JOBS = "jobs"  # enough requests waited for the other model
    AGE = "age"  # one had waited long enough for it
    IDLE = "idle"  # nobody wanted the model that was in
    QUARANTINE = "quarantine"  # the model that was in is not trusted any more


_CAUSES = {
    Cause.JOBS: SwapCause.JOBS,
    Cause.AGE: SwapCause.AGE,
    Cause.IDLE: SwapCause.IDLE,
    Cause.NOTHING: SwapCause.QUARANTINE,
}


@dataclass(frozen=True, slots=True)
class Swap:
    """A swap that has ended well.

    Attributes:
        backend: Whose model came in.
        cause: See `SwapCause`.
        took_s: From the first request that the other model did not take until this one serves.
    """

    backend: str
    cause: SwapCause
    took_s: float


class SwapTracker:
    """Follows one box from state to state."""

    def __init__(self) -> None:
        """Start with no swap under way."""
        self._under_way: Box | None = None

    def observe(self, box: Box) -> Swap | None:
        """Take in the box as it stands; return the swap that has just ended, or None.

        One that is called off, or that brings in another model than was wanted, is none.
        """
        if box.state is State.DRAINING:
            self._under_way = box
        if box.state not in (State.RESIDENT, State.FAILED):
            return None
        began, self._under_way = self._under_way, None
        if began is None or box.state is State.FAILED or began.target != box.backend:
            return None
        return Swap(box.backend, _CAUSES[began.cause], max(0.0, box.since - began.since))
