"""The upstream clients over real sockets: what they send, what they relay, what they make of failures.

Both pass the same tests: the one that serves, and the reference over httpx.
"""

import asyncio
import gc
import inspect
import os
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import uvloop
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.tls import TLSListener, TLSStream
from support.certificates import self_signed
from support.httpx_upstream import HttpxUpstream
from support.kernel import keepalive_s, vanish
from support.loops import on_both_loops
from support.raw_server import (
    LAST_CHUNK,
    STREAM_HEAD,
    Answer,
    RawServer,
    always,
    answer_of,
    chunk,
    raw_server,
    tls_server,
)

from gateway.core.backends import Backend, Capacity, KneeStep, Timeouts
from gateway.core.errors import (
    OutOfResources,
    UpstreamError,
    UpstreamFailed,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
    let_go,
)
from gateway.core.event_template import TOKEN_BYTES_MAX
from gateway.core.request import Endpoint
from gateway.ports import Target, Upstream, UpstreamResponse
from gateway.settings import BackendTls
from gateway.tcp import SILENT_S
from gateway.upstream import backend_clients, direct
from gateway.upstream.direct import DirectUpstream
from gateway.upstream.faults import tls_fault

CAPACITY = Capacity(context_tokens=100, knee=(KneeStep(None, 4),))


Kind = type[HttpxUpstream] | type[DirectUpstream]
KIND: ContextVar[Kind] = ContextVar("KIND")


@pytest.fixture(params=[DirectUpstream, HttpxUpstream], autouse=True)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    KIND.set(found)
    return found


anyio_backend = on_both_loops


@pytest.fixture
def only_direct(kind: Kind) -> None:
    """Leave the reference out of what httpx does not do."""
    if kind is not DirectUpstream:
        pytest.skip("httpx does not")


@asynccontextmanager
async def client_of(url: str, **secrets: str) -> AsyncIterator[tuple[Upstream, Target]]:
    backend = Backend("b", url, CAPACITY)
    upstream = KIND.get()([backend], secrets=secrets, tls={})
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
async def serving(answer: Answer) -> AsyncIterator[tuple[RawServer, Upstream, Target]]:
    async with raw_server(answer) as server, client_of(server.url) as (upstream, target):
        yield server, upstream, target


async def whole(response: UpstreamResponse) -> bytes:
    return await response.read_whole(1 << 30)


async def received(response: UpstreamResponse, *, is_poured: bool) -> None:
    """Receive the whole body in one of the two ways."""
    if is_poured:
        await response.stream_to(lambda _: True)
    else:
        await whole(response)


@pytest.mark.parametrize(
    ("url", "port"), [("http://b", 80), ("https://b", 443), ("http://b:443", 443), ("https://b:80/v", 80)]
)
@pytest.mark.usefixtures("only_direct")
def test_a_url_without_a_port_means_that_of_its_scheme(url: str, port: int) -> None:
    assert direct.DirectClient(url, None, verify=True)._port == port


async def test_it_sends_the_body_and_only_the_headers_it_is_given() -> None:
    answer = always(answer_of(b"{}"))
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


async def test_a_key_with_a_line_break_is_never_sent() -> None:
    answer = always(answer_of(b"{}"))
    async with raw_server(answer) as server, client_of(server.url, b="secret\nx: y") as (upstream, target):
        with pytest.raises(UpstreamError) as caught:
            async with upstream.open(target, Timeouts()):
                pass
        assert "secret" not in caught.value.message
    assert not server.requests


