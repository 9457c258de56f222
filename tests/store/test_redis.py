"""Leases over real servers: shared, woken for, renewed, expired, lost and put back."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from support.redis_server import RedisServer, own_server

from gateway.core.decision import Exclusion
from gateway.core.facts import Facts
from gateway.core.load import NO_LOAD, UNLIMITED, Load
from gateway.ports import Slot
from gateway.store.connections import StoreAway
from gateway.store.former import FormerAccounts
from gateway.store.leases import Leases, Order
from gateway.store.redis import RedisLedger

CLAIM = Load(seqs=1, share=500_000, kv_blocks=10, long_seqs=1, long_unanswered=1, prefill_ms=700)
FREE = Load(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED)
LIMITS = replace(FREE, share=1_000_000)
NO_LOOKS: Any = {"refresh_s": 60.0, "tick_s": 60.0}
NO_CEILING = Load(-1, -1, -1, -1, -1, -1)
WITHIN_S = 20.0

Store = Any  # tests/store/conftest.py
Connect = Callable[..., RedisLedger]


async def take(ledger: RedisLedger, claim: Load = CLAIM, limits: Load = LIMITS) -> Slot:
    slot = await ledger.acquire("b", claim, limits)
    assert isinstance(slot, Slot)
    return slot


@asynccontextmanager
async def running(*ledgers: RedisLedger) -> AsyncIterator[None]:
    """Run ledgers in the background, each after its first synchronisation."""
    async with anyio.create_task_group() as tasks:
        for ledger in ledgers:
            synced = anyio.Event()
            tasks.start_soon(ledger.run, lambda failure, synced=synced: synced.set())
            await synced.wait()
        yield
        tasks.cancel_scope.cancel()


def former(store: Store, dead: RedisLedger) -> FormerAccounts:
    return FormerAccounts(store.url, prefix=store.prefix, owner=dead.owner, backends=("a", "b"))


async def waits(ledger: RedisLedger) -> None:
    """Have the store know that somebody waits there."""
    ledger.waits({"b"})
    await ledger.sync()


async def server_ms(store: Store) -> float:
    seconds, microseconds = await store.redis.time()
    return float(seconds * 1000 + microseconds / 1000)


class Freed:
    """What a ledger was told."""

    def __init__(self, ledger: RedisLedger) -> None:
        self._event = anyio.Event()
        ledger.on_freed(lambda backend: self._event.set())

    async def wait(self) -> None:
        with anyio.fail_after(WITHIN_S):
            await self._event.wait()
        self._event = anyio.Event()


def ordered(number: int, used: Load = NO_LOAD, claims: Sequence[tuple[Load, Load]] = ()) -> Order:
    """Return the command of that number of a process that keeps nothing."""
    return Order(number, used, used, NO_CEILING, waits=False, may_keep=False, deaf=0, claims=tuple(claims))


@pytest.fixture
async def leases(store: Store) -> AsyncIterator[Leases]:
    """The scripts alone, for an owner called `me`."""
    leases = Leases(store.url, prefix=store.prefix, owner="me", ttl_s=30.0, command_s=10.0)
    yield leases
    await leases.aclose()


# ------------------------------------------------------------------ shared


async def test_two_gateways_share_one_limit(store: Store, connect: Connect) -> None:
    here, there = connect(store), connect(store)
    first, second = await take(here), await take(there)

    assert await here.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
    assert await there.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
    assert here.load("b") == there.load("b") == CLAIM + CLAIM
    assert here.held("b") == CLAIM
    await here.release(first)
    await take(there)
    assert await store.sums() == await store.added() == CLAIM + CLAIM
    await there.release(second)
    assert await store.sums() == await store.added() == CLAIM


async def test_a_hundred_at_once_in_two_processes_fill_it_exactly(store: Store, connect: Connect) -> None:
    ledgers = [connect(store) for _ in range(2)]
    granted: list[tuple[RedisLedger, Slot]] = []

    async def try_(ledger: RedisLedger) -> None:
        slot = await ledger.acquire("b", Load(seqs=1, share=1), replace(FREE, share=37))
        if isinstance(slot, Slot):
            granted.append((ledger, slot))

    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(try_, ledgers[number % 2])
    assert len(granted) == 37
    assert await store.sums() == await store.added() == Load(seqs=37, share=37)
    async with anyio.create_task_group() as tasks:
        for ledger, slot in granted:
            tasks.start_soon(ledger.release, slot)
    assert await store.sums() == Load()
    assert await store.accounts() == {}


async def test_others_are_seen_after_a_look(store: Store, connect: Connect) -> None:
    here, there = connect(store), connect(store)
    assert here.load("b") == Load()
    slot = await take(there)

    await here.sync()

    assert here.load("b") == here.loads()["b"] == CLAIM
    assert here.held("b") == Load()
    await there.answered(slot)
    await here.sync()
    assert here.load("b") == CLAIM.after_first_token


async def test_who_looks_sees_at_the_next_tick_what_others_took(store: Store, connect: Connect) -> None:
    here, there = connect(store, refresh_s=60.0, tick_s=0.01), connect(store, **NO_LOOKS)
    async with running(here):
        for expected in (CLAIM, CLAIM + CLAIM):
            await take(there)
            with anyio.fail_after(WITHIN_S):
                while here.load("b") != expected:
                    await anyio.lowlevel.checkpoint()


async def test_what_another_frees_is_known_as_soon_as_it_is_told(store: Store, connect: Connect) -> None:
    here, there = connect(store, **NO_LOOKS), connect(store, **NO_LOOKS)
    async with running(here, there):
        await waits(here)
        freed = Freed(here)
        slot, _ = await take(there), await take(there)
        assert await here.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE

        await there.answered(slot)
        await freed.wait()
        assert here.load("b") == CLAIM + CLAIM.after_first_token
        await there.release(slot)
        await freed.wait()
        assert here.load("b") == CLAIM
        await take(here)


async def test_a_waiter_wakes_even_if_the_message_is_lost(store: Store, connect: Connect) -> None:
    here, there = connect(store), connect(store)  # not run: nobody listens
    woken: list[str] = []
    here.on_freed(woken.append)
    slot, _ = await take(there), await take(there)
    assert await here.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE

    await there.release(slot)
    await here.sync()

    assert woken == ["b"]
    assert here.load("b") == CLAIM


async def test_a_listener_that_was_cut_off_listens_again(store: Store, connect: Connect) -> None:
    here, there, waiting = connect(store, refresh_s=0.05), connect(store), connect(store)
    woken: list[str] = []
    here.on_freed(woken.append)  # and it never looks at this backend: only a message can wake it
    await waits(waiting)
    async with running(here):
        for _ in range(2):
            with anyio.fail_after(WITHIN_S):
                while not woken:
                    await there.release(await take(there))
            await store.redis.client_kill_filter(_type="pubsub")
            woken.clear()


async def test_gateways_count_each_other(store: Store, connect: Connect) -> None:
    here, there = connect(store, ttl_s=0.3), connect(store)
    await here.sync()
    assert here.replicas == 1
    await there.sync()
    await here.sync()
    assert here.replicas == there.replicas == 2
    await store.lose()
    await here.sync()
    assert here.replicas == 2  # not having spoken yet is not having gone
    await there.aclose()
    with anyio.fail_after(WITHIN_S):
        while here.replicas > 1:
            await here.sync()


async def test_only_what_is_urgent_makes_the_others_read(store: Store, leases: Leases) -> None:
    """Else each of them would make all the others read, without end."""
    channel = f"{store.prefix}:freed"
    async with store.redis.pubsub() as said:
        await said.subscribe(channel)
        for is_urgent in (False, True, False):
            await leases.heartbeat("", is_urgent=is_urgent)
        await leases.leave()
        await store.redis.publish(channel, "the end")
        messages = []
        async for message in said.listen():
            messages.append(message["data"])
            if messages[-1] == "the end":
                break
    assert messages[1:] == ["me", "the end"]


async def test_how_long_others_count_unless_they_are_heard_again_is_told(
    store: Store, leases: Leases
) -> None:
    other = Leases(store.url, prefix=store.prefix, owner="other", ttl_s=20.0, command_s=10.0)
    await other.heartbeat("its facts", is_urgent=False)
    (told,) = (await leases.heartbeat("", is_urgent=False)).told
    await other.aclose()
    assert (told.owner, told.text) == ("other", "its facts")
    assert 0 < told.left_s <= 20


async def test_a_gateway_that_leaves_takes_no_other_with_it(store: Store, connect: Connect) -> None:
    here, there = connect(store), connect(store)
    await here.sync()
    await there.sync()

    await there.aclose()

    key = f"{{{store.prefix}}}:replicas"
    assert await store.redis.zrange(key, 0, -1) == [here.owner]
    assert await store.redis.pttl(key) > 1_000


async def test_what_a_gateway_still_holds_when_it_ends_is_given_back(store: Store, connect: Connect) -> None:
    ledger = connect(store)
    await take(ledger)

    await ledger.aclose()

    assert await store.accounts() == {}
    assert await store.sums() == Load()


# ------------------------------------------------------------------ commands that are repeated, or late


async def test_repeating_a_command_changes_nothing(store: Store, leases: Leases) -> None:
    order = ordered(1, claims=[(CLAIM, replace(FREE, seqs=1))])
    assert (await leases.settle("b", order)).outcomes == [0]
    assert await store.redis.pttl(store.key("b", "accounts")) > 30_000  # outlives what is in it

    for _ in range(2):
        with pytest.raises(StoreAway, match="a later command"):
            await leases.settle("b", order)
    assert await store.sums() == CLAIM


async def test_a_command_that_comes_after_a_later_one_takes_nothing(store: Store, leases: Leases) -> None:
    await leases.settle("b", ordered(2))

    with pytest.raises(StoreAway, match="a later command"):
        await leases.settle("b", ordered(1, claims=[(CLAIM, LIMITS)]))
    assert await store.accounts() == {}


async def test_a_command_that_comes_after_the_account_expired_takes_nothing(
    store: Store, leases: Leases
) -> None:
    await leases.settle("b", ordered(2, used=CLAIM))
    await store.expire("me")

    with pytest.raises(StoreAway, match="a later command"):
        await leases.settle("b", ordered(1, claims=[(CLAIM, LIMITS)]))
    assert await store.sums() == CLAIM  # until somebody looks


async def test_an_account_that_has_expired_is_not_known(store: Store, leases: Leases) -> None:
    """Others may have had its slots meanwhile; who hears of it reports all that it holds."""
    await leases.settle("b", ordered(1, CLAIM))
    await store.expire("me")
    assert not (await leases.settle("b", ordered(2, CLAIM))).is_known
    assert (await leases.settle("b", ordered(3, CLAIM))).is_known


async def test_what_was_not_told_is_told_by_the_next_command(store: Store, leases: Leases) -> None:
    await leases.settle("b", ordered(1, used=CLAIM))

    await leases.settle("b", ordered(4, used=CLAIM.after_first_token))

    assert await store.sums() == await store.added() == CLAIM.after_first_token


async def test_of_claims_that_come_together_those_are_taken_that_fit(store: Store, leases: Leases) -> None:
    small = Load(seqs=1, share=100_000)
    claims = [(CLAIM, LIMITS), (small, replace(LIMITS, share=550_000)), (CLAIM, LIMITS), (small, LIMITS)]

    reply = await leases.settle("b", ordered(1, claims=claims))

    assert reply.outcomes == [0, 2, 0, 2]
    assert reply.kept == await store.sums() == CLAIM + CLAIM


@pytest.mark.parametrize("text", ["", "x", "1 2 3", "9e99 1 0 0 1 1 1 1 1 1 1 1 1 1 1 1 1"])
async def test_an_account_that_cannot_be_read_is_nobody_s(store: Store, leases: Leases, text: str) -> None:
    await store.redis.hset(store.key("b", "accounts"), "other", text)

    assert (await leases.settle("b", ordered(1, claims=[(CLAIM, LIMITS)]))).others == Load()
    assert list(await store.accounts()) == ["me"]


async def test_callers_who_leave_while_a_slot_is_taken_leave_nothing(store: Store, connect: Connect) -> None:
    ledger = connect(store)
    taken = anyio.Event()

    async def call(number: int) -> None:
        slot = await ledger.acquire("b", Load(seqs=1), FREE)
        assert isinstance(slot, Slot)
        try:
            if number == 20:
                taken.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await ledger.release(slot)

    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(call, number)
        await taken.wait()
        tasks.cancel_scope.cancel()
    assert ledger.load("b") == await store.sums() == Load()
    await take(ledger)  # and its connections are all there


async def test_a_task_cancelled_from_outside_leaves_nothing_for_long(store: Store, connect: Connect) -> None:
    ledger = connect(store)
    await ledger.sync()
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(ledger.acquire("b", CLAIM, FREE)) for _ in range(20)]
        for turns in range(20):
            await asyncio.sleep(0)
            started[turns].cancel()
    held = sum(1 for task in started if not task.cancelled())

    await ledger.sync()

    assert (await store.sums()).seqs == held == ledger.load("b").seqs


@pytest.mark.parametrize("outcome", ["slot", "no room", "server away"])
async def test_a_task_that_is_cancelled_as_it_is_told_is_cancelled_and_leaves_nothing(
    store: Store, connect: Connect, outcome: str
) -> None:
    server = replace(store, url="unix:///nowhere.sock") if outcome == "server away" else store
    ledger = connect(server)
    limits = replace(LIMITS, seqs=0) if outcome == "no room" else LIMITS
    task = asyncio.get_running_loop().create_task(ledger.acquire("b", CLAIM, limits))
    await anyio.lowlevel.checkpoint()
    (asked,) = ledger._account("b").asked
    while not asked.outcome.done():
        await anyio.lowlevel.checkpoint()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger.held("b") == NO_LOAD
    with anyio.fail_after(WITHIN_S):
        while await store.sums() != NO_LOAD:
            pass


@pytest.mark.parametrize("when", ["before it is told", "as it is told"])
async def test_who_was_refused_for_a_task_that_is_cancelled_is_told_of_the_room(
    store: Store, connect: Connect, when: str
) -> None:
    ledger, freed = connect(store), list[str]()
    limits = replace(LIMITS, seqs=1)
    ledger.on_freed(freed.append)
    leaves, stays = (
        asyncio.get_running_loop().create_task(ledger.acquire("b", CLAIM, limits)) for _ in range(2)
    )
    await anyio.lowlevel.checkpoint()
    asked, _ = ledger._account("b").asked
    while ledger._account("b").asked or (when == "as it is told" and not asked.outcome.done()):
        await anyio.lowlevel.checkpoint()
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves

    assert await stays is Exclusion.AT_KNEE
    assert freed == ["b"]
    with anyio.fail_after(WITHIN_S):  # the server hears of it, too, without a further request
        while await store.sums() != NO_LOAD:
            pass
    assert isinstance(await ledger.acquire("b", CLAIM, limits), Slot)


async def test_a_backend_has_one_command_under_way_at_a_time(store: Store, connect: Connect) -> None:
    """What is granted by one of two might be used while the other says that it is not."""
    ledger = connect(store)

    async def take_as_the_command_begins() -> Slot:
        await asyncio.sleep(0)
        return await take(ledger, limits=FREE)

    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(take(ledger, limits=FREE)),
            tasks.create_task(take_as_the_command_begins()),
        ]
        while not all(task.done() for task in asked):
            await anyio.lowlevel.checkpoint()
            assert len(ledger._under_way) <= 1
    with anyio.fail_after(WITHIN_S):
        while ledger._under_way:
            await anyio.lowlevel.checkpoint()


# ------------------------------------------------------------------ expiry


async def test_a_lease_outlives_its_time_while_it_is_held(store: Store, connect: Connect) -> None:
    ledger = connect(store, ttl_s=0.4, refresh_s=0.05)
    async with running(ledger):
        await take(ledger)
        expiry = (await store.accounts())[ledger.owner].expires_ms
        with anyio.fail_after(WITHIN_S):
            while (await server_ms(store)) <= expiry:
                await ledger.sync()
        renewed = (await store.accounts())[ledger.owner].expires_ms

    assert renewed > expiry
    assert await store.sums() == CLAIM


async def test_what_a_dead_gateway_held_is_free_again_and_waiters_are_told(
    store: Store, connect: Connect
) -> None:
    here, dead = connect(store, refresh_s=0.05), connect(store, ttl_s=0.4)
    await take(dead)
    await take(dead)
    async with running(here):
        assert await here.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        await Freed(here).wait()
        await take(here)

    assert await store.sums() == await store.added() == CLAIM


CHILD = """
import sys, anyio
from gateway.core.load import Load
from gateway.store.redis import RedisLedger

