"""The ledger that gateway processes share: leases in Redis or Valkey.

Every slot is a lease in Redis, which one script takes and one gives back. The process keeps its own
slots here as well: it renews their leases while they are held, it can put them back after Redis has lost
them, and it can go on alone. Redis decides what may be taken; each process decides what it holds.
"""

import re
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import anyio

from gateway.core.admission import COUNTERS
from gateway.core.values import Exclusion, Load
from gateway.ports import Slot
from gateway.store.facts import Exchange
from gateway.store.leases import Freed, Leases, Reply, StoreAway
from gateway.store.memory import MemoryLedger, OnFreed

TTL_S = 15.0
"""Life of a lease that is not renewed: how long a crashed gateway's slots stay taken."""

COMMAND_S = 0.5
"""The longest a command may take, and the longest it may wait for its turn. Usual is below 1 ms."""

REFRESH_S = 1.0
"""How old a snapshot of what the others hold may become."""

CATCH_UPS_MAX = 5
"""Rounds in which a synchronisation runs after slots that were taken meanwhile."""

_REASONS = tuple(COUNTERS.values())
OnSync = Callable[[StoreAway | None], None]


@dataclass(frozen=True, slots=True)
class _Others:
    version: int
    load: Load


class RedisLedger:
    """`ports.Ledger` over Redis. Its methods raise StoreAway when Redis does not answer.

    `run` has to run as long as slots are held. What became of a command that failed is not known; the
    next synchronisation puts it right: leases that nobody holds are given back, slots that are held are
    counted.

    Attributes:
        owner: Names this process in Redis.
        replicas: Gateway processes seen within the last `ttl_s`, this one included.
        exchange: What these processes tell each other of themselves, with every synchronisation.
    """

    is_local = False

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "gw",
        ttl_s: float = TTL_S,
        command_s: float = COMMAND_S,
        refresh_s: float = REFRESH_S,
        connections_max: int = 16,
    ) -> None:
        """Prepare to share slots through the Redis at `url`; connects when first used.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: What keys and channel start with. Gateways share what they count by sharing it.
            ttl_s: Life of a lease that is not renewed; renewed after a third of it.
            command_s: The longest a command may take, and the longest it may wait for its turn.
            refresh_s: Time between two looks at what the others hold.
            connections_max: Connections at once, beside those for leases and the one that listens.
        """
        self.owner = owner_name()
        self.replicas = 1
        self._ttl_s, self._refresh_s = ttl_s, refresh_s
        self._leases = Leases(
            url,
            prefix=prefix,
            owner=self.owner,
            ttl_s=ttl_s,
            command_s=command_s,
            connections_max=connections_max,
        )
        self._own = MemoryLedger(f"{self.owner}:")
        self._others: dict[str, _Others] = {}
        self._seen: dict[str, None] = {}  # backends, in order
        self._behind: defaultdict[str, set[str]] = defaultdict(set)  # held, and Redis may not know it
        self._owed: defaultdict[str, dict[str, float]] = defaultdict(dict)  # not held, and Redis may think so
        self._renew_at = 0.0
        self._fewer_at = 0.0
        self._poked = anyio.Event()
        self.exchange = Exchange(ttl_s, self._poke)
        self._on_freed: list[OnFreed] = []

    def on_freed(self, callback: OnFreed) -> None:
        """Have `callback` called whenever something became free on a backend, through whichever gateway."""
        self._on_freed.append(callback)

    # -------------------------------------------------------------- the port

    def load(self, backend_id: str) -> Load:
        """See `ports.Ledger.load`. What this process holds is exact, what others hold as last heard of."""
        self._seen.setdefault(backend_id)
        return self._own.load(backend_id) + self.others(backend_id)

    def others(self, backend_id: str) -> Load:
        """See `ports.Ledger.others`."""
        others = self._others.get(backend_id)
        return Load() if others is None else others.load

    def loads(self) -> Mapping[str, Load]:
        """Return what is in flight on every backend that was ever asked about."""
        return {backend_id: self.load(backend_id) for backend_id in self._seen}

    def held(self) -> Mapping[str, Load]:
        """Return what this process itself has in flight, by backend."""
        return self._own.held()

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """See `ports.Ledger.acquire`."""
        self._seen.setdefault(backend_id)
        slot = Slot(id=self._own.new_id(), backend=backend_id, load=claim)
        try:
            reply = await self._leases.acquire(backend_id, slot.id, claim, limits)
        except BaseException:
            self._owe(slot)  # it may have been taken
            raise
        self._note(backend_id, reply)
        if reply.outcome:
            return _REASONS[reply.outcome - 1]
        self._own.adopt(slot)
        return slot

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        """See `ports.Ledger.acquire_at_once`. The store has to be asked."""
        return None

    def release_at_once(self, slot: Slot) -> bool:
        """See `ports.Ledger.release_at_once`. The store has to be told."""
        return False

    async def answered(self, slot: Slot) -> None:
        """See `ports.Ledger.answered`."""
        claim = self._own.shrink(slot)
        if claim is None:
            return
        self._behind[slot.backend].add(slot.id)
        try:
            self._note(slot.backend, await self._leases.answered(slot.backend, slot.id, claim))
            self._behind[slot.backend].discard(slot.id)
        finally:
            self._tell(slot.backend)

    async def release(self, slot: Slot) -> None:
        """See `ports.Ledger.release`. The slot is given back here even if Redis cannot be told yet."""
        if not self._own.forget(slot):
            return
        self._owe(slot)
        try:
            self._note(slot.backend, await self._leases.release(slot.backend, [slot.id]))
            self._owed[slot.backend].pop(slot.id, None)
        finally:
            self._tell(slot.backend)

    # -------------------------------------------------------------- without Redis

    async def acquire_alone(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """Take a place if what this process itself holds allows it. Redis is told when it can be."""
        self._seen.setdefault(backend_id)
        slot = await self._own.acquire(backend_id, claim, limits)
        if isinstance(slot, Slot):
            self._behind[backend_id].add(slot.id)
        return slot

    async def answered_alone(self, slot: Slot) -> None:
        """Note a slot's first token. Redis is told when it can be."""
        if self._own.shrink(slot) is not None:
            self._behind[slot.backend].add(slot.id)
            self._tell(slot.backend)

    async def release_alone(self, slot: Slot) -> None:
        """Give a place back. Redis is told when it can be."""
        if self._own.forget(slot):
            self._owe(slot)
            self._tell(slot.backend)

    # -------------------------------------------------------------- in the background

    async def run(self, synced: OnSync = lambda failure: None) -> None:
        """Renew leases, refresh snapshots and hear what others free, until cancelled.

        `synced` is called after every synchronisation, with its failure or None.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            while True:
                self._poked = anyio.Event()
                try:
                    await self.sync()
                except StoreAway as failure:
                    self.exchange.fade(anyio.current_time())
                    synced(failure)
                    await anyio.sleep(self._refresh_s)
                    continue
                if not self._poked.is_set():  # else it began before something that it has to see
                    synced(None)
                with anyio.move_on_after(self._refresh_s):
                    await self._poked.wait()

    def resync(self) -> None:
        """Have every lease renewed now: Redis may have forgotten some."""
        self._renew_at = 0.0
        self._poke()

    def _poke(self) -> None:
        self._poked.set()

    async def sync(self) -> None:
        """Make Redis and this process agree: on who is there, what is held here, and what is not.

        Raises:
            StoreAway: Redis did not answer; what was not done yet is done by the next one.
        """
        now = anyio.current_time()
        due = now >= self._renew_at
        if due:
            self._renew_at = now + self._ttl_s / 3
        try:
            await self._beat(now)
            for backend_id in list(self._seen):
                await self._renew(backend_id, self._own.claims(backend_id) if due else {})
            await self._catch_up()
        except StoreAway:
            self._renew_at = 0.0
            raise

    async def _beat(self, now: float) -> None:
        facts, is_urgent = self.exchange.outgoing()
        try:
            beat = await self._leases.heartbeat(facts, is_urgent=is_urgent)
        except StoreAway:
            self.exchange.not_sent(is_urgent)
            raise
        self._count(beat.replicas, now)
        self.exchange.incoming(beat.told, now)

    def _count(self, replicas: int, now: float) -> None:
        # A Redis that has just come back empty knows only those that have spoken since.
        if replicas >= self.replicas or now >= self._fewer_at:
            self.replicas = replicas
            self._fewer_at = now + self._ttl_s

    async def _catch_up(self) -> None:
        for _ in range(CATCH_UPS_MAX):
            late = [backend_id for backend_id in self._seen if self._is_late(backend_id)]
            for backend_id in late:
                await self._settle(backend_id)
                claims = self._own.claims(backend_id)
                behind = self._behind[backend_id]
                await self._renew(backend_id, {lease: claims[lease] for lease in behind & claims.keys()})
            if not late:
                break

    def _is_late(self, backend_id: str) -> bool:
        return bool(self._behind[backend_id] or self._owed[backend_id])

    async def aclose(self) -> None:
        """Give back what is still held, say goodbye and close, as far as Redis answers."""
        with suppress(StoreAway):  # leases expire by themselves
            for backend_id in self._seen:
                for lease, claim in self._own.claims(backend_id).items():
                    await self.release_alone(Slot(lease, backend_id, claim))
                await self._settle(backend_id)
            await self._leases.leave()
        await self._leases.aclose()

    async def _settle(self, backend_id: str) -> None:
        """Give back leases that may be counted although nobody holds them."""
        # A lease that was not renewed for so long has expired.
        oldest = anyio.current_time() - 2 * self._ttl_s
        owed = [lease for lease, since in self._owed[backend_id].items() if since > oldest]
        if owed:
            await self._leases.release(backend_id, owed)
        for lease in list(self._owed[backend_id]):
            if lease in owed or self._owed[backend_id][lease] <= oldest:
                del self._owed[backend_id][lease]

    async def _renew(self, backend_id: str, claims: Mapping[str, Load]) -> None:
        reply = await self._leases.renew(backend_id, claims)
        # One was given back, or answered, while this was under way: what is held now counts.
        held = self._own.claims(backend_id)
        agreed = {lease for lease, claim in claims.items() if held.get(lease) == claim}
        behind = (self._behind[backend_id] - agreed) & held.keys()
        if reply.mine < len(held.keys() - behind):
            behind = set(held)  # Redis has forgotten some
        self._behind[backend_id] = behind
        self._note(backend_id, reply, asked=True)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._leases.listening() as next_news:
                    self.resync()  # what was said meanwhile was not heard
                    while True:
                        news = await next_news()
                        if news is None or news.owner == self.owner:
                            continue
                        if isinstance(news, Freed):
                            self._heard(news)
                        else:
                            self._poke()
            except StoreAway:
                self.resync()  # Redis may have been replaced by an empty one
            await anyio.sleep(self._refresh_s)

    def _heard(self, freed: Freed) -> None:
        others = self._others.get(freed.backend)
        if others is not None and freed.version > others.version:
            self._others[freed.backend] = _Others(freed.version, _without(others.load, freed.load))
        self._tell(freed.backend)

    def _note(self, backend_id: str, reply: Reply, asked: bool = False) -> None:
        """Keep what a reply says of the others, unless a newer one came before it.

        Redis that has lost its data, and its clock, starts with old versions: what was asked for counts.
        """
        before = self._others.get(backend_id)
        if before is None or asked or reply.version >= before.version:
            self._others[backend_id] = _Others(reply.version, reply.others)
            if before is not None and _is_less(reply.others, before.load):
                self._tell(backend_id)  # though nobody said so

    def _owe(self, slot: Slot) -> None:
        self._owed[slot.backend][slot.id] = anyio.current_time()
        self._behind[slot.backend].discard(slot.id)

    def _tell(self, backend_id: str) -> None:
        for callback in self._on_freed:
            callback(backend_id)


def owner_name() -> str:
    """Return a name for this process, unlike any other's."""
    host = re.sub(r"[^\w.-]", "-", socket.gethostname())[:24]
    return f"{host}-{secrets.token_hex(4)}"


def _without(load: Load, freed: Load) -> Load:
    rest = load - freed
    return Load(**{name: max(0, getattr(rest, name)) for name in COUNTERS})


def _is_less(load: Load, before: Load) -> bool:
    return any(getattr(load, name) < getattr(before, name) for name in COUNTERS)
