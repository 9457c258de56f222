"""Limits on heads, connections and slow callers, and errors in OpenAI's shape for what uvicorn rejects.

uvicorn waits indefinitely for the end of a request's head and for a caller to read, limits neither heads,
pipelined requests nor connections, and rejects requests in plain text.
"""

import asyncio
import logging
import sys
from contextlib import suppress
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.core.errors import GatewayError, InvalidRequest, OutOfResources, RequestTimeout
from gateway.downstream.errors import envelope, fault, headers_of
from gateway.downstream.hosts import has_one_host, refuse_host
from gateway.downstream.http10 import as_http_1_0, reset_at_close
from gateway.downstream.idle import IdleConnections
from gateway.downstream.lingering import ClosingTransport, Lingering, closing_unless_continued
from gateway.events import about

log = logging.getLogger("gateway.downstream")

HEAD_BYTES_MAX = 65_536
"""Maximum bytes of a request's head, or of the trailers of its body. A choice: twice nginx's default."""

HEAD_WITHIN_S = 15.0
"""How long a head may take, from the connection or its own first byte: a choice, not a measurement."""

CONNECTIONS_MAX = 8_192
"""Maximum number of connections of a listener. A choice. For one more, an idle one is closed; without an idle
one, it is told so, and closed."""

FILES_SHARE = 0.5
"""Share of the files that the process may have open: a listener has no more connections than that. A choice:
a request in flight has another one, to its backend. If callers could take all, idle ones would lock out
everybody else."""

PIPELINED_MAX = 256
"""Maximum number of requests on one connection that wait for the answers before them. A choice: more than any
client sends. A connection with more is dropped."""

LINGER_S = 60.0
"""How long a connection that is being closed may wait for its caller to read the response, and how long the
rest of a body may take once it was answered early. A choice: slow networks against held connections."""

STALLED_S = 180.0
"""How long a caller may read nothing at all, whatever is sent. A choice, longer than `caller.CALLER_STALL_S`,
after which the routes that stream end their work."""

READ_BYTES_MAX = 262_144
"""Maximum bytes that event loops read at once: asyncio's figure."""


