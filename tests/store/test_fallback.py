"""Redis stalls, dies and comes back empty: chat goes on, nothing is lost, nothing is counted twice."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream
from redis.asyncio import Redis
from support.redis_server import RedisServer, failover

from gateway.core.decision import Exclusion
from gateway.core.facts import Facts
from gateway.core.load import UNLIMITED, Load
from gateway.ports import Slot
from gateway.store.connections import StoreAway
from gateway.store.fallback import FallbackLedger, Mode, divided
from gateway.store.redis import RedisLedger

CLAIM = Load(seqs=1, share=100_000, kv_blocks=10, long_seqs=1, long_unanswered=1, prefill_ms=700)
FREE = Load(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED)
LIMITS = replace(FREE, share=400_000)
WITHIN_S = 20.0

Store = Any  # tests/store/conftest.py


class WatchedLedger(FallbackLedger):
    """A ledger that says when its mode changes."""

    changed: anyio.Event | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "mode" and self.changed is not None:
            self.changed.set()


class Gateway:
    """A gateway's ledger, run, and when its mode changes."""

    def __init__(self, url: str, command_s: float = 0.3) -> None:
        shared = RedisLedger(url, command_s=command_s, refresh_s=0.05)
        self.ledger = WatchedLedger(shared, replicas_min=1)
        self.shared = shared

    async def wait_for(self, mode: Mode) -> None:
        with anyio.fail_after(WITHIN_S):
            while self.ledger.mode is not mode:
                self.ledger.changed = anyio.Event()
                await self.ledger.changed.wait()

    async def looks_again(self) -> None:
        """Return once what came of another look at the server has been told."""
        began = 0

        def begin() -> Facts:
            nonlocal began
            began += 1
            return Facts()

        self.ledger.exchange.join(begin, lambda facts: None)
        with anyio.fail_after(WITHIN_S):
            while began < 2:
                await anyio.lowlevel.checkpoint()

    async def take(self, claim: Load = CLAIM, limits: Load = LIMITS) -> Slot:
        slot = await self.ledger.acquire("b", claim, limits)
        assert isinstance(slot, Slot)
        return slot


@asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[None]:
    try:
        async with anyio.create_task_group() as tasks:
            for gateway in gateways:
                tasks.start_soon(gateway.ledger.run)
            with anyio.fail_after(WITHIN_S):
                while any(gateway.ledger.replicas < len(gateways) for gateway in gateways):
                    for gateway in gateways:
                        await gateway.shared.sync()
            yield
            tasks.cancel_scope.cancel()
    finally:
        for gateway in gateways:
            await gateway.ledger.aclose()


@pytest.fixture
async def seen(stoppable: RedisServer, store_type: Callable[..., Store]) -> AsyncIterator[Store]:
    """What the server holds, seen past the gateways."""
    redis = Redis.from_url(stoppable.url, decode_responses=True)
    yield store_type(stoppable.url, "gw", redis)
    await redis.aclose()


async def test_a_stall_costs_one_wait_and_then_nothing_is_asked(stoppable: RedisServer, seen: Store) -> None:
    gateway = Gateway(stoppable.url)
    async with running(gateway):
        before = await gateway.take()
        stoppable.stall()
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:  # all at once, beyond the pool of connections
                for _ in range(100):
                    tasks.start_soon(gateway.ledger.acquire, "b", CLAIM, LIMITS)
        assert gateway.ledger.mode is Mode.ALONE
        assert gateway.ledger.load("b").share == LIMITS.share

        await gateway.ledger.answered(before)
        assert gateway.ledger.load("b").prefill_ms == 3 * CLAIM.prefill_ms
        await gateway.ledger.release(before)
        after = await gateway.take()
        stoppable.resume()
        await gateway.wait_for(Mode.SHARED)

        # Also what the stalled server carried out late is not counted twice.
        assert await seen.sums() == await seen.added() == gateway.ledger.load("b")
        assert gateway.ledger.load("b").seqs == 4
        await gateway.ledger.release(after)
        assert (await seen.sums()).seqs == 3


async def test_the_server_is_told_of_all_that_it_is_to_know(stoppable: RedisServer, seen: Store) -> None:
    gateway = Gateway(stoppable.url, command_s=10.0)
    async with running(gateway):
        slot = await gateway.take()
        gateway.ledger.waits({"b"})
        with anyio.fail_after(WITHIN_S):
            while not any(account.waits for account in (await seen.accounts()).values()):
                pass
        await gateway.ledger.answered(slot)
        assert await seen.added() == CLAIM.after_first_token
        await gateway.ledger.release(slot)
        assert await seen.added() == Load()
        gateway.ledger.waits(())
        gateway.ledger.keep_only({"other"})
        with anyio.fail_after(WITHIN_S):
            while gateway.ledger.loads():
                await gateway.shared.sync()
                await anyio.lowlevel.checkpoint()


