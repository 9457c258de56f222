"""What is kept for a process beyond what it uses: it costs no command, and is nobody's loss."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream
from redis.asyncio import Redis
from support.redis_server import RedisServer

from gateway.core.admission import COUNTERS
from gateway.core.decision import Exclusion
from gateway.core.load import UNLIMITED, Load
from gateway.ports import Slot
from gateway.store.connections import StoreAway
from gateway.store.leases import Leases, Order
from gateway.store.redis import PLACED_MAX, RedisLedger
from gateway.store.wire import packed

CHAT = Load(seqs=1, share=10_000, kv_blocks=10, prefill_ms=20)
DOCUMENT = Load(seqs=1, share=80_000, kv_blocks=900, long_seqs=1, long_unanswered=1, prefill_ms=1_500)
LIMITS = Load(
    seqs=UNLIMITED,
    share=1_000_000,
    kv_blocks=10_000,
    long_seqs=UNLIMITED,
    long_unanswered=1,
    prefill_ms=4_019,
)
KNEE = 100
WITHIN_S = 20.0

Store = Any  # tests/store/conftest.py
Connect = Callable[..., RedisLedger]

pytestmark = pytest.mark.usefixtures("anyio_backend")


@asynccontextmanager
async def running(store: Store, *ledgers: RedisLedger) -> AsyncIterator[None]:
    """Run ledgers in the background, each hearing what the others say."""
    channel = f"{store.prefix}:freed"
    async with anyio.create_task_group() as tasks:
        before = await store.redis.publish(channel, "x y z")
        for ledger in ledgers:
            tasks.start_soon(ledger.run)
        with anyio.fail_after(WITHIN_S):
            while await store.redis.publish(channel, "x y z") < before + len(ledgers):
                pass
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def running_quietly(ledger: RedisLedger) -> AsyncIterator[None]:
    """Run a ledger in the background, which hears and has nothing to say by itself."""
    synced = anyio.Semaphore(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.run, lambda failure: synced.release())
        with anyio.fail_after(WITHIN_S):
            while not ledger._hears:
                await anyio.lowlevel.checkpoint()
            for _ in range(3):
                ledger.resync()
                await synced.acquire()
        yield
        tasks.cancel_scope.cancel()


async def take(ledger: RedisLedger, count: int = 1, claim: Load = CHAT) -> list[Slot]:
    slots = []
    for _ in range(count):
        slot = await ledger.acquire("b", claim, LIMITS)
        assert isinstance(slot, Slot)
        slots.append(slot)
    return slots


def at_once(ledger: RedisLedger, claim: Load = CHAT, limits: Load = LIMITS) -> list[Slot]:
    """Take all that is to be had without asking."""
    slots = []
    while (slot := ledger.acquire_at_once("b", claim, limits)) is not None:
        slots.append(slot)
    return slots


@pytest.fixture
def quiet(store: Store, connect: Connect) -> Callable[..., RedisLedger]:
    """Return a function that makes a ledger that does nothing by itself but hear."""

    def quiet_(**options: Any) -> RedisLedger:
        return connect(store, **{"refresh_s": 60.0, "tick_s": 60.0, **options})

    return quiet_


async def test_what_is_kept_counts_and_can_be_had_without_asking_but_no_more(
    store: Store, quiet: Connect
) -> None:
    here = quiet()
    async with running(store, here):
        await take(here, 20)
        account = (await store.accounts())[here.owner]
        assert account.keeps

        more = at_once(here)
        observer = quiet()
        observer.load("b")
        await observer.sync()
        assert await store.sums() == account.kept
        assert observer.load("b") == account.used

        kept = (await store.accounts())[here.owner].kept
        assert here.held("b") + CHAT != kept
        assert here.held("b").is_within(kept)
        assert not (here.held("b") + CHAT).is_within(kept)
        assert (await store.accounts())[here.owner] == account  # nobody was asked
        for slot in more:
            assert here.release_at_once(slot)
        assert len(at_once(here)) == len(more)  # what was given back can be had again
        assert more


async def test_who_finds_no_room_gets_at_once_what_another_keeps(store: Store, quiet: Connect) -> None:
    here, there = quiet(), quiet()
    async with running(store, here, there):
        slots = await take(here, 40)
        for slot in slots[:30]:
            assert here.release_at_once(slot)
        assert (await store.sums()).seqs > 10

        with anyio.fail_after(WITHIN_S):
            await take(there, KNEE - 10)

        assert await store.sums() == here.held("b") + there.held("b")
        assert (await store.sums()).seqs == KNEE
        assert await there.acquire("b", CHAT, LIMITS) is Exclusion.AT_KNEE
        assert here.acquire_at_once("b", CHAT, LIMITS) is None
        assert await here.acquire("b", CHAT, LIMITS) is Exclusion.AT_KNEE
        await there.sync()
        assert not await waits(store, there)  # which would keep everybody from keeping anything


async def test_who_does_not_give_back_what_it_keeps_is_waited_for_once(
    store: Store, quiet: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.redis.MUTE_S", 1000.0)
    here = quiet()
    async with running(store, here):
        await say(store, "other", used=Load(), kept=Load(seqs=KNEE, share=LIMITS.share))
        for given_back_s in (0.01, 1000.0):
            monkeypatch.setattr("gateway.store.redis.GIVEN_BACK_S", given_back_s)
            with anyio.fail_after(WITHIN_S):
                assert await here.acquire("b", CHAT, LIMITS) is Exclusion.AT_KNEE


async def test_who_did_not_give_back_is_waited_for_again_also_by_one_that_never_ceases_to_ask(
    store: Store, quiet: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.redis.MUTE_S", 0.5)
    here = quiet()
    async with running(store, here), anyio.create_task_group() as tasks:
        await say(store, "other", used=Load(), kept=Load(seqs=KNEE, share=LIMITS.share))
        monkeypatch.setattr("gateway.store.redis.GIVEN_BACK_S", 0.01)
        assert await here.acquire("b", CHAT, LIMITS) is Exclusion.AT_KNEE

        async def ask_on() -> None:
            while True:
                assert await here.acquire("b", CHAT, LIMITS) is Exclusion.AT_KNEE

        monkeypatch.setattr("gateway.store.redis.GIVEN_BACK_S", 1000.0)
        tasks.start_soon(ask_on)
        with anyio.fail_after(WITHIN_S):
            while not here._account("b").waiters:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_who_waits_for_what_others_keep_says_so_with_every_command_until_it_leaves(
    store: Store, quiet: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is given back meanwhile would not be told it; or nobody would keep anything after it."""
    monkeypatch.setattr("gateway.store.redis.GIVEN_BACK_S", 1000.0)
    here = quiet()
    async with running(store, here), anyio.create_task_group() as tasks:
        await say(store, "other", used=Load(), kept=Load(seqs=KNEE, share=LIMITS.share))
        tasks.start_soon(here.acquire, "b", CHAT, LIMITS)
        with anyio.fail_after(WITHIN_S):
            while not await waits(store, here):  # it was refused
                pass
        for _ in range(2):  # the first may have begun before the refusal was heard
            await here.sync()
        assert await waits(store, here)
        tasks.cancel_scope.cancel()
    await here.sync()
    assert not await waits(store, here)