async def test_a_backend_is_asked_for_life_while_it_says_nothing() -> None:
    """A machine without power ends no connection: the kernel has to ask whether it is still there."""
    asked, gate = anyio.Event(), anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        asked.set()
        await gate.wait()
        await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target), anyio.create_task_group() as tasks:

        async def ask() -> None:
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)

        tasks.start_soon(ask)
        await asked.wait()
        waits = await keepalive_s(int(server.url.rpartition(":")[2]), of_server=False)
        gate.set()

    assert 0 < waits <= SILENT_S


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize("size", [2, 4_000_000], ids=["short", "long"])
async def test_a_backend_whose_machine_vanishes_as_it_is_asked_is_lost(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is never acknowledged is sent again and again, and then no kernel asks for life."""
    monkeypatch.setattr("gateway.tcp.GONE_S", 0.2)
    monkeypatch.setattr("gateway.tcp.LOOK_S", 0.05)
    monkeypatch.setattr(backend_clients, "STALE_S", 0.0)  # less than it takes to be sure, as in earnest
    gone = anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(answer_of(b"{}"))
        vanish(stream.extra(SocketAttribute.raw_socket))
        gone.set()

    async with serving(answer) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)
        await gone.wait()
        (client,) = cast("DirectUpstream", upstream)._clients.values()
        with anyio.fail_after(10):
            while client._looking is not None:  # it looks again when there is something to look at
                await anyio.lowlevel.checkpoint()
        with pytest.raises(UpstreamLost), anyio.fail_after(10):
            async with upstream.open(replace(target, body=b" " * size), Timeouts()):
                pass


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
    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        for _ in range(3):
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)

    assert server.connections == 1


@pytest.mark.usefixtures("only_direct")
async def test_the_connection_that_was_used_last_is_used_again() -> None:
    """Those that are not needed any more rest until they are closed."""
    used: list[object] = []
    gates = [anyio.Event(), anyio.Event()]

    async def answer(stream: SocketStream, number: int) -> None:
        used.append(stream)
        if number < 2:
            await gates[number].wait()
        await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):

        async def call() -> None:
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            while not used:
                await anyio.lowlevel.checkpoint()
            gates[1].set()
            await call()  # on another connection, which then rests longer
            gates[0].set()
        for _ in range(2):
            await call()

    assert server.connections == 2
    assert used[2] is used[3] is used[0]


@pytest.mark.usefixtures("only_direct")
async def test_only_a_new_connection_takes_time() -> None:
    async with serving(always(answer_of(b"{}"))) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as first:
            assert 0.0 < first.connect_s < 20.0
            await whole(first)
        async with upstream.open(target, Timeouts()) as second:
            assert second.connect_s == 0.0


async def test_a_connection_that_was_idle_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_clients.KEEPALIVE_S < 5.0  # when vLLM closes it
    monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 0.0)

    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        for _ in range(3):
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)

    assert server.connections == 3


async def test_a_connection_that_was_idle_too_long_is_closed(
    only_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 0.1)

    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)
        with anyio.fail_after(10):
            await server.closed.wait()


async def test_a_connection_that_was_not_idle_long_enough_is_closed_later(
    only_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 0.0)

    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)
        monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 0.1)  # before the first look at it
        with anyio.fail_after(10):
            await server.closed.wait()


async def test_that_no_file_is_left_is_not_the_backends_fault(only_direct: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(always(answer_of(b"{}"))) as (_, upstream, target):
        gc.collect()  # so that none is closed meanwhile
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(OutOfResources):
                async with upstream.open(target, Timeouts()):
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"{}"


async def test_a_connection_that_was_not_idle_long_enough_is_used_again(
    only_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 0.0)

    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)
        monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 60.0)
        for _ in range(20):  # it is looked at
            await anyio.lowlevel.checkpoint()
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)

    assert server.connections == 1


async def test_a_connection_that_is_found_to_be_idle_for_too_long_is_closed(
    only_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 60.0)

    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)
        monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 0.0)
        async with upstream.open(target, Timeouts()):
            with anyio.fail_after(10):
                await server.closed.wait()


async def test_any_number_of_connections_may_have_been_idle_too_long(
    only_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 200
    come, gate = anyio.Semaphore(0), anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        come.release()
        await gate.wait()
        await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):

        async def call() -> None:
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)

        async with anyio.create_task_group() as tasks:
            for _ in range(many):
                tasks.start_soon(call)
            for _ in range(many):
                await come.acquire()
            gate.set()
        monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 0.0)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack()) + many)  # not a frame per connection
        try:
            await call()
        finally:
            sys.setrecursionlimit(limit)

    assert server.connections == many + 1


async def test_leaving_early_closes_the_connection() -> None:
    async with serving(always(STREAM_HEAD + chunk(b"data: 1\n\n"))) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await response.read()
        with anyio.fail_after(5):
            await server.closed.wait()


async def test_a_kept_connection_is_closed_too_by_leaving_early() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n") if number == 1 else answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)
        async with upstream.open(target, Timeouts()) as response:
            await response.read()
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"{}"

    assert server.connections == 2


@pytest.mark.usefixtures("only_direct")
async def test_what_was_not_read_of_an_answer_is_not_taken_for_the_next_one() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        await stream.send(answer_of(b"%d" % number))

    async with serving(answer) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            assert isinstance(response, direct._Connection)
            while not (response._is_complete or response._is_lost):
                await anyio.lowlevel.checkpoint()
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"1"


@pytest.mark.parametrize("is_configured", [True, False])
async def test_a_client_that_is_closed_closes_its_idle_connections(
    monkeypatch: pytest.MonkeyPatch, is_configured: bool
) -> None:
    monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 60.0)  # not because they are idle
    async with raw_server(always(answer_of(b"{}"))) as server:
        async with client_of(server.url) as (upstream, target):
            assert isinstance(upstream, HttpxUpstream | DirectUpstream)
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)
            if not is_configured:
                upstream.update([], secrets={}, tls={})
        with anyio.fail_after(10):
            await server.closed.wait()


def connections_held() -> int:
    return sum(isinstance(one, direct._Connection) for one in gc.get_objects())


@pytest.mark.usefixtures("only_direct", "without_collector")
async def test_no_memory_is_held_by_connections_that_were_closed() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        if number == 0:
            await stream.aclose()
        else:
            await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))

    before = connections_held()
    async with serving(answer) as (server, upstream, target):
        with pytest.raises(UpstreamLost) as lost:
            async with upstream.open(target, Timeouts()):
                pass
        let_go(lost.value)
        del lost
        async with upstream.open(target, Timeouts()) as response:
            await response.read()
        del response
        page = direct.DirectClient(server.url, None, verify=True)
        assert await page.get("/page", 1, kept=False) == (200, b"data: 1\n\n")
        with anyio.fail_after(10):
            while connections_held() > before:
                await anyio.lowlevel.checkpoint()


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


async def test_when_it_may_be_asked_again_is_said_by_the_answer_itself() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        said = "" if number == 1 else f"Retry-After: {number + 5}\r\n"
        behind = answer_of(b"{}", "429 Too Many Requests", "Retry-After: 9\r\n") if number == 2 else b""
        await stream.send(answer_of(b"{}", "429 Too Many Requests", said) + behind)

    found = []
    async with serving(answer) as (server, upstream, target):
        for _ in range(3):
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)
                found.append(response.retry_after)

    assert found == ["5", None, "7"]
    assert server.connections == 1


@pytest.mark.parametrize("before", ["an answer", "an early hint"])
async def test_how_an_answer_ends_is_said_by_the_answer_itself(before: str) -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        if before == "an answer" and number == 0:
            await stream.send(answer_of(b"{}"))
            return
        hint = b"HTTP/1.1 103 Early Hints\r\ncontent-length: 0\r\n\r\n" if before == "an early hint" else b""
        await stream.send(hint + b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await stream.aclose()

    async with serving(answer) as (server, upstream, target):
        if before == "an answer":
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"{}"
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"all of it"

    assert server.connections == 1


async def test_that_an_answer_is_compressed_is_said_by_the_answer_itself() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        if number == 0:
            await stream.send(answer_of(b"{}", "400 Bad Request", "Content-Encoding: gzip\r\n"))
        else:
            await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):
        for status in (400, 200):
            async with upstream.open(target, Timeouts()) as response:
                assert response.status == status
                assert await whole(response) == b"{}"

    assert server.connections == 1


@pytest.mark.usefixtures("only_direct")
async def test_what_nobody_asked_for_does_not_change_the_answer_before_it() -> None:
    answer = always(answer_of(b"{}") + answer_of(b"no", "500 Internal Server Error", "Retry-After: 9\r\n"))
    async with serving(answer) as (server, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                assert (response.status, response.retry_after) == (200, None)
                assert await whole(response) == b"{}"

    assert server.connections == 2


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


async def lost_behind_a_first_answer(
    lose: Callable[[RawServer, SocketStream], Awaitable[None]], error: type[UpstreamError] = UpstreamLost
) -> None:
    """Ask twice on one connection, and have `lose` do something instead of the second answer: an `error`."""

    async def answer(stream: SocketStream, number: int) -> None:
        if number == 1:
            await lose(server, stream)
        else:
            await stream.send(answer_of(b"{}"))

    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"{}"
        with pytest.raises(error):
            async with upstream.open(target, Timeouts()):
                pass

    assert len(server.requests) == 2


async def test_a_kept_connection_that_ends_long_after_the_request_may_have_ended_because_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_clients, "STALE_S", 0.0)

    async def lose(_: RawServer, stream: SocketStream) -> None:
        await stream.aclose()  # as a process does that is killed over what it has read

    await lost_behind_a_first_answer(lose)


async def test_a_backend_that_is_gone_with_a_kept_connection_may_be_gone_because_of_the_request() -> None:
    async def lose(server: RawServer, stream: SocketStream) -> None:
        await server.refuse()
        await stream.aclose()

    await lost_behind_a_first_answer(lose)


@pytest.mark.usefixtures("only_direct")
async def test_a_kept_connection_that_ends_within_an_answer_was_not_being_closed_as_idle() -> None:
    async def lose(_: RawServer, stream: SocketStream) -> None:
        await stream.send(b"HTTP/1.1 200 ")
        await stream.aclose()

    await lost_behind_a_first_answer(lose, UpstreamFailed)


async def test_a_request_that_was_read_is_not_sent_twice() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.aclose()

    async with serving(answer) as (server, upstream, target):
        with pytest.raises(UpstreamLost):
            async with upstream.open(target, Timeouts()):
                pass

    assert len(server.requests) == 1


async def test_what_is_not_http_is_a_failure_and_not_tried_again() -> None:
    async with serving(always(b"\x00\x01 nonsense\r\n\r\n")) as (server, upstream, target):
        with pytest.raises(UpstreamFailed):
            async with upstream.open(target, Timeouts()):
                pass

    assert len(server.requests) == 1


@pytest.mark.usefixtures("only_direct")
async def test_an_upgrade_that_nobody_asked_for_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    answer = always(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n")
    async with serving(answer) as (_, upstream, target):
        with pytest.raises(UpstreamFailed, match="is not HTTP"):
            async with upstream.open(target, Timeouts()):
                pass

    assert caplog.records == []  # nor did the event loop catch what it does not know


async def test_a_connection_that_breaks_mid_body_is_a_failure() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await stream.aclose()

    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        assert await response.read() == b"data: 1\n\n"
        with pytest.raises(UpstreamFailed):
            await response.read()


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize("is_poured", [False, True], ids=["read", "poured"])
async def test_what_is_not_http_within_a_body_is_said_to_be_that(is_poured: bool) -> None:
    async with serving(always(STREAM_HEAD + b"no chunk\r\n")) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            with pytest.raises(UpstreamFailed, match="not HTTP"):
                await received(response, is_poured=is_poured)


@pytest.mark.parametrize("host", ["a..b", "a" * 300])
async def test_a_host_that_can_have_no_address_is_unreachable(host: str) -> None:
    async with client_of(f"http://{host}:8000") as (upstream, target):
        with pytest.raises(UpstreamUnreachable):
            async with upstream.open(target, Timeouts()):
                pass


async def test_nobody_there_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with client_of(url) as (upstream, target):
            with pytest.raises(UpstreamUnreachable):
                async with upstream.open(target, Timeouts()):
                    pass


async def test_one_that_takes_no_connection_in_time_is_unreachable() -> None:
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket())
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        for _ in range(3):  # who comes when so many wait to be accepted gets no answer
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(busy.getsockname())
        async with client_of(f"http://127.0.0.1:{busy.getsockname()[1]}") as (upstream, target):
            with pytest.raises(UpstreamUnreachable):
                async with upstream.open(target, Timeouts(connect_s=0.05)):
                    pass


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize(("age_s", "connections"), [(60.0, 1), (0.0, 2)])
async def test_a_connection_is_kept_up_to_an_age(
    monkeypatch: pytest.MonkeyPatch, age_s: float, connections: int
) -> None:
    """Kept for as long as it is in use, it would stay with an address that the host's name has no more."""
    monkeypatch.setattr(backend_clients, "AGE_S", age_s)

    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"{}"

    assert server.connections == connections


async def test_a_redirect_is_not_followed() -> None:
    answer = always(answer_of(b"", "307 Temporary Redirect", "location: http://127.0.0.1:1/\r\n"))
    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            assert response.status == 307

    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "encoding", "fails"),
    [
        ("200 OK", "gzip", True),
        ("200 OK", "Br", True),
        ("200 OK", "identity", False),
        ("200 OK", "", False),
        ("400 Bad Request", "gzip", False),  # whose fault it is does not depend on that
    ],
)
async def test_a_backend_that_compresses_is_said_to(status: str, encoding: str, fails: bool) -> None:
    answer = always(answer_of(b"{}", status, f"Content-Encoding: {encoding}\r\n"))
    async with serving(answer) as (_, upstream, target):
        if fails:
            with pytest.raises(UpstreamFailed, match="compresses"):
                async with upstream.open(target, Timeouts()):
                    pass
        else:
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"{}"


