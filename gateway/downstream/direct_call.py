"""A chat that is answered on its connection: receiving its body, and writing its answer.

The connection itself is `direct.DirectProtocol`, a subclass of uvicorn's protocol.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Protocol

import anyio
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from gateway.cohort import Cohort
from gateway.core.errors import OutOfResources
from gateway.downstream.body_receiver import BodyReceiver
from gateway.downstream.origins import Origins
from gateway.downstream.relay import (
    FINISH_S,
    BodyLimits,
    Call,
    CallerGone,
    Head,
    HttpDownstream,
    Uploads,
)
from gateway.events import about
from gateway.ports import Headers, StreamTransform, UpstreamResponse

log = logging.getLogger("gateway.downstream")


class Chats(Protocol):
    """Answers chats.

    Attributes:
        limits: Limits on request bodies.
        uploads: The bodies being received.
        origins: The origins whose web pages may call.
        cohort: The requests that are ready.
    """

    limits: BodyLimits
    uploads: Uploads
    origins: Origins
    cohort: Cohort

    def head(self, headers: Headers) -> Head:
        """Validate a request by its head, before its body is read.

        Raises:
            GatewayError: the request is rejected.
        """

    def head_again(self, head: Head, length: str) -> Head | None:
        """Return the head of a request with the same headers as an earlier one, but another Content-Length.

        Returns None if it has to be validated anew.
        """

    def chat(self, call: Call) -> Awaitable[None]:
        """Answer a chat."""


class Connection(Protocol):
    """The parts of the connection that a call uses: uvicorn's protocol, and methods of `DirectProtocol`."""

    transport: asyncio.Transport
    flow: FlowControl
    loop: asyncio.AbstractEventLoop
    server_state: ServerState

    def answer(self, call: "DirectCall") -> None:
        """Answer a call in a task."""

    def on_response_complete(self) -> None:
        """Continue with the next request."""

    def linger(self) -> None:
        """Close the connection after an answer to an incomplete request."""

    def receive_no_more(self) -> None:
        """Stop receiving the body of a call."""


class _NullEvent:
    """An event without waiters: a call does not need uvicorn's notification."""

    def set(self) -> None:
        """Do nothing."""


_NULL_EVENT = _NullEvent()
_CHUNKED = (b"transfer-encoding", b"chunked")
_CLOSE = (b"connection", b"close")