async def test_many_at_once_in_two_processes_fill_it_exactly(store: Store, quiet: Connect) -> None:
    ledgers = [quiet(), quiet()]
    outcomes: list[tuple[RedisLedger, Slot | Exclusion]] = []

    async def ask(ledger: RedisLedger) -> None:
        outcomes.append((ledger, await ledger.acquire("b", replace(CHAT, prefill_ms=0), LIMITS)))

    async with running(store, *ledgers):
        for _ in range(3):
            for _ in range(9):  # one after the other, so that something is kept
                await ask(ledgers[0])
                await ask(ledgers[1])
            async with anyio.create_task_group() as tasks:
                for number in range(2 * KNEE):
                    tasks.start_soon(ask, ledgers[number % 2])
            taken = [(ledger, slot) for ledger, slot in outcomes if isinstance(slot, Slot)]
            assert len(taken) == KNEE
            assert (await store.sums()).seqs == KNEE
            outcomes.clear()
            for ledger, slot in taken:
                if not ledger.release_at_once(slot):
                    await ledger.release(slot)


async def test_what_a_dead_process_kept_is_missed_until_its_account_expires(
    store: Store, quiet: Connect
) -> None:
    dead, here = quiet(), quiet()
    async with running(store, here):
        async with running(store, dead):
            for slot in await take(dead, 40):
                dead.release_at_once(slot)
        kept = await store.sums()
        assert kept.seqs > 40

        room = (LIMITS.share - kept.share) // CHAT.share
        await take(here, room)
        assert await here.acquire("b", CHAT, LIMITS) is Exclusion.AT_KNEE
        await store.expire(dead.owner)

        await take(here, KNEE - room)
        assert await store.sums() == here.held("b")