async def test_an_answer_in_many_small_pieces_is_one_answer() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        for byte in STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + LAST_CHUNK:
            await stream.send(bytes([byte]))

    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        assert await whole(response) == b"data: 1\n\ndata: 2\n\n"


async def test_no_more_of_an_answer_is_read_than_is_wanted() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD)
        with suppress(anyio.BrokenResourceError):
            while True:  # without an end
                await stream.send(chunk(b"x" * 1000))

    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        with anyio.fail_after(10):
            assert len(await response.read_whole(100_000)) > 100_000


async def test_what_is_as_long_as_it_may_be_is_read_to_its_end() -> None:
    gate, found = anyio.Event(), list[bytes]()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"x" * 10))
        await gate.wait()
        await stream.send(chunk(b"y") + LAST_CHUNK)

    async def read(response: UpstreamResponse) -> None:
        found.append(await response.read_whole(10))

    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, response)
            await anyio.wait_all_tasks_blocked()
            gate.set()

    assert found == [b"x" * 10 + b"y"]  # else it would seem to be whole


@pytest.mark.usefixtures("only_direct")
class Late(direct.DirectClient):
    """Goes on only when its new connection is lost, as in a process that is busy at that moment.

    Or while it is `closing`: when the event loop still has to say that it is lost.
    """

    waits = True
    closing = False

    async def _connected(self, connect_s: float) -> direct._Connection:
        connection = await super()._connected(connect_s)
        with anyio.fail_after(10):
            while self.waits and not (
                connection._transport.is_closing() if self.closing else connection._is_lost
            ):
                await anyio.lowlevel.checkpoint()
        return connection


ASKED = b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("closing", [False, True])
async def test_a_connection_that_is_lost_as_soon_as_it_is_made_reached_nobody(closing: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Late(f"http://127.0.0.1:{listener.getsockname()[1]}", None, verify=True)
        client.closing = closing

        def close_one() -> None:
            listener.accept()[0].close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, close_one)
            with pytest.raises(UpstreamUnreachable):
                await client.ask(ASKED, b"", 5.0)
        assert not client._busy
        await client.aclose()


async def test_one_that_is_lost_so_behind_a_kept_one_may_be_lost_because_of_the_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Late(f"http://127.0.0.1:{listener.getsockname()[1]}", None, verify=True)

        def answer_one() -> None:
            with listener.accept()[0] as kept:
                kept.recv(1000)
                kept.sendall(answer_of(b"{}"))
                kept.recv(1000)
            listener.accept()[0].close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, answer_one)
            client.waits = False
            connection = await client.ask(ASKED, b"", 5.0)
            assert await whole(connection) == b"{}"
            assert client.take_back(connection)
            client.waits = True
            with pytest.raises(UpstreamLost):
                await client.ask(ASKED, b"", 5.0)
        await client.aclose()


