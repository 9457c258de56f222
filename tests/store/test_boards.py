"""One owner per box: the same rules in memory and in Redis, and what becomes of an owner that is away."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis
from support.boards import EmulatedBoard
from support.redis_server import RedisServer, legs

from gateway.ports import BoxBoard
from gateway.store.boards import RedisBoard

Expire = Callable[[], Awaitable[None]]


class Boards:
    """Two processes before one board, and a way to let the owner's time be over."""

    def __init__(self, one: BoxBoard, two: BoxBoard, expire: Expire) -> None:
        self.one, self.two, self.expire = one, two, expire


def board_of(process: str, url: str, prefix: str) -> RedisBoard:
    return RedisBoard(url, prefix=prefix, owner=process, ttl_s=60, command_s=10)


@pytest.fixture(params=["memory", *legs()])
async def boards(request: pytest.FixtureRequest, open_store: Any) -> AsyncIterator[Boards]:
    if request.param == "memory":
        now: list[float] = [1000.0]
        shared: dict[str, Any] = {}

        async def pass_by() -> None:
            now[0] += 61

        yield Boards(
            EmulatedBoard(lambda: now[0], process="one", ttl_s=60, shared=shared),
            EmulatedBoard(lambda: now[0], process="two", ttl_s=60, shared=shared),
            pass_by,
        )
        return
    store = await open_store(request.param)

    async def expire() -> None:
        keys = [key async for key in store.redis.scan_iter(match=f"*{store.prefix}:box:spark*")]
        assert len(keys) == 4
        assert await store.redis.pttl(next(key for key in keys if key.endswith(":state"))) > 86_000_000
        for key in keys:
            if key.endswith((":owner", ":notes")):
                assert 0 < await store.redis.pttl(key) <= 60_000
                await store.redis.delete(key)

    async with AsyncExitStack() as stack:
        one, two = (board_of(name, store.url, store.prefix) for name in ("one", "two"))
        stack.push_async_callback(one.aclose)
        stack.push_async_callback(two.aclose)
        yield Boards(one, two, expire)


async def test_the_first_to_come_is_the_owner_and_stays_it(boards: Boards) -> None:
    mine = await boards.one.sync("spark", fence=0, state="", note="")
    assert mine is not None
    assert mine.fence > 0
    assert await boards.two.sync("spark", fence=0, state="", note="") is not None
    again = await boards.one.sync("spark", fence=mine.fence, state="", note="")
    other = await boards.two.sync("spark", fence=0, state="", note="")
    assert (again and again.fence, other and other.fence) == (mine.fence, 0)
    elsewhere = await boards.two.sync("another-box", fence=0, state="", note="")
    assert elsewhere is not None
    assert elsewhere.fence > 0


async def test_only_the_owner_writes_and_everybody_reads(boards: Boards) -> None:
    mine = await boards.one.sync("spark", fence=0, state="", note="")
    assert mine is not None
    await boards.one.sync("spark", fence=mine.fence, state="resident: gemma", note="")
    other = await boards.two.sync("spark", fence=mine.fence, state="resident: qwen", note="")
    assert other is not None
    assert other.state == "resident: gemma"
    # Nor does it under a later number than its own, which is of before the store has lost its data.
    await boards.one.sync("spark", fence=mine.fence + 1, state="resident: qwen", note="")
    again = await boards.one.sync("spark", fence=mine.fence, state="", note="")  # it has nothing to say
    assert again is not None
    assert again.state == "resident: gemma"


async def test_everybody_leaves_a_note_for_the_others(boards: Boards) -> None:
    await boards.one.sync("spark", fence=0, state="", note="3 wait for qwen")
    two = await boards.two.sync("spark", fence=0, state="", note="1 waits")
    one = await boards.one.sync("spark", fence=0, state="", note="2 wait")
    assert two is not None
    assert one is not None
    assert (list(two.others), list(one.others)) == (["3 wait for qwen"], ["1 waits"])