async def test_a_server_that_is_away_is_asked_by_synchronisations_alone(
    stoppable: RedisServer, seen: Store
) -> None:
    tick_s = 0.005
    ledger = RedisLedger(stoppable.url, command_s=10.0, refresh_s=1000.0, tick_s=tick_s)
    assert isinstance(await ledger.acquire("b", CLAIM, LIMITS), Slot)
    stoppable.kill()
    async with anyio.create_task_group() as tasks:
        is_away = anyio.Event()
        tasks.start_soon(ledger.run, lambda failure: is_away.set())
        with anyio.fail_after(WITHIN_S):
            await is_away.wait()
        ledger.waits({"b"})
        await anyio.sleep(4 * tick_s)  # a loop's timers end in their order: by now it has ticked
        tasks.cancel_scope.cancel()
    stoppable.start()
    await ledger.sync()
    assert (await seen.account(ledger.owner)).number == 2  # the slot's command, and the synchronisation's
    await ledger.aclose()


@pytest.mark.parametrize(("step", "left"), [("answered", CLAIM.after_first_token), ("release", Load())])
async def test_a_request_whose_end_finds_the_server_gone_ends(
    stoppable: RedisServer, step: str, left: Load
) -> None:
    gateway = Gateway(stoppable.url)  # not run, or it would find that out before
    slot = await gateway.take()
    stoppable.kill()
    await getattr(gateway.ledger, step)(slot)
    assert (gateway.ledger.mode, gateway.ledger.load("b")) == (Mode.ALONE, left)
    await gateway.ledger.aclose()


async def test_who_looks_again_at_what_others_hold_and_finds_the_server_gone_goes_on(
    stoppable: RedisServer,
) -> None:
    gateway = Gateway(stoppable.url)  # not run, likewise
    await gateway.take()
    stoppable.kill()
    await gateway.ledger.refresh({"b"})
    assert (gateway.ledger.mode, gateway.ledger.load("b")) == (Mode.ALONE, CLAIM)
    await gateway.ledger.aclose()


async def test_slots_are_shared_again_on_the_server_that_took_the_place_of_one(tmp_path: Path) -> None:
    with failover("valkey-9", tmp_path) as servers:
        gateway = Gateway(servers.url)
        async with running(gateway):
            await gateway.take()
            await servers.demote()
            await gateway.wait_for(Mode.ALONE)
            servers.take_over()
            await gateway.wait_for(Mode.SHARED)


async def test_two_gateways_go_on_under_half_the_limits_each(stoppable: RedisServer, seen: Store) -> None:
    here, there = Gateway(stoppable.url), Gateway(stoppable.url)
    async with running(here, there):
        first = await here.take()
        there.ledger.load("b")  # from now on it is looked at
        await there.shared.sync()
        assert there.ledger.load("b") == CLAIM
        stoppable.kill()
        await here.wait_for(Mode.ALONE)
        await there.wait_for(Mode.ALONE)
        assert there.ledger.load("b") == Load()  # its own part is free

        await here.take()
        assert await here.ledger.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        assert here.ledger.load("b").share == LIMITS.share  # the other half is taken to be used as well
        await there.take()
        await there.take()
        assert await there.ledger.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        await here.ledger.release(first)
        assert here.shared.held("b") == CLAIM
        await here.take()

        stoppable.start()
        await here.wait_for(Mode.SHARED)
        await there.wait_for(Mode.SHARED)
        assert (await seen.sums()).share == (await seen.added()).share == LIMITS.share
        assert await here.ledger.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE


