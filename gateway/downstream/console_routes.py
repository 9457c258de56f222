"""The operator's console: its page, and the event stream that keeps it up to date.

Readers are cheap: the current state is encoded once for all of them, and nothing is buffered for slow ones.
Each gets the requests that have ended since its last event, as far as they are kept. A reader that stops
reading is disconnected, and reconnects later.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import resources
from typing import Any, Protocol

import anyio
import msgspec
from litestar import MediaType, Response, asgi, get
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.types import Receive, Scope, Send

from gateway.core.errors import GatewayError, RouteNotFound
from gateway.downstream.explain_routes import RequestForgotten
from gateway.downstream.operator_json import compact
from gateway.downstream.relay import AsgiDownstream, run_for_caller, send_error
from gateway.events import about
from gateway.pipeline import CallerStalled

log = logging.getLogger("gateway.console")

TICK_S = 1.0
"""Interval between two states sent to a console. A choice: live to the eye, and a state is costly with many
backends."""

HISTORY_TICKS = 5
"""The history is sent every few ticks. A choice: it changes slowly (`core.recent.SLICE_S`)."""

STALL_S = 10.0
"""How long a reader may block sending. A choice: a browser that sleeps reconnects."""

STOP_S = 0.5
"""Time limit for ending all streams. A choice: it delays the exit, and a console loses nothing."""

READERS_MAX = 32
"""Maximum open consoles. A choice: each takes a state per second."""

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)


class Source(Protocol):
    """The data that the console shows."""

    def snapshot(self) -> Any:
        """Return the current state."""

    def history(self) -> Any:
        """Return statistics of the last minutes."""

    def ended(self, since: int) -> tuple[int, Sequence[Any]]:
        """Return the number of finished requests, and the kept ones after number `since`."""

    def request(self, request_id: str) -> Any:
        """Return the full record of a request, or None."""


class TooManyReaders(GatewayError):
    """The maximum number of consoles is open."""

    status = 503
    code = "too_many_readers"


class Console:
    """The page, its assets, the event stream, and single requests.

    Attributes:
        readers: Number of open event streams.
    """

    def __init__(self, source: Source, *, tick_s: float = TICK_S, stall_s: float = STALL_S) -> None:
        """Send the state of `source` every `tick_s`. `stall_s`: how long a reader may block sending."""
        self._source = source
        self._tick_s = tick_s
        self._stall_s = stall_s
        self._pages = _files()
        self.readers = 0
        self._stopped = anyio.Event()
        self._left = anyio.Event()
        self._told: dict[str, tuple[float, bytes]] = {}

    async def stop(self) -> None:
        """End all event streams cleanly: the consoles will reconnect."""
        self._stopped.set()
        with anyio.move_on_after(STOP_S):
            while self.readers:
                await self._left.wait()

    def handlers(self) -> Sequence[BaseRouteHandler]:
        """Return the route handlers."""

        @get("/", sync_to_thread=False)
        def console() -> Response[bytes]:
            return _page(self._pages, "index.html")

        @get("/console/{name:str}", sync_to_thread=False)
        def file(name: FromPath[str]) -> Response[bytes]:
            return _page(self._pages, name)

        @get("/admin/request/{request_id:str}", sync_to_thread=False)
        def request(request_id: FromPath[str]) -> Response[bytes]:
            found = self._source.request(request_id)
            if found is None:
                message = "That request is not kept by this process, or no longer. The log has a line for it."
                raise RequestForgotten(message)
            return Response(compact(found), media_type=MediaType.JSON)

        @asgi("/admin/live", copy_scope=True)
        async def live(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(receive, send)

        return [console, file, request, live]

    async def _serve(self, receive: Receive, send: Send) -> None:
        """Send events until the reader disconnects or stops reading."""
        downstream = AsgiDownstream(send)
        if self.readers >= READERS_MAX:
            message = f"{READERS_MAX} consoles are open already."
            await send_error(TooManyReaders(message, retry_after_s=10), downstream)
            return
        self.readers += 1
        try:
            with suppress(CallerStalled):
                await run_for_caller(partial(self._tell, downstream), receive)
        finally:
            self.readers -= 1
            self._left.set()
            self._left = anyio.Event()

    async def _tell(self, downstream: AsgiDownstream) -> None:
        await downstream.start(200, _STREAM_HEADERS)
        seen, tick = 0, 0
        while not self._stopped.is_set():
            events = [self._shared("snapshot", self._source.snapshot, self._tick_s)]
            count, rows = self._source.ended(seen)
            if rows or not tick:
                events.append(_event("ended", {"count": count, "requests": rows}))
            seen = count
            if tick % HISTORY_TICKS == 0:
                for_s = HISTORY_TICKS * self._tick_s
                events.append(self._shared("history", self._source.history, for_s))
            tick += 1
            with anyio.move_on_after(self._stall_s) as patience:
                await downstream.send(b"".join(events))
            if patience.cancelled_caught:
                log.info("a console stopped reading and was disconnected", extra=about("console_dropped"))
                raise CallerStalled
            with anyio.move_on_after(self._tick_s):
                await self._stopped.wait()
        await downstream.finish()

    def _shared(self, name: str, make: Callable[[], Any], every_s: float) -> bytes:
        """Return an event, computed once for all readers within `every_s`."""
        now = anyio.current_time()
        if name not in self._told or now - self._told[name][0] > every_s / 2:
            self._told[name] = now, _event(name, make())
        return self._told[name][1]


def _event(name: str, data: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _files() -> Mapping[str, bytes]:
    folder = resources.files("gateway").joinpath("console")
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def _page(pages: Mapping[str, bytes], name: str) -> Response[bytes]:
    kind = _TYPES.get(f".{name.rpartition('.')[2]}")
    if name not in pages or kind is None:
        raise RouteNotFound(f"There is nothing at /console/{name[:100]}.")
    return Response(pages[name], headers=_PAGE_HEADERS, media_type=kind)