async def test_nothing_is_kept_while_somebody_waits(store: Store, quiet: Connect) -> None:
    here, there = quiet(), quiet()
    freed = anyio.Event()
    there.on_freed(lambda backend: freed.set())
    async with running(store, here, there):
        slots = await take(here, 10)
        assert (await store.accounts())[here.owner].keeps

        there.waits({"b"})
        with anyio.fail_after(WITHIN_S):
            while (await store.accounts())[here.owner].keeps:
                pass
            await freed.wait()  # it is told that something was given back
        await there.sync()
        freed = anyio.Event()
        assert not here.release_at_once(slots[0])
        await here.release(slots[0])
        with anyio.fail_after(WITHIN_S):
            await freed.wait()
        assert there.load("b") == await store.sums() == here.held("b")

        await take(here)
        assert not (await store.accounts())[here.owner].keeps

        there.waits(frozenset())
        await there.sync()
        await take(here)
        assert (await store.accounts())[here.owner].keeps


async def test_what_is_not_used_for_a_moment_is_given_back(store: Store, quiet: Connect) -> None:
    here = quiet(tick_s=0.01)
    async with running(store, here):
        for slot in await take(here, 40):
            if not here.release_at_once(slot):
                await here.release(slot)
        with anyio.fail_after(WITHIN_S):
            while await store.accounts():
                pass
        assert at_once(here) == []


async def test_others_know_of_what_is_placed_without_asking_after_some_requests(
    store: Store, quiet: Connect
) -> None:
    here, there = quiet(), quiet()
    async with running(store, here, there):
        await here.sync()
        assert here.replicas == 2
        await take(here, 40)
        told = (await store.accounts())[here.owner].used
        for _ in range(PLACED_MAX):
            slot = here.acquire_at_once("b", CHAT, LIMITS)
            assert slot is not None
            here.release_at_once(slot)
        with anyio.fail_after(WITHIN_S):
            while (await store.accounts())[here.owner].used == told:
                pass


async def test_of_what_is_kept_only_what_was_used_lately_stays(store: Store, quiet: Connect) -> None:
    here = quiet(tick_s=0.01)
    async with running(store, here):
        slots = await take(here, 40)
        for slot in slots[10:]:
            if not here.release_at_once(slot):
                await here.release(slot)
        with anyio.fail_after(WITHIN_S):
            while (await store.sums()).seqs > 10:
                pass
        assert at_once(here) == []


async def test_what_is_kept_stays_below_the_lowest_limit_it_is_wanted_under(
    store: Store, quiet: Connect
) -> None:
    here = quiet()
    async with running(store, here):
        await take(here, 20)
        assert (await store.sums()).seqs > 20

        assert isinstance(await here.acquire("b", CHAT, replace(LIMITS, share=220_000)), Slot)

        assert await store.sums() == here.held("b")


@pytest.mark.parametrize(
    ("claim", "limits"),
    [
        (CHAT, replace(LIMITS, share=500_000)),
        (CHAT, replace(LIMITS, seqs=30)),
        (CHAT, replace(LIMITS, kv_blocks=9_000)),
        (CHAT, replace(LIMITS, prefill_ms=3_000)),
        (DOCUMENT, LIMITS),
    ],
    ids=["less-of-the-knee", "seqs", "less-kv", "less-prompt-work", "another-counter"],
)
async def test_what_was_kept_under_one_limit_is_not_used_under_a_lower_one(
    store: Store, quiet: Connect, claim: Load, limits: Load
) -> None:
    here = quiet()
    async with running(store, here):
        await take(here, 20)
        kept = at_once(here)
        for slot in kept:
            here.release_at_once(slot)

        assert at_once(here, claim, limits) == []
        assert len(at_once(here)) == len(kept) > 0


async def test_what_was_kept_long_ago_is_not_used_unasked(store: Store, quiet: Connect) -> None:
    here = quiet(ttl_s=0.3)
    async with running(store, here):
        await take(here, 20)
        slot = here.acquire_at_once("b", CHAT, LIMITS)
        await anyio.sleep(0.11)
        assert at_once(here) == []
        assert slot is not None


