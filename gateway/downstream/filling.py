"""Receives a long body where it is to lie: in one piece, which the kernel writes into.

Received as any other bytes, a body comes in pieces that the event loop copies, the parser copies again, and
that are joined in the end. A body whose length was announced needs none of that.
"""

import asyncio
from collections.abc import Callable, Iterable
from io import BytesIO

from gateway.downstream.relay import Uploads

WORTH_BYTES = 65_536
"""What must be missing of a body to be received so."""

TOGETHER_MAX = 64 * 1024 * 1024
"""What may be set aside for bodies that have not come yet: whoever announces much and stalls holds it."""


class Filling(asyncio.BufferedProtocol):
    """Takes the place of a connection's protocol until a body is complete; tells it of all else."""

    def __init__(
        self,
        protocol: asyncio.Protocol,
        uploads: Uploads,
        size: int,
        parts: Iterable[bytes],
        on_bytes: Callable[[int, bool], None],
    ) -> None:
        """Set `size` bytes aside, of which `parts` have come.

        `on_bytes` is told how many more have come, each time, and whether those were the last.
        """
        self._protocol = protocol
        self._uploads = uploads
        self._size = size
        self._on_bytes = on_bytes
        self._file = BytesIO(bytes(size))
        self._left = self._file.getbuffer()  # to be filled
        uploads.set_aside += size
        for part in parts:
            self._left[: len(part)] = part
            self._take(len(part))

    def body(self) -> bytes:
        """Return the body, once it is complete. Not a copy: nobody looks into it from elsewhere by then."""
        return self._file.getvalue()

    def end(self) -> None:
        """Receive no more."""
        self._uploads.set_aside -= self._size
        self._size = 0
        self._left = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes belong."""
        return self._left

    def buffer_updated(self, nbytes: int) -> None:
        """Note that so many have come."""
        self._take(nbytes)
        self._on_bytes(nbytes, not self._left)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._protocol.resume_writing()

    def _take(self, size: int) -> None:
        self._left = self._left[size:]