async def test_an_answer_may_end_where_the_connection_does() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await stream.aclose()

    async with serving(answer) as (server, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"all of it"
    assert server.connections == 2


async def test_a_connection_that_is_announced_to_close_is_not_used_again() -> None:
    answer = always(answer_of(b"{}", headers="connection: close\r\n"))
    async with serving(answer) as (server, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)
    assert server.connections == 2


async def test_an_early_hint_is_no_answer() -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\ncontent-encoding: gzip\r\nretry-after: 9\r\n\r\n"
    answer = always(hint + answer_of(b"{}"))
    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        assert response.status == 200
        assert response.retry_after is None
        assert await whole(response) == b"{}"


async def test_trailers_say_nothing_of_the_answer() -> None:
    trailers = b"0\r\ncontent-encoding: gzip\r\nretry-after: 9\r\n\r\n"
    answer = always(STREAM_HEAD + chunk(b"x") + trailers)
    async with serving(answer) as (server, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"x"
                assert response.retry_after is None
    assert server.connections == 1


async def test_a_long_body_arrives_whole_and_a_long_answer_is_not_piled_up() -> None:
    pieces, read = 400, anyio.Event()
    sent = 0

    async def answer(stream: SocketStream, _: int) -> None:
        nonlocal sent
        await stream.send(STREAM_HEAD)
        for _ in range(pieces):
            await stream.send(chunk(b"x" * 65_536))
            sent += 1
        await stream.send(LAST_CHUNK)

    async with raw_server(answer) as server, client_of(server.url) as (upstream, target):
        body = bytes(range(256)) * 20_000
        async with upstream.open(replace(target, body=body), Timeouts()) as response:
            await response.read()
            with anyio.move_on_after(0.5):  # it has all the time it needs to send everything, and cannot
                await read.wait()
            assert sent < pieces
            left = len(await whole(response))
    assert server.requests[0][1] == body
    assert left > 0


@pytest.mark.usefixtures("only_direct")
async def test_an_answer_that_comes_before_the_body_was_read_is_an_answer() -> None:
    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.receive(10)
            await stream.send(answer_of(b"no", "413 Too Much"))
            await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        async with client_of(url) as (upstream, target):
            big = replace(target, body=bytes(30_000_000))
            for _ in range(2):  # the second time on another connection: the first one's body is not through
                with anyio.fail_after(10):
                    async with upstream.open(big, Timeouts()) as response:
                        assert response.status == 413
                        assert await whole(response) == b"no"
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def ending_unread(answer: bytes) -> AsyncIterator[tuple[str, anyio.Event]]:
    """Run a server that answers, reads nothing more, and ends its side of the connection at the event.

    Yields its URL and the event.
    """

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        with (await loop.sock_accept(listen))[0] as connection:
            await loop.sock_recv(connection, 10)
            await loop.sock_sendall(connection, answer)
            await is_read.wait()
            connection.shutdown(socket.SHUT_WR)
            await anyio.sleep_forever()

    is_read = anyio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listen:
        listen.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            with anyio.fail_after(10):
                yield f"http://127.0.0.1:{listen.getsockname()[1]}", is_read
            tasks.cancel_scope.cancel()


@pytest.mark.usefixtures("only_direct")
async def test_such_an_answer_may_end_where_its_side_of_the_connection_does() -> None:
    async with (
        ending_unread(b"HTTP/1.0 413 Too Much\r\n\r\nno") as (url, is_read),
        client_of(url) as (upstream, target),
        upstream.open(replace(target, body=bytes(30_000_000)), Timeouts()) as response,
    ):
        assert await response.read() == b"no"
        is_read.set()
        assert await response.read() == b""


@pytest.mark.usefixtures("only_direct")
async def test_such_an_answer_may_also_break_off_there() -> None:
    async with (
        ending_unread(b"HTTP/1.1 413 Too Much\r\nContent-Length: 9\r\n\r\nno") as (url, is_read),
        client_of(url) as (upstream, target),
        upstream.open(replace(target, body=bytes(30_000_000)), Timeouts()) as response,
    ):
        assert await response.read() == b"no"
        is_read.set()
        with pytest.raises(UpstreamFailed, match="broke"):
            await response.read()


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize(
    ("answer", "error"), [(b"", UpstreamLost), (b"HTTP/1.1 413 Too", UpstreamFailed)], ids=["no", "half a"]
)
async def test_a_backend_that_ends_its_side_before_the_head_of_an_answer_has_failed(
    answer: bytes, error: type[Exception]
) -> None:
    async with ending_unread(answer) as (url, is_read), client_of(url) as (upstream, target):
        is_read.set()
        with pytest.raises(error):
            async with upstream.open(replace(target, body=bytes(30_000_000)), Timeouts()):
                pass


async def test_a_body_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_clients, "WRITE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listen:
        url = f"http://127.0.0.1:{listen.getsockname()[1]}"
        async with client_of(url) as (upstream, target):
            with anyio.fail_after(10), pytest.raises(UpstreamTimeout, match="did not read the request"):
                async with upstream.open(replace(target, body=bytes(30_000_000)), Timeouts()):
                    pass


@pytest.mark.usefixtures("only_direct")
async def test_a_body_that_is_read_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_clients, "WRITE_S", 0.3)
    body, loop = bytes(60_000_000), asyncio.get_running_loop()

    async def read_slowly(listen: socket.socket) -> None:
        stream, _ = await loop.sock_accept(listen)
        with stream:
            stream.setblocking(False)
            slow_until = anyio.current_time() + 0.7
            left = len(body)
            while left > 0:  # the last of it may stay in the kernel
                left -= len(await loop.sock_recv(stream, 262_144))
                if anyio.current_time() < slow_until:
                    await anyio.sleep(0.01)
            await anyio.sleep(0.7)  # it has read it all, and thinks
            await loop.sock_sendall(stream, answer_of(b"yes"))
            await anyio.sleep_forever()

    with socket.create_server(("127.0.0.1", 0)) as listen:
        listen.setblocking(False)
        async with (
            client_of(f"http://127.0.0.1:{listen.getsockname()[1]}") as (upstream, target),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(read_slowly, listen)
            with anyio.fail_after(20):
                async with upstream.open(replace(target, body=body), Timeouts()) as response:
                    assert await whole(response) == b"yes"
            tasks.cancel_scope.cancel()


@pytest.mark.usefixtures("only_direct")
async def test_a_head_without_an_end_is_given_up() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\n")
        with suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(b"x-more: " + b"y" * 1000 + b"\r\n")

    async with serving(answer) as (_, upstream, target):
        with pytest.raises(UpstreamFailed):
            async with upstream.open(target, Timeouts()):
                pass


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize("is_poured", [False, True], ids=["read", "poured"])
@pytest.mark.parametrize(
    ("opening", "more"),
    [(b"", b"x-more: " + b"y" * 1000 + b"\r\n"), (b"x-more: ", b"y" * 1000)],
    ids=["many", "one"],
)
async def test_trailers_without_an_end_are_given_up(opening: bytes, more: bytes, is_poured: bool) -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"x") + b"0\r\n" + opening)
        with suppress(anyio.BrokenResourceError):
            for _ in range(10_000):
                await stream.send(more)
            await stream.send(b"\r\n\r\n")

    async with serving(answer) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            with pytest.raises(UpstreamFailed, match="headers of the backend's answer are too long"):
                await received(response, is_poured=is_poured)


