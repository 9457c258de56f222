"""Idempotency keys: one contract, in memory and on every supported server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from redis.asyncio import Redis
from support.redis_server import RedisServer, legs, own_server
from support.world import StillClock

from gateway.clock import SystemClock
from gateway.core.errors import StoreUnavailable
from gateway.core.idempotency import IdempotencyClaim, KeyState, fingerprint
from gateway.ports import IdempotencyStore
from gateway.store.idempotency import RedisIdempotency
from gateway.store.memory import MemoryIdempotency

HOUR = 3_600.0
LEASE_S = 600.0
BYTES_MAX = 1_000
SIZE = 300 - 64  # of an answer that makes a record of 300 bytes

ONE = IdempotencyClaim("a", "/v1/chat/completions", "k-1", fingerprint(b"{}"), "req-1")
AGAIN = replace(ONE, runner="req-2")
OTHER_BODY = replace(ONE, runner="req-3", fingerprint=fingerprint(b"[]"))


@pytest.fixture(params=["memory", *legs()])
async def idempotency(
    request: pytest.FixtureRequest, open_store: Callable[[str], Any]
) -> AsyncIterator[IdempotencyStore]:
    if request.param == "memory":
        yield MemoryIdempotency(SystemClock(), BYTES_MAX)
        return
    server = await open_store(request.param)
    store = RedisIdempotency(server.url, prefix=server.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    yield store
    await store.aclose()


async def begun(idempotency: IdempotencyStore, claim: IdempotencyClaim) -> bytes | KeyState:
    return await idempotency.begin(claim, LEASE_S)


async def lapsed(idempotency: IdempotencyStore, claim: IdempotencyClaim, lease_s: float = 0.001) -> None:
    """Begin, and return once the lease has run out."""
    assert await idempotency.begin(claim, lease_s) is KeyState.BEGUN
    next_one = replace(claim, runner="req-next")
    with anyio.fail_after(10):
        while await begun(idempotency, next_one) is not KeyState.BEGUN:
            await anyio.lowlevel.checkpoint()
    await idempotency.free(next_one)


async def test_what_is_kept_is_what_the_next_one_gets(idempotency: IdempotencyStore) -> None:
    answer = bytes(range(256))

    assert await begun(idempotency, ONE) is KeyState.BEGUN
    await idempotency.keep(ONE, answer, HOUR)

    assert [await begun(idempotency, AGAIN), await begun(idempotency, AGAIN)] == [answer, answer]
    assert await begun(idempotency, OTHER_BODY) is KeyState.REUSED


async def test_while_one_runs_the_others_do_not(idempotency: IdempotencyStore) -> None:
    assert await begun(idempotency, ONE) is KeyState.BEGUN

    assert await begun(idempotency, AGAIN) is KeyState.RUNNING
    assert await begun(idempotency, OTHER_BODY) is KeyState.REUSED
    assert await begun(idempotency, ONE) is KeyState.BEGUN  # as when a reply was lost


async def test_a_freed_key_is_anybodys(idempotency: IdempotencyStore) -> None:
    await begun(idempotency, ONE)
    await idempotency.free(ONE)

    assert await begun(idempotency, OTHER_BODY) is KeyState.BEGUN
    await idempotency.free(OTHER_BODY)
    await idempotency.free(OTHER_BODY)
    assert await begun(idempotency, AGAIN) is KeyState.BEGUN


async def test_owners_routes_and_keys_have_nothing_in_common(idempotency: IdempotencyStore) -> None:
    others = [
        replace(ONE, owner="b"),
        replace(ONE, owner=None),
        replace(ONE, route="/v1/completions"),
        replace(ONE, key="k-2"),
    ]
    for one in (ONE, *others):
        assert await begun(idempotency, one) is KeyState.BEGUN
    await idempotency.keep(ONE, b"mine", HOUR)

    assert [await begun(idempotency, replace(one, runner="req-9")) for one in others] == [
        KeyState.RUNNING
    ] * 4


async def test_exactly_one_of_many_begins(idempotency: IdempotencyStore) -> None:
    outcomes: list[bytes | KeyState] = []

    async def begin(number: int) -> None:
        outcomes.append(await begun(idempotency, replace(ONE, runner=f"req-{number}")))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(begin, number)

    assert sorted(map(str, outcomes)) == ["begun", *["running"] * 19]


async def test_a_mark_that_is_not_renewed_ends(idempotency: IdempotencyStore) -> None:
    await lapsed(idempotency, ONE)

    assert await begun(idempotency, AGAIN) is KeyState.BEGUN


async def test_a_renewed_mark_lasts(idempotency: IdempotencyStore) -> None:
    await idempotency.begin(ONE, 0.2)
    assert await idempotency.renew(ONE, LEASE_S)
    await lapsed(idempotency, replace(ONE, key="k-2"), 0.2)

    assert await begun(idempotency, AGAIN) is KeyState.RUNNING


async def test_a_late_runner_takes_its_mark_back_where_nobody_has_it(idempotency: IdempotencyStore) -> None:
    await lapsed(idempotency, ONE)

    assert await idempotency.renew(ONE, LEASE_S)
    assert await begun(idempotency, AGAIN) is KeyState.RUNNING


async def test_a_late_runner_cannot_touch_what_another_runs(idempotency: IdempotencyStore) -> None:
    await lapsed(idempotency, ONE)
    assert await begun(idempotency, AGAIN) is KeyState.BEGUN

    assert not await idempotency.renew(ONE, LEASE_S)
    await idempotency.keep(ONE, b"old", HOUR)
    await idempotency.free(ONE)

    assert await begun(idempotency, replace(ONE, runner="req-4")) is KeyState.RUNNING
    await idempotency.keep(AGAIN, b"new", HOUR)
    assert await begun(idempotency, ONE) == b"new"


async def test_a_late_runner_cannot_touch_what_another_has_answered(idempotency: IdempotencyStore) -> None:
    await lapsed(idempotency, ONE)
    await begun(idempotency, AGAIN)
    await idempotency.keep(AGAIN, b"new", HOUR)

    assert not await idempotency.renew(ONE, LEASE_S)
    await idempotency.keep(ONE, b"old", HOUR)
    await idempotency.free(ONE)

    assert await begun(idempotency, ONE) == b"new"


async def test_a_late_runners_answer_is_kept_where_there_is_no_other(idempotency: IdempotencyStore) -> None:
    await lapsed(idempotency, ONE)

    await idempotency.keep(ONE, b"late", HOUR)
    assert await begun(idempotency, AGAIN) == b"late"


async def test_an_answer_that_has_expired_is_forgotten(idempotency: IdempotencyStore) -> None:
    await begun(idempotency, ONE)
    await idempotency.keep(ONE, b"x", 0.001)

    with anyio.fail_after(10):
        while await begun(idempotency, OTHER_BODY) is not KeyState.BEGUN:
            await anyio.lowlevel.checkpoint()


async def test_the_oldest_answers_make_room(idempotency: IdempotencyStore) -> None:
    numbered = [replace(ONE, key=f"k-{number}") for number in range(5)]
    await begun(idempotency, replace(ONE, owner="b"))
    await idempotency.keep(replace(ONE, owner="b"), b"x" * SIZE, HOUR)
    for number, one in enumerate(numbered):
        await begun(idempotency, one)
        await idempotency.keep(one, b"x" * SIZE, HOUR + number)

    found = [await begun(idempotency, one) for one in numbered]

    assert found == [KeyState.BEGUN, KeyState.BEGUN, *[b"x" * SIZE] * 3]
    assert await begun(idempotency, replace(ONE, owner="b")) == b"x" * SIZE


async def test_the_answers_of_an_owner_never_end_a_mark(idempotency: IdempotencyStore) -> None:
    await begun(idempotency, ONE)
    for number in range(2, 9):
        other = replace(ONE, key=f"k-{number}")
        await begun(idempotency, other)
        await idempotency.keep(other, b"x" * SIZE, HOUR)

    assert await begun(idempotency, AGAIN) is KeyState.RUNNING


async def test_what_is_larger_than_all_that_may_be_kept_frees_its_key(idempotency: IdempotencyStore) -> None:
    await begun(idempotency, ONE)

    await idempotency.keep(ONE, b"x" * (BYTES_MAX - 63), HOUR)
    assert await begun(idempotency, AGAIN) is KeyState.BEGUN
    await idempotency.keep(AGAIN, b"x" * (BYTES_MAX - 64), HOUR)
    assert await begun(idempotency, ONE) == b"x" * (BYTES_MAX - 64)


# ---------------------------------------------------------------- in memory, on a server


async def test_marks_that_nobody_ended_take_no_memory() -> None:
    clock = StillClock()
    idempotency = MemoryIdempotency(clock, BYTES_MAX)
    for number in range(100):
        clock.time += 1.0
        await idempotency.begin(replace(ONE, key=f"k-{number}"), 10.0)

    assert len(idempotency._marks) == 10


async def test_a_mark_that_is_renewed_keeps_no_other_beyond_its_time() -> None:
    clock = StillClock()
    idempotency = MemoryIdempotency(clock, BYTES_MAX)
    for number in range(100):
        await idempotency.begin(replace(ONE, key=f"k-{number}"), 10.0)
    for _ in range(3):
        clock.time += 5.0
        assert await idempotency.renew(replace(ONE, key="k-0"), 10.0)

    assert len(idempotency._marks) == 1


@pytest.fixture
async def on_server(store: Any) -> AsyncIterator[RedisIdempotency]:
    idempotency = RedisIdempotency(store.url, prefix=store.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    yield idempotency
    await idempotency.aclose()


async def test_everything_on_a_server_expires(store: Any, on_server: RedisIdempotency) -> None:
    await begun(on_server, ONE)
    await on_server.keep(ONE, b"x", HOUR)
    await begun(on_server, replace(ONE, key="k-2"))

    keys = [key async for key in store.redis.scan_iter(f"*{store.prefix}*")]
    lives = [await cast("Awaitable[int]", store.redis.ttl(key)) for key in keys]

    assert len(keys) == 4
    assert all(key.startswith(f"{{{store.prefix}:promises:a}}:") for key in keys)
    assert all(0.9 * LEASE_S < life <= HOUR for life in lives)


async def test_many_answers_that_expire_at_once_go_some_at_a_time_and_are_no_answers(
    store: Any, on_server: RedisIdempotency
) -> None:
    many = [replace(ONE, key=f"k-{number}") for number in range(300)]
    idempotency = RedisIdempotency(store.url, prefix=store.prefix, bytes_max=10**6, command_s=10.0)
    for one in many:
        await idempotency.keep(one, b"x" * 100, HOUR)
    await idempotency.keep(replace(ONE, key="stays"), b"x" * 100, HOUR)
    expiries, size = (f"{{{store.prefix}:promises:a}}:{name}" for name in ("expiries", "bytes"))
    await store.redis.zadd(expiries, {one.id: number + 1 for number, one in enumerate(many)})

    assert await begun(idempotency, replace(many[-1], runner="req-2")) is KeyState.BEGUN
    left = await store.redis.zcard(expiries)
    await idempotency.keep(replace(many[-1], runner="req-2"), b"y" * 200, HOUR)
    assert await begun(idempotency, many[-1]) == b"y" * 200
    assert await begun(idempotency, replace(ONE, key="stays", runner="req-2")) == b"x" * 100
    assert 1 < left < 300
    assert await store.redis.zcard(expiries) == 2
    assert int(await store.redis.get(size)) == 2 * 64 + 300
    await idempotency.aclose()


async def test_gateways_on_a_server_share_promises(store: Any, on_server: RedisIdempotency) -> None:
    other = RedisIdempotency(store.url, prefix=store.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    assert await begun(on_server, ONE) is KeyState.BEGUN
    assert await begun(other, AGAIN) is KeyState.RUNNING
    await on_server.keep(ONE, b"x", HOUR)

    assert await begun(other, AGAIN) == b"x"
    await other.aclose()


async def test_a_server_that_forgot_everything_is_told_again(store: Any, on_server: RedisIdempotency) -> None:
    await begun(on_server, ONE)
    await store.lose()

    assert await on_server.renew(ONE, LEASE_S)
    assert await begun(on_server, AGAIN) is KeyState.RUNNING


async def test_a_server_that_is_full_is_not_said_to_be_silent(tmp_path: Path) -> None:
    with own_server("valkey-9", tmp_path) as server:
        idempotency = RedisIdempotency(server.url, prefix="gw", bytes_max=BYTES_MAX, command_s=10.0)
        redis = Redis.from_url(server.url)
        await redis.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="The store for idempotency keys refuses this"):
            await begun(idempotency, ONE)
        await redis.aclose()
        await idempotency.aclose()


async def test_a_request_that_runs_holds_its_key_though_the_server_is_full(stoppable: RedisServer) -> None:
    idempotency = RedisIdempotency(stoppable.url, prefix="gw", bytes_max=BYTES_MAX, command_s=10.0)
    assert await begun(idempotency, ONE) is KeyState.BEGUN
    async with Redis.from_url(stoppable.url) as redis:
        (mark,) = await redis.keys("*:running:*")
        await redis.pexpire(mark, 100_000)
        await redis.config_set("maxmemory", 1)
        assert await idempotency.renew(ONE, LEASE_S)
        assert await redis.pttl(mark) > 100_000
    with pytest.raises(StoreUnavailable):
        await idempotency.keep(ONE, b"x", HOUR)  # what is new finds no room
    await idempotency.free(ONE)
    await idempotency.aclose()


async def test_a_server_that_does_not_answer_is_said_to_be_away(stoppable: RedisServer) -> None:
    idempotency = RedisIdempotency(stoppable.url, prefix="gw", bytes_max=BYTES_MAX, command_s=0.2)
    await begun(idempotency, ONE)
    stoppable.stall()
    with pytest.raises(StoreUnavailable):
        await begun(idempotency, AGAIN)
    stoppable.resume()
    stoppable.kill()
    for call in (
        begun(idempotency, ONE),
        idempotency.renew(ONE, LEASE_S),
        idempotency.keep(ONE, b"x", HOUR),
        idempotency.free(ONE),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await call
        assert caught.value.retry_after_s is not None
    stoppable.start()
    assert await begun(idempotency, AGAIN) is KeyState.BEGUN
    await idempotency.aclose()


async def test_a_key_whose_reply_was_lost_is_freed_before_the_end(stoppable: RedisServer) -> None:
    idempotency = RedisIdempotency(stoppable.url, prefix="gw", bytes_max=BYTES_MAX, command_s=0.5)
    await idempotency.renew(OTHER_BODY, LEASE_S)  # so that the next command is sent at once
    await idempotency.free(OTHER_BODY)
    stoppable.stall()
    with pytest.raises(StoreUnavailable):
        await begun(idempotency, ONE)  # carried out as the stall ends
    stoppable.resume()
    await idempotency.aclose()

    other = RedisIdempotency(stoppable.url, prefix="gw", bytes_max=BYTES_MAX, command_s=10.0)
    assert await begun(other, AGAIN) is KeyState.BEGUN
    await other.aclose()
