"""What happens on a connection before there is a request: limits on heads, and refusals in the one shape.

uvicorn waits for ever for the end of a request's head, and lets it grow without bound; its own refusals are
plain text. This adds what is missing, and leaves everything else to it.
"""

import asyncio
from contextlib import suppress
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.core.errors import GatewayError, InvalidRequest, OutOfResources, RequestTimeout
from gateway.downstream.errors import envelope, headers_of

HEAD_BYTES_MAX = 65_536
HEAD_WITHIN_S = 15.0
CONNECTIONS_MAX = 8_192
LINGER_S = 60.0
"""How long a connection that is to be closed may wait for its caller to read what was written."""

_FRAMING = (b"content-length", b"transfer-encoding")


class HeadTooLarge(InvalidRequest):
    """The request's headers are longer than any client sends."""

    status = 431
    code = "headers_too_large"


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on heads: in bytes, in time, and in connections that may send one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn calls it."""
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # of a head that is not complete
        self._is_in_head = True
        self._is_last = False  # what follows the request is not HTTP/1.1, as far as its sender is concerned
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request that is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._refuse(OutOfResources("This gateway has too many connections.", retry_after_s=5))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection. uvicorn tells only the last request on it, which may not have begun."""
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head that does not end within its bound ends the connection."""
        if self.transport.is_closing() or self._is_last:
            return
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(HeadTooLarge(f"The request's headers are longer than {HEAD_BYTES_MAX} bytes."))

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._is_in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin its body.

        The parser skips the body of a request that asks for another protocol, and would take what it finds
        next for a request: it could be anybody's bytes. So nothing is read behind such a request, and it
        must have no body.
        """
        self.head_is_complete()
        self._is_last = self.parser.should_upgrade()
        if self._is_last and any(name in _FRAMING and value != b"0" for name, value in self.headers):
            self._refuse(
                InvalidRequest("Send a request with a body without `Upgrade`: this is HTTP/1.1 only.")
            )
            return
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """End a request, unless it was refused."""
        if not self.transport.is_closing():
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Note that the caller does not read as fast as it is answered."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(LINGER_S, self._stalled)

    def resume_writing(self) -> None:
        """Note that it has read enough."""
        self._stop_stall_timer()
        super().resume_writing()

    def head_is_complete(self) -> None:
        """Bound the head no more."""
        self._is_in_head = False
        self._stop_timer()

    def new_parser(self) -> httptools.HttpRequestParser:
        """Return a parser for what comes from now on, as uvicorn makes it."""
        parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools < 0.6.3
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(InvalidRequest(msg))

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

    def _stalled(self) -> None:
        """Drop a connection that is to be closed, and cannot be as long as its caller does not read."""
        if self.transport.is_closing():
            self.transport.abort()
        else:  # how long an answer may wait is for whoever gives it
            self._stall_timer = self.loop.call_later(LINGER_S, self._stalled)

    def _head_overdue(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(RequestTimeout(f"No complete request came within {HEAD_WITHIN_S:g} s."))

    def _refuse(self, error: GatewayError) -> None:
        self._stop_timer()
        body = envelope(error)
        lines = [STATUS_LINE[error.http_status]]
        headers = [pair for pair in headers_of(error, body) if pair[0] != b"connection"]
        lines += [b"%b: %b\r\n" % pair for pair in (*headers, (b"connection", b"close"))]
        self.transport.write(b"".join((*lines, b"\r\n", body)))
        self.transport.close()
