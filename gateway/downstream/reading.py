"""A request whose body has arrived and is to be read, and where it is read."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread

from gateway.core.value import valueclass
from gateway.downstream.crowded import may_be_crowded
from gateway.downstream.long_texts import SLICE_BYTES
from gateway.downstream.occurrences import occurrences
from gateway.downstream.relay import HttpDownstream
from gateway.ports import Arrival, Headers

INLINE_BYTES = SLICE_BYTES
"""A body up to this is read where it is, in at most 2 ms, if it is texts; a larger one in a thread."""

INLINE_OBJECTS = 1_000
"""Objects in a body that is read where it is: a part takes 2 us, an item of a response 12."""

INLINE_VALUES = 50_000
"""Likewise commas and brackets, about: 1.25 MB of prose has a third of that."""

COUNTED_BYTES = 16_384
"""In a smaller body they are not looked for, which takes up to 0.1 ms."""

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

    async def run(self, read: Callable[[], T], *read_from: bytes) -> T:
        """Return what `read` returns, which it makes of these bytes."""
        if _is_quick(read_from):
            return read()
        return await anyio.to_thread.run_sync(read, limiter=self._limiter)


def _is_quick(read_from: Sequence[bytes]) -> bool:
    size = sum(map(len, read_from))
    if size <= COUNTED_BYTES:
        return True
    if size > INLINE_BYTES:
        return False
    left = INLINE_OBJECTS
    for some in read_from:
        left -= occurrences(b"{", some, left)
    return left >= 0 and not any(may_be_crowded(some, INLINE_VALUES) for some in read_from)
