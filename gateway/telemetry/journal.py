"""The most recent requests with their decisions, which answer "why did it go there?"."""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from operator import itemgetter

from gateway.core.recent import History, Recent
from gateway.core.usage import Ending, RequestRecord
from gateway.ports import Recorder

KEPT_MAX = 1_000
"""Ordinary requests that are kept. A choice: 4 MB of memory."""

NOTABLE_MAX = 300
"""Notable requests that are kept beside them. A choice: 1 MB."""

KEPT_PER_S = 20
"""If more ordinary requests end in a second, only so many of them are kept. A choice: a full journal then
still goes back for most of a minute. What is not kept is freed while it is in the processor's caches, and its
memory used again, which takes 7 % less CPU per short request (docs/performance.md#what-was-tried)."""

BURST_S = 10
"""After a quiet time, as many are kept at once as otherwise in so many seconds. A choice: 200 requests."""

SHOWN_MAX = 200
"""The newest requests that a console is told of when it connects, beside notable ones. A choice: it is one
piece of work for the event loop."""

_IN_ORDER = frozenset({Ending.COMPLETED, Ending.REPLAYED, Ending.HANDED_OVER, Ending.LEFT})


class Journal(Recorder):
    """A bounded memory of finished requests, newest first. It contains features and figures, never text.

    Of many ordinary requests, only some are kept, so that it goes back for a while. All failed and late ones
    are, and they are kept separately, so that a busy minute does not evict them.

    Attributes:
        count: How many requests have ended.
    """

    def __init__(self, entries_max: int = KEPT_MAX, notable_max: int = NOTABLE_MAX) -> None:
        """Keep `entries_max` ordinary requests, and `notable_max` notable ones."""
        self._ordinary: deque[tuple[int, RequestRecord]] = deque(maxlen=entries_max)
        self._notable: deque[tuple[int, RequestRecord]] = deque(maxlen=notable_max)
        self._recent = Recent()
        self._next_at = -inf  # an ordinary request that ends earlier is not kept
        self.count = 0

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        count = self.count = self.count + 1
        self._recent.note(record)
        if is_notable(record):
            self._notable.appendleft((count, record))
        elif record.ended_at >= self._next_at:
            self._next_at = max(self._next_at, record.ended_at - BURST_S) + 1 / KEPT_PER_S
            self._ordinary.appendleft((count, record))

    def recent(self) -> Sequence[RequestRecord]:
        """Return all kept records, newest first."""
        return tuple(record for _, record in _in_order(*self._ordinary, *self._notable))

    def since(self, number: int) -> Sequence[tuple[int, RequestRecord]]:
        """Return the kept records after number `number`, with their numbers, newest first. Finished requests
        are numbered from 1. Of ordinary ones, `SHOWN_MAX` at most."""
        kept = _in_order(*islice(self._ordinary, SHOWN_MAX), *self._notable)
        return [entry for entry in kept if entry[0] > number]

    def find(self, request_id: str) -> RequestRecord | None:
        """Return the record of a request; None if it is no longer kept."""
        for _, record in (*self._ordinary, *self._notable):
            if record.id == request_id:
                return record
        return None

    def history(self, now: float) -> History:
        """Return statistics of the last minutes up to `now` (monotonic seconds)."""
        return self._recent.history(now)


def _in_order(*entries: tuple[int, RequestRecord]) -> list[tuple[int, RequestRecord]]:
    """Return numbered records, newest first."""
    return sorted(entries, key=itemgetter(0), reverse=True)


def is_notable(record: RequestRecord) -> bool:
    """Return whether a request failed, was retried, or was answered later than its class's target."""
    if record.ending not in _IN_ORDER or len(record.attempts) > 1:
        return True
    target_s = record.ttft_target_s
    if target_s is None or not record.route:  # nobody is watching a job
        return False
    first = record.first_byte_at if record.stream else record.admitted_at
    return first is not None and first - record.received_at > target_s
