"""Passes every record to several recorders."""

from collections.abc import Sequence

from gateway.core.usage import AttemptRecord, RequestRecord
from gateway.ports import Recorder


class Recorders(Recorder):
    """`ports.Recorder` that passes records to others, in order."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        """Pass records to these."""
        self._recorders = tuple(recorders)
        self._of_attempts = [one for one in recorders if type(one).attempt is not Recorder.attempt]

    def attempt(self, record: AttemptRecord) -> None:
        """See `ports.Recorder.attempt`."""
        for recorder in self._of_attempts:
            recorder.attempt(record)

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        for recorder in self._recorders:
            recorder.finished(record)
