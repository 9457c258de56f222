"""Listening: an ASGI application on a socket. uvicorn's only home.

uvicorn with httptools is the strictest of the servers that were tried against malformed requests
(docs/decisions/0003-http-server.md). It neither installs signal handlers nor decides when to stop here:
the process does, because it drains two listeners together.
"""

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from time import monotonic
from typing import Any

import anyio
import uvicorn
from litestar.types import ASGIApp

from gateway import tcp
from gateway.core.errors import ConfigError, NotYet
from gateway.downstream.direct import DirectProtocol
from gateway.downstream.direct_call import Chats
from gateway.downstream.guard import GuardedProtocol

KEEPALIVE_S = 75  # above the idle time after which common load balancers give a connection up
BACKLOG = 2048
CUT_S = 2
LOOKS_MAX = 200
"""Connections that are looked at in one turn of the event loop: each takes 5 us (one x86 core, uvloop)."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to that address and not yet listening; port 0 picks a free one.

    Raises:
        NotYet: it is taken, or is no address of this machine.
        ConfigError: this user may not listen there.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            bound = undo.enter_context(socket.socket(family, kind, proto))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for option in tcp.KEEPALIVE:
                bound.setsockopt(*option)
            bound.bind(address)
            undo.pop_all()
    except PermissionError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    except OSError as error:
        raise NotYet(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the base URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener(uvicorn.Server):
    """One ASGI application on one socket."""

    def __init__(self, app: ASGIApp, bound: socket.socket, chats: Chats | None = None) -> None:
        """Serve `app` on `bound`, once `run_until_stopped` is called; ordinary chats by `chats`."""
        protocol = GuardedProtocol if chats is None else partial(DirectProtocol, chats=chats)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # whatever makes a protocol does
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
        self._accepting = anyio.Event()
        self._ended = anyio.Event()

    async def run_until_stopped(self) -> None:
        """Serve until `cut`."""
        try:
            await self.serve(sockets=[self._bound])
        finally:
            self._ended.set()

    def cut(self) -> None:
        """End now: running requests are cancelled, their connections dropped."""
        self.config.timeout_graceful_shutdown = CUT_S
        self.force_exit = self.should_exit = True
        for task in self.server_state.tasks:
            task.cancel()
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and let `wait_started` return."""
        await super().startup(sockets=sockets)
        self._accepting.set()

    async def on_tick(self, counter: int) -> bool:
        """Do what uvicorn does ten times a second, and drop callers whose machines are gone."""
        if not self._to_look_at and monotonic() - self._looked_at >= tcp.LOOK_S:
            self._looked_at = monotonic()
            self._to_look_at = list(self.server_state.connections)
        looked_at, self._to_look_at = self._to_look_at[:LOOKS_MAX], self._to_look_at[LOOKS_MAX:]
        for connection in looked_at:
            if tcp.is_gone(connection.transport):
                connection.transport.abort()
        return await super().on_tick(counter)

    async def wait_ended(self) -> None:
        """Return once every connection is closed."""
        await self._ended.wait()

    async def wait_started(self) -> None:
        """Return once connections are accepted."""
        await self._accepting.wait()
