"""Drain rate of the queue: running requests over their mean residence time, or the current rate of starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

STARTS_OVER_S = 5.0
"""Time constant over which starts are counted. A choice: it averages single starts, and a rise in the rate
shows within seconds."""

RESIDENCE_WEIGHT = 0.1
"""Weight of the newest request in the moving average of residence times. A choice: about the last ten count,
so one long answer does not decide."""


@dataclass(slots=True)
class Drain:
    """Measured rate at which requests of one class get a slot.

    Attributes:
        running: Requests that have started and not ended.
        residence_s: Moving average of how long a request keeps its slot; None before the first has ended.
        starts: Number of starts, each of which counts less as time passes (`STARTS_OVER_S`), as of `at`.
        at: When `starts` was last updated, in monotonic seconds.
    """

    running: int = 0
    residence_s: float | None = None
    starts: float = 0.0
    at: float = 0.0

    def note_started(self, now: float) -> None:
        """Count the start of a request."""
        self.starts = self._decayed(now) + 1
        self.at = now
        self.running += 1

    def note_released(self, since: float, now: float, *, answered: bool) -> None:
        """Count the end of a request that started at `since`; without an answer, undo its start instead."""
        self.running -= 1
        if not answered:
            self.starts = max(0.0, self._decayed(now) - exp((since - now) / STARTS_OVER_S))
            self.at = now
            return
        stayed_s = now - since
        if self.residence_s is None:
            self.residence_s = stayed_s
        else:
            self.residence_s += RESIDENCE_WEIGHT * (stayed_s - self.residence_s)

    def _decayed(self, now: float) -> float:
        return self.starts * exp((self.at - now) / STARTS_OVER_S)

    @staticmethod
    def per_s(
        drains: Sequence["Drain"],
        now: float,
        running_min: float = 0.0,
        guests: Sequence[tuple["Drain", int]] = (),
    ) -> float | None:
        """Return the combined rate in slots per second; None before the first request has ended.

        None, too, while nothing runs: who waits then does so for something else, as after a refusal.

        At least `running_min` requests are assumed to be running. `guests`: other classes, and how many of
        their requests are in the same slots.

        The higher of two measures: running requests over their residence time (Little's law), and the
        current rate of starts. The first is too low while a burst fills an idle fleet, the second while no
        request had to wait. A class without a completed request is assumed to have the residence time of
        the others.
        """
        stays = [(drain.running, drain.residence_s) for drain in drains]
        stays += [(running, drain.residence_s) for drain, running in guests]
        known = [(running, residence_s) for running, residence_s in stays if residence_s]
        if not known:
            return None
        ended = sum(running / residence_s for running, residence_s in known)
        of_them = sum(running for running, _ in known)
        everything = max(running_min, sum(running for running, _ in stays))
        if not everything:
            return None
        if of_them:
            ended *= everything / of_them
        else:
            ended = everything / (sum(residence_s for _, residence_s in known) / len(known))
        started = (sum(drain._decayed(now) for drain in drains) - 1) / STARTS_OVER_S
        return max(started, ended)
