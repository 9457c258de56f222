"""Chats that never become ASGI requests: the same work, done on the connection itself.

The ASGI way of a request (a scope, a task group that listens for its caller's leaving, a message per piece)
costs more than all that is decided about it. So an ordinary chat, a POST with a length and a good key, is
taken here as soon as its head is complete, and becomes a `Call` like any other. Whatever is not ordinary
takes the ASGI way: chunked bodies, HTTP/1.0, `Expect`, upgrades, requests sent before the answer to the last
one, and every one that is refused by its head.

This leans on uvicorn's protocol class: a call stands where its `RequestResponseCycle` would, so that
keep-alive, pipelining, the end of connections and the graceful end of the server stay uvicorn's business.
Both ways pass the same tests (tests/downstream/test_calls.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import anyio
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core.errors import GatewayError, OutOfResources, RequestTimeout
from gateway.core.values import Endpoint
from gateway.downstream.filling import TOGETHER_MAX, WORTH_BYTES, Filling
from gateway.downstream.guard import GuardedProtocol
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
from gateway.ports import Headers, Pouring, UpstreamResponse

log = logging.getLogger("gateway.downstream")

_PATH = Endpoint.CHAT.value.encode()


class Chats(Protocol):
    """Who answers chats.

    Attributes:
        limits: What bounds the body of a request.
        uploads: What is being received.
    """

    limits: BodyLimits
    uploads: Uploads

    def head(self, headers: Headers) -> Head:
        """Return what is read of a request before its body is.

        Raises:
            GatewayError: something in it speaks against the request.
        """

    async def chat(self, call: Call) -> None:
        """Answer a chat."""


class DirectProtocol(GuardedProtocol):
    """uvicorn's protocol, guarded, from which ordinary chats are taken before they become ASGI requests."""

    def __init__(self, *args: Any, chats: Chats, **kwargs: Any) -> None:
        """As uvicorn calls it; `chats` answers what is taken."""
        super().__init__(*args, **kwargs)
        self._chats = chats
        self._call: Any = None  # a `DirectCall`, until its answer is complete
        self._is_receiving = False  # its body
        self._announced = 0  # bytes of that
        self._filling: Filling | None = None  # which receives it instead
        self._body_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Take bytes. A body that is not complete with those of its head has a time to be complete in."""
        super().data_received(data)
        if self._is_receiving and self._body_timer is None:
            self._body_timer = self.loop.call_later(self._chats.limits.within_s, self._body_overdue)
            self._fill()

    def on_headers_complete(self) -> None:
        """Take the request, or leave it to the ASGI way."""
        head = self._head_of_a_chat()
        if head is None:
            super().on_headers_complete()
            return
        self.head_is_complete()
        self.cycle = self._call = DirectCall(self, self._chats, head)  # type: ignore[assignment]
        self._is_receiving = True

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        if self._is_receiving:
            self._call.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Answer what is complete."""
        if self._is_receiving:
            self._is_receiving = False
            self._stop_body_timer()
            self._call.begin()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with what came meanwhile, or wait for what comes."""
        self._call, self._is_receiving = None, False
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work for a caller that has left."""
        self._stop_body_timer()
        self._end_filling()
        call, self._call = self._call, None
        super().connection_lost(exc)
        if call is not None:
            call.caller_left()

    def resume_writing(self) -> None:
        """Go on with an answer whose caller has read enough of it."""
        super().resume_writing()
        if self._call is not None:
            self._call.resumed()

    def answer(self, call: "DirectCall") -> None:
        """Answer a call in a task of its own, which ends with the server at the latest."""
        task = self.loop.create_task(call.answer())
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def receive_no_more(self) -> None:
        """Leave what still comes to the parser: the body is there, or the connection will be closed."""
        if self._filling is not None:
            self._end_filling()
            self.transport.set_protocol(self)

    def _fill(self) -> None:
        """Have the rest of a body received in one piece, if there is much of it."""
        uploads = self._chats.uploads
        if (
            self._announced - self._call.received < WORTH_BYTES
            or uploads.set_aside + self._announced > TOGETHER_MAX
            or self.transport.is_closing()
        ):
            return
        self._filling = Filling(self, uploads, self._announced, self._call.parts, self._filled)
        self._call.filling = self._filling
        self.transport.set_protocol(self._filling)

    def _filled(self, size: int, is_complete: bool) -> None:
        """Note that so much more of a body has come; answer what is complete."""
        self._call.took(size)
        if is_complete and self._filling is not None:
            self.receive_no_more()
            self.parser = self.new_parser()  # the old one still waits for this body
            self.on_message_complete()

    def _end_filling(self) -> None:
        if self._filling is not None:
            self._filling.end()
            self._filling = None

    def _head_of_a_chat(self) -> Head | None:
        """Return the head of an ordinary chat; None: it is none, or will be refused."""
        if self.url != _PATH or self.parser.get_method() != b"POST":
            return None
        if self.cycle is not None and not self.cycle.response_complete:
            return None
        if self.expect_100_continue or self.parser.should_upgrade() or not self.parser.should_keep_alive():
            return None
        announced = b""
        for name, value in self.headers:
            if name == b"content-length":
                announced = value
            elif name == b"transfer-encoding":
                return None
        if not announced.isdigit() or self.parser.get_http_version() != "1.1":
            return None
        self._announced = int(announced)
        if self._announced > self._chats.limits.bytes_max:
            return None
        try:
            return self._chats.head(self.headers)
        except GatewayError:
            return None

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _body_overdue(self) -> None:
        self._body_timer = None
        if self._is_receiving:
            within_s = self._chats.limits.within_s
            self._call.give_up(RequestTimeout(f"The request body was not complete within {within_s:g} s."))