async def test_who_does_not_hear_keeps_nothing(store: Store, connect: Connect) -> None:
    here = connect(store)
    await take(here, 20)

    assert not (await store.accounts())[here.owner].keeps
    assert at_once(here) == []


async def test_a_gate_for_documents_is_free_for_others_at_once(store: Store, quiet: Connect) -> None:
    here, there = quiet(), quiet()
    async with running(store, here, there):
        (document,) = await take(here, 1, DOCUMENT)
        await take(here, 3)
        assert (await store.accounts())[here.owner].keeps

        await here.answered(document)
        assert (await store.sums()).long_unanswered == 0
        assert not here.release_at_once(document)
        await here.release(document)
        assert (await store.sums()).long_seqs == 0
        await take(there, 1, DOCUMENT)


async def test_near_a_limit_nothing_is_kept(store: Store, quiet: Connect) -> None:
    here = quiet()
    async with running(store, here):
        slots = await take(here, 80)
        assert not (await store.accounts())[here.owner].keeps
        assert await store.sums() == here.held("b")
        await here.release(slots.pop())
        assert await store.sums() == here.held("b")


async def say(store: Store, owner: str, *, waits: bool = False, used: Load, kept: Load | None = None) -> None:
    """Have the server say this of a process, of which nobody hears a word."""
    seconds, microseconds = await store.redis.time()
    words = [1000 * seconds + microseconds // 1000 + 60_000, 1, int(waits), int(kept is not None)]
    counters = [getattr(load, name) for load in (used, kept or used) for name in COUNTERS]
    await store.redis.hset(store.key("b", "accounts"), owner, " ".join(map(str, [*words, *counters])))


async def test_a_wish_that_was_not_heard_is_found_at_the_next_look(store: Store, quiet: Connect) -> None:
    here = quiet(tick_s=0.01)
    async with running(store, here):
        slots = await take(here, 20)
        await say(store, "other", waits=True, used=Load())

        with anyio.fail_after(WITHIN_S):
            while (await store.accounts())[here.owner].kept != here.held("b"):
                pass
        for _ in range(5):
            slots += await take(here)
            assert at_once(here) == []
            assert await store.sums() == here.held("b")


SOME = Load(seqs=4, share=40_000, kv_blocks=40)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"used": SOME}, {"used": replace(SOME, seqs=3)}),
        ({"used": Load(), "kept": SOME}, {"used": Load(), "kept": replace(SOME, seqs=3)}),
        ({"used": SOME, "kept": SOME + SOME}, {"used": SOME, "kept": SOME}),
        ({"used": Load(), "kept": SOME}, None),
        ({"used": SOME}, None),
    ],
    ids=["used", "kept", "kept beyond what is used", "kept by the dead", "used by the dead"],
)
async def test_who_waits_finds_at_the_next_look_what_nobody_told(
    store: Store, quiet: Connect, before: dict[str, Any], after: dict[str, Any] | None
) -> None:
    here, woken = quiet(tick_s=0.01), anyio.Event()
    async with running(store, here):
        await say(store, "other", **before)
        here.waits({"b"})
        with anyio.fail_after(WITHIN_S):
            while here.others("b") != before["used"] or not await waits(store, here):
                await anyio.lowlevel.checkpoint()
        here.on_freed(lambda backend: woken.set())

        if after is None:
            await store.expire("other")
        else:
            await say(store, "other", **after)

        with anyio.fail_after(WITHIN_S):
            await woken.wait()


async def waits(store: Store, ledger: RedisLedger) -> bool:
    """Return whether the server knows that somebody waits at a process."""
    text = await store.redis.hget(store.key("b", "accounts"), ledger.owner)
    return text is not None and text.split()[2] == "1"


async def test_a_wish_is_said_also_while_a_command_is_under_way(
    stoppable: RedisServer, store_type: Callable[..., Store]
) -> None:
    ledger = RedisLedger(stoppable.url, command_s=WITHIN_S, refresh_s=60.0, tick_s=60.0)
    store = store_type(stoppable.url, "gw", Redis.from_url(stoppable.url, decode_responses=True))
    async with running_quietly(ledger), anyio.create_task_group() as tasks:
        await take(ledger)
        at_once(ledger)
        stoppable.stall()
        tasks.start_soon(take, ledger)
        for _ in range(2):
            await anyio.wait_all_tasks_blocked()
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()  # the command is under way
        ledger.waits({"b"})
        stoppable.resume()
        with anyio.fail_after(WITHIN_S):
            while not await waits(store, ledger):
                pass
        tasks.cancel_scope.cancel()
    await ledger.aclose()
    await store.redis.aclose()


