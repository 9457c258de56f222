"""The listener over real sockets: malformed, oversized and slow requests, before there is a request."""

import json
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from litestar import Litestar, Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from gateway.core.errors import StartupBlocked
from gateway.downstream import guard, idle, listener
from gateway.downstream.listener import Listener
from gateway.sockets import bind, url_of


@get("/", sync_to_thread=False)
def hello() -> str:
    return "hello"


class Held:
    """A request that is answered when the test says so."""

    def __init__(self) -> None:
        self.began, self.may_end = anyio.Event(), anyio.Event()

    def route(self) -> HTTPRouteHandler:
        @get("/held")
        async def held() -> str:
            self.began.set()
            await self.may_end.wait()
            return "held"

        return held


@asynccontextmanager
async def listening(*routes: HTTPRouteHandler) -> AsyncIterator[int]:
    bound = bind("127.0.0.1", 0)
    port: int = bound.getsockname()[1]
    async with serving(bound, *routes):
        yield port


@asynccontextmanager
async def serving(bound: socket.socket, *routes: HTTPRouteHandler) -> AsyncIterator[Listener]:
    app = Litestar([hello, *routes], openapi_config=None, logging_config=None)
    server = Listener(app, bound)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run_until_stopped)
        await server.wait_started()
        try:
            yield server
        finally:
            server.cut()
            with anyio.CancelScope(shield=True):
                await server.wait_ended()


