"""Attributes failures that no other backend has disproved: was it the backend, or the request?

A single failure does not tell. Client libraries retry after a 502, usually twice, and three failures eject a
backend: so one image that an engine cannot process would take the only backend for images away from everyone.
Therefore a request counts only once against a backend, however often it is repeated.

Until it is known, requests are better sent elsewhere: a backend that fails at once has room at once, and
would take all that wait for busy ones. So replicas on which several different requests have failed in a row
are passed over, as long as another replica is in no doubt.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from gateway.core.backends import Backend, Pool
from gateway.core.health import HealthRules
from gateway.core.policy import Policy

REPEATED_S = HealthRules().failure_window_s
"""How long a request is remembered: as long as a failure counts."""

KNOWN_MAX = 1_024
"""Maximum number of remembered requests, over all backends. A choice that bounds memory: more than fail
within a minute."""

IN_A_ROW = HealthRules().failures_max
"""Different requests that have to fail in a row before a backend is in doubt: as many as eject it."""

PAUSE_S = HealthRules().penalty_s
"""How long a backend in doubt gets no requests after a failure: as long as if it were ejected for the first
time. After that, it gets some, as in probation."""

ROW_MAX = 16
"""Different requests that are remembered of a row. A choice: more say no more."""


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


@dataclass(slots=True)
class _Row:
    first_at: float
    last_at: float = -inf
    requests: set[bytes] = field(default_factory=set)

    @property
    def is_doubt(self) -> bool:
        """Whether so many different requests have failed that the backend is in doubt."""
        return len(self.requests) >= IN_A_ROW


class Doubts:
    """Backends on which different requests have failed in a row, whoever is at fault.

    Attributes:
        rows: The failures of each backend at its URL since it last answered a request there. Mostly empty.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.rows: dict[tuple[str, str], _Row] = {}

    def failed(self, backend: Backend, request: bytes, now: float) -> bool:
        """Note a failure on `backend` at `now` (monotonic seconds). Return whether it is in doubt.

        `request` is a digest of the request.
        """
        server = (backend.id, backend.url)
        row = self.rows.get(server)
        if row is None or now - row.last_at >= REPEATED_S:
            row = self.rows[server] = _Row(now)
        row.last_at = now
        if len(row.requests) < ROW_MAX:
            row.requests.add(request)
        return row.is_doubt

    def answered(self, backend: Backend) -> bool:
        """Note that `backend` has begun to answer a request. Return whether it was in doubt."""
        row = self.rows.pop((backend.id, backend.url), None)
        return row is not None and row.is_doubt

    def lasted_s(self, backend: Backend, now: float) -> float | None:
        """Return for how long every request on a backend in doubt has failed; None if it is in no doubt."""
        row = self.rows.get((backend.id, backend.url))
        if row is None or not row.is_doubt or now - row.last_at >= REPEATED_S:
            return None
        return now - row.first_at

    def passed_over(
        self, policy: Policy, is_available: Callable[[str], bool], now: float
    ) -> Mapping[str, bool]:
        """Return the backends to which other replicas are preferred, and whether they get nothing at all now.

        Those that are gone, or at another URL now, or whose last failure is long ago, are forgotten.
        `is_available`: whether a backend would get any requests.
        """
        for (name, url), row in list(self.rows.items()):
            backend = policy.backends.get(name)
            if backend is None or backend.url != url or now - row.last_at >= REPEATED_S:
                del self.rows[name, url]
        doubted = {name: row for (name, _), row in self.rows.items() if row.is_doubt}

        def has_other(name: str, pool: Pool) -> bool:
            kind = policy.kinds[name]
            alike = [one for one in pool.backends if one not in doubted and policy.kinds[one] == kind]
            return any(is_available(one) for one in alike)

        return {
            name: now - row.last_at < PAUSE_S
            for name, row in doubted.items()
            if all(has_other(name, pool) for pool in policy.pools_of(name))
        }
