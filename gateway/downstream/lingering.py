"""Lingering close: ends a connection whose last request was answered before it was complete.

If such a connection is closed while data of the request is unread or in flight, the kernel resets it, and the
answer may be lost: a proxy that is still forwarding the body reports 502 instead. So only the gateway's side
is closed at first, and the rest of the request is discarded until the caller closes its side.
"""

import asyncio
from collections.abc import Callable

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Forwarding(asyncio.BaseProtocol):
    """Stands in for a connection's protocol, to which it forwards every event but incoming data."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        """Forward to `protocol`."""
        self._protocol = protocol

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward the event."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Forward the event."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Forward the event."""
        self._protocol.resume_writing()


class Lingering(Forwarding, asyncio.Protocol):
    """Discards incoming data: the last answer of its protocol has been written."""


class ClosingTransport:
    """The transport that uvicorn uses for an ASGI request, with a different `close`."""

    __slots__ = ("close", "get_extra_info", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        """Use `close` to close it."""
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.close = close


def closing_unless_continued(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Wrap `app` for a request with `Expect: 100-continue`: keep the connection only if `app` reads the body.

    After an early answer, the caller may or may not send the body, and the server cannot tell which (RFC
    9110, 10.1.1). Go before 1.22.5, and so Caddy, does not send it but continues with its next request, which
    would be taken for the body here (CVE-2024-24791).
    """

    async def answer(scope: Scope, receive: ASGIReceiveCallable, _: ASGISendCallable) -> None:
        async def send(message: ASGISendEvent) -> None:
            if cycle.waiting_for_100_continue:
                cycle.keep_alive = False
            await cycle.send(message)

        await app(scope, receive, send)

    return answer
