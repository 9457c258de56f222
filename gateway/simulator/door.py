"""A listening port and its connections.

uvicorn's HTTP protocol handles the clients; the sockets are handled here, because a server has to be able to
refuse connections, cut them, and come back, all on one port.
"""

import select
import socket
from asyncio import Task, get_running_loop
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway import tcp
from gateway.sockets import BACKLOG

KEEP_ALIVE_S = 5
"""Idle connections are closed after this time, as by vLLM (measured:
`upstream.backend_clients.KEEPALIVE_S`)."""

ENDING_S = 1.0
"""Real seconds for answers to write their last bytes. A choice."""

_LOOK_S = 0.002
"""Real seconds between two looks at uvicorn's tasks. A choice."""

_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)  # Linux has the first


def wire(application: Any) -> Config:
    """Return uvicorn's configuration for an ASGI application behind a `Door`, loaded."""
    config = Config(
        application,
        http=ClientConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return config


class ClientConnection(HttpToolsProtocol):
    """A client's connection: uvicorn's, with access below HTTP and an event for its end."""

    def __init__(self, config: Config, state: ServerState, closed: anyio.Event) -> None:
        """Refuse the client if `closed` is set: the port was, before the event loop handed it over.

        A killed process keeps no connections.
        """
        super().__init__(config, state, {})
        self._port_closed = closed
        self.on_lost: Callable[[], None] | None = None
        self._lost = anyio.Event()

    def connection_made(self, transport: Any) -> None:
        """Start, unless the port has been closed in the meantime."""
        super().connection_made(transport)
        if self._port_closed.is_set():
            transport.abort()

    def on_message_begin(self) -> None:
        """Attach the connection to each request."""
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_message_complete(self) -> None:
        """Resume reading: uvicorn pauses for a long body, and would not notice a disconnect until then."""
        super().on_message_complete()
        self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the answer in progress of the disconnect."""
        super().connection_lost(exc)
        self._lost.set()
        if self.on_lost is not None:
            self.on_lost()

    @property
    def is_lost(self) -> bool:
        """Whether the client is known to have closed it."""
        return self._lost.is_set()

    @property
    def was_left(self) -> bool:
        """Whether the client has closed it, known or not: asks the kernel."""
        if self.is_lost or self.transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _HANGUP)
        return bool(poll.poll(0))

    def write(self, data: bytes) -> None:
        """Write bytes, bypassing HTTP."""
        self.transport.write(data)

    async def close(self, *, abort: bool = False) -> None:
        """Close it, with a reset if `abort`, and wait until it is closed."""
        if abort:
            self.transport.abort()
        else:
            self.transport.close()
        await self._lost.wait()


class Door:
    """A server's port. While closed, it refuses connections, but remains bound."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the port, closed.

        Raises:
            OSError: the port is in use.
        """
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A bound socket that does not listen reserves the port: connections to it are refused.
        self._holder = self._bound(host, port)
        self.host, self.port = self._holder.getsockname()[:2]
        self._listener: socket.socket | None = None
        self._closed = anyio.Event()  # of the latest listener
        self._arriving: set[Task[object]] = set()

    def _bound(self, host: str, port: int) -> socket.socket:
        # asyncio disables Nagle's algorithm only for sockets with an explicit TCP protocol.
        bound = socket.socket(self._family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError:
            bound.close()
            raise
        return bound

    @property
    def url(self) -> str:
        """The server's base URL."""
        return f"http://{tcp.address(self.host, self.port)}"

    def open(self, config: Config, state: ServerState) -> None:
        """Accept connections, which are served as `config` says, and listed in `state`."""
        if self._listener is None:
            self._closed = anyio.Event()
            self._listener = self._bound(self.host, self.port)
            self._listener.setblocking(False)
            self._listener.listen(BACKLOG)
            get_running_loop().add_reader(self._listener, self._accept, self._listener, config, state)

    def _accept(self, listener: socket.socket, config: Config, state: ServerState) -> None:
        """Accept waiting connections.

        asyncio's own server, when closed, loses connections that it is about to hand over: they remain open,
        and nobody ever answers on them.
        """
        loop, made = get_running_loop(), partial(ClientConnection, config, state, self._closed)
        with suppress(OSError):  # the client is already gone
            while True:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                arriving = loop.create_task(loop.connect_accepted_socket(made, accepted))
                self._arriving.add(arriving)
                arriving.add_done_callback(self._arriving.discard)

    def close(self) -> None:
        """Refuse new connections; open ones remain."""
        self._closed.set()
        if self._listener is not None:
            get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def release(self) -> None:
        """Release the port."""
        self.close()
        self._holder.close()


async def cut_connections(state: ServerState) -> None:
    """Reset all connections, and give their requests `ENDING_S` to notice."""
    for connection in list(state.connections):
        connection.transport.abort()
    with anyio.move_on_after(ENDING_S):
        while state.tasks:
            await next_look()


async def next_look() -> None:
    """Wait briefly for uvicorn's own tasks, which have no event to wait for."""
    await anyio.sleep(_LOOK_S)
