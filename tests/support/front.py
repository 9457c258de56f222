"""The side of a gateway that callers see, on a real socket, before one backend that does as a test says.

Chats come in on either of two ways: directly, on their connections, or as ASGI requests. Whatever a caller
can tell of them is the same.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import count
from typing import Any

import anyio
import msgspec
from anyio.abc import SocketStream
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.clock import SystemClock
from gateway.cohort import Cohort
from gateway.core.backends import Backend, Pool, Timeouts
from gateway.core.count_check import CountTracker
from gateway.core.drift import DriftTracker
from gateway.core.health import BackendStatus, State
from gateway.core.policy import ModelPolicy, Policy, TrafficClass, Waiting
from gateway.core.trace import passed_on
from gateway.core.waiting import WaitingLine
from gateway.downstream.idempotency import IdempotencyRules
from gateway.downstream.keys import KeyRing
from gateway.downstream.listener import Listener
from gateway.downstream.origins import Origins
from gateway.downstream.relay import BodyLimits, Call, Head, Uploads
from gateway.downstream.routes import Applications
from gateway.downstream.stored_responses import ResponseRetention
from gateway.downstream.wire import WireRules
from gateway.pipeline import BackendWatch, Pipeline
from gateway.ports import Headers
from gateway.sockets import bind
from gateway.store.memory import MemoryIdempotency, MemoryLedger, MemoryResponseStore
from gateway.store.prefixes import MemoryPrefixIndex
from gateway.upstream.direct import DirectUpstream
from support.raw_server import LAST_CHUNK, STREAM_HEAD, RawServer, answer_of, chunk, raw_server
from support.world import DONE, HELLO, LIGHT, ROLE, STOP, USAGE, WHOLE, Estimates, Fleet, Notes

KEY, OTHER_KEY = "a-key", "another-key"
WAYS = ("direct", "asgi")
AT_ONCE = 200
"""After so many turns of the event loop, what has not happened yet waits for time to pass."""

COMPANY = 2
"""How many requests seem to be served besides: with others, answers are written together, and a request lets
the others catch up."""

Behaviour = Callable[[SocketStream, dict[str, Any]], Awaitable[None]]
"""Gets a connection of the backend, and the chat that came on it."""


async def oblige(stream: SocketStream, asked: dict[str, Any]) -> None:
    """Answer as a backend does that is well."""
    if asked["stream"]:
        await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
        await stream.send(chunk(STOP + USAGE) + chunk(DONE) + LAST_CHUNK)
    else:
        await stream.send(answer_of(WHOLE))


class Watched:
    """`Chats` that says which calls came to it, and how much memory was set aside for bodies then."""

    def __init__(self, applications: Applications) -> None:
        self.taken: list[Call] = []
        self.reserved_bytes: list[int] = []
        self._applications = applications
        self.limits = applications.serving.limits
        self.uploads: Uploads = applications.serving.uploads
        self.origins = applications.chats.origins
        self.cohort = applications.chats.cohort

    def head(self, headers: Headers) -> Head:
        return self._applications.chats.head(headers)

    def head_again(self, head: Head, length: str) -> Head | None:
        return self._applications.chats.head_again(head, length)

    async def chat(self, call: Call) -> None:
        self.taken.append(call)
        self.reserved_bytes.append(self.uploads.reserved_bytes)
        await self._applications.chats.chat(call)


@dataclass
class Front:
    """A gateway's front, and what can be seen behind it.

    Attributes:
        port: Where it listens.
        behave: What the backend does; may be changed meanwhile.
        backend: What came to the backend.
        notes: What was recorded.
        estimates: What counts prompts.
        watched: The chats that were taken directly.
        clock: The gateway's.
    """

    port: int
    behave: Behaviour
    backend: RawServer
    notes: Notes
    estimates: Estimates
    ledger: MemoryLedger
    applications: Applications
    watched: Watched
    listener: Listener
    clock: SystemClock

    @property
    def taken(self) -> int:
        """How many chats were taken directly."""
        return len(self.watched.taken)

    @asynccontextmanager
    async def caller(self) -> AsyncIterator["Wire"]:
        """A connection to it, while the block runs."""
        async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
            yield Wire(stream)

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` holds."""
        with anyio.fail_after(10):
            for looks in count():
                if condition():
                    return
                await anyio.sleep(0 if looks < AT_ONCE else 0.001)

    def is_idle(self) -> bool:
        """Return whether nothing of a request is left anywhere."""
        uploads = self.applications.serving.uploads
        held = any(self.ledger.claims(name) for name in self.ledger.loads())
        is_held = held or uploads.bytes or uploads.reserved_bytes
        return not (is_held or self.applications.serving.in_flight or uploads.calls)

    async def idle(self) -> None:
        """Return once nothing of a request is left, not even a task."""
        state = self.listener.server_state
        await self.eventually(lambda: self.is_idle() and not state.tasks)


