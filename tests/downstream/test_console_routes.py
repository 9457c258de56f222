"""The console's page and its events, over raw sockets: what is shipped, and readers of every kind."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import pytest
from litestar import Litestar
from support import clients

from gateway.downstream.console_routes import READERS_MAX, Console
from gateway.downstream.listener import Listener
from gateway.downstream.routes import exception_handlers
from gateway.sockets import bind

WITHIN_S = 20.0


class Source:
    """A source whose snapshots are as large as a test wants, and are counted."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.snapshots = 0
        self.asked_since: list[int] = []
        self.all: list[dict[str, int]] = [{"number": 1}]

    def snapshot(self) -> Any:
        self.snapshots += 1
        return {"n": self.snapshots, "text": "x" * self.size}

    def history(self) -> Any:
        return {"lines": {}}

    def ended(self, since: int) -> tuple[int, Sequence[Any]]:
        self.asked_since.append(since)
        return len(self.all), self.all[since:]

    def request(self, request_id: str) -> Any:
        return {"id": request_id} if request_id == "req-1" else None


@asynccontextmanager
async def served(source: Source, **options: float) -> AsyncIterator[tuple[Console, int]]:
    console = Console(source, **options)
    app = Litestar(
        list(console.handlers()),
        openapi_config=None,
        logging_config=None,
        exception_handlers=exception_handlers({}),
    )
    with bind("127.0.0.1", 0) as bound:
        listener = Listener(app, bound)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.run_until_stopped)
            await listener.wait_started()
            try:
                yield console, bound.getsockname()[1]
            finally:
                await console.stop()
                listener.cut()


async def reader(port: int) -> anyio.abc.SocketStream:
    stream = await anyio.connect_tcp("127.0.0.1", port)
    await stream.send(b"GET /admin/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return stream


async def read_until(stream: anyio.abc.SocketStream, wanted: bytes) -> bytes:
    said = b""
    with anyio.fail_after(WITHIN_S):
        while wanted not in said:
            said += await stream.receive()
    return said


async def eventually(condition: Callable[[], bool], port: int) -> None:
    """Return once `condition()` holds; it is asked again after every other answer."""
    with anyio.fail_after(WITHIN_S):
        async with clients.http() as http:
            while not condition():
                await http.get(f"http://127.0.0.1:{port}/console/icon.svg")
                await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/console/console.css", "text/css; charset=utf-8"),
        ("/console/main.js", "text/javascript; charset=utf-8"),
        ("/console/icon.svg", "image/svg+xml"),
    ],
)
async def test_the_page_and_its_files_bring_a_strict_policy(path: str, kind: str) -> None:
    async with served(Source()) as (_, port), clients.http() as http:
        answer = await http.get(f"http://127.0.0.1:{port}{path}")

    policy = answer.headers["content-security-policy"].split("; ")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == kind
    assert policy[0] == "default-src 'none'"
    assert "frame-ancestors 'none'" in policy
    assert all("unsafe" not in rule and "http" not in rule and "*" not in rule for rule in policy)
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/console/nothing.js", "/console/..%2fapp.py", "/console/__init__.py"])
async def test_nothing_else_is_served(path: str) -> None:
    async with served(Source()) as (_, port), clients.http() as http:
        answer = await http.get(f"http://127.0.0.1:{port}{path}")
    assert answer.status_code == 404


async def test_a_request_that_is_not_kept_is_said_to_be_so() -> None:
    async with served(Source()) as (_, port), clients.http() as http:
        kept = await http.get(f"http://127.0.0.1:{port}/admin/request/req-1")
        gone = await http.get(f"http://127.0.0.1:{port}/admin/request/req-2")
    assert kept.json() == {"id": "req-1"}
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_readers_are_told_what_has_ended_since_they_last_looked() -> None:
    source = Source()
    async with served(source, tick_s=0.01) as (_, port), await reader(port) as stream:
        said = await read_until(stream, b'"n":2,')
        source.all.append({"number": 2})
        more = await read_until(stream, b'{"number":2}')

    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\ncontent-type: text/event-stream\r\n" in said
    assert b"event: history" in said
    assert b'{"number":1}' in said
    assert b'{"number":1}' not in more  # only once
    assert source.asked_since[:2] == [0, 1]


async def test_what_is_true_at_a_moment_is_worked_out_once_for_all() -> None:
    source = Source()
    async with served(source, tick_s=30.0) as (_, port):
        streams = [await reader(port) for _ in range(5)]
        for stream in streams:
            assert b'"n":1,' in await read_until(stream, b'"n":')
            await stream.aclose()
    assert source.snapshots == 1


async def test_a_reader_that_does_not_read_is_dropped() -> None:
    source = Source(size=4_000_000)
    async with served(source, tick_s=0.001, stall_s=0.2) as (console, port), await reader(port) as stream:
        await eventually(lambda: console.readers == 1, port)
        await eventually(lambda: console.readers == 0, port)  # it has asked, and reads nothing
        seen = 0
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            while True:
                seen += len(await stream.receive())
        assert seen < 3 * source.size  # nothing was put by for it


async def test_one_that_leaves_is_forgotten() -> None:
    async with served(Source(), tick_s=0.01) as (console, port):
        stream = await reader(port)
        await read_until(stream, b"snapshot")
        assert console.readers == 1
        await stream.aclose()
        await eventually(lambda: console.readers == 0, port)


async def test_there_are_not_more_readers_than_may_be() -> None:
    async with served(Source()) as (_, port):
        streams = [await reader(port) for _ in range(READERS_MAX)]
        for stream in streams:
            await read_until(stream, b"snapshot")
        async with await reader(port) as one_too_many:
            refused = await read_until(one_too_many, b"too_many_readers")
        await streams[0].aclose()
        for stream in streams[1:]:
            await stream.aclose()
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 10" in refused


async def test_streams_end_properly_when_the_gateway_stops() -> None:
    async with served(Source(), tick_s=30.0) as (console, port), await reader(port) as stream:
        await read_until(stream, b"snapshot")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(console.stop)
            await read_until(stream, b"0\r\n\r\n")  # the last chunk of a whole answer
        assert console.readers == 0
