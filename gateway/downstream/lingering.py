"""How a connection ends whose last request was answered before it had come as a whole.

Closed at once, with bytes of the request unread or still on their way, it is reset by the kernel, and the
answer may be lost with it: a proxy that is still passing a body on says 502 instead of what it was told. So
only the gateway's side is closed, and the rest of the request is thrown away until the caller closes its own.
"""

import asyncio
from collections.abc import Callable

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGIReceiveEvent, ASGISendCallable, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Lingering(asyncio.Protocol):
    """Takes the place of a connection's protocol, and of what comes nothing; tells it of all else."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        """Tell `protocol`, whose last answer is written."""
        self._protocol = protocol

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._protocol.resume_writing()


class Exit:
    """The transport that uvicorn sees of an ASGI request, which it closes behind the last answer."""

    __slots__ = ("close", "get_extra_info", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        """Have it closed by `close`."""
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.close = close


def last_unless_told_to_go_on(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return `app` for a caller that waits to be told to go on: its connection is kept only where it was.

    Whoever is answered instead may send the body all the same, or not, and cannot be asked which (RFC 9110,
    10.1.1). Go before 1.22.5, and so Caddy, does not send it and goes on with its next request, which would
    be taken for the body here (CVE-2024-24791).
    """
    is_to_be_kept, cycle.keep_alive = cycle.keep_alive, False

    async def answer(scope: Scope, _: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def receive() -> ASGIReceiveEvent:
            if cycle.waiting_for_100_continue:
                cycle.keep_alive = is_to_be_kept
            return await cycle.receive()

        await app(scope, receive, send)

    return answer