def on_demand(build: Callable[[], ASGIApp]) -> ASGIApp:
    """Return an application that is built, which takes long, when the first request comes to it."""
    built = cache(build)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await built()(scope, receive, send)

    return app


@asynccontextmanager
async def front(
    way: str,
    behave: Behaviour = oblige,
    *,
    limits: BodyLimits = BodyLimits(),  # noqa: B008 - frozen
    waiting: Waiting = Waiting(),  # noqa: B008 - frozen
    estimates: Estimates | None = None,
    origins: Sequence[str] = (),
    timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    served: str = "served",
) -> AsyncIterator[Front]:
    """Serve on a free port while the block runs; whatever is in flight then is cut.

    `served`: the name by which the backend knows the model; callers call it "gemma-4".
    """
    notes, ledger, clock = Notes(), MemoryLedger(), SystemClock()
    estimates = estimates or Estimates()

    async def answer(stream: SocketStream, number: int) -> None:
        await site.behave(stream, msgspec.json.decode(backend.requests[number][1]))

    async with raw_server(answer) as backend:
        policy = Policy(
            models=(ModelPolicy(id="gemma-4", classes=(TrafficClass("chat", ("light",), waiting=waiting),)),),
            pools={"light": Pool("light", ("b",), timeouts=timeouts)},
            backends={"b": Backend("b", backend.url, LIGHT)},
        )
        cohort = Cohort()
        cohort.size = COMPANY
        upstream = DirectUpstream(policy.backends.values(), secrets={}, tls={}, cohort=cohort)
        pipeline = Pipeline(
            policy=lambda: policy,
            estimator=estimates,
            ledger=ledger,
            fleet=Fleet({"b": BackendStatus(state=State.UP, served_models=(served,))}),
            upstream=upstream,
            prefixes=MemoryPrefixIndex(),
            drift=DriftTracker(),
            counts=CountTracker(),
            watch=BackendWatch(lambda: policy, ledger, CountTracker(), clock),
            line=WaitingLine(),
            recorder=notes,
            clock=clock,
            objections=dict,
            cohort=cohort,
        )
        applications = Applications(
            pipeline=pipeline,
            policy=lambda: policy,
            keys=KeyRing(
                {
                    name: sha256(key.encode()).digest()
                    for name, key in {"team": KEY, "guests": OTHER_KEY}.items()
                }
            ),
            origins=Origins(origins),
            rules=WireRules(),
            limits=limits,
            retention=ResponseRetention(MemoryResponseStore(clock, 1_000_000), 60.0),
            idempotency=IdempotencyRules(MemoryIdempotency(clock, 1_000_000), 60.0, 100_000),
            background=None,
            batching=None,
            readiness=dict,
            recorder=notes,
            clock=clock,
            trace_of=passed_on,
            window_of=lambda backend: backend.capacity.context_tokens,
        )
        watched = Watched(applications)
        bound = bind("127.0.0.1", 0)
        port: int = bound.getsockname()[1]
        listener = (
            Listener(on_demand(applications.asgi_app), bound, watched)
            if way == "direct"
            else Listener(applications.asgi_app(), bound, None)
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.room.run)
            tasks.start_soon(listener.run_until_stopped)
            await listener.wait_started()
            try:
                site = Front(
                    port, behave, backend, notes, estimates, ledger, applications, watched, listener, clock
                )
                yield site
            finally:
                listener.cut()
                with anyio.CancelScope(shield=True):
                    await listener.wait_ended()
                    await upstream.aclose()
                tasks.cancel_scope.cancel()
        assert cohort.size == COMPANY  # each has left it


