"""Closes idle connections for new ones, when a listener has as many as it may have.

Without this, whoever opens that many connections and sends nothing keeps everybody else out. nginx does the
same when its `worker_connections` are not enough.
"""

from collections import deque
from collections.abc import Collection, Sequence
from heapq import nsmallest
from itertools import chain, islice
from operator import itemgetter
from random import randrange
from typing import Any, Protocol
from weakref import ref

LEAST_S = 1.0
"""Connections that have been idle for less are left alone, because their next request may be on its way. A
choice: a client that works through many requests sends the next one sooner."""

SEEN_MAX = 512
"""How many idle connections are compared at a time. A choice: each takes some 3 us (one x86 core), and to
compare 8,192 of them would stall the event loop."""

FOUND_MAX = 32
"""How many of them are closed before others are compared. A choice, as nginx's."""


class Idle(Protocol):
    """A connection that may be idle."""

    def idle_since(self) -> float | None:
        """Return since when nothing is left to answer, in the event loop's time; None if something is."""

    def close_idle(self) -> None:
        """Close it. Only while it is idle."""


class IdleConnections:
    """The connections of one listener that have been idle for longest, approximately.

    Attributes:
        connections_max: How many the listener may have, idle or not.
    """

    def __init__(self, connections_max: int) -> None:
        """Know of none yet."""
        self.connections_max = connections_max
        self._found: deque[tuple[float, ref[Idle]]] = deque()
        self._again_at = 0.0  # when it is worth looking again, after none was found

    def close_one(self, connections: Collection[Any], now: float) -> bool:
        """Close one that has been idle for long, about the longest; return False if none is idle.

        `connections`: those of the listener, all of which are `Idle`; uvicorn types them differently.
        """
        if self._close_found():
            return True
        if now >= self._again_at:
            self._look(list(connections), now)
        return self._close_found()

    def _close_found(self) -> bool:
        while self._found:
            since, found = self._found.popleft()
            connection = found()
            # Otherwise it has served a request since, or is gone.
            if connection is not None and connection.idle_since() == since:
                connection.close_idle()
                return True
        return False

    def _look(self, connections: Sequence[Idle], now: float) -> None:
        """Find some that have been idle for longest, among so many, beginning anywhere."""
        at = randrange(len(connections))
        idle: list[tuple[float, Idle]] = []
        next_at = now + LEAST_S
        for connection in chain(islice(connections, at, None), islice(connections, at)):
            since = connection.idle_since()
            if since is not None and since + LEAST_S <= now:
                idle.append((since, connection))
                if len(idle) == SEEN_MAX:
                    break
            elif since is not None:
                next_at = min(next_at, since + LEAST_S)
        self._found.extend((since, ref(one)) for since, one in nsmallest(FOUND_MAX, idle, key=itemgetter(0)))
        self._again_at = now if idle else next_at