@asynccontextmanager
async def client_of(server: RedisServer) -> AsyncIterator[SocketStream]:
    """Yield a connection to a server, which has accepted it."""
    async with await anyio.connect_unix(server.url.removeprefix("unix://")) as stream:
        await stream.send(b"PING\r\n")
        assert await stream.receive() == b"+PONG\r\n"
        yield stream


@pytest.mark.parametrize("has_kept", [False, True])
async def test_what_is_wanted_while_a_command_is_under_way_is_given_back_after_it(
    stoppable: RedisServer, store_type: Callable[..., Store], has_kept: bool
) -> None:
    ledger = RedisLedger(stoppable.url, command_s=WITHIN_S, refresh_s=60.0, tick_s=60.0)
    store = store_type(stoppable.url, "gw", Redis.from_url(stoppable.url, decode_responses=True))
    async with running_quietly(ledger):
        await ledger.acquire("another", CHAT, LIMITS)  # connects
        if has_kept:
            await take(ledger)
            at_once(ledger)
        async with client_of(stoppable) as other, anyio.create_task_group() as tasks:
            stoppable.stall()
            tasks.start_soon(take, ledger)
            for _ in range(20):  # by now it is sent
                await anyio.lowlevel.checkpoint()
            # Servers write first what they have to write last: this is heard before the reply.
            await other.send(b"*3\r\n" + packed(["PUBLISH", "gw:freed", "other b"]))
            stoppable.resume()
        with anyio.fail_after(WITHIN_S):
            while (await store.accounts())[ledger.owner].keeps:
                pass
    await ledger.aclose()
    await store.redis.aclose()


async def test_who_keeps_nothing_answers_no_wish(store: Store, quiet: Connect) -> None:
    here = quiet(takes_turns=["b"])
    async with running_quietly(here):
        await take(here)
        told = anyio.Event()
        here.on_freed(lambda backend: told.set())
        before = (await store.account(here.owner)).number
        await store.redis.publish(f"{store.prefix}:freed", "other b")
        await store.redis.publish(f"{store.prefix}:freed", "other 1 0 0 0 0 0 0 b")  # heard after it
        with anyio.fail_after(WITHIN_S):
            await told.wait()
        await here.sync()
        assert (await store.account(here.owner)).number == before + 1


async def test_who_ceases_to_wait_says_so_at_the_next_tick(store: Store, quiet: Connect) -> None:
    """Else nobody would keep anything until it looks at that backend again."""
    here = quiet(tick_s=0.01)
    async with running_quietly(here):
        for backends in ({"b"}, frozenset[str]()):
            here.waits(backends)
            with anyio.fail_after(WITHIN_S):
                while await waits(store, here) != bool(backends):
                    pass


async def test_who_has_said_that_it_waits_does_not_say_it_again(store: Store, quiet: Connect) -> None:
    here, numbers = quiet(), []
    for _ in range(2):
        here.waits({"b"})
        for _ in range(5):  # by now a command has begun
            await anyio.lowlevel.checkpoint()
        await here.sync()
        numbers.append((await store.account(here.owner)).number)
    assert numbers == [2, 3]


async def test_who_does_not_hear_any_more_uses_nothing_unasked(
    stoppable: RedisServer, store_type: Callable[..., Store]
) -> None:
    ledger = RedisLedger(stoppable.url, ttl_s=1000.0, refresh_s=60.0, tick_s=60.0)
    store = store_type(stoppable.url, "gw", Redis.from_url(stoppable.url, decode_responses=True))
    async with running(store, ledger):
        await take(ledger, 20)
        slots = at_once(ledger)
        for slot in slots[1:]:
            assert ledger.release_at_once(slot)

        stoppable.kill()

        with anyio.fail_after(WITHIN_S):
            while (kept := ledger.acquire_at_once("b", CHAT, LIMITS)) is not None:
                await ledger.release_alone(kept)
                await anyio.lowlevel.checkpoint()
        assert not ledger.release_at_once(slots[0])
    await ledger.aclose()
    await store.redis.aclose()


