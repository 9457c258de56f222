"""Attributes failures that no other backend has disproved: was it the backend, or the request?

A single failure does not tell. Client libraries retry after a 502, usually twice, and three failures eject a
backend: so one image that an engine cannot process would take the only backend for images away from everyone.
Therefore a request counts only once against a backend, however often it is repeated.

Until it is known, requests are better sent elsewhere: a backend that fails at once has room at once, and
would take all that wait for busy ones. So replicas on which several different requests have failed in a row
are passed over, as long as another replica is in no doubt.

A backend that refuses a request because of load is at no fault. But it, too, has room at once, and would be
asked first by every request. So for a moment, the others of its pool come first. And a request that it has
refused asks it again only once fewer run there, or, because it may have room for more by now, from time to
time (`Refusal.takes`).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from gateway.core.backends import Backend, Pool
from gateway.core.health import HealthRules
from gateway.core.policy import Policy

REFUSED_S = 1.0
"""How long others come before a backend that has refused a request because of load, and how long none that it
has refused asks it again with as many running there. A choice: where others have room, one request in a
second asks it first, which costs little; a full queue has room by then."""

ALONE = 2
"""Refusals of a backend that runs nothing, and answers nothing between them, after which none waits for it. A
choice: the first may be of an engine that has yet to note that its last request has ended."""

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
    requests: set[bytes] = field(default_factory=set)
    last_at: float = -inf


@dataclass(slots=True)
class Refusal:
    """The last refusal of a backend.

    Attributes:
        others: How many sequences of other requests ran there; of refusals in a row, the least. More if it
            has taken a request since while more ran.
        at: When it was, in monotonic seconds.
        until: When it may have room for more.
        alone: How many it has refused while it ran no others, since it last answered a request.
        taken: The most sequences of others that ran when it took a request since; -1 if it has taken none.
        is_unanswered: Whether the backend has answered no request since.
    """

    others: int
    at: float
    until: float
    alone: int
    taken: int = -1
    is_unanswered: bool = True

    def is_recent(self, now: float) -> bool:
        """Return whether it has just been."""
        return now < self.until

    def is_of_all(self, now: float) -> bool:
        """Return whether its backend refuses whatever comes, as an engine that is asleep.

        It has just refused one, and since it last answered one, `ALONE` of them while it ran nothing.
        """
        return self.alone >= ALONE and self.is_recent(now)

    def takes(self, now: float) -> int:
        """Return up to how many sequences those that its backend has refused may go there.

        At first, up to as many as ran there then. When it may have room for more, up to one more, and after
        each further `REFUSED_S` up to twice as many more: a backend that still holds as few refuses one
        request in that time, and one that holds more by now is soon full.
        """
        return self.others + _more(now - self.until)


def _more(since_s: float) -> int:
    """Return how many sequences more to try so many seconds after a backend may have room for more."""
    return 0 if since_s < 0 else 2 ** (1 + int(since_s / REFUSED_S)) - 1


class Refusals:
    """Backends that have refused a request because of load.

    Attributes:
        known: Their last refusals, by id and URL. Mostly empty.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.known: dict[tuple[str, str], Refusal] = {}

    def refused(self, backend: Backend, others: int, now: float, again_s: float = REFUSED_S) -> bool:
        """Note that `backend`, at its URL, has refused a request at `now` (monotonic seconds).

        Return whether it has taken another since the refusal before, while no fewer ran: then it may have
        refused this one for what it is.

        `others`: how many sequences of others ran there. Of refusals in a row, the least counts: of requests
        that come together, most are refused while the others are still there. `again_s`: when to ask it
        again, as it says itself; no sooner than after `REFUSED_S`.
        """
        server = (backend.id, backend.url)
        before = self.known.get(server)
        takes_others = before is not None and others <= before.taken
        alone = int(others <= 0) + (0 if before is None else before.alone)
        if before is not None and now < before.until:
            others = min(others, before.others)
        self.known[server] = Refusal(others, now, now + max(REFUSED_S, again_s), alone)
        return takes_others

    def answered(self, backend: Backend, others: int) -> None:
        """Note that `backend` has begun to answer a request, which it took while so many of others ran."""
        known = self.known.get((backend.id, backend.url))
        if known is not None:
            known.is_unanswered, known.alone = False, 0
            known.taken = max(known.taken, others)
            known.others = max(known.others, others)

    def forget(self, now: float) -> None:
        """Forget what is long ago."""
        self.known = {one: known for one, known in self.known.items() if now - known.at < REPEATED_S}

    def last(self, policy: Policy) -> Mapping[str, Refusal]:
        """Return, by id, the last refusals of those at their URLs now."""
        there: dict[str, Refusal] = {}
        for (name, url), known in self.known.items():
            backend = policy.backends.get(name)
            if backend is not None and backend.url == url:
                there[name] = known
        return there


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
            row = self.rows[server] = _Row()
        row.last_at = now
        if len(row.requests) < ROW_MAX:
            row.requests.add(request)
        return len(row.requests) >= IN_A_ROW

    def answered(self, backend: Backend) -> bool:
        """Note that `backend` has begun to answer a request. Return whether it was in doubt."""
        row = self.rows.pop((backend.id, backend.url), None)
        return row is not None and len(row.requests) >= IN_A_ROW

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
        doubted = {name: row for (name, _), row in self.rows.items() if len(row.requests) >= IN_A_ROW}

        def has_other(name: str, pool: Pool) -> bool:
            kind = policy.kinds[name]
            alike = [one for one in pool.backends if one not in doubted and policy.kinds[one] == kind]
            return any(is_available(one) for one in alike)

        return {
            name: now - row.last_at < PAUSE_S
            for name, row in doubted.items()
            if all(has_other(name, pool) for pool in policy.pools_of(name))
        }
