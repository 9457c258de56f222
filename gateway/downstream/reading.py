"""Received requests, and parsing them without blocking the event loop."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread

from gateway.core.usage import Ending, RequestRecord
from gateway.core.value import valueclass
from gateway.downstream.long_texts import SLICE_BYTES
from gateway.downstream.occurrences import occurrences
from gateway.downstream.relay import HttpDownstream
from gateway.downstream.value_limit import may_be_crowded
from gateway.ports import Arrival, Headers

INLINE_BYTES = SLICE_BYTES
"""Bodies up to this size are parsed inline, in at most 2 ms for text; larger ones in a thread."""

INLINE_OBJECTS = 1_000
"""Maximum objects in a body parsed inline. A choice: a content part takes 2 us, an item of a response 12."""

INLINE_VALUES = 50_000
"""Approximate maximum of commas and brackets in a body parsed inline. A choice: 1.25 MB of prose has a third
of that."""

COUNTED_BYTES = 16_384
"""Bodies up to this size are parsed inline without counting objects and values. A choice: counting takes up
to 0.1 ms."""

READERS = 2
"""Maximum threads that parse bodies. A choice: each that computes delays the event loop (`threads.DECODERS`),
and with one, a long body would hold up all others."""

T = TypeVar("T")


@valueclass(frozen=True, slots=True)
class Received:
    """A received request.

    Attributes:
        arrival: Its time of arrival and its id.
        body: The complete body.
        key: Name of the caller's API key, or None if no keys are configured.
        headers: Headers that policies may match, names in lower case.
        forwarded: Headers to forward.
    """

    arrival: Arrival
    body: bytes
    key: str | None
    headers: Mapping[str, str]
    forwarded: Headers


Work = Callable[[HttpDownstream], Awaitable[None]]
"""Answers a parsed request, to completion."""

Read = Callable[[Received], Awaitable[Work]]
"""Parses a request of one route; raises GatewayError."""


class BodyReaders:
    """Parses bodies, long ones in threads, so that they do not block other requests."""

    def __init__(self) -> None:
        """Start without threads in use."""
        self._limiter = anyio.CapacityLimiter(READERS)

    async def run(self, read: Callable[[], T], *read_from: bytes) -> T:
        """Return the result of `read`, which parses the bytes in `read_from`."""
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


def arrival_record(
    arrival: Arrival, key: str | None, ending: Ending, status: int, error_code: str, ended_at: float
) -> RequestRecord:
    """Return the record of a request that was not run, so that only its arrival and its end are known."""
    return RequestRecord(
        id=arrival.id,
        model="",
        stream=False,
        ending=ending,
        status=status,
        error_code=error_code,
        key=key,
        wall_at=arrival.wall_at,
        received_at=arrival.received_at,
        ended_at=ended_at,
        trace=arrival.trace,
        route=arrival.route,
    )
