"""Attributes failures that no other backend disproved: was it the backend, or the request?

A single failure does not tell. Client libraries retry after a 502, usually twice, and three failures eject a
backend: so one image that an engine cannot process would take the only backend for images away from everyone.
Therefore a request counts only once against a backend, however often it is repeated.
"""

from collections import OrderedDict

from gateway.core.health import HealthRules

REPEATED_S = HealthRules().failure_window_s
"""How long a request is remembered: as long as a failure counts."""

KNOWN_MAX = 1_024
"""Maximum number of remembered requests, over all backends. A choice that bounds memory: more than fail
within a minute."""


class Blame:
    """Remembers which requests have counted against which backends."""

    def __init__(self) -> None:
        """Start with none."""
        self._known: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def count(self, backend: str, request: bytes, now: float) -> bool:
        """Count a failure against `backend`. Return False if it is one of a request that has counted already.

        Args:
            backend: Its id.
            request: A digest of the request.
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
