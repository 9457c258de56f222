"""What one process keeps for itself, in memory, when nothing is shared with others.

State changes with no `await` between check and change.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import count

from gateway.core import admission
from gateway.core.decision import Exclusion
from gateway.core.idempotency import IdempotencyClaim, KeyState
from gateway.core.load import NO_LOAD, Load
from gateway.ports import Board, Clock, Slot
from gateway.store.expiring_records import ExpiringRecords

OnFreed = Callable[[str], None]
"""Called with a backend's id when capacity becomes free there. Must not block, must not raise."""


class MemoryLedger:
    """`ports.Ledger`: counts what is in flight on each backend, and enforces the limits."""

    is_local = True
    keeps_to_part = False

    def __init__(self, owner: str = "") -> None:
        """Start with nothing in flight. Slot ids start with `owner`."""
        self._owner = owner
        self._held: dict[str, dict[str, Load]] = {}  # per backend and slot id, what it takes now
        self._sums: dict[str, Load] = {}
        self._ids = count(1)
        self._on_freed: list[OnFreed] = []

    def on_freed(self, callback: OnFreed) -> None:
        """Register a callback for every release and every first token."""
        self._on_freed.append(callback)

    def load(self, backend_id: str) -> Load:
        """See `ports.Ledger.load`."""
        return self._sums.get(backend_id, NO_LOAD)

    def others(self, backend_id: str) -> Load:
        """See `ports.Ledger.others`. There are no other processes."""
        return NO_LOAD

    def loads(self) -> Mapping[str, Load]:
        """Return what is in flight on every backend used so far."""
        return dict(self._sums)

    def claims(self, backend_id: str) -> Mapping[str, Load]:
        """Return what each slot on a backend takes, by slot id."""
        return dict(self._held.get(backend_id, {}))

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """See `ports.Ledger.acquire`."""
        reason = admission.full(self.load(backend_id), claim, limits)
        return self.grant(backend_id, claim) if reason is None else reason

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        """See `ports.Ledger.acquire_at_once`."""
        reason = admission.full(self.load(backend_id), claim, limits)
        return self.grant(backend_id, claim) if reason is None else None

    def grant(self, backend_id: str, claim: Load) -> Slot:
        """Count a slot without checking limits, and return it."""
        slot = Slot(f"{self._owner}{next(self._ids)}", backend_id, claim)
        held = self._held.get(backend_id)
        if held is None:
            held = self._held[backend_id] = {}
        held[slot.id] = claim
        self._sums[backend_id] = self._sums.get(backend_id, NO_LOAD) + claim
        return slot

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

    async def refresh(self, backends: Collection[str]) -> None:
        """See `ports.Ledger.refresh`. A no-op, likewise."""

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


class MemoryBoard:
    """`ports.BoxBoard`: there is no other process, so every box is this one's, for as long as it runs."""

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board:
        """See `ports.BoxBoard.sync`."""
        return Board(fence=1)

    async def leave(self, box_id: str) -> None:
        """There is nobody to leave it to."""

    async def aclose(self) -> None:
        """There is nothing to close."""


class _MemoryRecords:
    """Records that expire, of which each owner may store only so many bytes."""

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        """Store at most `bytes_max` bytes per owner."""
        self._clock = clock
        self._bytes_max = bytes_max
        self._records_by_owner: dict[str | None, ExpiringRecords] = {}

    async def aclose(self) -> None:
        """There is nothing to close."""

    def _records(self, owner: str | None) -> ExpiringRecords:
        records = self._records_by_owner.setdefault(owner, ExpiringRecords())
        records.drop_until(self._clock.now())
        return records

    def _put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        return self._records(owner).put(id, record, self._clock.now() + ttl_s, self._bytes_max)


class MemoryResponseStore(_MemoryRecords):
    """`ports.ResponseStore`."""

    async def put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        """See `ports.ResponseStore.put`."""
        return self._put(owner, id, record, ttl_s)

    async def get(self, owner: str | None, id: str) -> bytes | None:
        """See `ports.ResponseStore.get`."""
        return self._records(owner).get(id)

    async def delete(self, owner: str | None, id: str) -> bool:
        """See `ports.ResponseStore.delete`."""
        return self._records(owner).drop(id)


class MemoryIdempotency(_MemoryRecords):
    """`ports.IdempotencyStore`."""

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        """Store at most `bytes_max` bytes of answers per owner."""
        super().__init__(clock, bytes_max)
        self._marks: dict[tuple[str | None, str], tuple[IdempotencyClaim, float]] = {}  # with its expiry

    async def begin(self, claim: IdempotencyClaim, lease_s: float) -> bytes | KeyState:
        """See `ports.IdempotencyStore.begin`."""
        record = self._records(claim.owner).get(claim.id)
        if record is not None:
            return claim.answer_in(record)
        mark = self._mark(claim)
        if mark is not None and mark != claim:
            return KeyState.RUNNING if mark.fingerprint == claim.fingerprint else KeyState.REUSED
        self._set_mark(claim, lease_s)
        return KeyState.BEGUN

    async def renew(self, claim: IdempotencyClaim, lease_s: float) -> bool:
        """See `ports.IdempotencyStore.renew`."""
        if not self._is_own(claim):
            return False
        self._set_mark(claim, lease_s)
        return True

    async def keep(self, claim: IdempotencyClaim, answer: bytes, ttl_s: float) -> None:
        """See `ports.IdempotencyStore.keep`."""
        if self._is_own(claim):
            await self.free(claim)
            self._put(claim.owner, claim.id, claim.record_of(answer), ttl_s)

    async def free(self, claim: IdempotencyClaim) -> None:
        """See `ports.IdempotencyStore.free`."""
        if self._mark(claim) == claim:
            del self._marks[claim.owner, claim.id]

    def _is_own(self, claim: IdempotencyClaim) -> bool:
        """Return whether no other runner has the key, and no answer is stored under it."""
        return self._mark(claim) in (claim, None) and self._records(claim.owner).get(claim.id) is None

    def _mark(self, claim: IdempotencyClaim) -> IdempotencyClaim | None:
        found = self._marks.get((claim.owner, claim.id))
        return None if found is None or found[1] <= self._clock.now() else found[0]

    def _set_mark(self, claim: IdempotencyClaim, lease_s: float) -> None:
        now = self._clock.now()
        self._marks.pop((claim.owner, claim.id), None)
        self._marks[claim.owner, claim.id] = claim, now + lease_s
        # All leases have the same length, so they expire in the order in which they were set.
        while (oldest := next(iter(self._marks.items())))[1][1] <= now:
            del self._marks[oldest[0]]