class _Deaf:
    """An event that nobody waits for: a call is told in other ways what uvicorn would tell it by one."""

    def set(self) -> None:
        """Do nothing."""


class DirectCall(HttpDownstream):
    """A chat on its connection: `Call`, and the `ports.Downstream` of its answer.

    Attributes:
        response_complete, keep_alive, disconnected, message_event: What uvicorn's protocol reads, sets and
            calls of the request whose turn it is.
        is_begun: Whether it is being answered.
        parts, received: What has come of its body, and how many bytes that is.
        filling: What the body is received in, where that is done in one piece; `parts` are in it, too.
    """

    method = "POST"
    message_event = _Deaf()

    def __init__(self, protocol: DirectProtocol, chats: Chats, head: Head) -> None:
        """Receive the body of a request with that head."""
        super().__init__()
        self.head: Head | None = head
        self.headers: Headers = protocol.headers
        self.response_complete = False
        self.keep_alive = True
        self.disconnected = False
        self.is_begun = False
        self._protocol = protocol
        self._transport = protocol.transport
        self._flow = protocol.flow
        self._chats = chats
        self.parts: list[bytes] = []
        self.received = 0
        self.filling: Filling | None = None
        self._failure: Exception | None = None
        self._scope = anyio.CancelScope()
        self._unwritten_head = b""
        self._is_chunked = False
        self._left = 0  # bytes of an answer whose length was announced
        self._on_resumed: Callable[[], None] | None = None
        chats.uploads.calls += 1

    # ------------------------------------------------------------ receiving

    def take(self, part: bytes) -> None:
        """Take a piece of the body."""
        if self.is_begun:
            return  # it was given up
        self.parts.append(part)
        self.took(len(part))

    def took(self, size: int) -> None:
        """Count what was taken of the body."""
        uploads = self._chats.uploads
        self.received += size
        uploads.bytes += size
        if uploads.bytes > self._chats.limits.together_max:
            self.give_up(OutOfResources("Too much is being uploaded at once. Please retry.", retry_after_s=5))

    def begin(self) -> None:
        """Begin to answer: the body is complete, or never will be."""
        if not self.is_begun:
            self.is_begun = True
            self._protocol.answer(self)

    def give_up(self, failure: Exception) -> None:
        """Take no more of the body."""
        if not self.is_begun:
            self._failure = failure
            self.keep_alive = False  # what follows on the connection is not a request
            self._protocol.receive_no_more()
            self.begin()

    def caller_left(self) -> None:
        """Note that the connection is gone."""
        self.disconnected = True
        if self.is_begun:
            self._scope.cancel()
        else:
            self.give_up(CallerGone())

    # ------------------------------------------------------------ `Call`

    @property
    def downstream(self) -> HttpDownstream:
        """See `Call.downstream`."""
        return self

    async def body(self, limits: BodyLimits, uploads: Uploads) -> bytes:
        """See `Call.body`."""
        parts, self.parts = self.parts, []
        filling, self.filling = self.filling, None
        uploads.bytes -= self.received
        self.received = 0
        if self._failure is not None:
            raise self._failure
        if filling is not None:
            return filling.body()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """See `Call.run`."""
        with self._scope, suppress(OSError):  # a socket found closed before the event loop told us so
            await work()

    async def answer(self) -> None:
        """Be answered; drop the connection if that does not come to its end."""
        self._chats.uploads.calls -= 1
        try:
            await self._chats.chat(self)
        except Exception:
            log.exception("a call failed", extra=about("internal_error"))
        finally:
            self._chats.uploads.bytes -= self.received
            self.received = 0
            if not self.response_complete:
                self._write_head()
                self._transport.close()

    # ------------------------------------------------------------ `ports.Downstream`

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        self.is_started = True
        self._is_chunked = True
        lines = [STATUS_LINE[status]]
        for name, value in (*self._protocol.server_state.default_headers, *headers):
            if name == b"connection":  # whoever sends it wants it closed
                self.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                self._is_chunked, self._left = False, int(value)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header holds a line break")
        # It is written with what follows: the first bytes of the body, as a rule in this very moment.
        self._unwritten_head = head + b"\r\n"
        self._protocol.loop.call_soon(self._write_head)

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`."""
        if not data:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            self._left -= len(data)
            if self._left < 0:
                raise RuntimeError("the answer is longer than was announced")
        await self._write(data)

    async def relay(self, response: UpstreamResponse, pouring: Pouring) -> None:
        """See `ports.Downstream.relay`. Bytes are written as they arrive; no task runs for them."""

        self._write_head()

        def take(data: bytes) -> bool:
            passed_on = pouring.take(data)
            if passed_on and not self.disconnected:
                if self._is_chunked:
                    passed_on = b"%x\r\n%b\r\n" % (len(passed_on), passed_on)
                self._transport.write(passed_on)
                if self._flow.write_paused:
                    pouring.stalled()
                    response.hold()
            return not pouring.is_over

        def caller_reads() -> None:
            pouring.resumed()
            response.go_on()

        self._on_resumed = caller_reads
        try:
            await response.pour(take)
        finally:
            self._on_resumed = None

    def resumed(self) -> None:
        """Note that the caller has read enough of what was written."""
        if self._on_resumed is not None:
            self._on_resumed()

    async def finish(self) -> None:
        """See `HttpDownstream.finish`."""
        if self._left:
            raise RuntimeError("the answer is shorter than was announced")
        if self._flow.write_paused:
            with anyio.move_on_after(FINISH_S) as patience:
                await self._flow.drain()
            if patience.cancelled_caught:
                return  # without an end, the connection is dropped
        self._write_head()
        if self._is_chunked and not self.disconnected:
            self._transport.write(b"0\r\n\r\n")
        self.response_complete = True
        if not self.keep_alive:
            self._transport.close()
        self._protocol.on_response_complete()

    async def _write(self, data: bytes) -> None:
        """Write, once the caller has read enough of what was written before."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if not self.disconnected:
            self._transport.write(self._unwritten_head + data)
            self._unwritten_head = b""

    def _write_head(self) -> None:
        if self._unwritten_head and not self.disconnected:
            self._transport.write(self._unwritten_head)
            self._unwritten_head = b""