# ---------------------------------------------------------------- a caller, byte by byte


@dataclass(frozen=True)
class Got:
    """An answer as it came.

    Attributes:
        is_whole: Whether it came to the end that its head announces.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    is_whole: bool = True

    def header(self, name: str) -> str | None:
        """Return the one header of that name."""
        found = [value for key, value in self.headers if key == name]
        assert len(found) < 2, found
        return found[0] if found else None

    @property
    def code(self) -> str:
        """The code of an error in the one shape."""
        return str(msgspec.json.decode(self.body)["error"]["code"])


class Closed(Exception):
    """The connection ended where an answer was expected."""


class Wire:
    """One connection, and strict reading of what comes on it."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            await self.stream.send(part)

    async def ask(self, *parts: bytes) -> Got:
        """Send parts, and return the answer."""
        await self.send(*parts)
        return await self.answer()

    async def answer(self) -> Got:
        """Return the next answer. Raises Closed if there is none."""
        with anyio.fail_after(20):
            head = await self.head()
            return await self.rest_of(head)

    async def head(self) -> Got:
        """Return the head of the next answer. Raises Closed if there is none."""
        while b"\r\n\r\n" not in self._buffer:
            await self._more()
        line, *fields = self._taken(self._buffer.index(b"\r\n\r\n"), behind=4).decode().split("\r\n")
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1"
        pairs = [(name.lower(), value) for name, value in (field.split(": ", 1) for field in fields)]
        return Got(int(status), pairs, b"", is_whole=False)

    async def rest_of(self, got: Got) -> Got:
        """Return an answer whose head is read, with its body."""
        length = got.header("content-length")
        body = bytearray()
        try:
            if length is not None:
                assert got.header("transfer-encoding") is None
                while len(self._buffer) < int(length):
                    await self._more()
                body += self._taken(int(length))
            else:
                assert got.header("transfer-encoding") == "chunked"
                while data := await self.chunk():
                    body += data
        except Closed:
            return replace(got, body=bytes(body + (self._buffer if length is not None else b"")))
        return replace(got, body=bytes(body), is_whole=True)

    async def chunk(self) -> bytes:
        """Return the next chunk of a body; b"" is its end. Raises Closed if it does not come."""
        while b"\r\n" not in self._buffer:
            await self._more()
        start = self._buffer.index(b"\r\n") + 2
        end = start + int(self._buffer[: start - 2], 16)
        while len(self._buffer) < end + 2:
            await self._more()
        assert self._buffer.startswith(b"\r\n", end)
        return self._taken(end, behind=2)[start:]

    async def until_closed(self) -> bytes:
        """Return all that comes until the connection ends. Raises Closed if it is reset."""
        received = self._taken(len(self._buffer))
        with anyio.fail_after(20):
            while True:
                try:
                    received += await self.stream.receive()
                except anyio.EndOfStream:
                    return received
                except anyio.BrokenResourceError as error:
                    raise Closed from error

    async def is_closed(self) -> bool:
        """Return whether the connection ends here, with nothing more on it."""
        with anyio.fail_after(20):
            try:
                await self._more()
            except Closed:
                return not self._buffer
        return False

    def _taken(self, size: int, behind: int = 0) -> bytes:
        """Return so many bytes of what came; they are not there any more, nor so many `behind` them."""
        taken = bytes(self._buffer[:size])
        del self._buffer[: size + behind]
        return taken

    async def _more(self) -> None:
        try:
            self._buffer += await self.stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise Closed from error


def chat(*, stream: bool = False, **fields: Any) -> bytes:
    """Return the body of a chat."""
    messages = [{"role": "user", "content": "hello?"}]
    return msgspec.json.encode({"model": "gemma-4", "messages": messages, "stream": stream, **fields})


def post(
    body: bytes = chat(),
    *fields: str,
    key: str | None = KEY,
    path: str = "/v1/chat/completions",
    line: str = "",
    length: int | None = -1,
) -> bytes:
    """Return a request; `length` in place of its body's, None: no such header."""
    lines = [line or f"POST {path} HTTP/1.1", "Host: gateway", "Content-Type: application/json"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    return "\r\n".join([*lines, *fields, "", ""]).encode() + body
