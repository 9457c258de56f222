"""Kept responses: one contract, in memory and on every supported server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from redis.asyncio import Redis
from support.redis_server import RedisServer, failover, legs, own_server

from gateway.clock import SystemClock
from gateway.core.errors import StoreUnavailable
from gateway.ports import ResponseStore
from gateway.store.memory import MemoryResponseStore
from gateway.store.responses import RedisResponseStore

HOUR = 3_600.0
BYTES_MAX = 1_000


@pytest.fixture(params=["memory", *legs()])
async def kept(
    request: pytest.FixtureRequest, open_store: Callable[[str], Any]
) -> AsyncIterator[ResponseStore]:
    if request.param == "memory":
        yield MemoryResponseStore(SystemClock(), BYTES_MAX)
        return
    server = await open_store(request.param)
    store = RedisResponseStore(server.url, prefix=server.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    yield store
    await store.aclose()


async def test_what_is_put_is_found_until_it_is_deleted(kept: ResponseStore) -> None:
    record = bytes(range(256))

    assert await kept.put("a", "r1", record, HOUR)
    assert await kept.get("a", "r1") == record
    assert await kept.delete("a", "r1")
    assert await kept.get("a", "r1") is None
    assert not await kept.delete("a", "r1")


@pytest.mark.parametrize("leg", legs())
async def test_a_server_that_is_full_takes_none(tmp_path: Path, leg: str) -> None:
    with own_server(leg, tmp_path) as server:
        store = RedisResponseStore(server.url, prefix="gw", bytes_max=1_000_000)
        assert await store.put("a", "r1", b"kept", HOUR)
        async with Redis.from_url(server.url) as redis:
            await redis.config_set("maxmemory", 1)
        for id in ("r1", "r2"):
            with pytest.raises(StoreUnavailable):
                await store.put("a", id, b"new", HOUR)
        assert await store.get("a", "r1") == b"kept"
        assert await store.delete("a", "r1")
        await store.aclose()


async def test_owners_have_nothing_in_common(kept: ResponseStore) -> None:
    owners = ["a", "b", None]
    for owner in owners:
        await kept.put(owner, "r1", str(owner).encode(), HOUR)

    assert await kept.delete("b", "r1")
    assert [await kept.get(owner, "r1") for owner in owners] == [b"a", None, b"None"]


async def test_putting_again_replaces(kept: ResponseStore) -> None:
    await kept.put("a", "r1", b"x" * 500, HOUR)
    for number in range(5):
        assert await kept.put("a", "r2", b"%d" % number * 500, 2 * HOUR)

    assert await kept.get("a", "r1") == b"x" * 500
    assert await kept.get("a", "r2") == b"4" * 500


async def test_what_expires_first_makes_room(kept: ResponseStore) -> None:
    await kept.put("b", "theirs", b"x" * BYTES_MAX, 1.0 * HOUR)
    await kept.put("a", "late", b"x" * 300, 3.0 * HOUR)
    await kept.put("a", "early", b"x" * 300, 1.0 * HOUR)
    await kept.put("a", "middle", b"x" * 300, 2.0 * HOUR)
    await kept.put("a", "new", b"x" * 500, 1.5 * HOUR)

    found = {id for id in ("late", "early", "middle", "new") if await kept.get("a", id)}
    assert found == {"late", "new"}
    assert await kept.get("b", "theirs")


@pytest.mark.parametrize(("times", "hours"), [(1, 1.0), (100, 5.0)])
async def test_what_was_replaced_or_deleted_does_not_count_for_what_makes_room(
    kept: ResponseStore, times: int, hours: float
) -> None:
    await kept.put("a", "late", b"x" * 300, 0.5 * HOUR)
    await kept.put("a", "late", b"x" * 300, 3.0 * HOUR)
    await kept.put("a", "early", b"x" * 300, 2.0 * HOUR)
    for _ in range(times):
        await kept.put("a", "gone", b"x", hours * HOUR)
    await kept.delete("a", "gone")

    await kept.put("a", "new", b"x" * 500, 4.0 * HOUR)

    assert [bool(await kept.get("a", id)) for id in ("late", "early", "new")] == [True, False, True]


async def test_the_bound_is_exact_and_what_was_deleted_counts_no_more(kept: ResponseStore) -> None:
    for id in ("r1", "r2", "r3", "r4"):
        await kept.put("a", id, b"x" * 250, HOUR)
    assert [bool(await kept.get("a", id)) for id in ("r1", "r2", "r3", "r4")] == [True] * 4

    await kept.delete("a", "r2")
    await kept.put("a", "r5", b"x" * 250, HOUR)

    assert [bool(await kept.get("a", id)) for id in ("r1", "r3", "r4", "r5")] == [True] * 4


async def test_what_is_larger_than_all_that_may_be_kept_is_not(kept: ResponseStore) -> None:
    await kept.put("a", "r1", b"small", HOUR)

    assert not await kept.put("a", "r2", b"x" * (BYTES_MAX + 1), HOUR)
    assert await kept.put("b", "r2", b"x" * BYTES_MAX, HOUR)
    assert [await kept.get("a", "r1"), await kept.get("a", "r2")] == [b"small", None]


async def test_what_has_expired_is_gone_and_takes_no_room(kept: ResponseStore) -> None:
    await kept.put("a", "long", b"x" * 500, HOUR)
    await kept.put("a", "brief", b"x" * 500, 0.001)

    with anyio.fail_after(10):
        while await kept.get("a", "brief") is not None:
            await anyio.lowlevel.checkpoint()
    assert not await kept.delete("a", "brief")
    await kept.put("a", "new", b"x" * 500, HOUR)
    assert await kept.get("a", "long")


async def test_everything_on_a_server_expires(open_store: Callable[[str], Any]) -> None:
    server = await open_store("valkey-9")
    store = RedisResponseStore(server.url, prefix=server.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    await store.put("a", "r1", b"x", HOUR)
    await store.put("a", "r2", b"x", 0.5 * HOUR)
    keys = [key async for key in server.redis.scan_iter(f"{{{server.prefix}:*")]
    lives = [await cast("Awaitable[int]", server.redis.ttl(key)) for key in keys]
    await store.delete("a", "r1")
    await store.delete("a", "r2")
    left = [key async for key in server.redis.scan_iter(f"{{{server.prefix}:*")]
    await store.aclose()

    assert len(keys) == 3
    assert all(0.9 * HOUR < life <= HOUR for life in lives)
    assert left == []


async def test_a_server_that_does_not_answer_is_said_to_be_away(stoppable: RedisServer) -> None:
    store = RedisResponseStore(stoppable.url, prefix="gw", bytes_max=BYTES_MAX, command_s=0.2)
    await store.put("a", "r1", b"x", HOUR)
    stoppable.stall()
    with pytest.raises(StoreUnavailable):
        await store.get("a", "r1")
    stoppable.resume()
    stoppable.kill()
    for call in (store.get("a", "r1"), store.delete("a", "r1"), store.put("a", "r1", b"x", HOUR)):
        with pytest.raises(StoreUnavailable) as caught:
            await call
        assert caught.value.retry_after_s is not None
    stoppable.start()
    assert await store.get("a", "r1") is None
    await store.aclose()


async def test_a_server_that_has_become_a_replica_is_left_for_the_one_in_its_place(tmp_path: Path) -> None:
    with failover("valkey-9", tmp_path) as servers:
        store = RedisResponseStore(servers.url, prefix="gw", bytes_max=BYTES_MAX, command_s=10.0)
        await store.put("a", "r1", b"x", HOUR)
        await servers.demote()
        servers.take_over()

        with pytest.raises(StoreUnavailable):
            await store.put("a", "r2", b"x", HOUR)
        assert await store.put("a", "r2", b"x", HOUR)
        await store.aclose()


async def test_what_has_expired_is_not_there_though_much_has_at_once(
    open_store: Callable[[str], Any],
) -> None:
    server = await open_store("valkey-9")
    store = RedisResponseStore(server.url, prefix=server.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    expiries = f"{{{server.prefix}:responses:a}}:expiries"
    for number in range(450):
        await store.put("a", f"r{number}", b"x", HOUR)
    await server.redis.zadd(expiries, {f"r{number}": number + 1 for number in range(449)})

    assert await store.get("a", "r448") is None
    assert not await store.delete("a", "r448")
    assert await store.get("a", "r449") == b"x"
    await server.redis.zadd(expiries, {"r449": 1})
    assert await store.get("a", "r449") is None
    await store.put("a", "new", b"x" * BYTES_MAX, HOUR)
    assert await store.get("a", "new")

    for number in range(450):
        await store.put("b", f"r{number}", b"x", HOUR)
    await server.redis.zadd(expiries.replace(":a}", ":b}"), {f"r{number}": 1 for number in range(450)})
    await store.put("b", "new", b"x", HOUR)
    assert await server.redis.get(f"{{{server.prefix}:responses:b}}:bytes") == "1"  # no more than there is
    assert await server.redis.zcard(expiries) == 1
    await store.aclose()


async def test_a_server_that_lost_single_keys_still_keeps_what_is_new(
    open_store: Callable[[str], Any],
) -> None:
    server = await open_store("valkey-9")
    store = RedisResponseStore(server.url, prefix=server.prefix, bytes_max=BYTES_MAX, command_s=10.0)
    await store.put("a", "r1", b"x" * 900, HOUR)
    await server.redis.delete(
        f"{{{server.prefix}:responses:a}}:records", f"{{{server.prefix}:responses:a}}:expiries"
    )

    for id in ("r2", "r3"):
        await store.put("a", id, b"x" * 400, HOUR)

    for id in ("r2", "r3"):
        assert await store.get("a", id) == b"x" * 400
    await store.aclose()


async def test_what_was_deleted_long_ago_takes_no_memory() -> None:
    store = MemoryResponseStore(SystemClock(), BYTES_MAX)
    await store.put("a", "stays", b"x", 0.5 * HOUR)
    for number in range(1_000):
        await store.put("a", f"r{number}", b"x", HOUR)
        await store.delete("a", f"r{number}")
    await store.put("a", "last", b"x" * BYTES_MAX, HOUR)

    assert len(store._records("a").order) < 100
    assert await store.get("a", "stays") is None