async def main(url, prefix):
    ledger = RedisLedger(url, prefix=prefix, ttl_s=1.0, refresh_s=0.05, command_s=10.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.run)
        for _ in range(3):
            print(await ledger.acquire("b", Load(seqs=1), Load(seqs=3)), flush=True)

anyio.run(main, *sys.argv[1:])
"""


async def test_a_gateway_killed_with_9_gives_everything_back_within_a_lease_lifetime(
    store: Store, connect: Connect
) -> None:
    here = connect(store, refresh_s=0.05)
    child = await anyio.open_process(
        [sys.executable, "-c", CHILD, store.url, store.prefix], stdout=subprocess.PIPE, stderr=None
    )
    assert child.stdout is not None
    async with child, running(here):
        text = b""
        with anyio.fail_after(WITHIN_S):
            while text.count(b"Slot") < 3:
                text += await child.stdout.receive()
        assert await here.acquire("b", Load(seqs=1), Load(seqs=3)) is Exclusion.AT_KNEE
        freed = Freed(here)
        (dead,) = (await store.accounts()).values()
        child.send_signal(signal.SIGKILL)
        await child.wait()
        await freed.wait()
        freed_at = await server_ms(store)
        await take(here, Load(seqs=3), Load(seqs=3))

    # Settled once more at most; then a look, and a slow machine.
    assert freed_at < dead.expires_ms + 2000
    assert await store.sums() == Load(seqs=3)


async def test_what_replaces_a_dead_process_frees_its_slots_before_they_expire(
    store: Store, connect: Connect
) -> None:
    here, dead = connect(store, refresh_s=0.05), connect(store, ttl_s=1000.0)
    await dead.sync()
    await take(dead)
    late = await take(dead)
    async with running(here):
        assert here.replicas == 2
        assert await here.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        freed = Freed(here)
        await waits(dead)
        await former(store, dead).run()
        await freed.wait()
        await take(here)
        await here.sync()
        assert await store.redis.zrange(f"{{{store.prefix}}}:replicas", 0, -1) == [here.owner]
        assert set(await store.accounts()) == {here.owner}
        closed = await store.account(dead.owner)
        assert (closed.waits, closed.keeps) == (False, False)
        assert await store.sums() == await store.added() == CLAIM
        with pytest.raises(StoreAway):  # what it had still sent is late
            await dead.release(late)
    assert await store.sums() == CLAIM


async def test_slots_of_a_dead_process_are_not_asked_for_once_they_have_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.former.TTL_S", 0.05)
    with own_server("valkey-9", tmp_path) as server:
        server.kill()
        with anyio.fail_after(WITHIN_S):
            await FormerAccounts(server.url, prefix="gw", owner="dead", backends=("a",)).run()


async def test_an_attempt_to_free_the_slots_of_a_dead_process_that_came_half_way_is_repeated(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gateway.store")
    monkeypatch.setattr("gateway.store.former.REFRESH_S", 0.0)
    await take(connect(store, owner="dead"))
    replicas = f"{{{store.prefix}}}:replicas"
    await store.redis.set(replicas, "of another type")  # so that it frees the slot, but cannot leave
    numbers = set[int]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(FormerAccounts(store.url, prefix=store.prefix, owner="dead", backends=("b",)).run)
        with anyio.fail_after(WITHIN_S):
            while len(numbers) < 3:
                numbers.add((await store.account("dead")).number)
        await store.redis.delete(replicas)

    events = [record.fields["event"] for record in caplog.records]  # type: ignore[attr-defined]
    assert events == ["slots_freed"]


async def test_slots_of_a_dead_process_are_freed_once_the_store_answers(
    tmp_path: Path, connect: Connect
) -> None:
    with own_server("valkey-9", tmp_path, keeps=True) as server:
        store = SimpleNamespace(url=server.url, prefix="gw")
        here, dead = connect(store), connect(store, ttl_s=1000.0)
        await take(dead)
        await take(dead)
        assert await here.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
        server.kill()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(former(store, dead).run)
            for _ in range(100):  # it finds nobody there
                await anyio.lowlevel.checkpoint()
            await anyio.to_thread.run_sync(server.start)
        await take(here)
        await take(here)


async def test_a_backend_that_nobody_uses_leaves_no_keys(store: Store, connect: Connect) -> None:
    ledger = connect(store, ttl_s=0.05)
    await ledger.release(await take(ledger))

    with anyio.fail_after(WITHIN_S):
        while [key async for key in store.redis.scan_iter(match=f"*{store.prefix}*")]:
            pass


async def test_a_backend_that_was_removed_is_settled_only_while_something_is_held_there(
    store: Store, connect: Connect
) -> None:
    ledger = connect(store)
    slot = await take(ledger)
    ledger.keep_only({"other"})

    await ledger.sync()
    assert list(ledger.loads()) == ["b"]
    assert await store.sums() == CLAIM
    await ledger.release(slot)
    await ledger.sync()
    assert not ledger.loads()

    ledger.keep_only({"b"})  # which has returned
    await take(ledger)
    await ledger.sync()
    assert list(ledger.loads()) == ["b"]
    assert await store.sums() == await store.added() == CLAIM


# ------------------------------------------------------------------ lost


async def test_slots_that_are_held_are_counted_again_after_the_data_was_lost(
    store: Store, connect: Connect
) -> None:
    here, there = connect(store), connect(store)
    kept = [await take(here), await take(there)]
    await here.sync()
    await there.sync()

    await store.lose()
    above = await take(there)
    await here.sync()
    await there.sync()

    assert await store.sums() == await store.added() == CLAIM + CLAIM + CLAIM
    for ledger, slot in [(here, kept[0]), (there, kept[1]), (there, above)]:
        await ledger.release(slot)
    assert await store.sums() == Load()
    assert await store.accounts() == {}


async def test_slots_whose_leases_expired_are_counted_again(store: Store, connect: Connect) -> None:
    here, there = connect(store), connect(store)
    slot = await take(here)
    await here.answered(slot)
    await here.sync()

    await store.expire(here.owner)
    await there.acquire("b", Load(), Load())  # which reclaims it
    assert await store.sums() == Load()
    await here.sync()

    assert await store.sums() == await store.added() == CLAIM.after_first_token
    await here.release(slot)
    assert await store.sums() == Load()


async def test_everything_is_counted_again_after_a_key_was_evicted(store: Store, connect: Connect) -> None:
    here, there = connect(store), connect(store)
    slots = [await take(here), await take(there)]

    await store.redis.delete(store.key("b", "accounts"))
    await here.sync()
    await there.sync()

    assert await store.sums() == await store.added() == CLAIM + CLAIM
    assert await store.sums(owner=here.owner) == CLAIM
    await here.release(slots[0])
    await there.release(slots[1])
    assert await store.sums() == Load()


async def test_who_finds_one_account_lost_has_all_counted_again_at_once(
    store: Store, connect: Connect
) -> None:
    here = connect(store, **NO_LOOKS, takes_turns=["a", "b"])
    async with running(here):
        assert isinstance(await here.acquire("a", CLAIM, LIMITS), Slot)
        await take(here)
        await store.lose()
        await take(here)
        with anyio.fail_after(WITHIN_S):
            while here.owner not in await store.accounts("a"):
                pass


async def test_what_was_done_alone_is_told_by_the_next_synchronisation(
    store: Store, connect: Connect
) -> None:
    ledger = connect(store)
    await ledger.sync()  # which renewed everything: the next one only does what is new

    slot = await ledger.acquire_alone("b", CLAIM, LIMITS)
    assert isinstance(slot, Slot)
    await ledger.sync()
    assert await store.sums() == CLAIM
    await ledger.answered_alone(slot)
    await ledger.sync()
    assert await store.sums() == CLAIM.after_first_token
    await ledger.release_alone(slot)
    await ledger.sync()
    assert await store.sums() == Load()


async def test_a_synchronisation_that_began_before_there_was_news_of_the_server_does_not_count(
    store: Store, connect: Connect
) -> None:
    """What it did not cover may have failed meanwhile."""
    ledger, began, counted = connect(store, **NO_LOOKS), 0, list[int]()

    def begin() -> Facts:
        nonlocal began
        began += 1
        if began == 1:
            ledger.resync()
        return Facts()

    ledger.exchange.join(begin, lambda facts: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.run, lambda failure: counted.append(began))
        with anyio.fail_after(WITHIN_S):
            while not counted:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert counted[0] > 1


async def test_who_begins_or_ceases_to_hear_messages_looks_at_once_for_what_it_missed(
    store: Store, connect: Connect
) -> None:
    ledger, began = connect(store, **NO_LOOKS), 0

    def begin() -> Facts:
        nonlocal began
        began += 1
        return Facts()

    async def has_begun(times: int) -> None:
        with anyio.fail_after(WITHIN_S):
            while began < times:
                await anyio.lowlevel.checkpoint()

    ledger.exchange.join(begin, lambda facts: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.run)
        await has_begun(2)
        await store.redis.client_kill_filter(_type="pubsub")
        await has_begun(3)
        tasks.cancel_scope.cancel()


async def test_scripts_are_loaded_again_after_the_server_forgot_them(store: Store, connect: Connect) -> None:
    ledger = connect(store)
    slot = await take(ledger)
    await store.redis.script_flush()
    await ledger.answered(slot)
    await store.redis.script_flush()
    await ledger.sync()
    await store.redis.script_flush()
    await ledger.release(slot)

    assert await store.sums() == Load()


async def test_messages_of_a_gateway_that_counts_otherwise_are_not_understood(
    store: Store, connect: Connect
) -> None:
    here, there = connect(store, **NO_LOOKS), connect(store, **NO_LOOKS)
    async with running(here):
        await waits(here)
        freed = Freed(here)
        slot = await take(there)
        for counters in ("2 3", "2 3 4 5 6 7 8 9", "2 3 4 5 6 seven"):
            await store.redis.publish(f"{store.prefix}:freed", f"another 1 {counters} b")
        await there.release(slot)
        await freed.wait()


# ------------------------------------------------------------------ away


async def test_a_server_that_is_not_there_is_said_to_be_away(tmp_path: Any, connect: Connect) -> None:
    nowhere = RedisLedger(f"unix://{tmp_path}/none.sock")
    with pytest.raises(StoreAway, match="ConnectionError"):
        await nowhere.acquire("b", CLAIM, LIMITS)
    with pytest.raises(StoreAway):
        await nowhere.sync()
    assert nowhere.load("b") == Load()
    await nowhere.aclose()


async def test_a_password_is_not_told() -> None:
    ledger = RedisLedger("redis://user:hunter2@127.0.0.1:1/0")
    with pytest.raises(StoreAway) as failure:
        await ledger.acquire("b", CLAIM, LIMITS)
    await ledger.aclose()
    assert "hunter2" not in str(failure.value)


async def test_a_server_that_refuses_is_away_too(store: Store, connect: Connect) -> None:
    ledger = connect(store)
    await store.redis.set(store.key("b", "accounts"), "of another type")

    with pytest.raises(StoreAway, match="WRONGTYPE"):
        await ledger.acquire("b", CLAIM, LIMITS)
    with pytest.raises(RedisError):
        await store.redis.hlen(store.key("b", "accounts"))


async def test_a_server_that_is_full_of_jobs_shares_limits_all_the_same(stoppable: RedisServer) -> None:
    async with Redis.from_url(stoppable.url) as redis:
        await redis.config_set("maxmemory", 1)
    one, two = (RedisLedger(stoppable.url, command_s=10.0, **NO_LOOKS) for _ in range(2))
    async with running(one, two):
        slots = [await take(one), await take(two)]
        assert isinstance(await one.acquire("b", CLAIM, LIMITS), Exclusion)
        await one.release(slots[0])
        assert isinstance(await two.acquire("b", CLAIM, LIMITS), Slot)
    for ledger in (one, two):
        await ledger.aclose()


async def test_a_server_that_is_full_hears_of_processes_and_their_facts_all_the_same(
    stoppable: RedisServer,
) -> None:
    async with Redis.from_url(stoppable.url) as redis:
        await redis.config_set("maxmemory", 1)
    one, two = (
        Leases(stoppable.url, prefix="gw", owner=owner, ttl_s=60.0, command_s=10.0)
        for owner in ("one", "two")
    )
    await one.heartbeat("facts", is_urgent=False)
    beat = await two.heartbeat("", is_urgent=True)
    for leases in (one, two):
        await leases.aclose()
    assert (beat.replicas, [told.owner for told in beat.told]) == (2, ["one"])
