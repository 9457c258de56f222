"""The most recent requests with their decisions, which answer "why did it go there?"."""

from collections import deque
from collections.abc import Sequence

from gateway.core.recent import History, Recent
from gateway.core.usage import Ending, RequestRecord
from gateway.ports import Recorder

_IN_ORDER = frozenset({Ending.COMPLETED, Ending.REPLAYED, Ending.HANDED_OVER, Ending.LEFT})


class Journal(Recorder):
    """A bounded memory of finished requests, newest first. It contains features and figures, never text.

    Failed and late requests are kept separately, so that a busy minute does not evict them.
    """

    def __init__(self, entries_max: int = 200, notable_max: int = 100) -> None:
        """Keep `entries_max` requests, and `notable_max` notable ones."""
        self._records: deque[tuple[int, RequestRecord]] = deque(maxlen=entries_max)
        self._notable: deque[tuple[int, RequestRecord]] = deque(maxlen=notable_max)
        self._recent = Recent()
        self.count = 0

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        count = self.count = self.count + 1
        self._recent.note(record)
        entry = count, record
        self._records.appendleft(entry)
        if is_notable(record):
            self._notable.appendleft(entry)

    def recent(self) -> Sequence[RequestRecord]:
        """Return all kept records, newest first."""
        return tuple(record for _, record in self._records)

    def since(self, number: int) -> Sequence[tuple[int, RequestRecord]]:
        """Return the kept records after number `number`, with their numbers, newest first. Finished requests
        are numbered from 1."""
        kept = dict(self._notable) | dict(self._records)
        return [(one, kept[one]) for one in sorted(kept, reverse=True) if one > number]

    def find(self, request_id: str) -> RequestRecord | None:
        """Return the record of a request; None if it is no longer kept."""
        for _, record in (*self._records, *self._notable):
            if record.id == request_id:
                return record
        return None

    def history(self, now: float) -> History:
        """Return statistics of the last minutes up to `now` (monotonic seconds)."""
        return self._recent.history(now)


def is_notable(record: RequestRecord) -> bool:
    """Return whether a request failed, was retried, or was answered later than its class's target."""
    if record.ending not in _IN_ORDER or len(record.attempts) > 1:
        return True
    target_s = record.ttft_target_s
    if target_s is None or not record.route:  # nobody is watching a job
        return False
    first = record.first_byte_at if record.stream else record.admitted_at
    return first is not None and first - record.received_at > target_s
