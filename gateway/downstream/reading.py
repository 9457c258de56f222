"""A request whose body has arrived and is to be read, and where it is read."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import anyio
import anyio.to_thread

from gateway.core.value import valueclass
from gateway.downstream.long_texts import SLICE_BYTES
from gateway.downstream.relay import HttpDownstream
from gateway.ports import Arrival, Headers

INLINE_BYTES = SLICE_BYTES
"""A body up to this is read where it is, in at most 2 ms; a larger one in a thread."""

READERS = 2

T = TypeVar("T")


@valueclass(frozen=True, slots=True)
class Received:
    """A request as it arrived.

    Attributes:
        arrival: When, and under which id.
        body: All of it.
        key: Name of the caller's API key, or None where none is configured.
        headers: What policy may match on, names in lower case.
        forwarded: The headers that travel on.
    """

    arrival: Arrival
    body: bytes
    key: str | None
    headers: Mapping[str, str]
    forwarded: Headers


Work = Callable[[HttpDownstream], Awaitable[None]]
"""Answers a request that has been read, to its end."""

Read = Callable[[Received], Awaitable[Work]]
"""Reads a request of one route; raises GatewayError."""


class Readers:
    """Where bodies are read: a long one must not keep the others waiting."""

    def __init__(self) -> None:
        """Start with no thread in use."""
        self._limiter = anyio.CapacityLimiter(READERS)

    async def run(self, size_bytes: int, read: Callable[[], T]) -> T:
        """Return what `read` returns of a body that long."""
        if size_bytes <= INLINE_BYTES:
            return read()
        return await anyio.to_thread.run_sync(read, limiter=self._limiter)
