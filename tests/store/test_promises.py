"""Idempotency keys: one contract, in memory and on every supported server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import anyio
import pytest
from support.redis_server import RedisServer, legs
from support.world import StillClock

from gateway.clock import SystemClock
from gateway.core.errors import StoreUnavailable
from gateway.core.idempotency import Promise, Standing, fingerprint
from gateway.ports import PromiseStore
from gateway.store.promises import MemoryPromises, RedisPromises

HOUR = 3_600.0
LEASE_S = 600.0
BYTES_MAX = 1_000
SIZE = 300 - 64  # of an answer that makes a record of 300 bytes

ONE = Promise("a", "/v1/chat/completions", "k-1", fingerprint(b"{}"), "req-1")
AGAIN = replace(ONE, runner="req-2")
OTHER_BODY = replace(ONE, runner="req-3", fingerprint=fingerprint(b"[]"))


@pytest.fixture(params=["memory", *legs()])
async def promises(
    request: pytest.FixtureRequest, open_store: Callable[[str], Any]
) -> AsyncIterator[PromiseStore]:
    if request.param == "memory":
        yield MemoryPromises(SystemClock(), BYTES_MAX)
        return
    server = await open_store(request.param)
    store = RedisPromises(server.url, prefix=server.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    yield store
    await store.aclose()


async def begun(promises: PromiseStore, promise: Promise) -> bytes | Standing:
    return await promises.begin(promise, LEASE_S)


async def lapsed(promises: PromiseStore, promise: Promise, lease_s: float = 0.001) -> None:
    """Begin, and return once the lease has run out."""
    assert await promises.begin(promise, lease_s) is Standing.BEGUN
    next_one = replace(promise, runner="req-next")
    with anyio.fail_after(10):
        while await begun(promises, next_one) is not Standing.BEGUN:
            await anyio.lowlevel.checkpoint()
    await promises.free(next_one)


async def test_what_is_kept_is_what_the_next_one_gets(promises: PromiseStore) -> None:
    answer = bytes(range(256))

    assert await begun(promises, ONE) is Standing.BEGUN
    assert await promises.keep(ONE, answer, HOUR)

    assert [await begun(promises, AGAIN), await begun(promises, AGAIN)] == [answer, answer]
    assert await begun(promises, OTHER_BODY) is Standing.REUSED


async def test_while_one_runs_the_others_do_not(promises: PromiseStore) -> None:
    assert await begun(promises, ONE) is Standing.BEGUN

    assert await begun(promises, AGAIN) is Standing.RUNNING
    assert await begun(promises, OTHER_BODY) is Standing.REUSED
    assert await begun(promises, ONE) is Standing.BEGUN  # as when a reply was lost


async def test_a_freed_key_is_anybodys(promises: PromiseStore) -> None:
    await begun(promises, ONE)
    await promises.free(ONE)

    assert await begun(promises, OTHER_BODY) is Standing.BEGUN
    await promises.free(OTHER_BODY)
    await promises.free(OTHER_BODY)
    assert await begun(promises, AGAIN) is Standing.BEGUN


async def test_owners_routes_and_keys_have_nothing_in_common(promises: PromiseStore) -> None:
    others = [
        replace(ONE, owner="b"),
        replace(ONE, owner=None),
        replace(ONE, route="/v1/completions"),
        replace(ONE, key="k-2"),
    ]
    for one in (ONE, *others):
        assert await begun(promises, one) is Standing.BEGUN
    await promises.keep(ONE, b"mine", HOUR)

    assert [await begun(promises, replace(one, runner="req-9")) for one in others] == [Standing.RUNNING] * 4


async def test_exactly_one_of_many_begins(promises: PromiseStore) -> None:
    outcomes: list[bytes | Standing] = []

    async def begin(number: int) -> None:
        outcomes.append(await begun(promises, replace(ONE, runner=f"req-{number}")))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(begin, number)

    assert sorted(map(str, outcomes)) == ["begun", *["running"] * 19]


async def test_a_mark_that_is_not_renewed_ends(promises: PromiseStore) -> None:
    await lapsed(promises, ONE)

    assert await begun(promises, AGAIN) is Standing.BEGUN


async def test_a_renewed_mark_lasts(promises: PromiseStore) -> None:
    await promises.begin(ONE, 0.2)
    assert await promises.renew(ONE, LEASE_S)
    await lapsed(promises, replace(ONE, key="k-2"), 0.2)

    assert await begun(promises, AGAIN) is Standing.RUNNING


async def test_a_late_runner_takes_its_mark_back_where_nobody_has_it(promises: PromiseStore) -> None:
    await lapsed(promises, ONE)

    assert await promises.renew(ONE, LEASE_S)
    assert await begun(promises, AGAIN) is Standing.RUNNING


async def test_a_late_runner_cannot_touch_what_another_runs(promises: PromiseStore) -> None:
    await lapsed(promises, ONE)
    assert await begun(promises, AGAIN) is Standing.BEGUN

    assert not await promises.renew(ONE, LEASE_S)
    assert not await promises.keep(ONE, b"old", HOUR)
    await promises.free(ONE)

    assert await begun(promises, replace(ONE, runner="req-4")) is Standing.RUNNING
    assert await promises.keep(AGAIN, b"new", HOUR)


async def test_a_late_runner_cannot_touch_what_another_has_answered(promises: PromiseStore) -> None:
    await lapsed(promises, ONE)
    await begun(promises, AGAIN)
    await promises.keep(AGAIN, b"new", HOUR)

    assert not await promises.renew(ONE, LEASE_S)
    assert not await promises.keep(ONE, b"old", HOUR)
    await promises.free(ONE)

    assert await begun(promises, ONE) == b"new"


async def test_a_late_runners_answer_is_kept_where_there_is_no_other(promises: PromiseStore) -> None:
    await lapsed(promises, ONE)

    assert await promises.keep(ONE, b"late", HOUR)
    assert await begun(promises, AGAIN) == b"late"


async def test_an_answer_that_has_expired_is_forgotten(promises: PromiseStore) -> None:
    await begun(promises, ONE)
    await promises.keep(ONE, b"x", 0.001)

    with anyio.fail_after(10):
        while await begun(promises, OTHER_BODY) is not Standing.BEGUN:
            await anyio.lowlevel.checkpoint()


async def test_the_oldest_answers_make_room(promises: PromiseStore) -> None:
    numbered = [replace(ONE, key=f"k-{number}") for number in range(5)]
    await begun(promises, replace(ONE, owner="b"))
    await promises.keep(replace(ONE, owner="b"), b"x" * SIZE, HOUR)
    for number, one in enumerate(numbered):
        await begun(promises, one)
        assert await promises.keep(one, b"x" * SIZE, HOUR + number)

    found = [await begun(promises, one) for one in numbered]

    assert found == [Standing.BEGUN, Standing.BEGUN, *[b"x" * SIZE] * 3]
    assert await begun(promises, replace(ONE, owner="b")) == b"x" * SIZE


async def test_the_answers_of_an_owner_never_end_a_mark(promises: PromiseStore) -> None:
    await begun(promises, ONE)
    for number in range(2, 9):
        other = replace(ONE, key=f"k-{number}")
        await begun(promises, other)
        await promises.keep(other, b"x" * SIZE, HOUR)

    assert await begun(promises, AGAIN) is Standing.RUNNING


async def test_what_is_larger_than_all_that_may_be_kept_frees_its_key(promises: PromiseStore) -> None:
    await begun(promises, ONE)

    assert not await promises.keep(ONE, b"x" * (BYTES_MAX - 63), HOUR)
    assert await begun(promises, AGAIN) is Standing.BEGUN
    assert await promises.keep(AGAIN, b"x" * (BYTES_MAX - 64), HOUR)


# ---------------------------------------------------------------- in memory, on a server


async def test_marks_that_nobody_ended_take_no_memory() -> None:
    clock = StillClock()
    promises = MemoryPromises(clock, BYTES_MAX)
    for number in range(100):
        clock.time += 1.0
        await promises.begin(replace(ONE, key=f"k-{number}"), 10.0)

    assert len(promises._marks) == 10


@pytest.fixture
async def on_server(store: Any) -> AsyncIterator[RedisPromises]:
    promises = RedisPromises(store.url, prefix=store.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    yield promises
    await promises.aclose()


async def test_everything_on_a_server_expires(store: Any, on_server: RedisPromises) -> None:
    await begun(on_server, ONE)
    await on_server.keep(ONE, b"x", HOUR)
    await begun(on_server, replace(ONE, key="k-2"))

    keys = [key async for key in store.redis.scan_iter(f"*{store.prefix}*")]
    lives = [await cast("Awaitable[int]", store.redis.ttl(key)) for key in keys]

    assert len(keys) == 4
    assert all(key.startswith(f"{{{store.prefix}:promises:a}}:") for key in keys)
    assert all(0.9 * LEASE_S < life <= HOUR for life in lives)


async def test_many_answers_that_expire_at_once_go_some_at_a_time_and_are_no_answers(
    store: Any, on_server: RedisPromises
) -> None:
    many = [replace(ONE, key=f"k-{number}") for number in range(300)]
    promises = RedisPromises(store.url, prefix=store.prefix, bytes_max=10**6, command_s=10.0)
    for one in many:
        await promises.keep(one, b"x" * 100, HOUR)
    await promises.keep(replace(ONE, key="stays"), b"x" * 100, HOUR)
    expiries, size = (f"{{{store.prefix}:promises:a}}:{name}" for name in ("expiries", "bytes"))
    await store.redis.zadd(expiries, {one.id: number + 1 for number, one in enumerate(many)})

    assert await begun(promises, replace(many[-1], runner="req-2")) is Standing.BEGUN
    left = await store.redis.zcard(expiries)
    assert await promises.keep(replace(many[-1], runner="req-2"), b"y" * 200, HOUR)
    assert await begun(promises, many[-1]) == b"y" * 200
    assert await begun(promises, replace(ONE, key="stays", runner="req-2")) == b"x" * 100
    assert 1 < left < 300
    assert await store.redis.zcard(expiries) == 2
    assert int(await store.redis.get(size)) == 2 * 64 + 300
    await promises.aclose()


async def test_gateways_on_a_server_share_promises(store: Any, on_server: RedisPromises) -> None:
    other = RedisPromises(store.url, prefix=store.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    assert await begun(on_server, ONE) is Standing.BEGUN
    assert await begun(other, AGAIN) is Standing.RUNNING
    await on_server.keep(ONE, b"x", HOUR)

    assert await begun(other, AGAIN) == b"x"
    await other.aclose()


async def test_a_server_that_forgot_everything_is_told_again(store: Any, on_server: RedisPromises) -> None:
    await begun(on_server, ONE)
    await store.lose()

    assert await on_server.renew(ONE, LEASE_S)
    assert await begun(on_server, AGAIN) is Standing.RUNNING


async def test_a_server_that_does_not_answer_is_said_to_be_away(stoppable: RedisServer) -> None:
    promises = RedisPromises(stoppable.url, prefix="gw", bytes_max=BYTES_MAX, command_s=0.2)
    await begun(promises, ONE)
    stoppable.stall()
    with pytest.raises(StoreUnavailable):
        await begun(promises, AGAIN)
    stoppable.resume()
    stoppable.kill()
    for call in (
        begun(promises, ONE),
        promises.renew(ONE, LEASE_S),
        promises.keep(ONE, b"x", HOUR),
        promises.free(ONE),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await call
        assert caught.value.retry_after_s is not None
    stoppable.start()
    assert await begun(promises, AGAIN) is Standing.BEGUN
    await promises.aclose()
