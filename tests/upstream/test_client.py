"""The upstream client over real sockets: what it sends, what it relays, what it makes of failures."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketStream
from support.raw_server import LAST_CHUNK, STREAM_HEAD, Answer, RawServer, answer_of, chunk, raw_server

from gateway.core.errors import UpstreamFailed, UpstreamLost, UpstreamUnreachable
from gateway.core.values import Backend, Capacity, Endpoint, KneeStep, Timeouts
from gateway.ports import Target, UpstreamResponse
from gateway.upstream import client
from gateway.upstream.client import HttpxUpstream

CAPACITY = Capacity(context_tokens=100, knee=(KneeStep(None, 4),))


@asynccontextmanager
async def client_of(url: str, **secrets: str) -> AsyncIterator[tuple[HttpxUpstream, Target]]:
    backend = Backend("b", url, CAPACITY)
    upstream = HttpxUpstream([backend], secrets=secrets, tls={})
    target = Target(
        backend=backend,
        endpoint=Endpoint.CHAT,
        headers=((b"x-request-id", b"req-1"), (b"traceparent", b"00-a-b-01")),
        body=b'{"model":"m"}',
    )
    try:
        yield upstream, target
    finally:
        await upstream.aclose()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[RawServer, HttpxUpstream, Target]]:
    async with raw_server(answer) as server, client_of(server.url) as (upstream, target):
        yield server, upstream, target


async def whole(response: UpstreamResponse) -> bytes:
    parts = []
    while data := await response.read():
        parts.append(data)
    return b"".join(parts)


async def test_it_sends_the_body_and_only_the_headers_it_is_given() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(answer_of(b"{}"))

    async with raw_server(answer) as server, client_of(server.url, b="secret") as (upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            assert response.status == 200
            assert await whole(response) == b"{}"

    head, body = server.requests[0]
    assert body == b'{"model":"m"}'
    line, *fields = head.decode().split("\r\n")
    assert line == "POST /v1/chat/completions HTTP/1.1"
    names = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
    assert set(names) == {
        "host",
        "content-type",
        "content-length",
        "accept",
        "accept-encoding",
        "connection",
        "user-agent",
        "authorization",
        "x-request-id",
        "traceparent",
    }
    assert names["authorization"] == "Bearer secret"
    assert names["accept-encoding"] == "identity"


async def test_every_chunk_is_handed_on_as_it_comes() -> None:
    gate = anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await gate.wait()
        await stream.send(chunk(b"data: 2\n\n") + LAST_CHUNK)

    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        assert await response.read() == b"data: 1\n\n"  # the second one has not been sent yet
        gate.set()
        assert await response.read() == b"data: 2\n\n"
        assert await response.read() == b""


async def test_a_finished_connection_is_used_again() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):
        for _ in range(3):
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)

    assert server.connections == 1


async def test_a_connection_that_was_idle_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.KEEPALIVE_S < 5.0  # when vLLM closes it
    monkeypatch.setattr(client, "KEEPALIVE_S", 0.0)

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):
        for _ in range(3):
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)

    assert server.connections == 3


async def test_leaving_early_closes_the_connection() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))

    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await response.read()
        with anyio.fail_after(5):
            await server.closed.wait()


async def test_cancelling_while_waiting_for_headers_closes_the_connection() -> None:
    asked = anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        asked.set()

    async with serving(answer) as (server, upstream, target):

        async def ask() -> None:
            async with upstream.open(target, Timeouts()):
                raise AssertionError("there is no answer")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await asked.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await server.closed.wait()


async def test_a_kept_connection_that_the_backend_just_closed_costs_nothing() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        if number == 1:
            await stream.aclose()  # as an engine does whose idle time is up
        else:
            await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"{}"

    assert server.connections == 2
    assert len(server.requests) == 3


async def test_a_request_that_was_read_is_not_sent_twice() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.aclose()

    async with serving(answer) as (server, upstream, target):
        with pytest.raises(UpstreamLost):
            async with upstream.open(target, Timeouts()):
                pass

    assert len(server.requests) == 1


async def test_what_is_not_http_is_a_failure_and_not_tried_again() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(b"\x00\x01 nonsense\r\n\r\n")

    async with serving(answer) as (server, upstream, target):
        with pytest.raises(UpstreamFailed):
            async with upstream.open(target, Timeouts()):
                pass

    assert len(server.requests) == 1


async def test_a_connection_that_breaks_mid_body_is_a_failure() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await stream.aclose()

    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        assert await response.read() == b"data: 1\n\n"
        with pytest.raises(UpstreamFailed):
            await response.read()


async def test_nobody_there_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with client_of(url) as (upstream, target):
            with pytest.raises(UpstreamUnreachable):
                async with upstream.open(target, Timeouts()):
                    pass


async def test_a_redirect_is_not_followed() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(answer_of(b"", "307 Temporary Redirect", "location: http://127.0.0.1:1/\r\n"))

    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            assert response.status == 307

    assert len(server.requests) == 1
