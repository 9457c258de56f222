"""The records of one owner in memory: bounded in bytes, evicted in the order of their expiry."""

import heapq
from dataclasses import dataclass, field

_SPARE = 64
"""The heap is rebuilt when it exceeds twice the number of records by more than this. A choice: rebuilding a
small one saves nothing."""


@dataclass(slots=True)
class ExpiringRecords:
    """The records of one owner.

    Attributes:
        records: By id, with their expiry.
        order: A heap of (expiry, id), which may contain removed records.
        size: Total bytes of all records.
    """

    records: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    order: list[tuple[float, str]] = field(default_factory=list)
    size: int = 0

    def get(self, id: str) -> bytes | None:
        """Return a record, or None."""
        found = self.records.get(id)
        return None if found is None else found[0]

    def put(self, id: str, record: bytes, expires: float, bytes_max: int) -> bool:
        """Store a record, replacing any previous one. Return False if it alone exceeds `bytes_max`."""
        if len(record) > bytes_max:
            return False
        self.drop(id)
        while self.size > bytes_max - len(record):
            self._drop_first()
        self.records[id] = (record, expires)
        self.size += len(record)
        heapq.heappush(self.order, (expires, id))
        if len(self.order) > 2 * len(self.records) + _SPARE:
            self.order = [(expires, id) for id, (_, expires) in self.records.items()]
            heapq.heapify(self.order)
        return True

    def drop(self, id: str) -> bool:
        """Remove a record. Return whether it existed."""
        found = self.records.pop(id, None)
        if found is None:
            return False
        self.size -= len(found[0])
        return True

    def drop_until(self, now: float) -> None:
        """Remove all records that have expired by `now`."""
        while self.order and self.order[0][0] <= now:
            self._drop_first()

    def _drop_first(self) -> None:
        expires, id = heapq.heappop(self.order)
        if id in self.records and self.records[id][1] == expires:
            self.drop(id)
