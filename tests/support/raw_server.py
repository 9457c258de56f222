"""A server that reads HTTP requests off a real socket and answers with whatever bytes a test says."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
from anyio.abc import Listener, SocketStream, TaskGroup
from anyio.streams.tls import TLSAttribute, TLSStream


@dataclass
class RawServer:
    """What a test sees of it.

    Attributes:
        url: Its base URL.
        requests: Head and body of every request, as received.
        connections: How many were opened.
        closed: Set whenever a connection was closed by the other side.
        listener: What it listens with, as long as it runs.
    """

    url: str = ""
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: int = 0
    closed: anyio.Event = field(default_factory=anyio.Event)
    listener: Listener[SocketStream] | None = None

    async def refuse(self) -> None:
        """Listen no more; connections that are open stay."""
        assert self.listener is not None
        await self.listener.aclose()


Answer = Callable[[SocketStream, int], Awaitable[None]]
"""Gets the connection and the number of the request on the server, from 0."""


def always(data: bytes) -> Answer:
    """Return what answers every request with these bytes."""

    async def answer(stream: SocketStream, _: int) -> None:
        await stream.send(data)

    return answer


@asynccontextmanager
async def raw_server(answer: Answer) -> AsyncIterator[RawServer]:
    """Serve on a free port of 127.0.0.1 while the block runs."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    server = RawServer(listener=listener)
    server.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"

    async def serve(stream: SocketStream) -> None:
        server.connections += 1
        buffer = bytearray()
        async with stream:
            try:
                while True:
                    while b"\r\n\r\n" not in buffer:
                        buffer += await stream.receive()
                    end = buffer.index(b"\r\n\r\n")
                    head = bytes(buffer[:end])
                    del buffer[: end + 4]
                    length = content_length(head)
                    while len(buffer) < length:
                        buffer += await stream.receive()
                    body = bytes(buffer[:length])
                    del buffer[:length]
                    server.requests.append((head, body))
                    await answer(stream, len(server.requests) - 1)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                server.closed.set()

    async def listen(tasks: TaskGroup) -> None:
        try:
            await listener.serve(serve, tasks)
        except* anyio.ClosedResourceError:  # a test has closed it
            pass

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listen, tasks)
        yield server
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def tls_server(context: ssl.SSLContext, data: bytes) -> AsyncIterator[tuple[int, list[object]]]:
    """Answer `data` by TLS while the block runs; yield the port, and the certificate of each who connects."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    seen: list[object] = []

    async def serve(stream: SocketStream) -> None:
        async with stream:
            with suppress(ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream):
                tls = await TLSStream.wrap(
                    stream, server_side=True, ssl_context=context, standard_compatible=False
                )
                seen.append(tls.extra(TLSAttribute.peer_certificate))
                await tls.receive()
                await tls.send(data)
                await tls.receive()

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield listener.extra(anyio.abc.SocketAttribute.local_port), seen
        tasks.cancel_scope.cancel()


def content_length(head: bytes) -> int:
    """Return the announced length of a request's body."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def answer_of(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """Return a complete HTTP answer with that body."""
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