async def test_who_gets_no_answer_for_one_backend_uses_nothing_unasked_of_any(
    store: Store, quiet: Connect
) -> None:
    here = quiet()
    async with running(store, here):
        assert isinstance(await here.acquire("b", CHAT, LIMITS), Slot)
        slot = here.acquire_at_once("b", CHAT, LIMITS)
        assert slot is not None
        assert here.release_at_once(slot)
        await store.redis.set(store.key("c", "accounts"), "of another type")
        with pytest.raises(StoreAway):
            await here.acquire("c", CHAT, LIMITS)
        assert here.acquire_at_once("b", CHAT, LIMITS) is None


async def test_who_ends_neither_keeps_anything_nor_waits(store: Store, quiet: Connect) -> None:
    """Else nobody would have that surplus, or any, until its accounts expire."""
    keeps, waits = quiet(), quiet()
    async with running(store, keeps, waits):
        assert isinstance(await keeps.acquire("b", CHAT, LIMITS), Slot)
        assert keeps.acquire_at_once("b", CHAT, LIMITS) is not None
        waits.waits({"c"})
        await waits.sync()
        assert (await store.account(keeps.owner)).keeps
        assert (await store.account(waits.owner, "c")).waits

        await keeps.aclose()
        await waits.aclose()

        assert not (await store.account(keeps.owner)).keeps
        assert await store.accounts() == {}
        assert not (await store.account(waits.owner, "c")).waits


async def test_who_is_cut_off_from_messages_alone_keeps_nothing(store: Store, quiet: Connect) -> None:
    here = quiet()
    async with running(store, here):
        await take(here, 20)
        await store.redis.client_kill_filter(_type="pubsub")
        with anyio.fail_after(WITHIN_S):
            while (slot := here.acquire_at_once("b", CHAT, LIMITS)) is not None:
                await here.release(slot)
                await anyio.lowlevel.checkpoint()
        await take(here)
        assert not (await store.accounts())[here.owner].keeps


async def test_of_a_backend_that_takes_turns_nothing_is_kept(store: Store, quiet: Connect) -> None:
    here = quiet(takes_turns=["b"])
    async with running(store, here):
        slots = await take(here, 20)
        assert at_once(here) == []
        assert await store.sums() == here.held("b")

        assert not here.release_at_once(slots[0])
        await here.release(slots[0])
        assert await store.sums() == here.held("b")


@pytest.fixture
async def open_leases(store: Store) -> AsyncIterator[Callable[[str], Leases]]:
    """Return a function that makes a process's leases."""
    made: list[Leases] = []

    def open_(owner: str) -> Leases:
        made.append(Leases(store.url, prefix=store.prefix, owner=owner, ttl_s=60.0, command_s=10.0))
        return made[-1]

    yield open_
    for leases in made:
        await leases.aclose()


def order(number: int, used: int = 0, claim: int = 0, **changes: Any) -> Order:
    """Return an order of a process that may keep surplus, up to a limit of 100 sequences."""
    none, limits = Load(-1, -1, -1, -1, -1, -1), Load(100, *[UNLIMITED] * 5)
    rest = {"ceiling": replace(none, seqs=100), "waits": False, "may_keep": True, "deaf": 0, **changes}
    claims = [(Load(claim), limits)] if claim else ()
    return Order(**{"number": number, "used": Load(used), "kept": Load(used), "claims": claims, **rest})


@pytest.mark.parametrize(
    ("others", "used", "claim", "kept"),
    [
        pytest.param(0, 8, 1, 12, id="as-much-again-and-a-quarter-of-the-use"),
        pytest.param(0, 60, 1, 68, id="half-of-what-is-left-of-three-quarters"),
        pytest.param(0, 0, 25, 50, id="as-much-as-half-of-it"),
        pytest.param(0, 0, 26, 26, id="more-than-half-of-it"),
        pytest.param(10, 0, 13, 26, id="as-much-as-half-of-an-even-share"),
        pytest.param(10, 0, 14, 14, id="more-than-half-of-an-even-share"),
    ],
)
async def test_how_much_surplus_is_granted(
    open_leases: Callable[[str], Leases], others: int, used: int, claim: int, kept: int
) -> None:
    if others:
        await open_leases("there").settle("b", order(1, others, may_keep=False))
    reply = await open_leases("here").settle("b", order(1, used, claim))
    assert (list(reply.outcomes), reply.kept, reply.may_keep) == ([0], Load(kept), kept > used + claim)


