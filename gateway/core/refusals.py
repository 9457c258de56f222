"""Backends that have refused a request because of load: who asks them next, and when.

A backend that refuses a request because of load is at no fault. But it has room at once, and would be asked
first by every request. So for a moment, the others of its pool come first. And a request that it has
refused asks it again only once fewer run there, or, because it may have room for more by now, from time to
time (`Refusal.takes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.backends import Backend
from gateway.core.health import HealthRules
from gateway.core.policy import Policy

REFUSED_S = 1.0
"""How long others come before a backend that has refused a request because of load, and how long none that it
has refused asks it again with as many running there. A choice: where others have room, one request in a
second asks it first, which costs little; a full queue has room by then."""

ALONE = 2
"""Refusals of a backend that runs nothing, and answers nothing between them, after which none waits for it. A
choice: the first may be of an engine that has yet to note that its last request has ended."""

KEPT_S = HealthRules().failure_window_s
"""How long a refusal is remembered: as long as a failure counts."""


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
        self.known = {one: known for one, known in self.known.items() if now - known.at < KEPT_S}

    def last(self, policy: Policy) -> Mapping[str, Refusal]:
        """Return, by id, the last refusals of those at their URLs now."""
        there: dict[str, Refusal] = {}
        for (name, url), known in self.known.items():
            backend = policy.backends.get(name)
            if backend is not None and backend.url == url:
                there[name] = known
        return there
