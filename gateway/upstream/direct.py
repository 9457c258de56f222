"""A minimal HTTP/1.1 client on httptools, for the one kind of call the gateway makes to engines.

A general-purpose client costs more than everything else the gateway does for a request: it builds request,
URL and header objects, and asks a pool that scans all of its connections. Here a call is a head made of
prebuilt bytes, the last connection of a list, and a parser. Tests compare it with one over httpx.

It supports exactly what a call needs: one POST with a complete body, and an answer that is read as it
arrives. Redirects are returned as answers. Nothing is decompressed, since compression is not requested.
Probes need even less, a GET, but two a second per backend: with httpx, they took half of the CPU of an idle
gateway.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import httptools

from gateway import __version__, open_files, tcp
from gateway.cohort import Cohort
from gateway.core.backends import Backend, Timeouts
from gateway.core.errors import (
    OutOfResources,
    UpstreamFailed,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.event_template import TOKEN_BYTES_MAX
from gateway.ports import TakeChunk, Target, UpstreamResponse
from gateway.upstream import backend_clients
from gateway.upstream.backend_clients import BackendClient, BackendClients
from gateway.upstream.faults import tls_fault

HEAD_BYTES_MAX = 64 * 1024
"""Maximum bytes of a response head. A choice: no engine sends a longer one."""

BUFFERED_BYTES_MAX = 256 * 1024
"""Bytes of an answer that may be buffered; above this, reading is paused (backpressure). A choice: as much as
event loops read at once."""

APART_BYTES = 64 * 1024
"""A body of at least this size is written separately from its head. A choice: it saves a copy, and costs a
call."""


def _opening(size: int) -> bytes:
    """Return the size line of a chunk of `size` bytes in total.

    If no chunk has this size, return a bare line feed, which no chunk starts with.
    """
    for digits in range(1, 4):
        line = b"%x\r\n" % (size - digits - 4) if size > digits + 4 else b""
        if len(line) == digits + 2:
            return line
    return b"\n"


_OPENINGS = tuple(_opening(size) for size in range(TOKEN_BYTES_MAX + 1))


def _hold_a_line_break(fields: bytes, number: int) -> bool:
    """Return whether one of the `number` fields holds a line break, besides the one that ends it."""
    return fields.count(b"\n") != number or fields.count(b"\r") != number


_LOST = "The connection to the backend broke before it answered."
_USER_AGENT = f"gemma-gateway/{__version__}".encode()


class DirectUpstream(BackendClients["DirectClient"]):
    """`ports.Upstream`."""

    def __init__(
        self,
        backends: Iterable[Backend],
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
        cohort: Cohort | None = None,
    ) -> None:
        """Prepare a client per backend. What the requests of `cohort` send is written together."""
        self._cohort = Cohort() if cohort is None else cohort
        super().__init__(backends, secrets=secrets, tls=tls)

    def _new_client(self, url: str, secret: str | None, verify: ssl.SSLContext | bool) -> "DirectClient":
        return DirectClient(url, secret, verify, self._cohort)

    def open(self, target: Target, timeouts: Timeouts) -> "_Call":
        """See `ports.Upstream.open`."""
        return _Call(self, target, timeouts)

    async def begin(self, call: "_Call") -> UpstreamResponse:
        """Send the request of a call, and return its answer once the status is known. Raises as `open`."""
        target, call.target = call.target, None  # releases the body's memory before the answer
        assert target is not None
        client = call.client = self._take(target.backend)
        try:
            call.connection = await client.ask(client.head_of(target), target.body, call.timeouts.connect_s)
        except BaseException:
            await _closed()
            await self._give_back(client)
            raise
        return call.connection

    async def end(self, call: "_Call") -> None:
        """Return the connection to the pool if its answer is complete; close it otherwise."""
        client, connection = call.client, call.connection
        try:
            # Closing the connection early tells the engine to stop generating.
            if not client.take_back(connection):
                await _closed()
        finally:
            if client in self._retired:
                await self._give_back(client)
            else:
                client.in_flight -= 1


async def _closed() -> None:
    """Wait until the event loop has closed what was aborted, in its next iteration.

    Otherwise, the slot would be released before the engine can know of it.
    """
    with anyio.CancelScope(shield=True):
        await anyio.lowlevel.checkpoint()


class _Call:
    """The context manager returned by `DirectUpstream.open`. (A decorated generator takes 2 us more.)

    Its methods return the coroutines of the upstream: a coroutine of their own would only forward.
    """

    __slots__ = ("_upstream", "client", "connection", "target", "timeouts")

    def __init__(self, upstream: DirectUpstream, target: Target, timeouts: Timeouts) -> None:
        self._upstream, self.timeouts = upstream, timeouts
        self.target: Target | None = target
        self.client: DirectClient
        self.connection: _Connection

    def __aenter__(self) -> Coroutine[Any, Any, UpstreamResponse]:
        return self._upstream.begin(self)

    def __aexit__(self, *_: object) -> Coroutine[Any, Any, None]:
        return self._upstream.end(self)


class DirectClient(BackendClient):
    """The connections to one backend."""

    def __init__(
        self,
        url: str,
        secret: str | None,
        verify: ssl.SSLContext | bool,
        cohort: Cohort | None = None,
    ) -> None:
        super().__init__(url, secret, verify)
        self._cohort = Cohort() if cohort is None else cohort
        address = urlsplit(url)
        self._is_tls = address.scheme == "https"
        self._host = address.hostname or ""
        self._port = address.port or (443 if self._is_tls else 80)
        self._path = address.path.rstrip("/").encode()
        self._idle: list[_Connection] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._busy: set[_Connection] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._context: ssl.SSLContext | None = None
        lines = [b"host: " + address.netloc.rpartition("@")[2].encode()]
        lines += [b"user-agent: " + _USER_AGENT, b"accept: */*", b"accept-encoding: identity"]
        lines += [b"connection: keep-alive"]
        if secret is not None:
            lines.append(b"authorization: Bearer " + secret.encode())
        self._fields = b"".join(line + b"\r\n" for line in lines)
        self._is_unusable = _hold_a_line_break(self._fields, len(lines))
        self._openings: dict[str, bytes] = {}  # request line and constant fields, by endpoint
        self._pages: dict[str, bytes] = {}  # heads of requests for pages, by path

    def head_of(self, target: Target) -> bytes:
        """Return the head of a request."""
        fields = b"%b: %b\r\n" * len(target.headers) % tuple(chain.from_iterable(target.headers))
        if _hold_a_line_break(fields, len(target.headers)):
            raise ValueError("a header holds a line break")
        opening = self._openings.get(target.endpoint)
        if opening is None:
            opening = self._openings[target.endpoint] = self._opening(
                b"POST", target.endpoint, b"content-type: application/json\r\n"
            )
        return b"%b%bcontent-length: %d\r\n\r\n" % (opening, fields, len(target.body))

    def _opening(self, method: bytes, path: str, fields: bytes = b"") -> bytes:
        """Return the request line and the fields of every request. Raises UpstreamUnreachable."""
        if self._is_unusable:
            error = ValueError("a line break in an API key")
            raise UpstreamUnreachable("The API key for the backend cannot be sent.") from error
        return b"%b %b%b HTTP/1.1\r\n%b%b" % (method, self._path, path.encode(), self._fields, fields)

    async def get(self, path: str, bytes_max: int, *, kept: bool) -> tuple[int, bytes]:
        """Return the status of a page, and its content if that is 200. Has no time limit.

        Args:
            path: Of the page, below the backend's URL.
            bytes_max: Reading stops when the content is longer than this.
            kept: Whether the connection may be one that was kept alive, and is kept; else it is a new one.

        Raises:
            UpstreamUnreachable, UpstreamLost, UpstreamFailed, OutOfResources: as `Upstream.open`.
        """
        head = self._pages.get(path)
        if head is None:
            head = self._pages[path] = self._opening(b"GET", path) + b"\r\n"
        connection = await self.ask(head, b"", inf, anew=not kept)
        try:
            if connection.status != 200:
                return connection.status, b""
            return 200, await connection.read_whole(bytes_max)
        finally:
            if kept:
                self.take_back(connection)
            else:
                self._busy.discard(connection)
                connection.abort()

    async def ask(self, head: bytes, body: bytes, connect_s: float, *, anew: bool = False) -> "_Connection":
        """Send a request, and return its connection once the status is known. Raises as `Upstream.open`.

        `anew`: not on a connection that was kept alive.
        """
        was_sent = False
        if not anew and (kept := self._kept()) is not None:
            try:
                return await self._ask_on(kept, head, body)
            except _Stale as stale:  # the backend closed it, probably before reading the request
                was_sent = stale.was_sent
        since = monotonic()
        try:
            connection = await self._connected(connect_s)
        except UpstreamUnreachable as error:
            if was_sent:  # the backend may have read the request and crashed on it
                raise UpstreamLost(_LOST) from error
            raise
        connection.connect_s = monotonic() - since
        try:
            return await self._ask_on(connection, head, body)
        except _Stale as stale:  # it was lost as soon as it was made
            if was_sent:
                raise UpstreamLost(_LOST) from stale
            raise UpstreamUnreachable("The backend cannot be reached.") from stale

    async def _ask_on(self, connection: "_Connection", head: bytes, body: bytes) -> "_Connection":
        self._busy.add(connection)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(tcp.LOOK_S, self._look)
        try:
            await connection.ask(head, body)
        except BaseException:
            self._busy.discard(connection)
            connection.abort()
            raise
        return connection

    def take_back(self, connection: "_Connection") -> bool:
        """Keep a connection whose answer is complete, close any other. Return whether it was kept."""
        self._busy.discard(connection)
        now = monotonic()
        if not connection.is_reusable or now - connection.made_at >= backend_clients.AGE_S:
            connection.abort()
            return False
        connection.rest_from(now)
        self._idle.append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(backend_clients.KEEPALIVE_S, self._sweep)
        return True

    async def aclose(self) -> None:
        """Close every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _kept(self) -> "_Connection | None":
        """Return the most recently used idle connection that is not too old, or None."""
        while self._idle:
            connection = self._idle.pop()
            if monotonic() - connection.resting_since < backend_clients.KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    def _sweep(self) -> None:
        """Close connections that have been idle for too long, before the backend does."""
        now, self._sweeping = monotonic(), None
        while self._idle and now - self._idle[0].resting_since >= backend_clients.KEEPALIVE_S:
            self._idle.pop(0).abort()
        if self._idle:
            wait_s = self._idle[0].resting_since + backend_clients.KEEPALIVE_S - now
            self._sweeping = asyncio.get_running_loop().call_later(wait_s, self._sweep)

    def _look(self) -> None:
        """Close connections whose peer is unreachable, and check again later."""
        self._looking = None
        for connection in tuple(self._busy):
            connection.abort_if_gone()
        if self._busy:
            self._looking = asyncio.get_running_loop().call_later(tcp.LOOK_S, self._look)

    async def _connected(self, connect_s: float) -> "_Connection":
        """Open a new connection."""
        loop = asyncio.get_running_loop()
        try:
            with anyio.fail_after(connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._cohort),
                    self._host,
                    self._port,
                    ssl=self._tls(),
                )
        except TimeoutError as error:
            raise UpstreamUnreachable("The backend cannot be reached.") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: the name is invalid
            if isinstance(error, OSError) and open_files.are_used_up(error):
                raise OutOfResources("This gateway has no connections left.", retry_after_s=1) from error
            raise _unreachable(error) from error
        return connection

    def _tls(self) -> ssl.SSLContext | None:
        if not self._is_tls:
            return None
        if isinstance(self.verify, ssl.SSLContext):
            return self.verify
        if self._context is None:  # loading the system's certificates takes 20 ms
            self._context = ssl.create_default_context()
            if not self.verify:
                self._context.check_hostname = False
                self._context.verify_mode = ssl.CERT_NONE
        return self._context


