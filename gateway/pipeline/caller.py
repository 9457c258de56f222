"""What the caller of a stream gets beside its answer, and how long it may take to read.

Comments keep whatever is between the gateway and its caller from taking a stream that waits for dead. They
need the response to have started, and from then on no failure can be a status any more; so they begin only
where the operator says so (`keep_alive_after_s`). Moving on to another backend stays possible until the first
token.
"""

from collections.abc import Awaitable, Callable, Mapping

import anyio

from gateway.ports import Headers

CALLER_STALL_S = 120.0
"""A caller that reads nothing for this long, with full buffers, is gone: it holds a place on a GPU."""

SSE_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 10.0
"""Time between two comments. 15 s is the most that was found to be safe; a busy process needs some room."""

PATIENCE_HEADER = "x-gateway-timeout-s"


def patience_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the caller says it waits for its first token, or None if it does not say."""
    written = headers.get(PATIENCE_HEADER)
    if written is None:
        return None
    try:
        wait_s = float(written)
    except ValueError:
        return None
    return wait_s if 0 < wait_s < float("inf") else None


class CallerStalled(Exception):
    """The caller has stopped reading its answer."""


class KeepAlive:
    """Sends comments to the caller of one stream, until `stop`."""

    def __init__(
        self, start: Callable[[], Awaitable[None]], send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Call `start` before the first comment, and `send` with each."""
        self._start = start
        self._send = send
        self._sending = anyio.Lock()
        self._is_over = False

    async def run(self, wait_s: float) -> None:
        """Send nothing for `wait_s`, then comments. Returns when stopped, or when the caller is gone.

        Raises:
            CallerStalled: the caller does not read.
        """
        await anyio.sleep(wait_s)
        await self._unless_over(self._start)
        while not self._is_over:
            await self._unless_over(lambda: self._send(KEEP_ALIVE))
            await anyio.sleep(KEEP_ALIVE_S)

    async def stop(self) -> None:
        """Send no more. What is being sent is sent to its end, so that nothing gets between its bytes."""
        self._is_over = True
        async with self._sending:
            pass

    async def _unless_over(self, work: Callable[[], Awaitable[None]]) -> None:
        with anyio.move_on_after(CALLER_STALL_S) as patience:
            async with self._sending:
                if not self._is_over:
                    await work()
        if patience.cancelled_caught:
            raise CallerStalled
