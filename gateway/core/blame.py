"""Requests that a backend failed, and that no other backend answered: was it the backend, or the request?

One such failure does not tell. A client library sends what was answered with 502 again, twice as a rule, and
three failures put a backend out: so one picture that an engine cannot read would take the only endpoint for
pictures from everybody. Therefore a request counts once against a backend, however often it comes.
"""

from collections import OrderedDict

REPEATED_S = 60.0
"""How long a request is known again: as long as a failure counts (`HealthRules.failure_window_s`)."""

KNOWN_MAX = 1_024
"""Requests that are known, of all backends together."""


class Blame:
    """Remembers which requests have been held against which backends."""

    def __init__(self) -> None:
        """Know none."""
        self._known: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def is_new(self, backend: str, request: bytes, now: float) -> bool:
        """Return whether a failure is one more against `backend`, which counts from now on.

        Args:
            backend: Its id.
            request: A digest of what was sent.
            now: Monotonic seconds.
        """
        while self._known and next(iter(self._known.values())) <= now - REPEATED_S:
            self._known.popitem(last=False)
        if (backend, request) in self._known:
            return False
        self._known[backend, request] = now
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return True
