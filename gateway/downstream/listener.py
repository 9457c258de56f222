"""Serves an ASGI application on a socket. The only module that runs uvicorn.

uvicorn with httptools handled malformed requests most strictly of all servers that were tested
(docs/decisions/0003-http-server.md). Here it neither installs signal handlers nor decides when to stop: the
process does, because it drains two listeners together.
"""

import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial
from time import monotonic
from typing import Any

import anyio
import uvicorn
from litestar.types import ASGIApp

from gateway import open_files, tcp
from gateway.downstream import guard
from gateway.downstream.direct import DirectProtocol
from gateway.downstream.direct_call import Chats
from gateway.downstream.guard import GuardedProtocol
from gateway.downstream.idle import IdleConnections
from gateway.events import about
from gateway.sockets import BACKLOG

log = logging.getLogger("gateway.downstream")

KEEPALIVE_S = 75
"""Idle connections are closed after this. A choice, longer than the idle timeout of common load balancers, 60
s (docs/behind-a-proxy.md)."""

CUT_S = 2
"""Seconds that uvicorn gives requests which were cut off. A choice: they have been told before."""

TICK_S = 1.0
"""How often a listener does its periodic work, such as renewing the date in answers. A choice: uvicorn does
it ten times a second, which for two listeners took a tenth of the CPU of an idle gateway."""

LOOKS_MAX = 200
"""Connections checked per event loop iteration. A choice: each takes 5 us (one x86 core, uvloop)."""

LOOKS_S = 0.1
"""How soon the next ones are checked. A choice: 8,192 connections take 4 s."""

ENOUGH_BELOW = 0.9
"""Below this share of the connections that a listener may have, there is room for others again. A choice: it
is not logged for every one that comes and goes."""


class Listener(uvicorn.Server):
    """One ASGI application on one socket."""

    def __init__(self, app: ASGIApp, bound: socket.socket, chats: Chats | None = None) -> None:
        """Prepare to serve `app` on `bound`; ordinary chats are passed to `chats`."""
        self._connections_max = min(guard.CONNECTIONS_MAX, int(open_files.limit() * guard.FILES_SHARE))
        idle = IdleConnections(self._connections_max)
        guarded = partial(GuardedProtocol, idle=idle)
        protocol = guarded if chats is None else partial(DirectProtocol, chats=chats, idle=idle)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # any factory of protocols works
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEPALIVE_S,
            )
        )
        self._bound = bound
        self._looked_at = monotonic()
        self._to_look_at: list[Any] = []
        self._is_full = False
        self._accepting = anyio.Event()
        self._cut = anyio.Event()
        self._ended = anyio.Event()

    def connections(self) -> tuple[int, int]:
        """Return how many connections it has, and how many it may have."""
        return len(self.server_state.connections), self._connections_max

    async def run_until_stopped(self) -> None:
        """Serve until `cut`."""
        try:
            await self.serve(sockets=[self._bound])
        finally:
            self._ended.set()

    def close(self) -> None:
        """Accept no more connections; those that there are stay open."""
        for server in self.servers:
            server.close()

    def cut(self) -> None:
        """Stop now: cancel running requests and close their connections."""
        self.config.timeout_graceful_shutdown = CUT_S
        self.force_exit = self.should_exit = True
        self._cut.set()
        for task in self.server_state.tasks:
            task.cancel()
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            connection.drop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and release `wait_started`."""
        await super().startup(sockets=sockets)
        self._accepting.set()

    async def main_loop(self) -> None:
        """Do the periodic work until the listener is to end."""
        while not await self.on_tick(0):  # at any other number, uvicorn would not renew the date
            with anyio.move_on_after(LOOKS_S if self._to_look_at else TICK_S):
                await self._cut.wait()

    async def on_tick(self, counter: int) -> bool:
        """Run uvicorn's periodic work, and drop callers whose machines are gone, or that do not read."""
        if not self._to_look_at and monotonic() - self._looked_at >= tcp.LOOK_S:
            self._looked_at = monotonic()
            self._to_look_at = list(self.server_state.connections)
        looked_at, self._to_look_at = self._to_look_at[:LOOKS_MAX], self._to_look_at[LOOKS_MAX:]
        for connection in looked_at:
            if tcp.is_gone(connection.transport):
                connection.transport.abort()
            connection.limit_closing()
        self._note_connections(*self.connections())
        return await super().on_tick(counter)

    def _note_connections(self, count: int, limit: int) -> None:
        """Log when there are as many as there may be, and when that is over."""
        was_full, self._is_full = self._is_full, count >= limit * (ENOUGH_BELOW if self._is_full else 1)
        if self._is_full and not was_full:
            log.error(
                "%d connections are open, as many as a port may have: idle ones are closed for new ones",
                count,
                extra=about("connections_full", open=count, limit=limit),
            )
        elif was_full and not self._is_full:
            log.warning(
                "%d connections are open, of at most %d",
                count,
                limit,
                extra=about("connections_enough", open=count, limit=limit),
            )

    async def wait_ended(self) -> None:
        """Wait until every connection is closed."""
        await self._ended.wait()

    async def wait_started(self) -> None:
        """Wait until connections are accepted."""
        await self._accepting.wait()