class _StreamedAnswer:
    """Writes a streamed answer as it arrives."""

    __slots__ = ("_call", "_flow", "_match", "_response", "_transform", "_write")

    def __init__(
        self,
        call: "DirectCall",
        write: Callable[[bytes], None],
        flow: FlowControl,
        response: UpstreamResponse,
        transform: StreamTransform,
    ) -> None:
        """Pass the output of `transform` for `response` to `write`, in chunks."""
        self._call = call
        self._write = write
        self._flow = flow
        self._response = response
        self._transform = transform
        self._match = transform.match

    def take(self, data: bytes) -> bool:
        """Write the output for some received bytes. Return whether more is wanted."""
        passed_on = self._transform.take(data)
        if passed_on and not self._call.disconnected:
            self._write(_chunk(passed_on))
            if self._flow.write_paused:
                self._stall()
        return not self._transform.is_over

    def take_chunk(self, chunk: bytes, start: int, end: int) -> bool:
        """Write a chunk if the fast path recognizes it. Return whether it did."""
        passed_on = self._match(chunk, start, end)
        if passed_on is None:
            return False
        if not self._call.disconnected:
            # An unchanged chunk is written with its original framing.
            self._write(chunk if passed_on is chunk else _chunk(passed_on))
            if self._flow.write_paused:
                self._stall()
        return True

    def resumed(self) -> None:
        """Continue after the write buffer has drained."""
        self._transform.resumed()
        self._response.resume()

    def _stall(self) -> None:
        """Wait until the caller reads."""
        self._transform.stalled()
        self._response.pause()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class DirectCall(HttpDownstream):
    """A chat on its connection: both the `Call`, and the `ports.Downstream` of its answer.

    Attributes:
        response_complete, keep_alive, disconnected, message_event, more_body: The attributes of a request
            cycle that uvicorn's protocol and its subclasses use. `more_body`: its body may prove invalid.
        is_begun: Whether answering has begun.
        scope: Encloses `answer`; cancelled when the caller leaves meanwhile.
        parts, received: The received parts of the body, and their size.
        receiver: Receives a long body into a single buffer, which includes `parts`; None for a short body.
    """

    scope: anyio.CancelScope
    method = "POST"
    message_event = _NULL_EVENT
    response_complete = False
    keep_alive = True
    disconnected = False
    more_body = False
    is_begun = False
    received = 0
    receiver: BodyReceiver | None = None
    _failure: Exception | None = None
    _is_running = False
    _unwritten_head = b""
    _is_chunked = False
    _left = 0  # remaining bytes of an answer with a Content-Length
    _streamed: _StreamedAnswer | None = None

    def __init__(self, protocol: Connection, chats: Chats, head: Head, headers: Headers = ()) -> None:
        """Start receiving the body of a request with that head. `headers`: as parsed, if they were."""
        self.head = head
        self.headers = headers
        self._protocol = protocol
        self._transport = protocol.transport
        self._flow = protocol.flow
        self._chats = chats
        self.parts: list[bytes] = []
        chats.uploads.calls += 1

    # ------------------------------------------------------------ receiving

    def take(self, part: bytes) -> None:
        """Process a part of the body."""
        if self.is_begun:
            return  # it was given up
        self.parts.append(part)
        self.took(len(part))

    def took(self, size: int) -> None:
        """Account for received bytes of the body."""
        self.received += size
        try:
            self._chats.uploads.take(size, self.head.key, self._chats.limits.together_max)
        except OutOfResources as failure:
            self.give_up(failure)

    def begin(self) -> None:
        """Start answering: the body is complete, or was given up."""
        if not self.is_begun:
            self.is_begun = True
            self._protocol.answer(self)

    def give_up(self, failure: Exception) -> None:
        """Stop receiving the body, and answer with an error."""
        if not self.is_begun:
            self._failure = failure
            self.keep_alive = False  # the rest of the body must not be parsed as a request
            self._protocol.receive_no_more()
            self.begin()

    def caller_left(self) -> None:
        """Handle the loss of the connection."""
        self.disconnected = True
        if not self.is_begun:
            self.give_up(CallerGone())
        elif self._is_running:
            self.scope.cancel()

    # ------------------------------------------------------------ `Call`

    @property
    def downstream(self) -> HttpDownstream:
        """See `Call.downstream`."""
        return self

    async def body(self, limits: BodyLimits, uploads: Uploads, key: str | None) -> bytes:
        """See `Call.body`."""
        parts, self.parts = self.parts, []
        receiver, self.receiver = self.receiver, None
        if self.received:
            uploads.release(self.received, key)
            self.received = 0
        if self._failure is not None:
            raise self._failure
        if receiver is not None:
            return receiver.body()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """See `Call.run`."""
        self._is_running = True
        if self.disconnected:
            self.scope.cancel()
        try:
            await work()
        except OSError:  # a closed socket, noticed before the event loop has reported it
            return

    async def answer(self) -> None:
        """Answer the request; close the connection if the answer remains incomplete."""
        self._chats.uploads.calls -= 1
        self._chats.cohort.size -= 1  # it counts itself from here on
        try:
            await self._chats.chat(self)
        except Exception:
            log.exception("a request failed inside the gateway", extra=about("internal_error"))
        finally:
            if self.received:
                self._chats.uploads.release(self.received, self.head.key)
            if not self.response_complete:
                self._write_head()
                self._transport.close()

    # ------------------------------------------------------------ `ports.Downstream`

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        # Written together with the first bytes of the body. Those of a stream may be late; those of an answer
        # whose length is known follow at once.
        self._unwritten_head = self._begun(status, headers)
        if self._is_chunked:
            self._protocol.loop.call_soon(self._write_head)

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """See `ports.Downstream.send_whole`.

        One write, without waiting: an answer begins after the caller has read the previous one (`finish`).
        """
        head = self._begun(status, (*headers, (b"content-length", b"%d" % len(body))))
        self._left = 0
        if not self.disconnected:
            self._transport.write(head + body)

    def _begun(self, status: int, headers: Headers) -> bytes:
        """Return the head of the answer, which begins now."""
        self.is_started = True
        fields = [*self._protocol.server_state.default_headers, *headers]
        if self._chats.origins.allowed:
            fields += self._chats.origins.fields(self.head.headers.get("origin", ""))
        by_name = dict(fields)
        if b"connection" in by_name:  # only sent to close the connection
            self.keep_alive = False
            fields = [field for field in fields if field[0] != b"connection"]
        length = by_name.get(b"content-length")
        if length is None:
            self._is_chunked = True
            fields.append(_CHUNKED)
        else:
            self._left = int(length)
        if not self.keep_alive:
            fields.append(_CLOSE)
        lines = b"%b: %b\r\n" * len(fields) % tuple(chain.from_iterable(fields))  # in one step
        head = STATUS_LINE[status] + lines + b"\r\n"
        if head.count(b"\n") != len(fields) + 2 or head.count(b"\r") != len(fields) + 2:
            raise ValueError("a header holds a line break")
        return head

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`."""
        if not data:
            return
        if self._is_chunked:
            data = _chunk(data)
        else:
            self._left -= len(data)
            if self._left < 0:
                raise RuntimeError("the answer is longer than was announced")
        await self._write(data)

    async def relay(self, response: UpstreamResponse, transform: StreamTransform) -> None:
        """See `ports.Downstream.relay`. Bytes are written as they arrive, without waking a task.

        The answer is one whose length is not known.
        """
        self._write_head()
        write = self._chats.cohort.at_once(self._transport)
        streamed = self._streamed = _StreamedAnswer(self, write, self._flow, response, transform)
        try:
            await response.stream_to(streamed.take, streamed.take_chunk)
        finally:
            self._streamed = None

    def resumed(self) -> None:
        """Continue after the write buffer has drained."""
        if self._streamed is not None:
            self._streamed.resumed()

    async def finish(self) -> None:
        """See `HttpDownstream.finish`."""
        if self._left:
            raise RuntimeError("the answer is shorter than was announced")
        if self._flow.write_paused:
            with anyio.move_on_after(FINISH_S) as patience:
                await self._flow.drain()
            if patience.cancelled_caught:
                return  # the connection is closed without completing the body
        self._write_head()
        if self._is_chunked and not self.disconnected:
            self._transport.write(b"0\r\n\r\n")
        self.response_complete = True
        if self._failure is not None:
            self._protocol.linger()
        elif not self.keep_alive:
            self._transport.close()
        self._protocol.on_response_complete()

    async def _write(self, data: bytes) -> None:
        """Write once the buffer has room."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if not self.disconnected:
            self._transport.write(self._unwritten_head + data)
            self._unwritten_head = b""

    def _write_head(self) -> None:
        if self._unwritten_head and not self.disconnected:
            self._transport.write(self._unwritten_head)
            self._unwritten_head = b""
