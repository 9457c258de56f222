"""When queued requests expire: a heap that drops what has left the queue, or got another time, late."""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import inf

from gateway.core.waiting.fairness import Entry

SPARE = 1_024
"""The heap is rebuilt when it exceeds twice the number of queued requests by more than this. A choice:
rebuilding a small one saves nothing."""


class Expiries:
    """The times at which the entries of a queue expire."""

    def __init__(self, waiting: Mapping[str, Entry]) -> None:
        """Start empty. `waiting` are the queued entries by the ids of their tickets, now and later."""
        self._waiting = waiting
        self._heap: list[tuple[float, int, Entry]] = []

    def note(self, entry: Entry) -> None:
        """Note when a queued entry expires. A time noted before counts no longer."""
        # Entries that never expire stay out of the heap, because they would never reach its top and be
        # dropped. Stale entries below a long-lived one are dropped by rebuilding the heap.
        if entry.expires_at < inf:
            heappush(self._heap, (entry.expires_at, entry.number, entry))
        if len(self._heap) > SPARE + 2 * len(self._waiting):
            self._heap = [one for one in self._heap if self._is_current(one[0], one[2])]
            heapify(self._heap)

    def next_at(self) -> float:
        """Return when the next entry expires; inf if none does."""
        while self._heap and not self._is_current(self._heap[0][0], self._heap[0][2]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def take(self, now: float) -> Iterator[Entry]:
        """Yield the entries that have expired by `now`. Each must leave the queue or be noted again."""
        while self.next_at() <= now:
            yield heappop(self._heap)[2]

    def _is_current(self, expires_at: float, entry: Entry) -> bool:
        return self._waiting.get(entry.ticket.id) is entry and entry.expires_at == expires_at
