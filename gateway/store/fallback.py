"""The shared ledger with a fallback: while Redis is unreachable, this process counts alone.

Chat must continue without Redis. So each process then admits requests within its part of every limit, by its
own count, and does not contact Redis again before a synchronization has reported everything that happened
in the meantime. The two ways of counting are never mixed, because each process always knows what it holds.

When Redis returns, it does not know yet what the other processes admitted in the meantime. So each process
keeps to its part for a moment longer, until all live processes have reported.
"""

import logging
from collections.abc import Collection, Mapping
from enum import StrEnum

import anyio

from gateway.core import admission
from gateway.core.admission import COUNTERS
from gateway.core.decision import Exclusion
from gateway.core.load import NO_LOAD, UNLIMITED, Load
from gateway.events import about
from gateway.ports import Slot
from gateway.store.connections import StoreAway
from gateway.store.facts import Exchange
from gateway.store.memory import OnFreed
from gateway.store.redis import RedisLedger

log = logging.getLogger("gateway.store")


class Mode(StrEnum):
    """How slots are counted. A closed set: used as a metric label."""

    SHARED = "shared"  # by Redis, for all gateways
    ALONE = "alone"  # by this process, within its part of every limit


class FallbackLedger:
    """`ports.Ledger` over a RedisLedger, with a fallback while Redis is unreachable.

    Attributes:
        mode: How slots are counted at the moment.
        keeps_to_part: Whether this process keeps to its part of every limit: while it counts alone, and
            until all other processes can have reported to Redis what they hold.
    """

    is_local = False

    def __init__(self, shared: RedisLedger, *, replicas_min: int) -> None:
        """Count with `shared`. At least `replicas_min` processes are assumed to exist, seen or not."""
        self._shared = shared
        self._replicas_min = replicas_min
        self._alone_since = 0.0
        self._whole_at = 0.0  # when all other processes have reported to Redis
        self._asking: dict[str, Load] = {}  # per backend, claims on this process's part that are in progress
        self.keeps_to_part = False
        self.mode = Mode.SHARED

    @property
    def replicas(self) -> int:
        """Number of gateway processes last seen, including this one, and at least the configured minimum."""
        return max(self._shared.replicas, self._replicas_min)

    def modes(self) -> Mapping[str, bool]:
        """Return for each mode whether it is the current one."""
        return {mode: mode is self.mode for mode in Mode}

    @property
    def owner(self) -> str:
        """The name of this process in Redis."""
        return self._shared.owner

    @property
    def exchange(self) -> Exchange:
        """The exchange of facts between gateway processes, while Redis is reachable."""
        return self._shared.exchange

    def on_freed(self, callback: OnFreed) -> None:
        """Register a callback for when capacity becomes free on a backend, through any gateway."""
        self._shared.on_freed(callback)

    def load(self, backend_id: str) -> Load:
        """See `ports.Ledger.load`. While `keeps_to_part`, as if every replica held as much as this one."""
        return self._seen(self._shared.load(backend_id), backend_id, self.replicas)

    def others(self, backend_id: str) -> Load:
        """See `ports.Ledger.others`. While `keeps_to_part`, as for `load`."""
        return self._seen(self._shared.others(backend_id), backend_id, self.replicas - 1)

    def loads(self) -> Mapping[str, Load]:
        """Return what is in flight on every backend used so far."""
        return {backend_id: self.load(backend_id) for backend_id in self._shared.loads()}

    def keep_only(self, backends: Collection[str]) -> None:
        """Forget all other backends, each as soon as nothing is held there."""
        self._shared.keep_only(backends)

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """See `ports.Ledger.acquire`. While alone, `limits` are divided by the number of replicas."""
        if self.mode is Mode.SHARED:
            try:
                if self.keeps_to_part:
                    return await self._acquire_of_part(backend_id, claim, limits)
                return await self._shared.acquire(backend_id, claim, limits)
            except StoreAway as failure:
                self._fall_back(failure)
        return await self._shared.acquire_alone(backend_id, claim, divided(limits, claim, self.replicas))

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        """See `ports.Ledger.acquire_at_once`."""
        if self.keeps_to_part:
            return None
        return self._shared.acquire_at_once(backend_id, claim, limits)

    def release_at_once(self, slot: Slot) -> bool:
        """See `ports.Ledger.release_at_once`."""
        return self.mode is Mode.SHARED and self._shared.release_at_once(slot)

    def waits(self, backends: Collection[str]) -> None:
        """See `ports.Ledger.waits`."""
        self._shared.waits(backends)

    async def refresh(self, backends: Collection[str]) -> None:
        """See `ports.Ledger.refresh`."""
        if self.mode is Mode.SHARED:
            try:
                await self._shared.refresh(backends)
            except StoreAway as failure:
                self._fall_back(failure)

    async def answered(self, slot: Slot) -> None:
        """See `ports.Ledger.answered`."""
        if self.mode is Mode.ALONE:
            await self._shared.answered_alone(slot)
            return
        try:
            await self._shared.answered(slot)
        except StoreAway as failure:
            self._fall_back(failure)

    async def release(self, slot: Slot) -> None:
        """See `ports.Ledger.release`."""
        if self.mode is Mode.ALONE:
            await self._shared.release_alone(slot)
            return
        try:
            await self._shared.release(slot)
        except StoreAway as failure:
            self._fall_back(failure)

    async def run(self) -> None:
        """Keep Redis and this process synchronized, until cancelled; reconnect after outages."""
        await self._shared.run(self._synced)

    async def aclose(self) -> None:
        """Release everything still held, as far as Redis responds, and close."""
        await self._shared.aclose()

    def _synced(self, failure: StoreAway | None) -> None:
        if failure is not None:
            self._fall_back(failure)
        elif self.mode is Mode.ALONE:
            away_s = anyio.current_time() - self._alone_since
            log.warning(
                "the store is available again after %.1f s: slots are shared again",
                away_s,
                extra=about("store_back", store="limits", away_s=round(away_s, 1)),
            )
            self._whole_at = anyio.current_time() + self._shared.return_s
            self.mode = Mode.SHARED
            self._tell_all()
        elif self.keeps_to_part and anyio.current_time() >= self._whole_at:
            self.keeps_to_part = False
            self._tell_all()  # every limit has just increased

    def _fall_back(self, failure: StoreAway) -> None:
        """Switch to counting alone, at least until every command in progress has ended."""
        if self.mode is Mode.ALONE:
            return
        log.error(
            "the store is unavailable (%s): this process counts alone, with every limit divided by %d",
            failure,
            self.replicas,
            extra=about("store_away", store="limits", replicas=self.replicas),
        )
        self._alone_since, self.keeps_to_part = anyio.current_time(), True
        self.mode = Mode.ALONE
        self._shared.resync()
        self._tell_all()  # a backend that others had filled may have room for this process's part

    def _tell_all(self) -> None:
        for backend_id in self._shared.loads():
            self._shared.tell(backend_id)

    async def _acquire_of_part(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """Acquire a slot counted by Redis, if it is within this process's part."""
        asking = self._asking.get(backend_id, NO_LOAD)
        own = self._shared.held(backend_id) + asking
        refused = admission.full(own, claim, divided(limits, claim, self.replicas))
        if refused is not None:
            return refused
        self._asking[backend_id] = asking + claim
        try:
            return await self._shared.acquire(backend_id, claim, limits)
        finally:
            self._asking[backend_id] -= claim

    def _seen(self, load: Load, backend_id: str, processes: int) -> Load:
        """Return `load`; while keeping to its part, as if `processes` processes held as much as this one.

        Once Redis is back: the larger of the two.
        """
        if not self.keeps_to_part:
            return load
        own, least = self._shared.held(backend_id), load if self.mode is Mode.SHARED else NO_LOAD
        return Load(**{name: max(getattr(least, name), getattr(own, name) * processes) for name in COUNTERS})


def divided(limits: Load, claim: Load, replicas: int) -> Load:
    """Return one process's part of `limits`, counter by counter, with room for at least one such `claim`.

    Otherwise, a document that takes half a backend could run on none of three replicas.
    """

    def part(name: str) -> int:
        most: int = getattr(limits, name)
        return most if most == UNLIMITED else max(most // replicas, min(most, getattr(claim, name)))

    return Load(**{name: part(name) for name in COUNTERS})
