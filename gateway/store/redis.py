"""The ledger shared by gateway processes, in Redis or Valkey.

For every backend, each process has an account: the slots it uses, and its grant, which covers these and may
include a surplus. Limits apply to the sum of all grants. A slot from the grant costs no command. For any
other slot, and near a limit for every change, a script settles the account (settle.lua), once for all
requests of an event loop iteration. Each process also counts its own slots locally, so it can restore its
account after Redis has lost it, and can continue alone. Redis decides which slots a process may acquire; the
process decides which it holds.

Invariants, per backend and counter, with their reasons:

1. Used slots, surplus and free slots add up to the limit. No slot is granted to two processes, because only
   the script grants slots, sequentially, and it sums up *grants*. (A Redis that has lost its data has learned
   within a second what is running; a process that counts alone keeps to its part.)
2. A process never uses more of its grant than the server counts. It takes nothing from it between a
   command and its reply, after a failed command, or if the last reply is `ttl_s` / 3 old or older.
3. Surplus is granted only to a process that receives messages, and only while no process waits: the script
   refuses it to all processes while any account says that its owner waits, or was refused.
4. A waiting process says so in its account, and the processes with surplus receive a message. They settle at
   once, or within their next two ticks if they missed the message. From then on they hold no surplus, and
   report each slot they free. A dead process does not, but its account expires after `ttl_s`.
5. A waiting process checks at every tick, with or without a message. If the others use or hold less than
   before, its requests are woken. So messages only reduce latency: no request waits for longer than two ticks
   while a slot is free, or four while a live process holds one as surplus.
6. No surplus is granted on a backend that shares a machine with others, because it must be seen to be empty.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import count
from time import monotonic

import anyio

from gateway.core.admission import COUNTERS
from gateway.core.decision import Exclusion
from gateway.core.load import NO_LOAD, Load
from gateway.ports import Slot
from gateway.store.accounts import Account, PendingSlot
from gateway.store.connections import StoreAway
from gateway.store.facts import Exchange
from gateway.store.leases import Freed, Leases, News, UrgentFacts
from gateway.store.memory import MemoryLedger, OnFreed
from gateway.store.process_name import process_name
from gateway.store.wire import fail

TTL_S = 15.0
"""Expiry of an account that is not settled: how long the slots of a crashed gateway stay occupied. A choice:
long enough for a stalled process, short enough for the others."""

COMMAND_S = 0.5
"""Timeout of a command, and of waiting for its turn. A choice: below 1 ms is normal (docs/store.md#size), and
requests wait for it."""

REFRESH_S = 1.0
"""Maximum age of a snapshot of what the others hold. A choice: a command per process and backend."""

TICK_S = 0.2
"""Maximum age of the snapshot while requests are being placed. A choice, judged by
`benchmarks/freshness.py`."""

PLACED_MAX = 24
"""Requests that a process places on a backend before it reports and refreshes, divided by the square of the
number of other processes: 24 with one other, 3 with three, each one with five. With staler data, many
processes all choose the same backend (`benchmarks/freshness.py`)."""

GIVEN_BACK_S = 0.1
"""How long a request without room waits for others to return surplus. A choice: 1 ms is normal."""

MUTE_S = 1.0
"""Processes that did not return their surplus in time are not waited for again for this long. A choice: a
tenth of the time at most is spent in vain."""

CATCH_UPS_MAX = 5
"""Maximum rounds of a synchronization to cover slots that were acquired during it. A choice: each round has
fewer."""

_REASONS = tuple(COUNTERS.values())
OnSync = Callable[[StoreAway | None], None]


class RedisLedger:
    """`ports.Ledger` over Redis. Its methods raise StoreAway if Redis does not reply.

    `run` must be running while slots are held; without it no surplus is granted, since this process could not
    learn that others need it. The outcome of a failed command is unknown; the next one corrects it, because
    each reports everything this process holds.

    Attributes:
        owner: Name of this process in Redis.
        replicas: Gateway processes seen within the last `ttl_s`, including this one.
        return_s: Time after an outage within which every live process has reported what it holds.
        exchange: The facts that processes exchange with every synchronization.
    """

    is_local = False
    keeps_to_part = False  # it raises StoreAway instead

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "gw",
        ttl_s: float = TTL_S,
        command_s: float = COMMAND_S,
        refresh_s: float = REFRESH_S,
        tick_s: float = TICK_S,
        takes_turns: Collection[str] = (),
        owner: str = "",
    ) -> None:
        """Prepare to share slots through the Redis at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys and of the channel. Gateways with the same prefix share their limits.
            ttl_s: Expiry of an account that is not settled.
            command_s: Timeout of a command, and of waiting for its turn.
            refresh_s: Interval between two snapshots of what the others hold.
            tick_s: This interval while requests are being placed.
            takes_turns: Backends on which no surplus may be granted.
            owner: See `process_name`; "" for one of its own.
        """
        self.owner = owner or process_name()
        self.replicas = 1
        # An attempt in progress may take as long as a command and its turn; the next one follows it.
        self.return_s = refresh_s + 2 * command_s
        self._ttl_s, self._refresh_s, self._tick_s = ttl_s, refresh_s, tick_s
        self._takes_turns = frozenset(takes_turns)
        self._leases = Leases(url, prefix=prefix, owner=self.owner, ttl_s=ttl_s, command_s=command_s)
        self._own = MemoryLedger(f"{self.owner}:")
        self._own.on_freed(self.tell)
        self._accounts: dict[str, Account] = {}
        self._numbers = count(1)  # of orders; those of a new account must follow those of a dropped one
        self._kept: Collection[str] | None = None
        self._waited_for: Collection[str] = frozenset()
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_listening = self._is_away = False
        self._failures = 0  # of commands that settle an account
        self._fewer_at = 0.0
        self._poked = anyio.Event()
        self.exchange = Exchange(ttl_s, self.resync)
        self._on_freed: list[OnFreed] = []

    def on_freed(self, callback: OnFreed) -> None:
        """Register a callback for when capacity becomes free on a backend, through any gateway."""
        self._on_freed.append(callback)

    # -------------------------------------------------------------- `ports.Ledger`

    def load(self, backend_id: str) -> Load:
        """See `ports.Ledger.load`. Exact for this process; for the others, as last reported."""
        account = self._account(backend_id)
        account.is_looked_at = True
        return self._own.load(backend_id) + account.others

    def others(self, backend_id: str) -> Load:
        """See `ports.Ledger.others`."""
        return self._account(backend_id).others

    def loads(self) -> Mapping[str, Load]:
        """Return what is in flight on every backend used so far."""
        return {name: self._own.load(name) + account.others for name, account in self._accounts.items()}

    def held(self, backend_id: str) -> Load:
        """Return what this process has in flight on a backend."""
        return self._own.load(backend_id)

    def keep_only(self, backends: Collection[str]) -> None:
        """Drop the accounts of all other backends, each as soon as nothing is held there."""
        self._kept = backends

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """See `ports.Ledger.acquire`."""
        slot = self.acquire_at_once(backend_id, claim, limits)
        if slot is not None:
            return slot
        account = self._account(backend_id)
        news = account.news
        outcome = await self._ask(account, claim, limits)
        if isinstance(outcome, Slot) or not account.may_find_more(monotonic()):
            return outcome
        account.waiters += 1
        try:
            with anyio.move_on_after(GIVEN_BACK_S):
                while not isinstance(outcome, Slot) and account.may_find_more(monotonic()):
                    await news.wait()
                    news = account.news
                    outcome = await self._ask(account, claim, limits)
        finally:
            account.waiters -= 1
        if not isinstance(outcome, Slot):
            account.not_given_back(monotonic() + MUTE_S)
        return outcome

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        """See `ports.Ledger.acquire_at_once`. Possible only from the grant."""
        account, used = self._account(backend_id), self._own.load(backend_id)
        if not self._hears or not account.covers(used, claim, limits, monotonic() - self._ttl_s / 3):
            return None
        account.placed += 1
        if account.placed * (self.replicas - 1) ** 2 >= PLACED_MAX:
            self._settle_soon(account)
        return self._own.grant(backend_id, claim)

    def release_at_once(self, slot: Slot) -> bool:
        """See `ports.Ledger.release_at_once`. Possible if the slot becomes surplus."""
        if not self._hears or not self._account(slot.backend).may_keep(slot.load):
            return False
        return self._own.release_at_once(slot)

    async def answered(self, slot: Slot) -> None:
        """See `ports.Ledger.answered`."""
        left = self._own.shrink(slot)
        if left is not None:
            await self._freed(slot.backend, slot.load - left)

    async def release(self, slot: Slot) -> None:
        """See `ports.Ledger.release`. The slot is released here even if Redis is unreachable."""
        if self._own.forget(slot):
            await self._freed(slot.backend, slot.load)

    def waits(self, backends: Collection[str]) -> None:
        """See `ports.Ledger.waits`."""
        before, self._waited_for = self._waited_for, backends
        for name in backends:
            account = self._account(name)
            if not account.says_it_waits and not self._is_away:
                self._settle_soon(account)
        for name in before:
            if name not in backends:
                self._account(name).is_looked_at = True

    async def refresh(self, backends: Collection[str]) -> None:
        """See `ports.Ledger.refresh`."""
        await self._settle_all([self._account(name) for name in backends])

    # -------------------------------------------------------------- without Redis

    async def acquire_alone(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """Acquire a slot based on this process's own count. Redis is updated once it is reachable."""
        self._account(backend_id)
        return await self._own.acquire(backend_id, claim, limits)

    async def answered_alone(self, slot: Slot) -> None:
        """Record a slot's first token. Redis is updated once it is reachable."""
        await self._own.answered(slot)

    async def release_alone(self, slot: Slot) -> None:
        """Release a slot. Redis is updated once it is reachable."""
        await self._own.release(slot)

    # -------------------------------------------------------------- in the background

    async def run(self, synced: OnSync = lambda failure: None) -> None:
        """Renew accounts, refresh snapshots and receive messages, until cancelled.

        `synced` is called after every synchronization, with its failure or None.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            tasks.start_soon(self._tick)
            while True:
                self._poked = anyio.Event()
                try:
                    await self.sync()
                except StoreAway as failure:
                    self.exchange.fade(anyio.current_time())
                    synced(failure)
                    await anyio.sleep(self._refresh_s)
                    continue
                if not self._poked.is_set():  # otherwise it began before the event that triggered this
                    synced(None)
                with anyio.move_on_after(self._refresh_s):
                    await self._poked.wait()

    def resync(self) -> None:
        """Synchronize now: there is news, or Redis may have lost some accounts."""
        self._poked.set()

    async def sync(self) -> None:
        """Synchronize with Redis: live processes, and what this one holds.

        Raises:
            StoreAway: Redis did not reply; the next synchronization completes the rest.
        """
        failures = self._failures
        facts, is_urgent = self.exchange.outgoing()
        try:
            beat = await self._leases.heartbeat(facts, is_urgent=is_urgent)
        except StoreAway:
            self.exchange.not_sent(is_urgent)
            self._is_away = True
            raise
        now = anyio.current_time()
        self._count(beat.replicas, now)
        self.exchange.incoming(beat.told, now)
        await self._settle_all(self._accounts.values())
        for _ in range(CATCH_UPS_MAX):
            behind = [one for one in self._accounts.values() if one.is_behind(self._own.load(one.backend))]
            if not behind:
                break
            await self._settle_all(behind)
        if self._failures == failures:  # another command may have failed meanwhile, after these
            self._is_away = False
        self._drop_unkept()

    def _drop_unkept(self) -> None:
        kept = self._accounts if self._kept is None else self._kept
        for name, account in tuple(self._accounts.items()):
            if name not in kept and account.is_empty(self._own.load(name)):
                del self._accounts[name]

    def _count(self, replicas: int, now: float) -> None:
        # After an outage of any length, Redis knows only the processes that have reported since.
        if self._is_away:
            self._fewer_at = now + self._ttl_s
        if replicas >= self.replicas or now >= self._fewer_at:
            self.replicas = replicas
            self._fewer_at = now + self._ttl_s

    async def aclose(self) -> None:
        """Release everything still held, announce the exit and close, as far as Redis replies."""
        self._is_listening, self._waited_for = False, frozenset()
        for backend_id in self._accounts:
            for lease, claim in self._own.claims(backend_id).items():
                self._own.release_at_once(Slot(lease, backend_id, claim))
        with suppress(StoreAway):  # accounts expire by themselves
            await self._settle_all(self._accounts.values())
            await self._leases.leave()
        await self._leases.aclose()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    # -------------------------------------------------------------- settling

    @property
    def _hears(self) -> bool:
        """Whether this process is known to receive messages from the others."""
        return self._is_listening and not self._is_away

    def _account(self, backend_id: str) -> Account:
        account = self._accounts.get(backend_id)
        if account is None:
            account = self._accounts[backend_id] = Account(backend_id, self._numbers)
        return account

    async def _ask(self, account: Account, claim: Load, limits: Load) -> Slot | Exclusion:
        asked = PendingSlot(claim, limits, asyncio.get_running_loop().create_future())
        account.asked.append(asked)
        self._settle_soon(account)
        try:
            with anyio.CancelScope(shield=True):
                await asked.outcome
        except asyncio.CancelledError:
            if asked.outcome.done() and not asked.outcome.cancelled() and not asked.outcome.exception():
                slot = asked.outcome.result()
                if isinstance(slot, Slot) and self._own.forget(slot):  # acquired by the cancelled task
                    self._settle_soon(account)
                    self.tell(account.backend)
            raise
        return asked.outcome.result()

    async def _freed(self, backend_id: str, freed: Load) -> None:
        """Report freed capacity to Redis unless it becomes surplus, and then to requests waiting here."""
        account = self._account(backend_id)
        try:
            if not self._hears or not account.may_keep(freed):
                await self._settle_all([account])
        finally:
            self.tell(backend_id)

    async def _settle_all(self, accounts: Iterable[Account]) -> None:
        """Report the current use of each account.

        Raises:
            StoreAway: the server did not reply.
        """
        loop, told = asyncio.get_running_loop(), []
        for account in accounts:
            told.append(loop.create_future())
            account.told.append(told[-1])
            self._settle_soon(account)
        with anyio.CancelScope(shield=True):
            for future in told:
                await future

    def _settle_soon(self, account: Account) -> None:
        """Settle an account once, for all requests of this event loop iteration."""
        if not account.is_due and not account.is_under_way:
            asyncio.get_running_loop().call_soon(self._begin, account)
            account.is_due = True

    def _begin(self, account: Account) -> None:
        account.is_due = False
        task = asyncio.get_running_loop().create_task(self._settle(account))
        account.is_under_way = True
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _settle(self, account: Account) -> None:
        asked = [one for one in account.asked if not one.outcome.done()]
        told, account.asked, account.told = account.told, [], []
        order = account.order(
            self._own.load(account.backend),
            asked,
            waits=account.backend in self._waited_for,
            may_keep=self._hears and account.backend not in self._takes_turns,
            now=monotonic(),
        )
        try:
            reply = await self._leases.settle(account.backend, order)
        except BaseException as failure:
            account.failed(self._own.load(account.backend))
            away = failure if isinstance(failure, StoreAway) else StoreAway("closed")
            # Requests behind it must not fail one timeout after the other.
            for one in (*asked, *account.asked):
                fail(one.outcome, away)
            for future in (*told, *account.told):
                fail(future, away)
            account.asked, account.told, self._is_away = [], [], True
            self._failures += 1
            self.resync()
            if failure is not away:
                raise
            return
        has_freed = account.settled(reply, monotonic())
        for one, outcome in zip(asked, reply.outcomes, strict=True):
            if not one.outcome.done():
                one.outcome.set_result(
                    _REASONS[outcome - 1] if outcome else self._own.grant(account.backend, one.claim)
                )
            elif not outcome:  # its task was cancelled, and another may have been refused for its sake
                has_freed = True
        for future in told:
            if not future.done():
                future.set_result(None)
        if not reply.is_known and not order.used.is_within(NO_LOAD):
            self.resync()  # Redis may have lost more than this
        self._settle_rest(account)
        if has_freed:
            self.tell(account.backend)

    def _settle_rest(self, account: Account) -> None:
        """Serve requests that arrived in the meantime, as far as the grant allows."""
        rest = []
        for one in account.asked:
            if one.outcome.done():
                continue
            slot = self.acquire_at_once(account.backend, one.claim, one.limits)
            if slot is None:
                rest.append(one)
            else:
                one.outcome.set_result(slot)
        account.asked = rest
        is_behind = account.is_behind(self._own.load(account.backend))
        is_unsaid = account.backend in self._waited_for and not account.says_it_waits
        if rest or account.told or is_behind or is_unsaid or (account.is_wanted and account.keeps):
            self._settle_soon(account)

    # -------------------------------------------------------------- messages

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(self._tick_s)
            for account in list(self._accounts.values()):
                is_due = account.tick(self._own.load(account.backend))
                if (is_due or account.backend in self._waited_for) and not self._is_away:
                    self._settle_soon(account)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._leases.listening() as next_news:
                    self._is_listening = True
                    self.resync()  # messages were missed in the meantime
                    while True:
                        news = await next_news()
                        if news is None or news.owner == self.owner:
                            continue
                        self._heard(news)
            except StoreAway:
                self._is_listening = False
                self.resync()  # Redis may have been replaced by an empty one
            await anyio.sleep(self._refresh_s)

    def _heard(self, news: News) -> None:
        if isinstance(news, UrgentFacts):
            self.resync()
            return
        account = self._accounts.get(news.backend)
        if isinstance(news, Freed):
            if account is not None:
                account.heard(news)
            self.tell(news.backend)
        elif account is not None and (account.keeps or account.is_under_way):
            account.is_wanted = True
            self._settle_soon(account)

    def tell(self, backend_id: str) -> None:
        """Notify all who registered that capacity became free on a backend."""
        for callback in self._on_freed:
            callback(backend_id)
