"""The ledger of one process: counts what is in flight on each backend, and enforces the limits."""

from collections.abc import Callable, Collection, Mapping
from itertools import count

from gateway.core import admission
from gateway.core.values import Exclusion, Load
from gateway.ports import Slot

OnFreed = Callable[[str], None]
"""Called with a backend's id when capacity becomes free there. Must not block, must not raise."""


class MemoryLedger:
    """`ports.Ledger` in memory. State changes with no `await` between check and change."""

    is_local = True

    def __init__(self, owner: str = "") -> None:
        """Start with nothing in flight. Slot ids start with `owner`."""
        self._owner = owner
        self._held: dict[str, dict[str, Load]] = {}  # per backend and slot id, what it takes now
        self._sums: dict[str, Load] = {}
        self._ids = count(1)
        self._on_freed: list[OnFreed] = []

    def new_id(self) -> str:
        """Return a unique slot id."""
        return f"{self._owner}{next(self._ids)}"

    def on_freed(self, callback: OnFreed) -> None:
        """Register a callback for every release and every first token."""
        self._on_freed.append(callback)

    def load(self, backend_id: str) -> Load:
        """See `ports.Ledger.load`."""
        return self._sums.get(backend_id, _NOTHING)

    def others(self, backend_id: str) -> Load:
        """See `ports.Ledger.others`. There are no other processes."""
        return _NOTHING

    def loads(self) -> Mapping[str, Load]:
        """Return what is in flight on every backend used so far."""
        return dict(self._sums)

    def held(self) -> Mapping[str, Load]:
        """Return what this process has in flight, which here is everything."""
        return dict(self._sums)

    def claims(self, backend_id: str) -> Mapping[str, Load]:
        """Return what each slot on a backend takes, by slot id."""
        return dict(self._held.get(backend_id, {}))

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """See `ports.Ledger.acquire`."""
        reason = admission.full(self.load(backend_id), claim, limits)
        return self._granted(backend_id, claim) if reason is None else reason

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        """See `ports.Ledger.acquire_at_once`."""
        reason = admission.full(self.load(backend_id), claim, limits)
        return self._granted(backend_id, claim) if reason is None else None

    def _granted(self, backend_id: str, claim: Load) -> Slot:
        slot = Slot(self.new_id(), backend_id, claim)
        self.adopt(slot)
        return slot

    def adopt(self, slot: Slot) -> None:
        """Count a slot granted by another ledger, without checking limits."""
        name = slot.backend
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = {}
        held[slot.id] = slot.load
        self._sums[name] = self._sums.get(name, _NOTHING) + slot.load

    async def answered(self, slot: Slot) -> None:
        """See `ports.Ledger.answered`."""
        if self.shrink(slot) is not None:
            self._tell(slot.backend)

    async def release(self, slot: Slot) -> None:
        """See `ports.Ledger.release`."""
        self.release_at_once(slot)

    def release_at_once(self, slot: Slot) -> bool:
        """See `ports.Ledger.release_at_once`."""
        if self.forget(slot):
            self._tell(slot.backend)
        return True

    def waits(self, backends: Collection[str]) -> None:
        """See `ports.Ledger.waits`. A no-op, since there are no other processes."""

    def shrink(self, slot: Slot) -> Load | None:
        """Count a slot as answered. Return what it takes from now on; None if nothing changed."""
        held = self._held.get(slot.backend, {}).get(slot.id)
        if held is None or held == held.after_first_token:
            return None
        self._held[slot.backend][slot.id] = held.after_first_token
        self._sums[slot.backend] += held.after_first_token - held
        return held.after_first_token

    def forget(self, slot: Slot) -> bool:
        """Stop counting a slot. Return whether it was counted."""
        slots = self._held.get(slot.backend)
        held = None if slots is None else slots.pop(slot.id, None)
        if held is None:
            return False
        self._sums[slot.backend] -= held
        return True

    def _tell(self, backend_id: str) -> None:
        for callback in self._on_freed:
            callback(backend_id)


_NOTHING = Load()
