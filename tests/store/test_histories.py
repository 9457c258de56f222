"""Any history of several gateways over one Redis: never above a limit, never a lost slot, never below zero.

What each gateway holds is modelled beside it. A slot that Redis has lost counts again once its gateway has
synchronised; until then, and only until then, more may be admitted than the limits say. What becomes free,
through whichever gateway, is told to all others. Each gateway has the limits of its own configuration, which
is reloaded now and then: what runs is kept, and nothing starts above the limit in force.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis
from support.redis_server import legs

from gateway.core import admission
from gateway.core.admission import COUNTERS
from gateway.core.values import UNLIMITED, Exclusion, Load
from gateway.ports import Slot
from gateway.store.redis import RedisLedger

LIMITS = Load(
    seqs=UNLIMITED, share=1_000_000, kv_blocks=100, long_seqs=3, long_unanswered=1, prefill_ms=2_000
)
SMALLER = replace(LIMITS, share=400_000, kv_blocks=40, long_seqs=1)
LARGER = replace(LIMITS, share=2_000_000, kv_blocks=300, long_seqs=UNLIMITED)
CLAIMS = [
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
    is_known: bool = True  # to Redis


@dataclass
class Process:
    ledger: RedisLedger
    limits: Load = LIMITS
    held: list[Held] = field(default_factory=list)
    told: int = 0  # how often its own waiters were woken

    def __post_init__(self) -> None:
        self.ledger.on_freed(self.tell)

    def tell(self, backend: str) -> None:
        self.told += 1


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
        while await self._redis.publish(self._channel, "x") == 0:
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
        self.processes = [Process(self.connect()) for _ in range(GATEWAYS)]
        self.dead: list[Process] = []
        self.observer = self.connect()
        self.observer.load("b")
        self.witness = Witness(self.connect(), redis, self.store.prefix)
        self.run(self.witness.start())
        self.before = Load()

    def connect(self) -> RedisLedger:
        prefix = self.store.prefix
        return RedisLedger(self.url, prefix=prefix, ttl_s=1000.0, refresh_s=1000.0, command_s=20.0)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def counted(self) -> Load:
        """What Redis has to count."""
        total = Load()
        for process in [*self.processes, *self.dead]:
            for held in process.held:
                total += held.claim if held.is_known else Load()
        return total

    # ------------------------------------------------------------------ requests

    @rule(gateway=gateways, claim=st.sampled_from(CLAIMS))
    def acquire(self, gateway: int, claim: Load) -> None:
        process = self.processes[gateway]
        expected = admission.full(self.counted, claim, process.limits)
        outcome = self.run(process.ledger.acquire("b", claim, process.limits))
        if isinstance(outcome, Exclusion):
            assert outcome is expected
        else:
            assert expected is None
            process.held.append(Held(outcome, claim))

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

    @rule(gateway=gateways, is_due=st.booleans())
    def sync(self, gateway: int, is_due: bool) -> None:
        process = self.processes[gateway]
        if is_due:
            process.ledger.resync()
        self.run(process.ledger.sync())
        for held in process.held:
            held.is_known = True

    @rule(gateway=gateways)
    def expire(self, gateway: int) -> None:
        """Its leases expire, as those of a process that was stopped for too long do."""
        process = self.processes[gateway]
        self.run(self.store.expire(process.ledger.owner))
        self.run(self.observer.sync())
        for held in process.held:
            held.is_known = False

    # ------------------------------------------------------------------ misfortune

    @rule(gateway=gateways)
    def crash(self, gateway: int) -> None:
        self.dead.append(self.processes[gateway])
        self.processes[gateway] = Process(self.connect())

    @rule()
    def bury(self) -> None:
        """The leases of the dead expire."""
        for process in self.dead:
            self.run(self.store.expire(process.ledger.owner))
            process.held.clear()
        self.run(self.observer.sync())

    @rule()
    def forget_scripts(self) -> None:
        self.run(self.store.redis.script_flush())

    @rule()
    def lose_everything(self) -> None:
        self.run(self.store.lose())
        self.before = Load()  # nobody freed it, so nobody says so
        for process in [*self.processes, *self.dead]:
            for held in process.held:
                held.is_known = False

    # ------------------------------------------------------------------ always

    @invariant()
    def redis_counts_what_is_held(self) -> None:
        assert self.run(self.store.sums()) == self.run(self.store.added()) == self.counted

    @invariant()
    def each_process_knows_what_it_holds(self) -> None:
        for process in self.processes:
            total = Load()
            for held in process.held:
                total += held.claim
            assert process.ledger.held().get("b", Load()) == total

    @invariant()
    def whoever_looks_sees_it_all(self) -> None:
        self.run(self.observer.sync())
        assert self.observer.load("b") == self.counted

    @invariant()
    def what_became_free_wakes_everybody(self) -> None:
        before, self.before = self.before, self.counted
        woken = self.run(self.witness.was_woken())
        assert woken or not any(getattr(self.before, name) < getattr(before, name) for name in COUNTERS)

    def teardown(self) -> None:
        self.bury()
        for gateway, process in enumerate(self.processes):
            self.sync(gateway, True)
            for held in process.held:
                self.run(process.ledger.release(held.slot))
        assert self.run(self.store.sums()) == Load()
        assert self.run(self.store.leases()) == {}
        self.run(self.witness.stop())
        for process in [*self.processes, *self.dead, Process(self.observer)]:
            self.run(process.ledger.aclose())
        self.run(self.store.lose())
        self.run(self.store.redis.aclose())
        self.runner.close()


@pytest.mark.parametrize(("leg", "examples"), list(zip(legs(), (25, 15), strict=False)))
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