async def answer_to(port: int, *parts: bytes) -> tuple[bytes, Any]:
    """Send parts, and return the status line and the body, decoded if it is JSON."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for part in parts:
            await stream.send(part)
        with anyio.fail_after(10):
            received = await everything(stream)
    head, _, body = received.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body) if body.startswith(b"{") else body


async def everything(stream: SocketStream) -> bytes:
    received = b""
    try:
        while True:
            received += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return received


async def test_an_ordinary_request_passes() -> None:
    async with listening() as port:
        line, body = await answer_to(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")

    assert (line, body) == (b"HTTP/1.1 200 OK", b"hello")


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(b"nonsense\r\n\r\n", id="not-http"),
        pytest.param(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            id="length-and-chunked",
        ),
        pytest.param(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
            id="two-lengths",
        ),
        pytest.param(b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", id="space-before-the-colon"),
        pytest.param(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
            id="+5",
        ),
        pytest.param(b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n", id="no-path"),
        pytest.param(b"GET http://x:99999/ HTTP/1.1\r\nhost: x\r\n\r\n", id="no-port"),
        pytest.param(b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n", id="no-url"),
        pytest.param(b"GET /%b HTTP/1.0\r\n\r\n" % (b"a" * 65_535), id="too-long-for-a-url"),
    ],
)
async def test_what_is_not_a_request_is_refused_in_the_one_shape(request_: bytes) -> None:
    async with listening() as port:
        line, body = await answer_to(port, request_)

    assert line == b"HTTP/1.1 400 Bad Request"
    assert body["error"]["code"] == "invalid_request"


async def test_a_head_has_a_bound() -> None:
    async with listening() as port:
        filler = b"x-filler: " + b"y" * 60_000 + b"\r\n"
        line, body = await answer_to(port, b"GET / HTTP/1.1\r\nhost: x\r\n", filler, filler)

    assert line.startswith(b"HTTP/1.1 431")
    assert body["error"]["code"] == "headers_too_large"


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("opening", "more"),
    [
        pytest.param(b"", b"a: b\r\n" * 10_000, id="many"),
        pytest.param(b"a: ", b"b" * 60_000, id="one"),
    ],
)
async def test_trailers_have_a_bound(opening: bytes, more: bytes) -> None:
    async with listening() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(CHUNKED + b"5\r\nhello\r\n0\r\n" + opening)
        with anyio.fail_after(10), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            for _ in range(1_000):  # which a connection that is not closed takes, all of them
                await stream.send(more)
            await stream.send(b"\r\n\r\n")
            while True:
                assert b"200 OK" not in await stream.receive()


async def test_trailers_within_it_pass_whatever_body_is_before_them() -> None:
    async with listening() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [b"z" * 50_000] * 20)
        await stream.send(CHUNKED + body + b"0\r\n")
        await stream.send(b"a: b\r\n" * 1_000)
        await stream.send(b"\r\nGET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        with anyio.fail_after(10):
            received = await everything(stream)

    assert [answer[:3] for answer in received.split(b"HTTP/1.1 ")[1:]] == [b"405", b"200"]


REFUSED = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"


async def test_the_rest_of_a_body_that_was_answered_without_it_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "LINGER_S", 0.1)
    async with listening() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(REFUSED)
        assert (await stream.receive()).startswith(b"HTTP/1.1 405")
        await stream.send(b"begun")
        with anyio.fail_after(10):
            await everything(stream)


async def test_a_connection_whose_body_came_after_its_answer_may_be_used_and_ends_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "KEEPALIVE_S", 0.3)
    async with listening() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        for _ in range(2):
            await stream.send(REFUSED)
            assert (await stream.receive()).startswith(b"HTTP/1.1 405")
            await stream.send(b"0123456789")
        with anyio.fail_after(10):
            await everything(stream)


async def test_a_server_that_ends_keeps_no_connection_that_is_told_to_go_on() -> None:
    began, may_read = anyio.Event(), anyio.Event()

    @post("/read", status_code=200)
    async def read(request: Request[Any, Any, Any]) -> str:
        began.set()
        await may_read.wait()
        return (await request.body()).decode()

    bound = bind("127.0.0.1", 0)
    address = bound.getsockname()
    async with serving(bound, read) as server, await anyio.connect_tcp(*address) as stream:
        with anyio.fail_after(10):
            await stream.send(
                REFUSED.replace(b"/", b"/read", 1).replace(b"host", b"expect: 100-continue\r\nhost")
            )
            await began.wait()
            server.should_exit = True
            while server.servers and server.servers[0].is_serving():
                await anyio.lowlevel.checkpoint()
            may_read.set()
            assert await stream.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await stream.send(b"0123456789")
            received = await everything(stream)
        assert b"\r\nconnection: close\r\n" in received
        assert received.endswith(b"0123456789")
        with anyio.fail_after(10):
            await server.wait_ended()


async def test_a_body_that_proves_invalid_behind_its_answer_has_no_second_one() -> None:
    async with listening() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(CHUNKED)
        assert (await stream.receive()).startswith(b"HTTP/1.1 405")
        await stream.send(b"zz\r\n\r\n" + GET)
        with anyio.fail_after(10):
            assert await everything(stream) == b""


async def test_a_body_that_proves_invalid_within_its_answer_does_not_change_it() -> None:
    may_end = anyio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"begun, "
        await may_end.wait()
        yield b"and over"

    @get("/streamed", sync_to_thread=False)
    def streamed() -> Stream:
        return Stream(parts(), headers={"content-length": "15"})

    async with listening(streamed) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(CHUNKED.replace(b"POST /", b"GET /streamed"))
        received = b""
        while not received.endswith(b"begun, "):
            received += await stream.receive()
        await stream.send(b"zz\r\n\r\n" + GET)
        async with await anyio.connect_tcp("127.0.0.1", port) as other:  # so that has been read
            await asked(other)
        may_end.set()
        with anyio.fail_after(10):
            assert await everything(stream) == b"and over"


async def test_a_head_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEAD_WITHIN_S", 0.05)
    async with listening() as port:
        silent, _ = await answer_to(port)
        half, body = await answer_to(port, b"GET / HTTP/1.1\r\nhost: x\r\n")

    assert silent.startswith(b"HTTP/1.1 408")
    assert half.startswith(b"HTTP/1.1 408")
    assert body["error"]["code"] == "request_timeout"


async def test_a_large_body_is_no_large_head() -> None:
    async with listening() as port:
        head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 500000\r\n\r\n"
        line, _ = await answer_to(port, head, b"z" * 500_000)

    assert line == b"HTTP/1.1 405 Method Not Allowed"


async def test_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(idle, "LEAST_S", 1e9)
    async with listening() as port, await anyio.connect_tcp("127.0.0.1", port) as first:
        await first.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await first.receive()).startswith(b"HTTP/1.1 200")
        line, body = await answer_to(port)

    assert line.startswith(b"HTTP/1.1 503")
    assert body["error"]["code"] == "out_of_resources"


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
NOT_HTTP = b"?\r\n\r\n"


async def asked(*connections: SocketStream) -> None:
    """Send a request on each, and receive its answer."""
    for one in connections:
        await one.send(GET)
        assert (await one.receive()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET, NOT_HTTP, REFUSED])
async def test_the_longest_idle_connection_makes_room_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(guard, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(idle, "LEAST_S", 0.0)
    held = Held()
    async with listening(held.route()) as port, await anyio.connect_tcp("127.0.0.1", port) as busy:
        await busy.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
        await held.began.wait()
        async with await anyio.connect_tcp("127.0.0.1", port) as longest:
            await longest.send(sent)
            if sent in (GET, NOT_HTTP, REFUSED):
                assert (await longest.receive()).startswith(b"HTTP/1.1 ")
            async with await anyio.connect_tcp("127.0.0.1", port) as later:
                await asked(later)
                async with await anyio.connect_tcp("127.0.0.1", port) as new:
                    await asked(new, later)
                    with anyio.fail_after(10):
                        assert await everything(longest) == b""
                    held.may_end.set()
                    assert (await busy.receive()).startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def three_of_three(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[int, SocketStream, SocketStream, SocketStream]]:
    """Yield a port and all the connections that it may have; for one more, an idle one is closed at once."""
    monkeypatch.setattr(guard, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(idle, "LEAST_S", 0.0)
    async with (
        listening() as port,
        await anyio.connect_tcp("127.0.0.1", port) as first,
        await anyio.connect_tcp("127.0.0.1", port) as second,
        await anyio.connect_tcp("127.0.0.1", port) as third,
    ):
        yield port, first, second, third


async def test_a_request_that_is_arriving_is_not_what_has_been_idle_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with three_of_three(monkeypatch) as (port, arriving, longest, last):
        await asked(arriving, longest)
        await arriving.send(GET[:10])
        await asked(last)  # so these bytes have been read
        async with await anyio.connect_tcp("127.0.0.1", port) as new:
            await asked(new)
            with anyio.fail_after(10):
                assert await everything(longest) == b""
            await arriving.send(GET[10:])
            assert (await arriving.receive()).startswith(b"HTTP/1.1 200")


async def test_a_request_that_goes_on_arriving_is_as_old_as_its_first_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with three_of_three(monkeypatch) as (port, arriving, other, last):
        await arriving.send(GET[:5])
        await asked(other)  # so these bytes have been read
        await arriving.send(GET[5:10])
        await asked(last)
        async with await anyio.connect_tcp("127.0.0.1", port) as new:
            await asked(new, other, last)
            with anyio.fail_after(10):
                assert await everything(arriving) == b""


async def test_an_answer_that_is_still_being_read_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, its connection would stay until all is read, for a minute at most: it makes no room."""
    monkeypatch.setattr(guard, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(idle, "LEAST_S", 0.0)

    @get("/large")
    async def large() -> bytes:
        return bytes(32_000_000)

    async with (
        listening(large) as port,
        await anyio.connect_tcp("127.0.0.1", port) as reading,
        await anyio.connect_tcp("127.0.0.1", port) as longest,
    ):
        await reading.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        begun = await reading.receive()
        left = len(begun.partition(b"\r\n\r\n")[0]) + 4 + 32_000_000 - len(begun)
        await asked(longest)
        async with await anyio.connect_tcp("127.0.0.1", port) as new:
            await asked(new)
            with anyio.fail_after(10):
                assert await everything(longest) == b""
        while left:
            left -= len(await reading.receive())
        await asked(reading)


async def test_connections_that_were_idle_a_moment_ago_are_looked_for_again() -> None:
    class Connection:
        def __init__(self, since: float | None) -> None:
            self.since, self.is_closed = since, False

        def idle_since(self) -> float | None:
            return None if self.is_closed else self.since

        def close_idle(self) -> None:
            self.is_closed = True

    def closed(*connections: Connection) -> list[bool]:
        return [one.is_closed for one in connections]

    of_port = idle.IdleConnections(3)
    busy, first, second = Connection(None), Connection(10.0), Connection(10.5)
    every = (busy, second, first)

    assert not of_port.close_one(every, now=10.9)  # too soon
    assert of_port.close_one(every, now=11.6)
    assert closed(*every) == [False, False, True]
    second.since = 11.7  # it was found, too, but has served a request since
    assert not of_port.close_one(every, now=12.6)
    busy.since = 11.0  # has ended meanwhile
    assert of_port.close_one(every, now=12.71)
    assert of_port.close_one(every, now=12.71)
    assert closed(*every) == [True, True, True]


async def test_a_port_without_room_for_connections_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(idle, "LEAST_S", 1e9)
    monkeypatch.setattr(listener, "TICK_S", 0.01)

    def logged() -> list[str]:
        return [record.fields["event"] for record in caplog.records if hasattr(record, "fields")]

    async def said(*events: str) -> None:
        with anyio.fail_after(10):
            while logged() != [*events]:
                await anyio.lowlevel.checkpoint()

    async with listening() as port, await anyio.connect_tcp("127.0.0.1", port):
        async with await anyio.connect_tcp("127.0.0.1", port) as second:
            await said("connections_full")
            assert (await answer_to(port))[0].startswith(b"HTTP/1.1 503")
            await second.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await second.receive()).startswith(b"HTTP/1.1 200")
        await said("connections_full", "connections_enough")