async def test_surplus_stays_as_long_as_it_is_wanted_and_grows_only_with_what_is_asked_for(
    open_leases: Callable[[str], Leases],
) -> None:
    here = open_leases("here")
    assert (await here.settle("b", order(1, claim=10))).kept == Load(20)
    for number, (wanted, kept) in enumerate([(20, 20), (30, 20), (15, 15), (20, 15), (0, 10)], start=2):
        reply = await here.settle("b", order(number, 10, kept=Load(wanted)))
        assert (reply.kept, reply.may_keep) == (Load(kept), True)


@pytest.mark.parametrize("waiting", ["who-has-it", "another"])
async def test_surplus_is_taken_back_from_who_does_not_give_it_while_anybody_waits(
    open_leases: Callable[[str], Leases], waiting: str
) -> None:
    here, there = open_leases("here"), open_leases("there")
    assert (await here.settle("b", order(1, claim=10))).kept == Load(20)
    if waiting == "another":
        await there.settle("b", order(1, waits=True))
    reply = await here.settle("b", order(2, 10, waits=waiting == "who-has-it", kept=Load(20)))
    assert (reply.kept, reply.may_keep) == (Load(10), False)
    assert (await there.settle("b", order(2))).others_kept == Load(10)


async def test_what_is_published_of_surplus(store: Store, open_leases: Callable[[str], Leases]) -> None:
    """Only what somebody can give back is asked for, and only what was used is said to be free."""
    here, there, dead = open_leases("here"), open_leases("there"), open_leases("dead")
    async with store.redis.pubsub(ignore_subscribe_messages=True) as said:
        await said.subscribe(f"{store.prefix}:freed")
        while not await store.redis.publish(f"{store.prefix}:freed", "begun"):
            pass
        await here.settle("b", order(1, waits=True))  # nobody has any
        await here.settle("b", order(2))
        assert (await dead.settle("b", order(1, claim=10))).kept == Load(20)
        await here.settle("b", order(3, waits=True, deaf=1))  # who has some does not hear
        await here.settle("b", order(4))
        await here.settle("b", order(5, waits=True))
        await store.expire("dead")
        version = (await there.settle("b", order(1))).version
        await store.redis.publish(f"{store.prefix}:freed", "over")
        told = []
        with anyio.fail_after(WITHIN_S):
            while (message := await said.get_message(timeout=WITHIN_S)) is None or message["data"] != "over":
                told += [message["data"]] if message else []
    assert told == ["begun", "here b", f"dead {version} 10 0 0 0 0 0 b"]


async def test_what_is_published_of_use_while_somebody_waits(
    store: Store, open_leases: Callable[[str], Leases]
) -> None:
    """Only what has become free, and only if something has."""
    here, there = open_leases("here"), open_leases("there")
    async with store.redis.pubsub(ignore_subscribe_messages=True) as said:
        await said.subscribe(f"{store.prefix}:freed")
        while not await store.redis.publish(f"{store.prefix}:freed", "begun"):
            pass
        await here.settle("b", order(1, waits=True))
        for number in (1, 2):
            await there.settle("b", order(number, 10))
        fewer = (await there.settle("b", order(3, 7, claim=1))).version
        await there.settle("b", order(4, 12))
        other = Load(5, 3)
        others = (await there.settle("b", replace(order(5), used=other, kept=other))).version
        await store.redis.publish(f"{store.prefix}:freed", "over")
        told = []
        with anyio.fail_after(WITHIN_S):
            while (message := await said.get_message(timeout=WITHIN_S)) is None or message["data"] != "over":
                told += [message["data"]] if message else []
    assert told == ["begun", f"there {fewer} 2 0 0 0 0 0 b", f"there {others} 7 0 0 0 0 0 b"]


async def test_a_store_that_has_lost_everything_goes_on_with_later_versions(
    store: Store, open_leases: Callable[[str], Leases]
) -> None:
    for _ in range(2):
        seconds, microseconds = await store.redis.time()
        reply = await open_leases("here").settle("b", order(1))
        assert reply.version >= seconds * 1_000_000 + microseconds
        await store.lose()
