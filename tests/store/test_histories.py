"""Any history of several gateways over one Redis: never above a limit, never a lost slot, never below zero.

What each gateway holds is modelled beside it. A slot that Redis has lost counts again once its gateway has
synchronised; until then, and only until then, more may be admitted than the limits say.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis
from support.redis_server import legs

from gateway.core import admission
from gateway.core.values import UNLIMITED, Exclusion, Load
from gateway.ports import Slot
from gateway.store.redis import RedisLedger

LIMITS = Load(
    seqs=UNLIMITED, share=1_000_000, kv_blocks=100, long_seqs=3, long_unanswered=1, prefill_ms=2_000
)
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
    held: list[Held] = field(default_factory=list)


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

    def connect(self) -> RedisLedger:
        return RedisLedger(self.url, prefix=self.store.prefix, ttl_s=1000.0, command_s=20.0)

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
        expected = admission.full(self.counted, claim, LIMITS)
        process = self.processes[gateway]
        outcome = self.run(process.ledger.acquire("b", claim, LIMITS))
        if isinstance(outcome, Exclusion):
            assert outcome is expected
        else:
            assert expected is None
            process.held.append(Held(outcome, claim))

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
            for _ in range(times):
                self.run(process.ledger.release(held.slot))

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

    def teardown(self) -> None:
        self.bury()
        for gateway, process in enumerate(self.processes):
            self.sync(gateway, True)
            for held in process.held:
                self.run(process.ledger.release(held.slot))
        assert self.run(self.store.sums()) == Load()
        assert self.run(self.store.leases()) == {}
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
