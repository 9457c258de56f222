"""Keep-alive comments for the caller of a stream, and how long a caller may stop reading.

SSE comments keep proxies from closing a stream that is still waiting for its first token. They require the
response to have started, after which a failure can no longer become a status code; so they are sent only if
configured (`keep_alive_after_s`). Moving on to another backend remains possible until the first token.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import anyio

from gateway.ports import Headers

CALLER_STALL_S = 120.0
"""A caller that reads nothing for this long, with full buffers, counts as gone. A choice: it occupies a GPU
slot."""

SSE_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
KEEP_ALIVE = b": keep-alive\n\n"

KEEP_ALIVE_S = 10.0
"""Interval between two comments. 15 s is the longest found to be safe; a busy process needs a margin, which
is a choice."""

PATIENCE_HEADER = "x-gateway-timeout-s"


def patience_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the caller will wait for its first token according to its header, or None."""
    written = headers.get(PATIENCE_HEADER)
    if written is None:
        return None
    try:
        wait_s = float(written)
    except ValueError:
        return None
    return wait_s if 0 < wait_s < float("inf") else None


class CallerStalled(Exception):
    """The caller has stopped reading the response."""


def stalled_detail() -> str:
    """Return what operators are told of an attempt whose caller has stopped reading."""
    return f"the caller read nothing for {CALLER_STALL_S:g} s"


@contextmanager
def while_caller_reads() -> Iterator[None]:
    """Limit the time of a block that sends to the caller.

    Raises:
        CallerStalled: the caller has stopped reading.
    """
    with anyio.move_on_after(CALLER_STALL_S) as patience:
        yield
    if patience.cancelled_caught:
        raise CallerStalled


class KeepAlive:
    """Sends SSE comments to the caller of one stream until stopped."""

    def __init__(
        self, start: Callable[[], Awaitable[None]], send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Call `start` before the first comment, and `send` with each comment."""
        self._start = start
        self._send = send
        self._sending = anyio.Lock()
        self._is_over = False

    async def run(self, wait_s: float) -> None:
        """Wait for `wait_s`, then send comments until stopped.

        Raises:
            CallerStalled: the caller has stopped reading.
            OSError: the caller is gone.
        """
        await anyio.sleep(wait_s)
        await self._unless_over(self._start)
        while not self._is_over:
            await self._unless_over(lambda: self._send(KEEP_ALIVE))
            await anyio.sleep(KEEP_ALIVE_S)

    async def stop(self) -> None:
        """Stop sending. A comment in progress is completed first, so that nothing is interleaved with it."""
        self._is_over = True
        async with self._sending:
            pass

    async def _unless_over(self, work: Callable[[], Awaitable[None]]) -> None:
        with while_caller_reads():
            async with self._sending:
                if not self._is_over:
                    await work()
