"""Long bodies, received in one piece: over real sockets, on both event loops, beside the ASGI way."""

import asyncio
import json
import tracemalloc
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from support.front import WAYS, Front, Wire, chat, front, post
from support.loops import on_both_loops

from gateway.core.usage import Ending
from gateway.downstream import guard, idle
from gateway.downstream.body_receiver import TOGETHER_MAX, WORTH_BYTES, BodyReceiver
from gateway.downstream.direct import DirectProtocol
from gateway.downstream.relay import BodyLimits, Uploads
from gateway.pipeline import LEFT_STATUS

anyio_backend = on_both_loops


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def long_chat(size: int, user: str = "x") -> bytes:
    """Return a chat of about that size, no part of which is like another."""
    return chat(user=user, messages=[{"role": "user", "content": " ".join(map(str, range(size // 6)))}])


def seen(site: Front) -> list[tuple[str, str]]:
    """Return what came to the backend: whose it is, and its text."""
    bodies = [json.loads(body) for _, body in site.backend.requests]
    return [(body["user"], body["messages"][0]["content"]) for body in bodies]


def sent(bodies: list[bytes]) -> list[tuple[str, str]]:
    decoded = [json.loads(body) for body in bodies]
    return [(body["user"], body["messages"][0]["content"]) for body in decoded]


@pytest.mark.parametrize("size", [WORTH_BYTES // 2, 2 * WORTH_BYTES, 2_000_000])
async def test_a_long_body_arrives_as_it_was_sent(way: str, size: int) -> None:
    bodies = [long_chat(size, "a"), chat(user="b"), long_chat(size, "c")]
    bodies[1] = json.dumps(json.loads(bodies[1])).encode()
    async with front(way) as site, site.caller() as caller:
        for body in bodies:
            assert (await caller.ask(post(body))).status == 200
        await site.idle()

        assert seen(site) == sent(bodies)
        assert site.taken == (3 if way == "direct" else 0)


@pytest.mark.parametrize("split", ["head", "a-byte", "most", "all-but-a-byte"])
async def test_a_long_body_may_be_split_anywhere(way: str, split: str) -> None:
    body = long_chat(400_000)
    request = post(body)
    head = len(request) - len(body)
    at = {"head": head, "a-byte": head + 1, "most": len(request) - 500, "all-but-a-byte": len(request) - 1}
    async with front(way) as site, site.caller() as caller:
        for _ in range(2):
            await caller.send(request[: at[split]])
            await site.eventually(
                lambda: site.applications.serving.uploads.bytes >= min(at[split] - head, 60_000)
            )
            assert (await caller.ask(request[at[split] :])).status == 200
        await site.idle()

        assert seen(site) == 2 * sent([body])


async def test_a_full_port_closes_no_connection_whose_body_is_arriving(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(idle, "LEAST_S", 0.001)  # not the new one itself: uvloop counts milliseconds
    request, loop = post(long_chat(400_000)), asyncio.get_running_loop()
    async with front(way) as site, site.caller() as sending, site.caller() as resting:
        assert (await sending.ask(post(chat()))).status == 200
        await sending.send(request[:-1])
        await site.eventually(lambda: site.applications.serving.uploads.bytes >= 60_000)
        assert (await resting.ask(post(chat()))).status == 200
        rested_at = loop.time() + 0.005
        while loop.time() < rested_at:
            await anyio.lowlevel.checkpoint()
        async with site.caller() as new:
            assert (await new.ask(post(chat()))).status == 200
            assert await resting.is_closed()
            assert (await sending.ask(request[-1:])).status == 200


async def test_what_follows_a_long_body_at_once_is_the_next_request(way: str) -> None:
    bodies = [long_chat(300_000, "a"), long_chat(20, "b"), long_chat(300_000, "c"), long_chat(300_000, "d")]
    async with front(way) as site, site.caller() as caller:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller.send, b"".join(map(post, bodies)))
            for _ in bodies:
                assert (await caller.answer()).status == 200
        await site.idle()

        assert seen(site) == sent(bodies)


async def test_where_too_much_is_set_aside_a_body_is_received_in_pieces() -> None:
    body = long_chat(400_000)
    request = post(body)
    async with front("direct") as site, site.caller() as caller:
        uploads = site.applications.serving.uploads
        uploads.reserved_bytes = TOGETHER_MAX - len(body) + 1
        await caller.send(request[:-1])
        await site.eventually(lambda: uploads.bytes == len(body) - 1)
        assert uploads.reserved_bytes == TOGETHER_MAX - len(body) + 1
        assert (await caller.ask(request[-1:])).status == 200
        uploads.reserved_bytes = 0
        await site.idle()

        assert seen(site) == sent([body])


async def test_memory_is_set_aside_until_the_body_is_there() -> None:
    body = long_chat(400_000)
    request = post(body)
    async with front("direct") as site, site.caller() as caller:
        uploads = site.applications.serving.uploads
        await caller.send(request[:-1])
        await site.eventually(lambda: uploads.bytes == len(body) - 1)
        assert uploads.reserved_bytes == len(body)
        assert (await caller.ask(request[-1:])).status == 200
        await site.idle()

        assert uploads.reserved_bytes == 0


async def test_a_caller_that_leaves_in_a_long_body_leaves_nothing(way: str) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            await caller.send(post(b" " * 200_000, length=400_000))
            await site.eventually(lambda: site.applications.serving.uploads.bytes >= 60_000)
        await site.idle()

        assert [(one.ending, one.status) for one in site.notes.requests] == [(Ending.LEFT, LEFT_STATUS)]
        assert site.applications.serving.uploads.reserved_bytes == 0


async def test_a_long_body_that_does_not_come_is_given_up(way: str) -> None:
    async with front(way, limits=BodyLimits(within_s=0.2)) as site, site.caller() as caller:
        got = await caller.ask(post(b" " * 20_000, length=400_000))

        assert (got.status, got.code) == (408, "request_timeout")
        assert got.header("connection") == "close"
        assert await caller.is_closed()
        await site.idle()
        assert site.watched.reserved_bytes == ([0] if way == "direct" else [])  # as soon as it was given up


async def test_a_caller_may_read_what_came_before_while_it_sends_a_long_body() -> None:
    """What is written waits for room as long as the caller does not read, and no longer."""
    request, before = post(long_chat(400_000)), bytes(8_000_000)
    async with front("direct") as site, site.caller() as caller:
        await caller.send(request[:-1])
        await site.eventually(lambda: site.applications.serving.uploads.reserved_bytes > 0)
        (connection,) = site.listener.server_state.connections
        assert isinstance(connection, DirectProtocol)
        connection.transport.write(before)
        await site.eventually(lambda: connection.flow.write_paused)
        while before:
            before = before[len(await caller.stream.receive()) :]
        await site.eventually(lambda: not connection.flow.write_paused)
        assert (await caller.ask(request[-1:])).status == 200
        await site.idle()


async def test_what_was_set_aside_for_a_body_that_does_not_come_is_free_before_its_connection_ends() -> None:
    async with front("direct", limits=BodyLimits(within_s=0.2)) as site, site.caller() as caller:
        tracemalloc.start()
        try:
            got = await caller.ask(post(b" " * 20_000, length=20_000_000))
            await site.idle()
            held, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert got.code == "request_timeout"
        assert most > 20_000_000
        assert held < 5_000_000
        assert site.listener.server_state.connections  # it waits for the caller to close it


async def test_long_bodies_have_a_bound_together(way: str) -> None:
    limits = BodyLimits(together_max=300_000)
    async with front(way, limits=limits) as site, site.caller() as first, site.caller() as second:
        uploads = site.applications.serving.uploads
        await first.send(post(b" " * 200_000, length=200_001))
        await site.eventually(lambda: uploads.bytes >= 60_000)
        if way == "direct":
            await site.eventually(lambda: uploads.bytes == 200_000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, second, post(b" " * 250_000, length=900_000))
            got = await second.answer()
        assert (got.status, got.code) == (503, "out_of_resources")
        assert got.header("connection") == "close"
        assert (await first.ask(b" ")).code == "invalid_json"
        await site.idle()


async def send(caller: Wire, data: bytes) -> None:
    """Send, to somebody who may have enough before it is all."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await caller.send(data)


class Other(asyncio.Protocol):
    """What has a connection otherwise."""


def test_a_body_is_handed_over_without_a_copy() -> None:
    """CPython's own bytes file gives away what it was written into, once nobody holds a view of it."""
    got: list[tuple[int, bool]] = []
    one = BodyReceiver(
        Other(), Uploads(), 10, [b"abc", b"de"], lambda size, is_last: got.append((size, is_last))
    )
    for part in (b"fgh", b"ij"):
        view = one.get_buffer(-1)
        view[: len(part)] = part
        one.buffer_updated(len(part))
    del view
    one.end()

    file = one._file
    body = one.body()
    assert got == [(3, False), (2, True)]
    assert body == b"abcdefghij"
    assert file.getvalue() is body
    assert one.body() == b""  # it is not kept here
