"""A fake engine on a real socket: answers the paths that probes ask, and misbehaves on demand."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic, time_ns

import anyio
import anyio.lowlevel
import pytest

ACCEPTING_TURNS = 5
"""Turns of asyncio's loop in which a connection that was just accepted becomes one that is served. If its
server is closed meanwhile, its socket stays open: CPython 3.11 fails to make a transport then."""


class RealClock:
    """`ports.Clock`."""

    def now(self) -> float:
        return monotonic()

    def wall(self) -> float:
        return time_ns() / 1e9


@pytest.fixture
def clock() -> RealClock:
    return RealClock()


@dataclass
class Engine:
    """What the fake engine says. Tests change it while it runs.

    Attributes:
        port: Where it listens; kept over `stop` and `start`.
        replies: Per path, (status, body); a missing path is 404.
        gates: Paths whose answers wait until their event is set.
        garbage: Bytes it greets with instead of HTTP, or None.
        api_key: What `/v1` paths ask for, or None.
        asked: Per path, how often it was asked.
        headers: Per path, the last request head.
        busiest: Per path, the most requests under way at once.
        used: Per path, on which connections it was asked, counted from 1.
        closes: Whether it closes a connection that rests, as one whose patience is over.
        tls: With which certificate it answers, by TLS; None: without.
    """

    port: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    generation_tokens: int = 0
    started_at: float = 1e9
    models: tuple[str, ...] = ("gemma",)
    context_tokens: int = 32768
    replies: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    gates: dict[str, anyio.Event] = field(default_factory=dict)
    garbage: bytes | None = None
    api_key: str | None = None
    asked: dict[str, int] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)
    busiest: dict[str, int] = field(default_factory=dict)
    used: dict[str, set[int]] = field(default_factory=dict)
    closes: bool = False
    tls: ssl.SSLContext | None = None
    _opened: int = 0
    _under_way: dict[str, int] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _connections: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)
    _news: anyio.Event = field(default_factory=anyio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop as a killed process does: connections are cut, new ones refused."""
        if self._server is not None:
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(ACCEPTING_TURNS):
                await anyio.lowlevel.checkpoint()
            self._server.close()
            self._server = None
            for task, writer in self._connections.items():
                writer.transport.abort()
                task.cancel()
            while self._connections:
                await self._news.wait()

    async def until_asked(self, path: str, times: int) -> None:
        """Return once `path` was asked that often."""
        while self.asked.get(path, 0) < times:
            await self._news.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        self._opened += 1
        number = self._opened
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                if self.garbage is not None:
                    writer.write(self.garbage)
                    await writer.drain()
                    return
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    path = head.split(b" ", 2)[1].decode()
                    self._count(path, head)
                    self.used.setdefault(path, set()).add(number)
                    try:
                        await self._answer(path, head, writer)
                    finally:
                        self._under_way[path] -= 1
                    if self.closes:
                        return
        finally:
            writer.close()
            try:
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            finally:
                del self._connections[task]
                self._tell()

    def _count(self, path: str, head: bytes) -> None:
        self.headers[path] = head
        self.asked[path] = self.asked.get(path, 0) + 1
        self._under_way[path] = self._under_way.get(path, 0) + 1
        self.busiest[path] = max(self.busiest.get(path, 0), self._under_way[path])
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def _answer(self, path: str, head: bytes, writer: asyncio.StreamWriter) -> None:
        if path in self.gates:
            await self.gates[path].wait()
        status, body = self._reply(path, head)
        writer.write(f"HTTP/1.1 {status} Reason\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    def _reply(self, path: str, head: bytes) -> tuple[int, bytes]:
        wanted = f"authorization: bearer {self.api_key}\r\n".encode()
        if path.startswith("/v1") and self.api_key is not None and wanted not in head.lower():
            return 401, b'{"error":"Unauthorized"}'
        if path in self.replies:
            return self.replies[path]
        match path:
            case "/health":
                return 200, b""
            case "/metrics":
                return 200, self.page()
            case "/v1/models":
                entries = ",".join(
                    f'{{"id":"{name}","max_model_len":{self.context_tokens}}}' for name in self.models
                )
                return 200, f'{{"object":"list","data":[{entries}]}}'.encode()
            case "/version":
                return 200, b'{"version":"0.32.0"}'
        return 404, b'{"detail":"Not Found"}'

    def page(self) -> bytes:
        labels = '{engine="0",model_name="gemma"}'
        return (
            f"process_start_time_seconds {self.started_at}\n"
            f"vllm:num_requests_running{labels} {self.running}\n"
            f"vllm:num_requests_waiting{labels} {self.waiting}\n"
            f"vllm:kv_cache_usage_perc{labels} {self.kv_usage}\n"
            f"vllm:generation_tokens_total{labels} {self.generation_tokens}\n"
            f"vllm:prompt_tokens_total{labels} 0\n"
        ).encode()


EngineFactory = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture
def fake_engine() -> EngineFactory:
    """Return what starts a fake engine for the length of an `async with` block."""

    @asynccontextmanager
    async def start(tls: ssl.SSLContext | None = None) -> AsyncIterator[Engine]:
        engine = Engine(tls=tls)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()

    return start
