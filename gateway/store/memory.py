"""The ledger of one process: what is in flight on each backend, and the check that keeps it there."""

from collections.abc import Mapping
from itertools import count

from gateway.core import admission
from gateway.core.values import Exclusion, Load
from gateway.ports import Slot


class MemoryLedger:
    """`ports.Ledger` in memory. State changes with no `await` between check and change."""

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self._held: dict[str, Load] = {}  # per slot id, what it takes at the moment
        self._sums: dict[str, Load] = {}
        self._ids = count(1)

    def load(self, backend_id: str) -> Load:
        """See `ports.Ledger.load`."""
        return self._sums.get(backend_id, _NOTHING)

    def loads(self) -> Mapping[str, Load]:
        """Return what is in flight on every backend that was ever used."""
        return dict(self._sums)

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """See `ports.Ledger.acquire`."""
        reason = admission.full(self.load(backend_id), claim, limits)
        if reason is not None:
            return reason
        slot = Slot(id=str(next(self._ids)), backend=backend_id, load=claim)
        self._held[slot.id] = claim
        self._sums[backend_id] = self.load(backend_id) + claim
        return slot

    async def answered(self, slot: Slot) -> None:
        """See `ports.Ledger.answered`."""
        held = self._held.get(slot.id)
        if held is not None:
            self._held[slot.id] = held.after_first_token
            self._sums[slot.backend] += held.after_first_token - held

    async def release(self, slot: Slot) -> None:
        """See `ports.Ledger.release`."""
        held = self._held.pop(slot.id, None)
        if held is not None:
            self._sums[slot.backend] -= held


_NOTHING = Load()