def _unreachable(error: Exception) -> UpstreamUnreachable:
    """Return what callers are told of an error, with what operators are."""
    told = UpstreamUnreachable("The backend cannot be reached.")
    told.cause = tls_fault(error)
    return told


class _Stale(Exception):
    """A kept-alive connection could not be used. `was_sent`: the request had been written to it."""

    def __init__(self, *, was_sent: bool) -> None:
        super().__init__()
        self.was_sent = was_sent


class _Connection(asyncio.Protocol):
    """One connection, and the answer that arrives on it: `ports.UpstreamResponse`."""

    # Beyond thirty attributes, CPython keeps them in a hash table per object, in many more cache lines.
    __slots__ = (
        "_asked_at",
        "_awaited",
        "_buffered",
        "_cohort",
        "_error",
        "_has_answer",
        "_head_bytes",
        "_input",
        "_is_asked",
        "_is_between_chunks",
        "_is_complete",
        "_is_encoded",
        "_is_framed",
        "_is_headed",
        "_is_held",
        "_is_lost",
        "_is_paused",
        "_is_spoiled",
        "_is_unwritten",
        "_is_used",
        "_keeps_alive",
        "_loop",
        "_parser",
        "_parts",
        "_take",
        "_take_chunk",
        "_take_error",
        "_take_whole",
        "_tls",
        "_transport",
        "connect_s",
        "made_at",
        "resting_since",
        "retry_after",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, cohort: Cohort) -> None:
        self._loop = loop
        self._cohort = cohort
        self._transport: asyncio.Transport
        self._input: Callable[[int], Sequence[object]]
        self._tls: ssl.SSLObject | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._buffered = 0
        self._awaited: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_lost = False
        self._is_asked = False  # a request is in progress
        self._asked_at = 0.0
        self._has_answer = False  # bytes of its answer have arrived
        self._head_bytes = 0  # since the last body data
        self._is_headed = False
        self._is_complete = False
        self._is_framed = False  # the answer is delimited by a length or by chunks
        self._is_encoded = False  # the answer is compressed
        self._keeps_alive = False
        self._is_spoiled = False  # data followed the end of the answer
        self._is_paused = False
        self._is_held = False  # by the caller of `stream_to`
        self._take: Callable[[bytes], bool] | None = None
        self._take_chunk: TakeChunk | None = None
        self._take_whole: TakeChunk | None = None  # `_take_chunk`, while the next chunk may bypass the parser
        self._take_error: Exception | None = None
        self._is_between_chunks = False
        self._is_used = False  # it has served a request before
        self._is_unwritten = False  # much of the request waits to be written
        self.made_at = monotonic()
        self.resting_since = 0.0
        self.connect_s = 0.0
        self.status = 0
        self.retry_after: str | None = None

    # ------------------------------------------------------------ called by the pool

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request, and wait for the head of its answer.

        Raises:
            _Stale: it was kept alive, and closed before or while the request was written, or it has input.
            UpstreamLost, UpstreamFailed, UpstreamTimeout: as `ports.Upstream.open`.
        """
        # What has arrived on a kept connection would be taken for the answer to this request.
        if self._is_ending() or (self._is_used and self._input(0)):
            raise _Stale(was_sent=False)
        self._begin()
        if len(body) < APART_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        while not self._is_headed:
            if self._error is not None:
                raise self._error
            if self._is_unwritten:
                await self._written()
            else:
                await self._news()
        if self._is_encoded and self.status == 200:
            raise UpstreamFailed(backend_clients.ENCODED)

    def rest_from(self, now: float) -> None:
        """Become idle."""
        self.resting_since = now
        self.connect_s = 0.0
        self._is_used, self._is_held = True, False
        self._read_on()  # so that it notices when the backend closes it, even if reading was paused

    @property
    def is_reusable(self) -> bool:
        """Whether the answer is complete and the connection can serve another request."""
        is_over = self._is_complete and self._keeps_alive and not self._is_spoiled and not self._parts
        return is_over and not self._is_ending() and not self._transport.get_write_buffer_size()

    def _is_ending(self) -> bool:
        """Return whether it can serve no request. The event loop calls `connection_lost` only later."""
        return self._is_lost or self._transport.is_closing()

    def abort(self) -> None:
        """Close it immediately."""
        if not self._is_lost:
            self._transport.abort()

    def abort_if_gone(self) -> None:
        """Close it if its peer is unreachable, which ends the request waiting on it."""
        if not self._is_lost and tcp.is_gone(self._transport):
            self._transport.abort()

    async def read(self) -> bytes:
        """See `ports.UpstreamResponse.read`."""
        while not self._parts:
            if self._is_complete:
                return b""
            if self._error is not None:
                raise UpstreamFailed(str(self._error)) from self._error
            await self._news()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._buffered = self._head_bytes = 0
        self._read_on()
        return data

    async def read_whole(self, bytes_max: int) -> bytes:
        """See `ports.UpstreamResponse.read_whole`."""
        if self._is_complete and len(self._parts) == 1:
            return self._parts.pop()  # as most answers, it arrived at once
        return await backend_clients.read_on(self, await self.read(), bytes_max)

    async def stream_to(self, take: Callable[[bytes], bool], take_chunk: TakeChunk | None = None) -> None:
        """See `ports.UpstreamResponse.stream_to`. `take` is called from `data_received`."""
        self._take, self._take_chunk = take, take_chunk
        self._update_take_whole()
        try:
            self._pass_on()
            self._read_on()  # if more had arrived before than may be buffered
            while self._take is not None and (self._parts or not self._is_complete):
                if self._error is not None and not self._parts:
                    raise UpstreamFailed(str(self._error)) from self._error
                await self._news()
            if self._take_error is not None:
                raise self._take_error
        finally:
            self._take = self._take_chunk = self._take_whole = self._take_error = None

    def pause(self) -> None:
        """See `ports.UpstreamResponse.pause`."""
        self._is_held = True
        self._take_whole = None
        if not self._is_paused and not self._is_lost:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """See `ports.UpstreamResponse.resume`."""
        self._is_held = False
        self._pass_on()
        self._read_on()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._cohort.coalesce(transport, self._loop)
        self._input = tcp.input_of(transport)
        self._tls = transport.get_extra_info("ssl_object")
        for option in tcp.KEEPALIVE:
            transport.get_extra_info("socket").setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        take = self._take_whole
        if take is not None and (size := len(data)) <= TOKEN_BYTES_MAX:
            # Bytes that are exactly one chunk may be taken unparsed: the parser remains between two chunks.
            opening = _OPENINGS[size]
            if data.startswith(opening) and data.endswith(b"\r\n"):
                try:
                    if take(data, len(opening), size - 2):
                        return
                except Exception as error:  # noqa: BLE001 - re-raised by `stream_to`
                    self._take_error = error
                    self._stop_delivery()
                    return
        if not self._is_asked:  # no request was sent
            self._fail(UpstreamFailed("The backend sent unrequested data."))
            return
        self._has_answer = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # no upgrade was requested
            self._fail(UpstreamFailed("The backend sent something that is not HTTP."))
        # The parser does not report a partial size line; data then does not end with a line break.
        self._is_between_chunks = self._is_between_chunks and data.endswith(b"\r\n")
        if not self._parts and not self._is_complete:  # part of a head or of trailers
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._fail(UpstreamFailed("The headers of the backend's answer are too long."))
        if self._take is not None:
            self._update_take_whole()
            self._pass_on()
            return
        if self._buffered > BUFFERED_BYTES_MAX and not self._is_paused and not self._is_lost:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        # `connection_lost` is called only when the rest of the request is written, which may be never.
        if self._is_headed and not self._is_complete and not self._is_framed:
            self._is_complete = True  # an answer delimited by the end of the connection
            self._keeps_alive = False
            self._wake()
        elif self._is_asked:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._tls is not None and self._is_asked and self._error is None:
            self._receive_rest(self._tls)
        if self._error is None:
            self._error = self._loss()
            self._error.__cause__ = exc
        del self._parser  # it refers to this object: else both would wait for the garbage collector
        self._wake()

    def pause_writing(self) -> None:
        self._is_unwritten = True

    def resume_writing(self) -> None:
        self._is_unwritten = False

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        if self._is_complete:  # unrequested data after the answer
            self._is_spoiled = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_headed:  # a trailer, or the head of what nobody asked for, says nothing of the answer
            return
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True
        elif name == b"content-encoding":
            self._is_encoded = value.strip().lower() not in (b"", b"identity")
        elif name == b"retry-after":
            self.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._is_spoiled:
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._is_headed = True
        else:  # an interim response; the final one follows
            self._is_framed = self._is_encoded = False
            self.retry_after = None

    def on_body(self, body: bytes) -> None:
        if self._is_spoiled:
            return
        self._parts.append(body)
        self._buffered += len(body)

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        self._is_between_chunks = False
        if self._is_headed:
            self._is_complete = True
            # Must be read here: the parser resets it afterwards.
            self._keeps_alive = self._parser.should_keep_alive()
            self._is_asked = False

    # ------------------------------------------------------------ internals

    def _begin(self) -> None:
        """Reset the state of the previous answer."""
        self._is_asked = True
        self._asked_at = self._loop.time()
        self._has_answer = self._is_headed = self._is_complete = self._is_framed = False
        self._is_encoded = False
        self.retry_after = None
        self._head_bytes = self._buffered = 0

    def _receive_rest(self, tls: ssl.SSLObject) -> None:
        """Receive what came by TLS while reading was paused: uvloop drops it when the connection ends."""
        try:
            while data := tls.read(BUFFERED_BYTES_MAX):
                self.data_received(data)
        except ssl.SSLError:  # there is no more, and no end
            return
        self.eof_received()

    def _stop_delivery(self) -> None:
        """Stop delivering data, and wake the task in `stream_to`."""
        self._take = self._take_chunk = self._take_whole = None
        self._wake()

    def _update_take_whole(self) -> None:
        """Update whether the next chunk may bypass the parser."""
        self._take_whole = self._take_chunk if self._is_between_chunks and not self._is_held else None

    def _pass_on(self) -> None:
        """Deliver the buffered data, and wake the task in `stream_to` at the end of the answer."""
        take, parts = self._take, self._parts
        if take is None or self._is_held:
            return
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            self._buffered = self._head_bytes = 0
            try:
                goes_on = take(data)
            except Exception as error:  # noqa: BLE001 - re-raised by `stream_to`
                self._take_error, goes_on = error, False
            if not goes_on:
                self._stop_delivery()
                return
        if self._is_complete or self._error is not None:
            self._wake()

    def _read_on(self) -> None:
        if self._is_paused and not self._is_held:
            self._is_paused = False
            if not self._is_lost:
                self._transport.resume_reading()

    def _loss(self) -> Exception:
        if self._is_headed:
            return UpstreamFailed("The connection to the backend broke.")
        if self._has_answer:
            return UpstreamFailed("The backend sent something that is not HTTP.")
        if self._is_used and self._loop.time() - self._asked_at < backend_clients.STALE_S:
            return _Stale(was_sent=True)
        return UpstreamLost(_LOST)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._transport.abort()

    async def _news(self) -> None:
        """Wait until data arrives or the connection is lost."""
        awaited = self._awaited = self._loop.create_future()
        self._cohort.size -= 1
        try:
            await awaited
        finally:
            self._awaited = None
            if awaited.cancelled():
                self._cohort.size += 1

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)
            self._cohort.size += 1

    async def _written(self) -> None:
        """Wait while the request is being written: for news, or for `WRITE_S`.

        Raises:
            UpstreamTimeout: the backend has read nothing of it meanwhile.
        """
        left = self._transport.get_write_buffer_size()
        with anyio.move_on_after(backend_clients.WRITE_S) as patience:
            await self._news()
        if patience.cancelled_caught and self._transport.get_write_buffer_size() >= left:
            raise UpstreamTimeout("The backend did not read the request in time.")
