"""The last requests, each with its decision: the operator's answer to "why did it go there?"."""

from collections import deque
from collections.abc import Sequence

from gateway.core.usage import AttemptRecord, RequestRecord


class Journal:
    """A bounded memory of what ended, newest first. Features and figures only, never text."""

    def __init__(self, entries_max: int = 200) -> None:
        """Keep that many."""
        self._records: deque[RequestRecord] = deque(maxlen=entries_max)

    def attempt(self, record: AttemptRecord) -> None:
        """See `ports.Recorder.attempt`. Attempts arrive with their request."""

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        self._records.appendleft(record)

    def recent(self) -> Sequence[RequestRecord]:
        """Return the records kept, newest first."""
        return tuple(self._records)
