"""The ledger of one process: what is in flight on each backend, and the check that keeps it there."""

from collections.abc import Mapping
from itertools import count

from gateway.core import admission
from gateway.core.values import Backend, Demand, Exclusion, Load
from gateway.ports import Slot


class MemoryLedger:
    """`ports.Ledger` in memory. State changes with no `await` between check and change."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Load]] = {}
        self._sums: dict[str, Load] = {}
        self._ids = count(1)

    def load(self, backend_id: str) -> Load:
        """See `ports.Ledger.load`."""
        return self._sums.get(backend_id, _NOTHING)

    def loads(self) -> Mapping[str, Load]:
        """Return what is in flight on every backend that was ever used."""
        return dict(self._sums)

    async def acquire(self, backend: Backend, demand: Demand) -> Slot | Exclusion:
        """See `ports.Ledger.acquire`."""
        reason = admission.refusal(backend.capacity, self.load(backend.id), demand)
        if reason is not None:
            return reason
        slot = Slot(
            id=str(next(self._ids)), backend=backend.id, load=admission.load_of(backend.capacity, demand)
        )
        self._held.setdefault(backend.id, {})[slot.id] = slot.load
        self._sums[backend.id] = _plus(self.load(backend.id), slot.load, 1)
        return slot

    async def release(self, slot: Slot) -> None:
        """See `ports.Ledger.release`."""
        if self._held.get(slot.backend, {}).pop(slot.id, None) is not None:
            self._sums[slot.backend] = _plus(self.load(slot.backend), slot.load, -1)


_NOTHING = Load()


def _plus(one: Load, other: Load, sign: int) -> Load:
    return Load(
        seqs=one.seqs + sign * other.seqs,
        share=one.share + sign * other.share,
        kv_blocks=one.kv_blocks + sign * other.kv_blocks,
    )
