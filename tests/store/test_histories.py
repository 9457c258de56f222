"""Any history of several gateways over one Redis: never above a limit, never a lost slot, never below zero.

What each gateway holds is modelled beside it. What Redis counts for it is that, or more where it keeps
places that it does not use; nobody is refused for these as long as who keeps them is there. What Redis has
lost counts again once its gateway has said so; until then, and only until then, more may be admitted than the
limits say.
Nobody keeps anything while somebody waits, and what becomes free then, through whichever gateway, is told to
all others. Each gateway has the limits of its own configuration, which is reloaded now and then: what runs is
kept, and nothing starts above the limit in force.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis
from support.redis_server import legs

from gateway.core import admission
from gateway.core.admission import COUNTERS
from gateway.core.decision import Exclusion
from gateway.core.load import UNLIMITED, Load
from gateway.ports import Slot
from gateway.store.redis import RedisLedger

LIMITS = Load(
    seqs=UNLIMITED, share=1_000_000, kv_blocks=100, long_seqs=3, long_unanswered=1, prefill_ms=2_000
)
SMALLER = replace(LIMITS, share=80_000, kv_blocks=12, long_seqs=1)
LARGER = replace(LIMITS, share=2_000_000, kv_blocks=300, long_seqs=UNLIMITED)
CLAIMS = [
    Load(seqs=1, share=10_000, kv_blocks=1),  # small enough for some to be kept
    Load(seqs=1, share=20_000, kv_blocks=2, prefill_ms=10),
    Load(seqs=1, share=200_000, kv_blocks=3, prefill_ms=40),
    Load(seqs=2, share=400_000, kv_blocks=30, prefill_ms=900),
    Load(seqs=1, share=83_333, kv_blocks=20, long_seqs=1, long_unanswered=1, prefill_ms=1_500),
    Load(seqs=1, share=1, kv_blocks=101),
]
GATEWAYS = 3
T = TypeVar("T")
gateways = st.integers(0, GATEWAYS - 1)
picks = st.integers(0, 100)


@dataclass
class Held:
    slot: Slot
    claim: Load


class Process:
    """A gateway process, which hears what others say as soon as it has begun."""

    def __init__(self, ledger: RedisLedger) -> None:
        self.ledger = ledger
        self.limits = LIMITS
        self.held: list[Held] = []
        self.told = 0  # how often its own waiters were woken
        self.is_lost = False  # whether Redis may have forgotten what it has
        self._task: asyncio.Task[None] | None = None
        ledger.on_freed(self.tell)

    def tell(self, backend: str) -> None:
        self.told += 1

    @property
    def used(self) -> Load:
        total = Load()
        for held in self.held:
            total += held.claim
        return total

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self.ledger.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None


class Witness:
    """A gateway with nothing but waiters: it hears what the others free."""

    def __init__(self, ledger: RedisLedger, redis: Redis, prefix: str) -> None:
        self.ledger = ledger
        self._redis, self._channel = redis, f"{prefix}:freed"
        self._heard: set[str] = set()
        self._grown = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        ledger.on_freed(self._note)

    def _note(self, backend: str) -> None:
        self._heard.add(backend)
        self._grown.set()

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self.ledger.run())
        while await self._redis.publish(self._channel, "x y z") == 0:
            pass  # until somebody listens

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.ledger.aclose()

    async def was_woken(self) -> bool:
        """Return whether something was freed on `b` since the last time this was asked."""
        # Messages keep their order: once this one has come, so has all that was said before.
        zeros = " ".join("0" * len(COUNTERS))
        await self._redis.publish(self._channel, f"nobody 0 {zeros} mark")
        async with asyncio.timeout(20):
            while "mark" not in self._heard:
                self._grown.clear()
                await self._grown.wait()
        heard, self._heard = self._heard, set()
        return "b" in heard


class Histories(RuleBasedStateMachine):
    """Steps that gateways, Redis and time can take."""

    make_store: Callable[[str, Redis], Any]
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        redis = Redis.from_url(self.url, decode_responses=True)
        self.store = type(self).make_store(f"test-{secrets.token_hex(4)}", redis)
        self.witness = Witness(self.connect(), redis, self.store.prefix)
        self.run(self.witness.start())
        self.listeners = 1
        self.processes = [self.begun() for _ in range(GATEWAYS)]
        self.dead: list[Process] = []
        self.observer = self.connect()
        self.observer.load("b")
        self.is_waiting = False
        self.before = Load()

    def connect(self) -> RedisLedger:
        never: Any = {"ttl_s": 1000.0, "refresh_s": 1000.0, "tick_s": 1000.0}
        return RedisLedger(self.url, prefix=self.store.prefix, command_s=20.0, **never)

    def begun(self) -> Process:
        process = Process(self.connect())
        self.run(process.start())
        self.listeners += 1
        self.run(self.are_listening())
        return process

    async def are_listening(self) -> None:
        channel = f"{self.store.prefix}:freed"
        while await self.store.redis.publish(channel, "x y z") != self.listeners:
            pass

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def accounts(self) -> Mapping[str, Any]:
        """Return what Redis has of each process, as far as it counts."""
        return {
            owner: account
            for owner, account in self.run(self.store.accounts()).items()
            if account.expires_ms > 1
        }

    # ------------------------------------------------------------------ requests

    @rule(gateway=gateways, claim=st.sampled_from(CLAIMS))
    def acquire(self, gateway: int, claim: Load) -> None:
        process = self.processes[gateway]
        owner, used = process.ledger.owner, process.used
        before = self.accounts()
        outcome = self.run(process.ledger.acquire("b", claim, process.limits))
        after = self.accounts()
        others = Load()
        for name, account in after.items():
            others += account.kept if name != owner else Load()
        expected = admission.full(others + used, claim, process.limits)
        if isinstance(outcome, Exclusion):
            assert outcome is expected
            # Nobody is refused for what is kept and not used, as long as who keeps it is there.
            in_use = {one.ledger.owner: one.used for one in self.processes}
            taken = used
            for name, account in after.items():
                taken += in_use.get(name, account.kept) if name != owner else Load()
            assert admission.full(taken, claim, process.limits) is not None
            return
        if expected is not None:  # then it was kept for it all along, or Redis has lost what was
            assert process.is_lost or (used + claim).is_within(before[owner].kept)
        process.held.append(Held(outcome, claim))

    @rule(gateway=gateways, count=st.integers(2, 8))
    def acquire_some(self, gateway: int, count: int) -> None:
        """Requests that are so small that places are kept for them."""
        for number in range(count):
            self.acquire(gateway, CLAIMS[number % 2])
            self.redis_counts_what_is_held()

    @rule(gateway=gateways, limits=st.sampled_from([SMALLER, LIMITS, LARGER]))
    def reload(self, gateway: int, limits: Load) -> None:
        """Its configuration is read again."""
        self.processes[gateway].limits = limits

    @rule(gateway=gateways, pick=picks)
    def answered(self, gateway: int, pick: int) -> None:
        process = self.processes[gateway]
        if process.held:
            held = process.held[pick % len(process.held)]
            self.run(process.ledger.answered(held.slot))
            held.claim = held.claim.after_first_token

    @rule(gateway=gateways, pick=picks, times=st.integers(1, 2))
    def release(self, gateway: int, pick: int, times: int) -> None:
        process = self.processes[gateway]
        if process.held:
            held = process.held.pop(pick % len(process.held))
            told = process.told
            for _ in range(times):
                self.run(process.ledger.release(held.slot))
            assert process.told > told  # its own waiters hear of it without a message

    # ------------------------------------------------------------------ time

    @rule(gateway=gateways)
    def sync(self, gateway: int) -> None:
        self.run(self.processes[gateway].ledger.sync())

    @rule(is_waiting=st.booleans())
    def wait(self, is_waiting: bool) -> None:
        """Somebody waits for the backend, or nobody any more."""
        self.is_waiting = is_waiting
        self.run(self.note_waiting())
        self.before = self.run(self.store.added())

    async def note_waiting(self) -> None:
        self.witness.ledger.waits({"b"} if self.is_waiting else frozenset())
        await self.witness.ledger.sync()
        if self.is_waiting:
            await self.nothing_kept()

    async def nothing_kept(self) -> None:
        owners = {process.ledger.owner for process in self.processes}
        async with asyncio.timeout(20):
            while any(
                account.keeps for owner, account in (await self.store.accounts()).items() if owner in owners
            ):
                pass

    @rule(gateway=gateways)
    def expire(self, gateway: int) -> None:
        """Its leases expire, as those of a process that was stopped for too long do."""
        process = self.processes[gateway]
        self.run(self.store.expire(process.ledger.owner))
        self.run(self.observer.sync())
        process.is_lost = True

    # ------------------------------------------------------------------ misfortune

    @rule(gateway=gateways)
    def crash(self, gateway: int) -> None:
        process = self.processes[gateway]
        self.run(process.stop())
        self.listeners -= 1
        self.dead.append(process)
        self.processes[gateway] = self.begun()

    @rule()
    def bury(self) -> None:
        """The leases of the dead expire."""
        for process in self.dead:
            self.run(self.store.expire(process.ledger.owner))
            process.held.clear()
            process.is_lost = True
        self.run(self.observer.sync())

    @rule()
    def forget_scripts(self) -> None:
        self.run(self.store.redis.script_flush())

    @rule()
    def lose_everything(self) -> None:
        self.run(self.store.lose())
        self.before = Load()  # nobody freed it, so nobody says so
        self.run(self.witness.ledger.sync())  # which says again whether somebody waits
        for process in [*self.processes, *self.dead]:
            process.is_lost = True

    # ------------------------------------------------------------------ always

    @invariant()
    def redis_counts_what_is_held(self) -> None:
        accounts = self.accounts()
        for process in [*self.processes, *self.dead]:
            account = accounts.get(process.ledger.owner)
            if account is None:
                assert process.is_lost or process.used == Load()
                continue
            process.is_lost = False
            if account.keeps:
                assert process.used.is_within(account.kept) and account.used.is_within(account.kept)
            else:
                assert process.used == account.used == account.kept

    @invariant()
    def each_process_knows_what_it_holds(self) -> None:
        for process in self.processes:
            assert process.ledger.held("b") == process.used

    @invariant()
    def whoever_looks_sees_what_was_told(self) -> None:
        self.run(self.observer.sync())
        assert self.observer.load("b") == self.run(self.store.added())

    @invariant()
    def what_became_free_wakes_whoever_waits(self) -> None:
        before, self.before = self.before, self.run(self.store.added())
        woken = self.run(self.witness.was_woken())
        if self.is_waiting and any(getattr(self.before, name) < getattr(before, name) for name in COUNTERS):
            assert woken

    def teardown(self) -> None:
        self.bury()
        for gateway, process in enumerate(self.processes):
            self.sync(gateway)
            for held in process.held:
                self.run(process.ledger.release(held.slot))
            self.run(process.stop())
            self.run(process.ledger.aclose())
        self.run(self.observer.aclose())
        assert self.run(self.store.accounts()) == {}
        self.run(self.witness.stop())
        for process in self.dead:
            self.run(process.ledger.aclose())
        self.run(self.store.lose())
        self.run(self.store.redis.aclose())
        self.runner.close()


@pytest.mark.parametrize(("leg", "examples"), list(zip(legs(), (15, 10), strict=False)))
def test_any_history(
    servers: Callable[[str], str], store_type: Callable[..., Any], leg: str, examples: int
) -> None:
    where = servers(leg)

    class OverLeg(Histories):
        url = where

        @staticmethod
        def make_store(prefix: str, redis: Redis) -> Any:
            return store_type(where, prefix, redis)

    run_state_machine_as_test(
        OverLeg,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
