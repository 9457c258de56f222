"""Receives a long body directly into its final buffer.

Normally a body arrives in parts that the event loop copies, the parser copies again, and that are joined at
the end. For a body with a known length, the kernel can write directly into a buffer of that length.
"""

import asyncio
from collections.abc import Callable, Iterable
from io import BytesIO

from gateway.downstream.lingering import Forwarding
from gateway.downstream.relay import Uploads

WORTH_BYTES = 65_536
"""The minimum remaining length for which this is worthwhile. A choice: below, copying takes microseconds."""

TOGETHER_MAX = 64 * 1024 * 1024
"""Maximum memory allocated for bodies that have not arrived yet. A choice: two of the largest; stalling
callers could hold it."""


class BodyReceiver(Forwarding, asyncio.BufferedProtocol):
    """Replaces a connection's protocol until a body is complete."""

    def __init__(
        self,
        protocol: asyncio.Protocol,
        uploads: Uploads,
        size: int,
        parts: Iterable[bytes],
        on_bytes: Callable[[int, bool], None],
    ) -> None:
        """Allocate `size` bytes, the first of which are `parts`.

        `on_bytes` is called after each read, with its number of bytes and whether the body is complete.
        """
        super().__init__(protocol)
        self._uploads = uploads
        self._size = size
        self._on_bytes = on_bytes
        self._file = BytesIO(bytes(size))
        self._left = self._file.getbuffer()  # still to be filled
        uploads.reserved_bytes += size
        for part in parts:
            self._left[: len(part)] = part
            self._left = self._left[len(part) :]

    def body(self) -> bytes:
        """Hand over the complete body without copying it: no other view of the buffer exists any more.

        It is not kept here: uvloop keeps this protocol's methods, and so its object, until the connection
        closes.
        """
        file, self._file = self._file, BytesIO()
        return file.getvalue()

    def end(self) -> None:
        """Stop receiving. An incomplete body is dropped now; see `body` for what keeps this object."""
        if self._left:
            self._file = BytesIO()
        self._uploads.reserved_bytes -= self._size
        self._left = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._left

    def buffer_updated(self, nbytes: int) -> None:
        """Note that `nbytes` were received."""
        self._left = self._left[nbytes:]
        self._on_bytes(nbytes, not self._left)

    def eof_received(self) -> bool | None:
        """Forward the event."""
        return self._protocol.eof_received()
