"""Requests of HTTP/1.0: answers without chunks, and connections that are kept where both sides know."""

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import pytest
from anyio.abc import SocketStream
from support.front import KEY, Closed, Front, chat, front, post
from support.loops import on_both_loops
from support.raw_server import LAST_CHUNK, STREAM_HEAD, chunk
from support.world import DONE, HELLO, ROLE, STOP

from gateway.core.usage import Ending

CHAT = "POST /v1/chat/completions HTTP/1.0"
KEEP = "Connection: Keep-Alive"

anyio_backend = on_both_loops


@dataclass(frozen=True)
class Case:
    """A request, and how it is answered.

    Attributes:
        has_length: Whether the answer says how long it is.
        is_kept: Whether the connection is kept.
    """

    request: bytes
    status: int = 200
    has_length: bool = True
    is_kept: bool = False


BODY = chat()
CHUNKED = post(b"", KEEP, "Transfer-Encoding: chunked", length=None, line=CHAT) + chunk(BODY) + LAST_CHUNK
CASES = {
    "chat": Case(post(line=CHAT)),
    "chat, kept": Case(post(BODY, KEEP, line=CHAT), is_kept=True),
    "chat, kept in a list": Case(post(BODY, "Connection: TE, keep-alive", line=CHAT), is_kept=True),
    "chat, closed": Case(post(BODY, "Connection: close", line=CHAT)),
    "stream": Case(post(chat(stream=True), line=CHAT), has_length=False),
    "stream, kept": Case(post(chat(stream=True), KEEP, line=CHAT), has_length=False),
    "wrong key": Case(post(BODY, KEEP, line=CHAT, key="other"), 401, is_kept=True),
    "chunked": Case(CHUNKED),
    "to be told to go on": Case(post(BODY, "Expect: 100-continue", line=CHAT)),
    "get": Case(f"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()),
    "get, kept": Case(b"GET /readyz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", is_kept=True),
    "no route": Case(b"GET / HTTP/1.0\r\n\r\n", 404),
    "later than 1.1": Case(b"GET /readyz HTTP/2.0\r\n\r\n"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_an_answer_has_a_length_or_ends_with_its_connection(case: Case) -> None:
    async with front("direct") as site, site.caller() as caller:
        await caller.send(case.request)
        got = await caller.head()

        assert got.status == case.status
        assert got.header("transfer-encoding") is None
        assert got.header("connection") == ("keep-alive" if case.is_kept else "close")
        if not case.has_length:
            assert got.header("content-length") is None
            body = await caller.until_closed()
            assert body.startswith(b"data: ") and body.endswith(b"\n\n" + DONE)
            return
        assert (await caller.rest_of(got)).is_whole
        if case.is_kept:
            assert (await caller.ask(post(line=CHAT))).status == 200
        assert await caller.is_closed()


def cut(site: Front) -> None:
    site.listener.cut()


def fail(site: Front) -> None:
    for task in site.listener.server_state.tasks:
        task.cancel()


@pytest.mark.parametrize("end", [cut, fail])
async def test_a_stream_that_breaks_off_does_not_end_as_one_that_is_whole(
    end: Callable[[Front], None],
) -> None:
    async def begin(stream: SocketStream, _: object) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
        await anyio.sleep_forever()

    async with front("direct", begin) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True), line=CHAT))
        await caller.head()
        end(site)

        with pytest.raises(Closed):
            await caller.until_closed()


def let_go(site: Front) -> None:
    """Leave the connection to the listener, which drops it."""


@pytest.mark.parametrize("end", [let_go, cut])
async def test_a_stream_whose_end_was_not_read_in_time_does_not_end_as_one_that_is_whole(
    end: Callable[[Front], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = 1 << 11
    monkeypatch.setattr("gateway.downstream.guard.LINGER_S", 0.05 if end is let_go else 60.0)
    monkeypatch.setattr("gateway.downstream.listener.TICK_S", 0.02)
    monkeypatch.setattr("gateway.tcp.LOOK_S", 0.0)
    sizes = ((socket.SOL_SOCKET, name, few) for name in (socket.SO_RCVBUF, socket.SO_SNDBUF))
    monkeypatch.setattr("gateway.tcp.KEEPALIVE", tuple(sizes))

    async def answer(stream: SocketStream, _: object) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE + HELLO.replace(b"hello", b"x" * 40_000)))
        await stream.send(chunk(STOP + DONE) + LAST_CHUNK)

    async with front("direct", answer) as site:
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, few)  # before it connects: its window
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(caller, ("127.0.0.1", site.port))
            await loop.sock_sendall(caller, post(chat(stream=True), line=CHAT))
            await site.eventually(lambda: bool(site.notes.requests))
            await site.idle()
            end(site)
            await site.eventually(lambda: not site.listener.server_state.connections)

            with anyio.fail_after(10), pytest.raises(ConnectionResetError):
                while await loop.sock_recv(caller, 65_536):
                    pass
    assert [record.ending for record in site.notes.requests] == [Ending.COMPLETED]


@pytest.mark.parametrize("steps", range(6))
async def test_a_caller_that_leaves_as_its_stream_begins_is_no_fault(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def begin(stream: SocketStream, _: object) -> None:
        caller.close()
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))

    async with front("direct", begin) as site:
        caller = socket.create_connection(("127.0.0.1", site.port))
        caller.sendall(post(chat(stream=True), line=CHAT))
        await site.eventually(lambda: bool(site.notes.requests))
        await site.idle()

    assert [(record.ending, record.error_code) for record in site.notes.requests] == [(Ending.LEFT, "")]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
