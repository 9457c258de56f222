"""Cohort scheduling: requests that are ready together take each step together.

A request's code and data do not fit into a core's caches. Where many requests are ready, each step is fetched
once for all of them instead of once for each (Larus and Parkes, 2002). And what they write is passed to the
kernel together, at the end of a round of the event loop: written in the midst of a request, it displaces the
gateway from the caches, and wakes an idle peer each time. The figures are in
docs/performance.md#what-was-tried. Nothing waits for a timer: a round ends when everything that was ready
when it began has been handled. A request that is alone waits for nothing at all.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from gateway.events import about

log = logging.getLogger("gateway.process")

AT_ONCE_BYTES = 65_536
"""As much is not held back, so that the event loop notices a peer that reads too slowly. A choice: the event
loops' own limit for that."""


class Cohort:
    """The requests of one event loop that are ready, rather than waiting for a slot or for a backend.

    Attributes:
        size: How many there are. Those that do not count themselves, such as probes, are not among them.
    """

    __slots__ = ("_waiting", "size")

    def __init__(self) -> None:
        """Start with none."""
        self.size = 0
        self._waiting: list[tuple[_Transport, bytes]] = []

    async def catch_up(self) -> None:
        """Let all requests that are ready come as far as this one."""
        if self.size > 1:
            await asyncio.sleep(0)

    def coalesce(
        self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Transport:
        """Return a transport that writes what `transport` would write, together with the other requests."""
        return cast("asyncio.Transport", _Transport(self, cast("asyncio.Transport", transport), loop))

    def at_once(self, transport: asyncio.Transport) -> Callable[[bytes], None]:
        """Return a function that writes to a transport of `coalesce` at once.

        Whatever is written to it otherwise has to be written before or after all that this function writes.
        """
        own = cast("_Transport", transport)
        own.write_held()
        return own.write_now

    def hold(self, transport: "_Transport", data: bytes) -> None:
        """Write `data` to `transport` at the end of the round."""
        if not self._waiting:
            transport.loop.call_soon(self.write_all)
        self._waiting.append((transport, data))

    def write_all(self) -> None:
        """Write everything that is held back."""
        due, self._waiting = self._waiting, []
        for transport, data in due:
            transport.held_bytes = 0
            try:
                transport.write_now(data)
            except Exception:
                if not transport.is_closing():  # else it was lost meanwhile
                    log.exception("a connection could not be written to", extra=about("internal_error"))
                    transport.abort()


class _Transport:
    """Passes everything on, and keeps the order of the calls."""

    __slots__ = (
        "_cohort",
        "_inner",
        "get_extra_info",
        "held_bytes",
        "is_closing",
        "loop",
        "pause_reading",
        "resume_reading",
        "set_protocol",
        "write_now",
    )

    def __init__(self, cohort: Cohort, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._cohort = cohort
        self._inner = inner
        self.loop = loop
        self.held_bytes = 0
        self.write_now = inner.write
        self.get_extra_info = inner.get_extra_info
        self.is_closing = inner.is_closing
        self.pause_reading = inner.pause_reading
        self.resume_reading = inner.resume_reading
        self.set_protocol = inner.set_protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        if self._cohort.size < 2 and not self.held_bytes:
            self.write_now(data)
            return
        self._cohort.hold(self, data)
        self.held_bytes += len(data)
        if self.held_bytes >= AT_ONCE_BYTES:
            self._cohort.write_all()

    def get_write_buffer_size(self) -> int:
        return self.held_bytes + self._inner.get_write_buffer_size()

    def write_eof(self) -> None:
        self.write_held()
        self._inner.write_eof()

    def close(self) -> None:
        self.write_held()
        self._inner.close()

    def abort(self) -> None:
        self.held_bytes = 0  # the event loop drops what is written from now on
        self._inner.abort()

    def write_held(self) -> None:
        """Write what is held back."""
        if self.held_bytes:
            self._cohort.write_all()