class HeadTooLarge(InvalidRequest):
    """The request's headers are longer than any client sends."""

    status = 431
    code = "headers_too_large"


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the size of a head, the time it takes, and the connections.

    The trailers of a chunked body have the same size limit as a head, and are ignored; uvicorn would keep all
    of them, as headers.
    """

    # Beyond thirty attributes, uvicorn's included, CPython keeps them in a hash table per object.
    __slots__ = (
        "_has_ended",
        "_head_bytes",
        "_head_timer",
        "_idle",
        "_idle_since",
        "_is_in_head",
        "_read_bytes",
        "_refusal",
        "_rest_at",
        "_rest_timer",
        "_running",
        "_stall_timer",
        "_stalled_at",
        "_uncounted_bytes",
        "_wants_upgrade",
    )

    def __init__(self, *args: Any, idle: IdleConnections, **kwargs: Any) -> None:
        """Called by uvicorn; `idle` are those of the listener."""
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._idle_since = self.loop.time()  # since the last answer, or the first bytes of a head in parts
        self._head_bytes = 0  # of an incomplete head, or incomplete trailers
        self._uncounted_bytes = 0  # some of which may be in that head, too
        self._read_bytes = 0  # of the data being parsed
        self._is_in_head = True
        self._has_ended = False  # whether a request has ended within the data being parsed
        self._wants_upgrade = False  # the head is to be parsed again without its upgrade
        self._rest_at = 0  # where its head ended in the data
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stalled_at = 0.0  # when the write buffer became full
        self._rest_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request being answered
        self._refusal: GatewayError | None = None  # follows the answers to those before it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or reject it if there are too many, of which none is idle."""
        super().connection_made(transport)
        is_full = len(self.connections) > self._idle.connections_max
        if is_full and not self._idle.close_one(self.connections, self.loop.time()):
            self._refuse(OutOfResources("This gateway has too many connections.", retry_after_s=5))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up, and notify the running request.

        uvicorn notifies only the latest request, which may be a pipelined one that has not started.
        """
        self._unset_keepalive_if_required()  # uvicorn's own timer, which would outlive a reset connection
        self._stop_timer()
        self._stop_stall_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        # They refer to this protocol: else the memory of both would wait for the garbage collector.
        self.cycle = self._running = None  # type: ignore[assignment]  # as uvicorn begins
        self.pipeline.clear()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.on_response = self._asgi_answered
        cycle.transport = ClosingTransport(self.transport, self._close_behind_asgi)  # type: ignore[assignment]
        if not has_one_host(cycle.scope):
            app = refuse_host
        if cycle.scope["http_version"] != "1.1":
            app = as_http_1_0(cycle, app)
        elif cycle.waiting_for_100_continue:
            app = closing_unless_continued(cycle, app)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; close the connection if a head exceeds its limit."""
        if self.has_refused():
            return
        self._parse(data)
        while self._wants_upgrade:  # each of a row of requests, whose rest is held only once
            data = self._without_upgrade(data)
            self._parse(data)
        if self._is_in_head and not self.has_refused():
            self._count_head(len(data))
        elif self.timeout_keep_alive_task is None and self.is_between_requests():
            self._await_request()  # these were line breaks, which do not begin a request

    def _parse(self, data: bytes) -> None:
        self._has_ended = False
        self._read_bytes = len(data)
        super().data_received(data)

    def _count_head(self, size: int) -> None:
        """Note that so many bytes were received, and the head, or the trailers, are still incomplete."""
        if self._has_ended:  # all of them may belong to the request before
            self._uncounted_bytes = size
            return
        if self._head_bytes == 0:
            self._idle_since = self.loop.time()
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()

    def is_between_requests(self) -> bool:
        """Return whether the next byte received is the first of a request, or before it."""
        return (
            self.cycle is not None
            and self.cycle.response_complete
            and not self._is_in_head
            and self._rest_timer is None
            and not self.transport.is_closing()
        )

    def idle_since(self) -> float | None:
        """Return since when nothing is left to answer (time of the event loop); None while something is.

        Then it waits for a complete head, or for what its caller still sends to a request that was answered.
        To close it would free nothing while its caller is still reading the answer.
        """
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            return None
        return None if self.transport.get_write_buffer_size() else self._idle_since

    def close_idle(self) -> None:
        """Close the connection, which is idle."""
        self.transport.close()

    def has_refused(self) -> bool:
        """Return whether what is received is discarded, because of what came before."""
        return self._refusal is not None or self.transport.is_closing()

    def on_message_begin(self) -> None:
        """Start a request."""
        self._is_in_head = True
        self._head_bytes = self._uncounted_bytes = 0
        if self._head_timer is None and not self.has_refused():
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start its body.

        Java's client requests an upgrade with the first request on every connection, which a server may
        ignore. But the parser then stops after the head: a body would be parsed as the next request, although
        its bytes may come from a third party. So such a head is parsed again without the upgrade.
        """
        self.head_is_complete()
        if self.has_refused():
            return
        if len(self.pipeline) >= PIPELINED_MAX:
            self.pipeline.clear()
            self.transport.abort()
        elif self.has_long_head():
            self._refuse_head()
        elif not self.parser.should_upgrade() and not _has_path(self.url):
            self._refuse(InvalidRequest("The request's target is no URL with a path."))
        elif not self.parser.should_upgrade():
            super().on_headers_complete()
            self.headers = []  # for trailers; those of the head are the request's
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(InvalidRequest("This is not a proxy."))
        else:
            self._wants_upgrade = True

    def on_chunk_header(self) -> None:
        """Limit the data until the next body bytes: after the last chunk, these are trailers."""
        self._is_in_head = True
        self._head_bytes = -READ_BYTES_MAX  # allows for body data read together with them

    def on_body(self, body: bytes) -> None:
        """Process a part of a body, unless its request was rejected."""
        self._is_in_head = False
        if not self.has_refused():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless it was rejected or is being parsed again."""
        self._is_in_head, self._has_ended = False, True
        self._stop_rest_timer()  # it may have been answered early
        if not self.has_refused() and not self._wants_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with the next request, or wait for one.

        uvicorn would read on after every answer, however many requests are waiting.
        """
        self._idle_since = self.loop.time()
        is_answered = self._rest_timer is not None  # what was rejected is the rest of this request
        if self._refusal is not None and not (self.pipeline or is_answered or self.transport.is_closing()):
            self._write_refusal(self._refusal)
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        """Handle a full write buffer: the caller reads slowly."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stalled_at = self.loop.time()
            self._stall_timer = self.loop.call_later(LINGER_S, self._stalled)

    def resume_writing(self) -> None:
        """Handle a drained write buffer."""
        self._stop_stall_timer()
        super().resume_writing()

    def limit_closing(self) -> None:
        """If the connection is being closed, limit how long it waits for its caller to read the rest.

        Called periodically: a rest that is too small to fill the write buffer pauses nothing.
        """
        is_ending = self.transport.is_closing() and self in self.connections
        if is_ending and self._stall_timer is None:
            self._stall_timer = self.loop.call_later(LINGER_S, self._stalled)

    def drop(self) -> None:
        """Close the connection now. A caller that has not got everything sees a reset instead of an end."""
        if self.transport.get_write_buffer_size():
            reset_at_close(self.transport, True)  # the end of an answer to HTTP/1.0 would seem to be there
        self.transport.abort()

    def has_long_head(self) -> bool:
        """Return whether the head that is now complete exceeds its limit: it may have come in one piece."""
        if self._head_bytes + self._uncounted_bytes + self._read_bytes <= HEAD_BYTES_MAX:
            return False
        fields = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.url) + fields > HEAD_BYTES_MAX

    def head_is_complete(self) -> None:
        """Lift the limits on the head."""
        self._is_in_head = False
        self._stop_timer()

    def linger(self) -> None:
        """Close the connection after an answer to an incomplete request."""
        if not self.transport.is_closing():
            self._stop_rest_timer()
            self.pipeline.clear()  # what came behind the incomplete request is no request
            self.transport.write_eof()
            self.transport.set_protocol(Lingering(self))
            self._idle_since = self.loop.time()
            self._rest_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def new_parser(self) -> httptools.HttpRequestParser:
        """Return a new parser, created as by uvicorn."""
        parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools < 0.6.3
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP, or that the gateway failed to process. (Called as it is noticed.)"""
        error = sys.exception()
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
        if cause is None:
            self._refuse(InvalidRequest(msg))
        else:
            log.error("a request failed inside the gateway", exc_info=cause, extra=about("internal_error"))
            self._refuse(fault(cause))

    def _unsupported_upgrade_warning(self) -> None:
        """Note where the parser has stopped. (Called by uvicorn at that point.)"""
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        (self._rest_at,) = error.args

    def _without_upgrade(self, data: bytes) -> bytes:
        """Return a request whose head ends in `data` without its upgrade, to be parsed again."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self._wants_upgrade = False
        self.parser = self.new_parser()
        return b"\r\n".join((*lines, b"", memoryview(data)[self._rest_at :]))

    def _await_request(self) -> None:
        """Start, or restart, the time limit for an idle connection."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_overdue)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _asgi_answered(self) -> None:
        """Continue after an answer. If its request is still incomplete, limit the time for the rest.

        uvicorn's own timer stops at the next byte received, so a stalled caller would never time out.
        """
        is_rest_to_come = self._running is not None and self._running.more_body
        if is_rest_to_come and self._rest_timer is None and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(LINGER_S, self.transport.close)
        self.on_response_complete()

    def _close_behind_asgi(self) -> None:
        """Close the connection: its last answer is complete, or will never be."""
        if self._running is not None and self._running.response_complete and self._running.more_body:
            self.linger()
        else:
            self.transport.close()

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _stalled(self) -> None:
        """Drop a connection whose caller does not read, if it is to be closed, or after `STALLED_S`."""
        if self.transport.is_closing() or self.loop.time() - self._stalled_at >= STALLED_S:
            self.drop()
        else:
            self._stall_timer = self.loop.call_later(LINGER_S, self._stalled)

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # it may have come already: what follows waiting requests is not read
        else:
            self._refuse(RequestTimeout(f"No complete request arrived within {HEAD_WITHIN_S:g} s."))

    def _refuse_head(self) -> None:
        self._refuse(HeadTooLarge(f"The request's headers are longer than {HEAD_BYTES_MAX} bytes."))

    def _refuse(self, error: GatewayError) -> None:
        """Reject what was received: the latest request's body, or what came behind that request.

        What came behind requests that are still being answered is answered after them. Only the first error
        counts: the parser goes on with the data in which it was found, but nothing behind it is a request.
        A request whose answer began before its body proved invalid has that answer, and no other.
        """
        if self.has_refused():
            return
        self._stop_timer()
        self._refusal = error
        latest = self.cycle
        is_first = not self.pipeline and (latest is None or latest.response_complete or latest.more_body)
        if self._rest_timer is not None:
            self.linger()
        elif is_first and self._is_half_answered():
            latest.keep_alive = False
        elif is_first:
            self._write_refusal(error)
        elif latest.more_body:  # it waits for the answers before it
            self.pipeline.popleft()

    def _is_half_answered(self) -> bool:
        """Return whether the latest request is being answered, although its body is incomplete."""
        latest = self.cycle
        has_begun = latest is not None and latest.more_body and latest.response_started
        return has_begun and not latest.response_complete

    def _write_refusal(self, error: GatewayError) -> None:
        """Write it, and close the connection. What the caller is still sending must not reset it."""
        body = envelope(error)
        lines = [STATUS_LINE[error.status]]
        headers = [pair for pair in headers_of(error, body) if pair[0] != b"connection"]
        lines += [b"%b: %b\r\n" % pair for pair in (*headers, (b"connection", b"close"))]
        self.transport.write(b"".join((*lines, b"\r\n", body)))
        is_running = self._running is not None and not self._running.response_complete
        if is_running or len(self.connections) > self._idle.connections_max:
            self.transport.close()
        else:
            self.linger()


def _has_path(target: bytes) -> bool:
    """Return whether a request's target is a URL with a path: without one, uvicorn fails."""
    try:
        return httptools.parse_url(target).path is not None
    except httptools.HttpParserInvalidURLError:
        return False