async def test_an_owner_whose_time_is_over_cannot_write_over_the_next_one(boards: Boards) -> None:
    old = await boards.one.sync("spark", fence=0, state="", note="old")
    assert old is not None
    await boards.one.sync("spark", fence=old.fence, state="draining", note="old")
    await boards.expire()
    new = await boards.two.sync("spark", fence=0, state="", note="")
    assert new is not None
    assert new.fence > old.fence
    assert (new.state, list(new.others)) == ("draining", [])
    await boards.two.sync("spark", fence=new.fence, state="stopping", note="")
    late = await boards.one.sync("spark", fence=old.fence, state="resident", note="")
    assert late is not None
    assert (late.fence, late.state) == (0, "stopping")


async def test_one_that_was_away_and_owns_it_again_does_so_under_a_new_number(boards: Boards) -> None:
    old = await boards.one.sync("spark", fence=0, state="", note="")
    assert old is not None
    await boards.one.sync("spark", fence=old.fence, state="draining", note="")
    await boards.expire()
    new = await boards.one.sync("spark", fence=old.fence, state="stopping", note="")
    assert new is not None
    assert new.fence > old.fence
    assert new.state == "draining"


async def test_who_leaves_makes_room_at_once(boards: Boards) -> None:
    old = await boards.one.sync("spark", fence=0, state="", note="gone")
    assert old is not None
    await boards.two.leave("spark")  # it is not the owner: nothing changes
    again = await boards.one.sync("spark", fence=old.fence, state="", note="gone")
    assert again is not None and again.fence == old.fence
    await boards.one.leave("spark")
    new = await boards.two.sync("spark", fence=0, state="", note="")
    assert new is not None
    assert new.fence > old.fence
    assert list(new.others) == []


async def test_a_store_that_is_away_is_no_answer(stoppable: RedisServer) -> None:
    board = board_of("one", stoppable.url, "gw")
    try:
        assert await board.sync("spark", fence=0, state="", note="") is not None
        stoppable.kill()
        assert await board.sync("spark", fence=0, state="", note="") is None
        await board.leave("spark")
    finally:
        await board.aclose()


async def test_a_server_that_is_full_has_owners_all_the_same(stoppable: RedisServer) -> None:
    async with Redis.from_url(stoppable.url) as redis:
        await redis.config_set("maxmemory", 1)
    one, two = board_of("one", stoppable.url, "gw"), board_of("two", stoppable.url, "gw")
    try:
        own = await one.sync("spark", fence=0, state="", note="")
        assert own is not None and own.fence
        assert await one.sync("spark", fence=own.fence, state="draining", note="mine") is not None
        seen = await two.sync("spark", fence=0, state="", note="")
        assert seen is not None
        assert (seen.fence, seen.state, list(seen.others)) == (0, "draining", ["mine"])
    finally:
        await one.aclose()
        await two.aclose()


async def test_numbers_go_on_rising_when_the_store_has_lost_everything(valkey: Any) -> None:
    board = board_of("one", valkey.url, valkey.prefix)
    old = await board.sync("spark", fence=0, state="", note="")
    assert old is not None
    while (await valkey.redis.time())[0] * 1000 + (await valkey.redis.time())[1] // 1000 <= old.fence:
        pass  # its clock, which the numbers never fall behind, goes on by a millisecond
    await valkey.lose()
    new = await board.sync("spark", fence=0, state="", note="")
    await board.aclose()
    assert new is not None
    assert new.fence > old.fence


async def test_a_number_that_nobody_wrote_is_none(store: Any) -> None:
    board = board_of("one", store.url, store.prefix)
    await store.redis.set(f"{{{store.prefix}:box:spark}}:fence", "no number")
    found = await board.sync("spark", fence=0, state="", note="")
    await board.aclose()
    assert found is not None and found.fence


@pytest.mark.parametrize("text", ["1 note", "no note", "9", ""])
async def test_a_note_of_one_that_is_gone_or_of_nobody_is_not_kept_while_others_come(
    store: Any, text: str
) -> None:
    board = board_of("one", store.url, store.prefix)
    notes = f"{{{store.prefix}:box:spark}}:notes"
    await store.redis.hset(notes, "gone", text)
    found = await board.sync("spark", fence=0, state="", note="")
    await board.aclose()
    assert found is not None and found.fence and list(found.others) == []
    assert await store.redis.hkeys(notes) == ["one"]
