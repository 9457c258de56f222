"""The last requests, each with its decision: the operator's answer to "why did it go there?"."""

from collections import deque
from collections.abc import Sequence

from gateway.core.recent import History, Recent
from gateway.core.usage import AttemptRecord, Ending, RequestRecord

_IN_ORDER = frozenset({Ending.COMPLETED, Ending.REPLAYED, Ending.HANDED_OVER, Ending.LEFT})


class Journal:
    """A bounded memory of what ended, newest first. Features and figures only, never text.

    What went wrong, or was late, is kept beside the rest, so that a busy minute does not wash it away.
    """

    def __init__(self, entries_max: int = 200, notable_max: int = 100) -> None:
        """Keep that many, and that many notable ones."""
        self._records: deque[tuple[int, RequestRecord]] = deque(maxlen=entries_max)
        self._notable: deque[tuple[int, RequestRecord]] = deque(maxlen=notable_max)
        self._recent = Recent()
        self.count = 0

    def attempt(self, record: AttemptRecord) -> None:
        """See `ports.Recorder.attempt`. Attempts arrive with their request."""

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        self.count += 1
        self._recent.note(record)
        self._records.appendleft((self.count, record))
        if is_notable(record):
            self._notable.appendleft((self.count, record))

    def recent(self) -> Sequence[RequestRecord]:
        """Return the records kept, newest first."""
        return tuple(record for _, record in self._records)

    def since(self, number: int) -> Sequence[tuple[int, RequestRecord]]:
        """Return what is still kept of those that ended after the first `number`, with their numbers, the
        newest first: every request that has ended has the next number, from 1."""
        kept = dict(self._notable) | dict(self._records)
        return [(one, kept[one]) for one in sorted(kept, reverse=True) if one > number]

    def find(self, request_id: str) -> RequestRecord | None:
        """Return the record of a request, or None where it is not kept any more."""
        for _, record in (*self._records, *self._notable):
            if record.id == request_id:
                return record
        return None

    def history(self, now: float) -> History:
        """Return what the last minutes looked like, up to `now` (monotonic seconds)."""
        return self._recent.history(now)


def is_notable(record: RequestRecord) -> bool:
    """Return whether a request went wrong, was tried twice, or was answered later than its class wants."""
    if record.ending not in _IN_ORDER or len(record.attempts) > 1:
        return True
    if record.ttft_target_s is None or not record.route:  # nobody looks on at a job
        return False
    first = record.first_byte_at if record.stream else record.admitted_at
    return first is not None and first - record.received_at > record.ttft_target_s