@asynccontextmanager
async def back_beside_one_that_says_nothing(
    stoppable: RedisServer, command_s: float
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Yield two gateways whose server has come back empty. The second has not told it anything yet."""
    gateway, other = Gateway(stoppable.url, command_s), Gateway(stoppable.url)
    async with running(gateway):
        await other.shared.sync()
        await gateway.shared.sync()
        stoppable.kill()
        await gateway.wait_for(Mode.ALONE)
        stoppable.start()
        await gateway.wait_for(Mode.SHARED)
        yield gateway, other
    await other.ledger.aclose()


async def test_who_finds_the_server_back_takes_no_more_than_its_part_before_the_others_can_have_told(
    stoppable: RedisServer,
) -> None:
    async with back_beside_one_that_says_nothing(stoppable, command_s=10.0) as (gateway, _):
        outcomes: list[Slot | Exclusion] = []

        async def ask() -> None:
            outcomes.append(await gateway.ledger.acquire("b", CLAIM, LIMITS))

        await gateway.looks_again()
        await gateway.take()
        assert gateway.ledger.acquire_at_once("b", CLAIM, LIMITS) is None
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
        assert [isinstance(outcome, Slot) for outcome in outcomes].count(True) == 1
        assert gateway.ledger.load("b").share == LIMITS.share  # the other half may be in use as well
        assert gateway.ledger.others("b").share == LIMITS.share // 2


async def test_who_finds_the_server_back_takes_no_surplus_beyond_its_part(stoppable: RedisServer) -> None:
    limits = replace(FREE, share=40 * CLAIM.share)
    async with back_beside_one_that_says_nothing(stoppable, command_s=10.0) as (gateway, _):
        await gateway.looks_again()
        for _ in range(20):
            await gateway.take(limits=limits)
        assert gateway.ledger.acquire_at_once("b", CLAIM, limits) is None
        assert gateway.shared.acquire_at_once("b", CLAIM, limits) is not None  # it has some


async def test_who_finds_the_server_back_sees_what_others_have_told_by_then(stoppable: RedisServer) -> None:
    """A box whose models take turns stops none that runs something at another gateway."""
    async with back_beside_one_that_says_nothing(stoppable, command_s=10.0) as (gateway, other):
        await other.take()
        gateway.ledger.load("b")  # from now on it is looked at
        await gateway.shared.sync()
        assert gateway.ledger.load("b") == gateway.ledger.others("b") == CLAIM


async def test_who_found_the_server_back_takes_the_rest_as_soon_as_the_others_have_told(
    stoppable: RedisServer,
) -> None:
    async with back_beside_one_that_says_nothing(stoppable, command_s=0.3) as (gateway, _):
        has_room, taken = anyio.Event(), 0
        gateway.ledger.on_freed(lambda backend: has_room.set())
        with anyio.fail_after(WITHIN_S):
            while taken < 4:
                has_room = anyio.Event()
                if isinstance(await gateway.ledger.acquire("b", CLAIM, LIMITS), Slot):
                    taken += 1
                else:
                    await has_room.wait()
        assert await gateway.ledger.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        assert gateway.ledger.load("b").share == LIMITS.share


async def test_the_others_count_on_after_a_server_was_away_for_longer_than_they_would_be_known(
    stoppable: RedisServer,
) -> None:
    ttl_s = 0.2
    here, there = (RedisLedger(stoppable.url, command_s=10.0, ttl_s=ttl_s) for _ in range(2))
    with anyio.fail_after(WITHIN_S):
        while here.replicas < 2:
            await there.sync()
            await here.sync()
    stoppable.kill()
    away_since = anyio.current_time()
    while anyio.current_time() < away_since + 2 * ttl_s:
        with pytest.raises(StoreAway):
            await here.sync()
    stoppable.start()
    await here.sync()
    assert here.replicas == 2  # though it alone has spoken
    for ledger in (here, there):
        await ledger.aclose()


async def test_what_is_held_is_registered_even_above_the_limit(stoppable: RedisServer, seen: Store) -> None:
    gateway = Gateway(stoppable.url)
    async with running(gateway):
        slots = [await gateway.take() for _ in range(4)]
        stoppable.kill()
        await gateway.wait_for(Mode.ALONE)
        await gateway.ledger.release(slots.pop())
        slots.append(await gateway.take(limits=FREE))
        slots.append(await gateway.take(limits=FREE))
        stoppable.start()
        await gateway.wait_for(Mode.SHARED)

        assert (await seen.sums()).seqs == 5
        assert await gateway.ledger.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        for slot in slots:
            await gateway.ledger.release(slot)
        assert await seen.sums() == gateway.ledger.load("b") == Load()
        assert await seen.accounts() == {}


async def test_a_server_that_restarts_unnoticed_by_any_request_is_filled_again(
    stoppable: RedisServer, seen: Store
) -> None:
    gateway = Gateway(stoppable.url)
    async with running(gateway):
        await gateway.take()
        stoppable.kill()
        stoppable.start()
        with anyio.fail_after(WITHIN_S):
            while await seen.sums() != CLAIM:
                pass


async def test_an_empty_server_in_place_of_the_full_one_is_never_overbooked_for_long(
    stoppable: RedisServer, seen: Store
) -> None:
    gateway = Gateway(stoppable.url)
    async with running(gateway):
        slots = [await gateway.take() for _ in range(4)]
        await seen.redis.flushall()
        freed = anyio.Event()
        gateway.ledger.on_freed(lambda backend: freed.set())
        with anyio.fail_after(WITHIN_S):
            while (await seen.sums()).seqs < 4:
                pass
        assert await gateway.ledger.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        await gateway.ledger.release(slots[0])
        assert freed.is_set()
        await gateway.take()


async def test_changes_are_told_once_each(stoppable: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.store")
    gateway = Gateway(stoppable.url)
    woken: list[str] = []
    gateway.ledger.on_freed(woken.append)
    async with running(gateway):
        slot = await gateway.take()
        stoppable.stall()
        await gateway.wait_for(Mode.ALONE)
        await gateway.looks_again()
        stoppable.resume()
        await gateway.wait_for(Mode.SHARED)
        await gateway.ledger.release(slot)

    away, back = [record for record in caplog.records if record.name == "gateway.store"]
    assert away.levelno == logging.ERROR
    assert (
        "unavailable (no answer within 0.3 s): this process counts alone, with every limit divided by 1"
        in away.message
    )
    assert "the store is available again" in back.message
    assert woken == ["b", "b", "b"]  # both ways, limits have changed; then the release


class Road:
    """A way to a server, on which each connection can be blocked and cut.

    Attributes:
        url: Where it begins.
        blocked: How many connections have sent something since `is_blocked`, none of which got through.
        is_blocked: Whether what connections send is kept back from now on, for good.
    """

    def __init__(self, server_url: str, folder: Path) -> None:
        self._to, self._path = server_url.removeprefix("unix://"), folder / "road.sock"
        self.url = f"unix://{self._path}"
        self.is_blocked = False
        self.blocked: list[SocketStream] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        listener = await anyio.create_unix_listener(self._path)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._carry)
            yield
            tasks.cancel_scope.cancel()
        await listener.aclose()

    async def _carry(self, here: SocketStream) -> None:
        async with here, await anyio.connect_unix(self._to) as there, anyio.create_task_group() as tasks:
            tasks.start_soon(self._pass_on, there, here)
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for data in here:
                    if self.is_blocked or here in self.blocked:
                        self.blocked.append(here)
                    else:
                        await there.send(data)
            tasks.cancel_scope.cancel()

    async def _pass_on(self, there: SocketStream, here: SocketStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in there:
                await here.send(data)

    async def wait_for(self, count: int) -> None:
        with anyio.fail_after(WITHIN_S):
            while len(self.blocked) < count:
                await anyio.lowlevel.checkpoint()


async def test_limits_are_not_shared_again_before_every_command_has_ended(
    stoppable: RedisServer, tmp_path: Path
) -> None:
    """Else one that fails later would let start what only a gateway alone may."""
    other, road = Gateway(stoppable.url), Road(stoppable.url, tmp_path)
    gateway = Gateway(road.url, command_s=10.0)
    async with road.open(), running(other, gateway):
        other.ledger.load("b")
        outcomes: list[Slot | Exclusion] = []

        async def ask(backend: str) -> None:
            outcomes.append(await gateway.ledger.acquire(backend, CLAIM, LIMITS))

        async with anyio.create_task_group() as tasks:
            road.is_blocked = True
            for asked, backend in enumerate("bc", start=1):
                tasks.start_soon(ask, backend)
                await road.wait_for(asked)
            road.is_blocked = False
            slow, quick = dict.fromkeys(road.blocked)
            await quick.aclose()
            await gateway.wait_for(Mode.ALONE)
            for _ in range(3):  # it looks again and again, and waits for what hangs
                await other.shared.sync()
            assert gateway.ledger.mode is Mode.ALONE
            await slow.aclose()
            await gateway.wait_for(Mode.SHARED)

        assert all(isinstance(outcome, Slot) for outcome in outcomes)
        assert other.ledger.load("c") == Load()  # which it has not looked at before
        await other.shared.sync()
        assert [other.ledger.load(backend) for backend in "bc"] == [CLAIM, CLAIM]


@pytest.mark.parametrize("behind", ["a claim", "a look"])
async def test_what_comes_behind_a_command_that_fails_fails_with_it(
    stoppable: RedisServer, tmp_path: Path, behind: str
) -> None:
    """Else it would be sent after it, with a whole timeout of its own; or would not be answered at all."""
    road = Road(stoppable.url, tmp_path)
    ledger = Gateway(road.url, command_s=10.0).shared  # not run: nothing else is under way
    async with road.open():
        await ledger.refresh({"b"})
        road.is_blocked = True
        account, loop = ledger._account("b"), asyncio.get_running_loop()
        first = loop.create_task(ledger.refresh({"b"}))
        await road.wait_for(1)
        again: Coroutine[Any, Any, object] = (
            ledger.acquire("b", CLAIM, LIMITS) if behind == "a claim" else ledger.refresh({"b"})
        )
        second = loop.create_task(again)
        while not account.asked and not account.told:
            await anyio.lowlevel.checkpoint()
        await road.blocked[0].aclose()

        _, left = await asyncio.wait([first, second], timeout=WITHIN_S)  # no scope could end them
        for task in left:
            task.cancel()
        assert not left
        assert isinstance(first.exception(), StoreAway)
        assert second.exception() is first.exception()
        road.is_blocked = False
        assert isinstance(await ledger.acquire("b", CLAIM, LIMITS), Slot)
        await ledger.aclose()


async def test_nothing_is_asked_of_a_server_that_has_not_answered(
    stoppable: RedisServer, tmp_path: Path
) -> None:
    road = Road(stoppable.url, tmp_path)
    gateway = Gateway(road.url)  # not run, or it would look whether the server is back
    async with road.open():
        before = await gateway.take()
        road.is_blocked = True
        after = await gateway.take()
        assert (gateway.ledger.mode, len(road.blocked)) == (Mode.ALONE, 1)

        await gateway.ledger.answered(before)
        await gateway.ledger.release(before)
        assert not gateway.ledger.release_at_once(after)
        await gateway.take()
        await gateway.ledger.release(after)
        assert len(road.blocked) == 1
        assert gateway.ledger.loads() == {"b": CLAIM}
        await gateway.ledger.aclose()


async def test_surplus_is_used_and_given_back_without_asking(stoppable: RedisServer) -> None:
    limits = replace(FREE, share=40 * CLAIM.share)
    gateway = Gateway(stoppable.url)
    async with running(gateway):
        with anyio.fail_after(WITHIN_S):
            await gateway.take(limits=limits)
            while (slot := gateway.ledger.acquire_at_once("b", CLAIM, limits)) is None:
                await gateway.ledger.release(await gateway.take(limits=limits))
        assert gateway.ledger.load("b").seqs == 2
        assert gateway.ledger.release_at_once(slot)
        assert gateway.ledger.load("b") == gateway.ledger.loads()["b"] == CLAIM


async def test_no_redis_at_all_from_the_start(tmp_path: Any) -> None:
    gateway = Gateway(f"unix://{tmp_path}/none.sock")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gateway.ledger.run)
        await gateway.wait_for(Mode.ALONE)
        slot = await gateway.take()
        await gateway.ledger.answered(slot)
        await gateway.ledger.release(slot)
        tasks.cancel_scope.cancel()
    await gateway.ledger.aclose()
    assert gateway.ledger.load("b") == Load()


@pytest.mark.parametrize(
    ("most", "wanted", "replicas", "part"),
    [
        (9, 1, 1, 9),
        (9, 1, 2, 4),
        (9, 1, 4, 2),
        (9, 1, 10, 1),
        (9, 5, 3, 5),
        (9, 10, 3, 9),
        (1, 1, 3, 1),
        (0, 1, 3, 0),
        (UNLIMITED, 1, 3, UNLIMITED),
    ],
    ids=[
        "one-process",
        "rounded-down",
        "four",
        "at-least-one",
        "room-for-one",
        "but-not-beyond-the-whole",
        "one-is-not-divided",
        "none-stays-none",
        "unlimited",
    ],
)
def test_one_process_s_part_of_a_limit(most: int, wanted: int, replicas: int, part: int) -> None:
    limits, claim = Load(seqs=most, kv_blocks=most), Load(seqs=wanted, kv_blocks=wanted)
    assert divided(limits, claim, replicas) == Load(seqs=part, kv_blocks=part)


async def test_those_that_never_met_go_on_under_half_the_limits_if_they_know_of_each_other() -> None:
    shared = RedisLedger("redis://127.0.0.1:9")
    alone = FallbackLedger(shared, replicas_min=2)

    for _ in range(2):
        assert isinstance(await alone.acquire("b", CLAIM, LIMITS), Slot)
    assert await alone.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
    await alone.aclose()