@pytest.fixture
def few_files() -> Iterator[int]:
    """Yield how many files this process may have open during a test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, limits[1]))
    yield 1000
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_callers_do_not_get_all_the_files_that_a_process_may_have_open(few_files: int) -> None:
    app = Litestar([hello], openapi_config=None, logging_config=None)
    with bind("127.0.0.1", 0) as bound:
        assert Listener(app, bound).connections() == (0, few_files // 2)


def test_an_address_is_an_ip_or_a_name() -> None:
    with bind("::1", 0) as six, bind("localhost", 0) as name:
        assert url_of(six).startswith("http://[::1]:")
        assert url_of(name).startswith("http://")


def test_an_address_of_nobody_may_be_somebody_s_a_moment_later() -> None:
    with pytest.raises(StartupBlocked, match=r"cannot listen on 203\.0\.113\.1:1"):
        bind("203.0.113.1", 1)
    with pytest.raises(StartupBlocked, match=r"cannot listen on \[2001:db8::1\]:1"):
        bind("2001:db8::1", 1)


LOW_PORTS = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
UNPRIVILEGED = """
import encodings.idna  # which is needed below, and may be where only root may look
import os
from gateway.core.errors import ConfigError
from gateway.sockets import bind

if os.geteuid() == 0:
    os.setuid(65534)
try:
    bind("127.0.0.1", 1)
except ConfigError as error:
    print(type(error).__name__, error)
"""


def test_a_port_that_this_user_may_not_have_is_a_configuration_error() -> None:
    """No later start would do better."""
    if not LOW_PORTS.exists() or int(LOW_PORTS.read_text()) <= 1:
        pytest.skip("every user may have every port here")
    said = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=True)
    assert said.stdout == "ConfigError cannot listen on 127.0.0.1:1: Permission denied\n"
