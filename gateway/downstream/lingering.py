"""How a connection ends whose last request was answered before it had come as a whole.

Closed at once, with bytes of the request unread or still on their way, it is reset by the kernel, and the
answer may be lost with it: a proxy that is still passing a body on says 502 instead of what it was told. So
only the gateway's side is closed, and the rest of the request is thrown away until the caller closes its own.
"""

import asyncio
from collections.abc import Callable


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
