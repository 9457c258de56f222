"""A port and the connections on it.

uvicorn's HTTP protocol speaks to the clients; the sockets are handled here, because a server has to be
able to refuse connections, cut them, and come back, all on one port.
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

KEEP_ALIVE_S = 5  # vLLM's: an idle connection is closed after it
ENDING_S = 1.0  # real seconds that answers get to write their last bytes
_BACKLOG = 2048
_LOOK_S = 0.002
_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)  # Linux has the first


def wire(application: Any) -> Config:
    """Return uvicorn's settings for an ASGI application behind a `Door`, loaded."""
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


class Entrance:
    """What connections came in by.

    Attributes:
        is_open: Whether the port still accepts them. One that the event loop was about to hand over when it
            was closed is refused: of a process that was killed no connection is left.
    """

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        """Be open."""
        self.is_open = True


class ClientConnection(HttpToolsProtocol):
    """One client's connection: uvicorn's, with a way past HTTP and an event for its end."""

    def __init__(self, config: Config, state: ServerState, entrance: Entrance) -> None:
        super().__init__(config, state, {})
        self._entrance = entrance
        self.on_lost: Callable[[], None] | None = None
        self._lost = anyio.Event()

    def connection_made(self, transport: Any) -> None:
        """Begin, unless the port was closed meanwhile."""
        super().connection_made(transport)
        if not self._entrance.is_open:
            transport.abort()

    def on_message_begin(self) -> None:
        """Give each request its connection."""
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_message_complete(self) -> None:
        """Read on: uvicorn stops for a long body, and hears of no client's leaving until it goes on."""
        super().on_message_complete()
        self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the answer under way that its client is gone."""
        super().connection_lost(exc)
        self._lost.set()
        if self.on_lost is not None:
            self.on_lost()

    @property
    def is_lost(self) -> bool:
        """See `exchange.Connection.is_lost`."""
        return self._lost.is_set()

    @property
    def was_left(self) -> bool:
        """See `exchange.Connection.was_left`."""
        if self.is_lost or self.transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _HANGUP)
        return bool(poll.poll(0))

    def write(self, data: bytes) -> None:
        """See `app.Connection.write`."""
        self.transport.write(data)

    async def close(self, *, abort: bool = False) -> None:
        """See `app.Connection.close`."""
        if abort:
            self.transport.abort()
        else:
            self.transport.close()
        await self._lost.wait()


class Door:
    """The server's port. Closed, it refuses connections, but nobody else can take it."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the port, closed.

        Raises:
            OSError: the port is taken.
        """
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A socket that is bound but does not listen holds the port: connecting to it is refused.
        self._holder = self._bound(host, port)
        self.host, self.port = self._holder.getsockname()[:2]
        self._listener: socket.socket | None = None
        self._entrance = Entrance()
        self._arriving: set[Task[object]] = set()

    def _bound(self, host: str, port: int) -> socket.socket:
        # asyncio sends small writes at once only on sockets that say that they are TCP.
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
        host = f"[{self.host}]" if self._family == socket.AF_INET6 else self.host
        return f"http://{host}:{self.port}"

    async def open(self, connect: Callable[[Entrance], ClientConnection]) -> None:
        """Accept connections, each served by what `connect` returns."""
        if self._listener is None:
            self._entrance = Entrance()
            self._listener = self._bound(self.host, self.port)
            self._listener.setblocking(False)
            self._listener.listen(_BACKLOG)
            get_running_loop().add_reader(self._listener, self._accept, self._listener, connect)

    def _accept(self, listener: socket.socket, connect: Callable[[Entrance], ClientConnection]) -> None:
        """Accept who has come.

        asyncio's own server loses those that it is about to hand over when it is closed: they stay open, and
        nobody ever answers on them.
        """
        loop, made = get_running_loop(), partial(connect, self._entrance)
        with suppress(OSError):  # nobody is there any more
            while True:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                arriving = loop.create_task(loop.connect_accepted_socket(made, accepted))
                self._arriving.add(arriving)
                arriving.add_done_callback(self._arriving.discard)

    def close(self) -> None:
        """Refuse connections; those that are open stay."""
        self._entrance.is_open = False
        if self._listener is not None:
            get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def release(self) -> None:
        """Give the port back."""
        self.close()
        self._holder.close()


async def cut_connections(state: ServerState) -> None:
    """Reset every connection, and give the requests on them `ENDING_S` to notice."""
    for connection in list(state.connections):
        connection.transport.abort()
    with anyio.move_on_after(ENDING_S):
        while state.tasks:
            await next_look()


async def next_look() -> None:
    """Wait a moment for what uvicorn's tasks do by themselves: they have no event to wait for."""
    await anyio.sleep(_LOOK_S)