@pytest.mark.usefixtures("only_direct")
async def test_chunks_whose_lines_come_by_themselves_are_no_trailers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "HEAD_BYTES_MAX", 100)

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD[: len(STREAM_HEAD) // 2])
        await stream.send(STREAM_HEAD[len(STREAM_HEAD) // 2 :])
        for _ in range(200):
            await stream.send(b"1\r\n")
            await anyio.lowlevel.checkpoint()
            await stream.send(b"x\r\n")
            await anyio.lowlevel.checkpoint()
        await stream.send(LAST_CHUNK)

    async with serving(answer) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"x" * 200
        sink = Sink()
        async with upstream.open(target, Timeouts()) as response:
            await response.stream_to(sink.take)
        assert sink.data == b"x" * 200


@pytest.mark.usefixtures("only_direct")
async def test_the_heads_of_earlier_answers_make_none_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "HEAD_BYTES_MAX", 100)
    head, body = answer_of(b"{}")[:-2], b"{}"

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(head)
        (client,) = cast("DirectUpstream", upstream)._clients.values()
        (connection,) = client._busy
        while not (connection._is_headed or connection._is_lost):
            await anyio.lowlevel.checkpoint()
        await stream.send(body)

    async with serving(answer) as (server, upstream, target):
        for _ in range(4):
            async with upstream.open(target, Timeouts()) as response:
                assert isinstance(response, direct._Connection)
                while not (response._is_complete or response._is_lost):  # so that it is read at once
                    await anyio.lowlevel.checkpoint()
                assert await whole(response) == body

    assert server.connections == 1


@pytest.mark.usefixtures("only_direct")
async def test_what_nobody_asked_for_ends_a_kept_connection() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        await stream.send(answer_of(b"{}") + (b"HTTP/1.1 200 OK\r\n\r\nmore" if number == 0 else b""))

    async with serving(answer) as (_, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"{}"


async def until_it_closes(client: direct.DirectClient) -> None:
    """Return while the event loop still has to tell the idle connection of a client that it is lost."""
    (connection,) = client._idle
    with anyio.fail_after(10):
        while not connection._transport.is_closing():
            await anyio.lowlevel.checkpoint()


@pytest.mark.usefixtures("only_direct")
async def test_a_kept_connection_is_not_used_between_what_nobody_asked_for_and_its_end() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        await stream.send(answer_of(b"{}"))
        if number == 0:  # as a proxy does whose patience with an idle connection is over
            await timed_out.wait()
            await stream.send(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n")

    timed_out = anyio.Event()
    async with raw_server(answer) as server:
        client = direct.DirectClient(server.url, None, verify=True)
        for _ in range(2):
            connection = await client.ask(ASKED, b"", 5.0)
            assert await whole(connection) == b"{}"
            if client.take_back(connection) and not timed_out.is_set():
                timed_out.set()
                await until_it_closes(client)
        await client.aclose()

    assert server.connections == 2


@pytest.mark.usefixtures("only_direct")
async def test_what_the_event_loop_has_not_read_yet_is_not_taken_for_the_next_answer() -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        ends.append(stream.extra(SocketAttribute.raw_socket).fileno())
        await stream.send(answer_of(b"%d" % number))

    ends: list[int] = []
    async with raw_server(answer) as server:
        client = direct.DirectClient(server.url, None, verify=True)
        for number in range(3):
            connection = await client.ask(ASKED, b"", 5.0)
            assert await whole(connection) == b"%d" % number
            assert client.take_back(connection)
            os.write(ends[-1], answer_of(b"nobody asked for this"))
        await client.aclose()


@pytest.mark.usefixtures("only_direct")
async def test_a_connection_that_is_being_closed_is_not_kept() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(answer_of(b"{}"))
        await is_read.wait()
        await stream.send(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n")

    is_read = anyio.Event()
    async with raw_server(answer) as server:
        client = direct.DirectClient(server.url, None, verify=True)
        connection = await client.ask(ASKED, b"", 5.0)
        assert await whole(connection) == b"{}"
        is_read.set()  # its caller has yet to read the answer, and holds the connection
        with anyio.fail_after(10):
            while not connection._transport.is_closing():
                await anyio.lowlevel.checkpoint()

        assert not client.take_back(connection)

        await client.aclose()


@pytest.mark.usefixtures("only_direct")
async def test_a_backend_that_stopped_before_it_was_asked_is_not_lost_because_of_the_request() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(answer_of(b"{}"))
        await stopped.wait()
        await server.refuse()
        await stream.aclose()

    stopped = anyio.Event()
    async with raw_server(answer) as server:
        client = direct.DirectClient(server.url, None, verify=True)
        connection = await client.ask(ASKED, b"", 5.0)
        assert await whole(connection) == b"{}"
        assert client.take_back(connection)
        stopped.set()
        await until_it_closes(client)
        with pytest.raises(UpstreamUnreachable):
            await client.ask(ASKED, b"", 5.0)
        await client.aclose()


async def test_a_backend_has_its_connections_for_as_long_as_it_is_asked_in_the_same_way() -> None:
    answer = always(answer_of(b"{}"))
    async with raw_server(answer) as server, client_of(server.url, b="first") as (upstream, target):
        assert isinstance(upstream, HttpxUpstream | DirectUpstream)

        async def key_sent() -> bytes:
            async with upstream.open(target, Timeouts()) as response:
                await whole(response)
            (key,) = (line for line in server.requests[-1][0].split(b"\r\n") if b"Bearer" in line)
            return key.partition(b"Bearer ")[2]

        assert await key_sent() == b"first"
        upstream.update([target.backend], secrets={"b": "first"}, tls={})
        assert await key_sent() == b"first"
        assert (server.connections, upstream._retired) == (1, [])

        upstream.update([target.backend], secrets={"b": "second"}, tls={})
        assert await key_sent() == b"second"
        assert (server.connections, len(upstream._retired)) == (2, 1)

        upstream.update([target.backend], secrets={"b": "second"}, tls={"b": False})
        assert await key_sent() == b"second"
        assert (server.connections, len(upstream._retired)) == (3, 2)


async def test_a_backend_that_has_moved_is_not_asked_for_what_was_meant_for_its_former_url() -> None:
    answer = always(answer_of(b"{}"))
    async with raw_server(answer) as former, serving(answer) as (server, upstream, target):
        assert isinstance(upstream, HttpxUpstream | DirectUpstream)
        moved = replace(target.backend, url=former.url)
        upstream.update([moved], secrets={}, tls={})
        with pytest.raises(UpstreamUnreachable):
            async with upstream.open(target, Timeouts()):
                pass
        async with upstream.open(replace(target, backend=moved), Timeouts()) as response:
            assert await whole(response) == b"{}"

    assert (len(server.requests), len(former.requests)) == (0, 1)


async def test_a_way_that_is_configured_no_more_is_run_to_its_end() -> None:
    gate = anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await gate.wait()
        await stream.send(chunk(b"data: 2\n\n") + LAST_CHUNK)

    async with serving(answer) as (_, upstream, target):
        assert isinstance(upstream, HttpxUpstream | DirectUpstream)
        async with upstream.open(target, Timeouts()) as response:
            await response.read()
            upstream.update([], secrets={}, tls={})
            await upstream.close_retired()
            assert len(upstream._retired) == 1
            with pytest.raises(UpstreamUnreachable):
                async with upstream.open(target, Timeouts()):
                    pass
            gate.set()
            assert await whole(response) == b"data: 2\n\n"
        assert not upstream._retired


async def test_a_way_that_is_configured_no_more_is_closed_however_its_last_call_ends() -> None:
    class Left(Exception):
        pass

    async with serving(always(STREAM_HEAD + chunk(b"data: 1\n\n"))) as (_, upstream, target):
        assert isinstance(upstream, HttpxUpstream | DirectUpstream)
        with pytest.raises(Left):
            async with upstream.open(target, Timeouts()) as response:
                await response.read()
                upstream.update([], secrets={}, tls={})
                raise Left
        assert not upstream._retired


async def test_so_is_one_whose_call_has_failed() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.aclose()

    async with serving(answer) as (_, upstream, target):
        assert isinstance(upstream, HttpxUpstream | DirectUpstream)
        with pytest.raises(UpstreamLost):
            async with upstream.open(target, Timeouts()):
                pass
        upstream.update([], secrets={}, tls={})
        await upstream.close_retired()
        assert not upstream._retired


async def test_so_is_one_whose_calls_have_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_clients, "KEEPALIVE_S", 60.0)  # not because it is idle
    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        assert isinstance(upstream, HttpxUpstream | DirectUpstream)
        async with upstream.open(target, Timeouts()) as response:
            await whole(response)
        upstream.update([], secrets={}, tls={})
        await upstream.close_retired()
        assert not upstream._retired
        with anyio.fail_after(10):
            await server.closed.wait()


@pytest.mark.usefixtures("only_direct")
async def test_a_call_that_ends_early_ends_with_its_connection_closed() -> None:
    """Else its slot would be free while the engine still works for it."""
    async with serving(always(STREAM_HEAD + chunk(b"data: 1\n\n"))) as (_, upstream, target):
        for is_cancelled in (False, True):
            with anyio.CancelScope() as scope:
                async with upstream.open(target, Timeouts()) as response:
                    await response.read()
                    if is_cancelled:
                        scope.cancel()
            assert isinstance(response, direct._Connection)
            assert response._is_lost


@pytest.mark.usefixtures("only_direct")
async def test_so_does_a_call_that_ends_before_its_answer() -> None:
    held = list[direct._Connection]()

    async def answer(_: SocketStream, __: int) -> None:
        held.extend(client._busy)
        scope.cancel()

    async with serving(answer) as (_, upstream, target):
        (client,) = cast("DirectUpstream", upstream)._clients.values()
        with anyio.CancelScope() as scope:
            async with upstream.open(target, Timeouts()):
                raise AssertionError("there is no answer")
        (connection,) = held
        assert connection._is_lost
        assert not client.in_flight


@pytest.mark.parametrize("value", [b"b\r\nc: d", b"b\nc: d", b"b\rc: d"])
async def test_a_header_with_a_line_break_never_leaves(value: bytes) -> None:
    async with serving(always(answer_of(b"{}"))) as (server, upstream, target):
        with pytest.raises(Exception):  # noqa: B017 - each client has its own
            async with upstream.open(replace(target, headers=((b"a", value),)), Timeouts()):
                pass
    assert server.requests == []


# ------------------------------------------------------------------ poured


class Sink:
    """What an answer is poured into."""

    def __init__(self, enough: int | None = None) -> None:
        """Want no more after `enough` bytes."""
        self.data = b""
        self.calls = 0
        self.got = anyio.Event()
        self.enough = enough
        self._holding: UpstreamResponse | None = None
        self._held: UpstreamResponse

    def take(self, data: bytes) -> bool:
        assert data
        self.calls += 1
        self.data += data
        if self._holding is not None:
            self._held, self._holding = self._holding, None
            self._held.pause()
        self.got.set()
        return self.enough is None or len(self.data) < self.enough

    async def more(self) -> None:
        """Return once something has come that had not when this was called last."""
        await self.got.wait()
        self.got = anyio.Event()

    def hold_once(self, response: UpstreamResponse) -> None:
        """Hold an answer when the first of it has come."""
        self._holding = response

    async def go_on_after(self, event: anyio.Event) -> None:
        """Let it go on once that has happened."""
        await event.wait()
        self._held.resume()


class Spilt(Exception):
    """What a sink raises."""


async def test_all_that_comes_is_poured_as_it_comes() -> None:
    gate, sink = anyio.Event(), Sink()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await gate.wait()
        for byte in chunk(b"data: 2\n\n") + LAST_CHUNK:
            await stream.send(bytes([byte]))

    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response, anyio.create_task_group() as tasks:
            tasks.start_soon(response.stream_to, sink.take)
            await sink.more()
            assert sink.data == b"data: 1\n\n"  # the second one has not been sent yet
            gate.set()
        assert sink.data == b"data: 1\n\ndata: 2\n\n"
        async with upstream.open(target, Timeouts()) as response:
            assert await response.read() == b"data: 1\n\n"
            gate.set()
            assert await whole(response) == b"data: 2\n\n"

    assert server.connections == 1


async def test_the_rest_of_an_answer_may_be_poured() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await stream.send(chunk(b"data: 2\n\n") + LAST_CHUNK)

    sink = Sink()
    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        first = await response.read()
        await response.stream_to(sink.take)

        assert first + sink.data == b"data: 1\n\ndata: 2\n\n"
        assert await response.read() == b""


async def test_what_had_to_wait_before_it_is_poured_is_read_on() -> None:
    """More arrives between the first read and the rest than may be buffered, so that reading is paused."""
    event, sent = b"data: " + b"x" * 100_000 + b"\n\n", anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        for number in range(200):
            if number == 4:
                sent.set()
            await stream.send(chunk(event))
        await stream.send(LAST_CHUNK)

    sink = Sink()
    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        first = await response.read()
        with anyio.move_on_after(0.5):  # a client that reads nothing until it is asked never gets there
            await sent.wait()
        with anyio.fail_after(20):
            await response.stream_to(sink.take)

        assert first + sink.data == b"data: 1\n\n" + 200 * event


class Chunks(Sink):
    """What takes chunks as they were sent, but for those with `not_whole` in them."""

    def __init__(self, not_whole: bytes = b"?") -> None:
        super().__init__()
        self.whole = 0
        self._not_whole = not_whole

    def take_chunk(self, data: bytes, start: int, end: int) -> bool:
        assert data == chunk(data[start:end])
        if self._not_whole in data:
            return False
        self.whole += 1
        self.take(data[start:end])
        return True


@pytest.mark.usefixtures("only_direct")
async def test_a_chunk_that_comes_alone_is_taken_as_it_was_sent() -> None:
    sink, gate = Chunks(not_whole=b"4"), anyio.Event()

    async def answer(stream: SocketStream, number: int) -> None:
        if number == 1:
            await stream.send(answer_of(b"{}"))
            return
        await stream.send(STREAM_HEAD + chunk(b"data: 0\n\n"))
        await gate.wait()
        for count in range(1, 8):
            size = 9 if count != 6 else TOKEN_BYTES_MAX
            await stream.send(chunk(b"data: %d" % count + b"\n" * (size - 7)))
            await sink.more()
        await stream.send(LAST_CHUNK)

    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            first = await response.read()
            gate.set()
            await response.stream_to(sink.take, sink.take_chunk)
        async with upstream.open(target, Timeouts()) as response:  # the parser has not lost its place
            assert await whole(response) == b"{}"

    assert (
        first + sink.data
    ).split() == b"data: 0 data: 1 data: 2 data: 3 data: 4 data: 5 data: 6 data: 7".split()
    assert sink.whole == 5  # the one that is not wanted so, and the one that is too long, are not
    assert server.connections == 1


WIRE = b"".join(chunk(b"data: %d\n\n" % count) for count in range(8))
LONGER = chunk(b"data: x\n\n").replace(b"9\r\n", b"0009;note=1\r\n") + WIRE  # legal, if unusual
NESTED = chunk(chunk(b"data: z\n\n") + b" " * 200)  # with what looks like a chunk in it
LURE = chunk(b"data: y\n\n\r\n" + b" " * 14)  # as this one does without the first digit of its length


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize("sent", [WIRE, LONGER, NESTED + WIRE, WIRE + LURE, LURE + NESTED])
async def test_chunks_arrive_whole_however_they_are_cut(sent: bytes) -> None:
    """Cut exactly: the reads of a socket are not the writes of the other side."""
    dice = Random(1)
    count = len(sent)
    all_cuts = [[cut] for cut in range(1, count)]
    all_cuts += [sorted(dice.sample(range(1, count), 6)) for _ in range(200)]
    starts = [0, *(at for at in range(2, count) if sent.startswith(b"\r\n", at - 2))]
    all_cuts += [[start + 1, end] for start in starts for end in starts if start + 1 < end]
    all_cuts += [[start, end] for start in starts[1:] for end in starts if start < end]
    all_cuts += [[start, start + 1, end] for start in starts[1:] for end in starts if start + 1 < end]

    async with serving(always(STREAM_HEAD)) as (server, upstream, target):
        for cuts in all_cuts:
            sink = Chunks(not_whole=b"7")
            async with upstream.open(target, Timeouts()) as response:
                assert isinstance(response, asyncio.Protocol)
                with anyio.fail_after(10):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(response.stream_to, sink.take, sink.take_chunk)
                        await anyio.lowlevel.checkpoint()
                        for start, end in pairwise([0, *cuts, count]):
                            response.data_received(sent[start:end])
                        response.data_received(LAST_CHUNK)
            assert sink.data == dechunked(sent), cuts

    assert server.connections == 1


def dechunked(sent: bytes) -> bytes:
    """Return what is in chunks."""
    data = b""
    while sent:
        line, _, sent = sent.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        data, sent = data + sent[:size], sent[size + 2 :]
    return data


@pytest.mark.usefixtures("only_direct")
async def test_what_is_wrong_behind_a_chunk_that_was_taken_whole_is_found() -> None:
    sink = Chunks()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 0\n\n"))
        await sink.more()
        await stream.send(chunk(b"data: 1\n\n"))
        await sink.more()
        await stream.send(b"9\r\ndata: 2\n\nno\r\n")

    async with serving(answer) as (server, upstream, target), upstream.open(target, Timeouts()) as response:
        with pytest.raises(UpstreamFailed):
            await response.stream_to(sink.take, sink.take_chunk)
        with anyio.fail_after(5):
            await server.closed.wait()
    assert sink.whole == 1


@pytest.mark.usefixtures("only_direct")
async def test_what_a_sink_of_chunks_raises_is_raised() -> None:
    sink = Sink()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 0\n\n"))
        await sink.more()
        await stream.send(chunk(b"data: 1\n\n"))

    def spill(_: bytes, __: int, ___: int) -> bool:
        raise Spilt

    async with serving(answer) as (server, upstream, target):
        with pytest.raises(Spilt):
            async with upstream.open(target, Timeouts()) as response:
                await response.stream_to(sink.take, spill)
        with anyio.fail_after(5):
            await server.closed.wait()
    assert sink.data == b"data: 0\n\n"


@pytest.mark.usefixtures("only_direct")
async def test_an_answer_that_is_held_hands_over_no_chunk() -> None:
    sink = Chunks(not_whole=b"0")
    async with serving(always(STREAM_HEAD)) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as response, anyio.create_task_group() as tasks:
            assert isinstance(response, asyncio.Protocol)
            sink.hold_once(response)
            tasks.start_soon(response.stream_to, sink.take, sink.take_chunk)
            await anyio.lowlevel.checkpoint()
            response.data_received(chunk(b"data: 0\n\n"))
            response.data_received(chunk(b"data: 1\n\n"))  # on its way when the reading was stopped
            assert sink.data == b"data: 0\n\n"
            response.resume()
            response.data_received(LAST_CHUNK)
    assert sink.data == b"data: 0\n\ndata: 1\n\n"


@pytest.mark.usefixtures("only_direct")
async def test_a_sink_that_wants_no_more_gets_no_further_chunk() -> None:
    sink = Chunks()
    sink.enough = 1
    async with serving(always(STREAM_HEAD)) as (_, upstream, target):
        async with upstream.open(target, Timeouts()) as response, anyio.create_task_group() as tasks:
            assert isinstance(response, asyncio.Protocol)
            tasks.start_soon(response.stream_to, sink.take, sink.take_chunk)
            await anyio.lowlevel.checkpoint()
            response.data_received(chunk(b"data: 0\n\n"))
            response.data_received(chunk(b"data: 1\n\n"))  # before the one that pours can know
    assert sink.data == b"data: 0\n\n"


@pytest.mark.usefixtures("only_direct")
async def test_what_follows_an_answer_is_no_chunk_of_it() -> None:
    sink = Chunks()
    async with serving(always(STREAM_HEAD)) as (server, upstream, target):
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response, anyio.create_task_group() as tasks:
                assert isinstance(response, asyncio.Protocol)
                tasks.start_soon(response.stream_to, sink.take, sink.take_chunk)
                await anyio.lowlevel.checkpoint()
                response.data_received(chunk(b"data: 0\n\n"))
                response.data_received(LAST_CHUNK)
                response.data_received(chunk(b"data: 1\n\n"))

    assert sink.data == 2 * b"data: 0\n\n"
    assert server.connections == 2


async def test_an_answer_without_a_body_pours_nothing() -> None:
    sink = Sink()
    answer = always(answer_of(b""))
    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        await response.stream_to(sink.take)
    assert sink.calls == 0


async def test_a_poured_answer_may_end_where_the_connection_does() -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await stream.aclose()

    sink = Sink()
    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        await response.stream_to(sink.take)
    assert sink.data == b"all of it"


@pytest.mark.parametrize("is_held", [False, True], ids=["flowing", "held"])
async def test_a_sink_that_wants_no_more_gets_no_more(is_held: bool) -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        if number == 0:
            await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        else:
            await stream.send(answer_of(b"{}"))

    sink = Sink(enough=1)
    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response:
            if is_held:
                sink.hold_once(response)
            with anyio.fail_after(10):
                await response.stream_to(sink.take)
        assert sink.data == b"data: 1\n\n"
        with anyio.fail_after(5):
            await server.closed.wait()  # it was not read to its end
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"{}"
        assert sink.calls == 1

    assert server.connections == 2


@pytest.mark.parametrize("is_late", [False, True], ids=["with the head", "behind it"])
async def test_what_a_sink_raises_is_raised_and_its_connection_is_not_used_again(is_late: bool) -> None:
    is_read = anyio.Event()

    async def answer(stream: SocketStream, number: int) -> None:
        if number == 0 and is_late:
            await stream.send(STREAM_HEAD)
            await is_read.wait()
            await stream.send(chunk(b"data: 1\n\n"))
        elif number == 0:
            await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        else:
            await stream.send(answer_of(b"{}"))

    def spill(_: bytes) -> bool:
        raise Spilt

    async with serving(answer) as (server, upstream, target):
        with pytest.raises(Spilt):
            async with upstream.open(target, Timeouts()) as response:
                is_read.set()
                await response.stream_to(spill)
        with anyio.fail_after(5):
            await server.closed.wait()
        async with upstream.open(target, Timeouts()) as response:
            assert await whole(response) == b"{}"

    assert server.connections == 2


BREAKS = {
    "closed": b"",
    "not a chunk": b"zz\r\n",
    "another answer": b"HTTP/1.1 200 OK\r\n\r\n",
}


@pytest.mark.parametrize("is_held", [False, True], ids=["flowing", "held"])
@pytest.mark.parametrize("last", BREAKS.values(), ids=BREAKS.keys())
async def test_what_came_before_an_answer_broke_is_poured_before_the_failure(
    last: bytes, is_held: bool
) -> None:
    broken = anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await sink.more()
        await stream.send(chunk(b"data: 2\n\n") + last)
        await stream.aclose()
        broken.set()

    sink = Sink()
    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        async with anyio.create_task_group() as tasks:
            if is_held:
                sink.hold_once(response)
                tasks.start_soon(sink.go_on_after, broken)
            with anyio.fail_after(10):
                await fails_to_pour(response, sink)

        assert sink.data == b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize("is_in_one", [False, True], ids=["later", "at once"])
async def test_an_answer_that_ends_while_it_is_held_is_poured_to_its_end(is_in_one: bool) -> None:
    ended = anyio.Event()

    async def answer(stream: SocketStream, number: int) -> None:
        if number or is_in_one:
            await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + LAST_CHUNK)
        else:
            await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await sink.more()
            await stream.send(chunk(b"data: 2\n\n") + LAST_CHUNK)
        ended.set()

    sink = Sink()
    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response, anyio.create_task_group() as tasks:
            sink.hold_once(response)
            tasks.start_soon(sink.go_on_after, ended)
            with anyio.fail_after(10):
                await response.stream_to(sink.take)
            response.pause()  # when it is over, this is of no account
        assert sink.data == b"data: 1\n\ndata: 2\n\n"
        for _ in range(2):
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"data: 1\n\ndata: 2\n\n"

    assert server.connections == 1


@pytest.mark.parametrize("last", [LAST_CHUNK, b"zz\r\n"], ids=["whole", "broken"])
async def test_what_is_held_from_the_first_is_poured_when_that_ends(last: bytes) -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD + chunk(b"data: 1\n\n") + last)
        ended.set()

    ended, sink, is_broken = anyio.Event(), Sink(), False

    async def stream_to(response: UpstreamResponse) -> None:
        nonlocal is_broken
        try:
            await response.stream_to(sink.take)
        except UpstreamFailed:
            is_broken = True

    async with serving(answer) as (_, upstream, target), upstream.open(target, Timeouts()) as response:
        response.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream_to, response)
            await ended.wait()
            await anyio.wait_all_tasks_blocked()
            assert sink.calls == 0
            response.resume()
    assert sink.data == b"data: 1\n\n"
    assert is_broken == (last != LAST_CHUNK)


async def test_nothing_is_poured_while_it_is_held_and_the_backend_waits() -> None:
    pieces = [bytes([number % 251]) * 65_536 for number in range(400)]
    sent, all_sent = 0, anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        nonlocal sent
        await stream.send(STREAM_HEAD)
        for piece in pieces:
            await stream.send(chunk(piece))
            sent += 1
        await stream.send(LAST_CHUNK)
        all_sent.set()

    sink = Sink()
    async with serving(answer) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response, anyio.create_task_group() as tasks:
            sink.hold_once(response)
            tasks.start_soon(response.stream_to, sink.take)
            await sink.more()
            with anyio.move_on_after(0.5):  # it has all the time it needs to send everything, and cannot
                await all_sent.wait()
            assert sink.calls == 1
            assert sent < len(pieces)
            response.resume()
        assert sha256(sink.data).digest() == sha256(b"".join(pieces)).digest()
        async with upstream.open(target, Timeouts()) as response:  # nothing of the holding is left
            assert len(await whole(response)) == len(sink.data)

    assert server.connections == 1


async def test_leaving_while_it_is_held_closes_the_connection() -> None:
    sink = Sink()
    async with serving(always(STREAM_HEAD + chunk(b"data: 1\n\n"))) as (server, upstream, target):
        async with upstream.open(target, Timeouts()) as response, anyio.create_task_group() as tasks:
            sink.hold_once(response)
            tasks.start_soon(response.stream_to, sink.take)
            await sink.more()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await server.closed.wait()


async def fails_to_pour(response: UpstreamResponse, sink: Sink) -> None:
    with pytest.raises(UpstreamFailed):
        await response.stream_to(sink.take)


# ------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.mark.parametrize("trust", ["pinned", "system", "unsaid", "none"])
async def test_the_certificate_of_a_backend_is_checked(
    certificate: tuple[Path, Path], kind: Kind, trust: str
) -> None:
    cert, key = certificate
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    tls: dict[str, dict[str, ssl.SSLContext | bool]] = {
        "pinned": {"b": ssl.create_default_context(cafile=cert)},
        "system": {"b": True},  # which does not know it
        "unsaid": {},
        "none": {"b": False},
    }
    async with tls_server(serving, answer_of(b"{}")) as (port, _):
        backend = Backend("b", f"https://localhost:{port}", CAPACITY)
        upstream = kind([backend], secrets={}, tls=tls[trust])
        target = Target(backend, Endpoint.CHAT, (), b"{}")
        if trust in ("system", "unsaid"):
            with pytest.raises(UpstreamUnreachable) as caught:
                async with upstream.open(target, Timeouts()):
                    pass
            assert "certificate" not in caught.value.message  # this is for callers, the cause for operators
            if kind is DirectUpstream:
                assert caught.value.cause.startswith("TLS: self")  # OpenSSL 3 has a hyphen next
        else:
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"{}"
        await upstream.aclose()


@pytest.mark.usefixtures("only_direct")  # with httpx, it is the caller who does not read
@pytest.mark.parametrize("has_length", [True, False], ids=["length", "no length"])
async def test_what_came_by_tls_before_the_end_is_not_lost_while_the_answer_is_held(
    certificate: tuple[Path, Path], kind: Kind, has_length: bool
) -> None:
    if not has_length and not isinstance(asyncio.get_running_loop(), uvloop.Loop):
        pytest.skip("asyncio cannot tell one end from the other")
    cert, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    body, sink, ended = b"x" * 100_000, Sink(), anyio.Event()

    async def answer(tls: TLSStream) -> None:
        data = answer_of(body) if has_length else b"HTTP/1.1 200 OK\r\n\r\n" + body
        await tls.receive()
        await tls.send(data[:-50_000])
        await sink.more()
        await tls.send(data[-50_000:])
        await tls.aclose()  # without a word by TLS that this is the end: without a length, it has broken off
        for _ in range(20):  # rounds of the event loop, in which the client may read it
            await anyio.lowlevel.checkpoint()
        ended.set()

    tcp_listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = tcp_listener.extra(SocketAttribute.local_port)
    listener = TLSListener(tcp_listener, context, standard_compatible=False)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        backend = Backend("b", f"https://localhost:{port}", CAPACITY)
        upstream = kind([backend], secrets={}, tls={"b": ssl.create_default_context(cafile=cert)})
        async with upstream.open(Target(backend, Endpoint.CHAT, (), b"{}"), Timeouts()) as response:
            sink.hold_once(response)
            tasks.start_soon(sink.go_on_after, ended)
            with (
                anyio.fail_after(10),
                nullcontext() if has_length else pytest.raises(UpstreamFailed, match="broke"),
            ):
                await response.stream_to(sink.take)
        await upstream.aclose()
        tasks.cancel_scope.cancel()
    assert sink.data == body


@pytest.mark.parametrize("has_one", [True, False], ids=["with-certificate", "without"])
async def test_a_backend_may_ask_for_a_client_certificate(
    certificate: tuple[Path, Path], kind: Kind, tmp_path: Path, has_one: bool
) -> None:
    cert, key = certificate
    own_cert, own_key = self_signed(tmp_path, "gateway")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(own_cert))
    serving.load_cert_chain(cert, key)
    serving.verify_mode = ssl.CERT_REQUIRED
    own = (own_cert, own_key) if has_one else (None, None)
    context = BackendTls(cert, True, *own).context()
    async with tls_server(serving, answer_of(b"{}")) as (port, seen):
        backend = Backend("b", f"https://localhost:{port}", CAPACITY)
        upstream = kind([backend], secrets={}, tls={"b": context})
        target = Target(backend, Endpoint.CHAT, (), b"{}")
        if has_one:
            async with upstream.open(target, Timeouts()) as response:
                assert await whole(response) == b"{}"
            assert len(seen) == 1
            assert seen[0]
        else:
            with pytest.raises(UpstreamError):
                async with upstream.open(target, Timeouts()):
                    pass
        await upstream.aclose()


async def test_that_a_client_certificate_is_wanted_is_known_of_a_lost_call(
    certificate: tuple[Path, Path], only_direct: None
) -> None:
    """By TLS 1.3, the server says so only after the handshake, when the request may have been sent."""
    cert, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED

    def refuse_one() -> None:
        with context.wrap_socket(
            listener.accept()[0], server_side=True, do_handshake_on_connect=False
        ) as connection:
            with suppress(ssl.SSLError):
                connection.do_handshake()
            with socket.socket(fileno=connection.detach()) as plain:
                while plain.recv(1000):  # what is still unread when it is closed would reset the connection
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://localhost:{listener.getsockname()[1]}"
        client = direct.DirectClient(url, None, ssl.create_default_context(cafile=cert))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, refuse_one)
            with anyio.fail_after(10), pytest.raises(UpstreamLost) as caught:
                await client.ask(ASKED, b"", 5.0)
        await client.aclose()

    assert tls_fault(caught.value).endswith("certificate required")  # docs/health.md
