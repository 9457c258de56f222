"""The sockets on which a process listens."""

import contextlib
import socket

from gateway import tcp
from gateway.core.errors import ConfigError, StartupBlocked

BACKLOG = 2048
"""Connections that may wait to be accepted: uvicorn's default. Linux also applies `net.core.somaxconn`."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on that address. Connections wait. Port 0 picks a free one.

    With SO_REUSEADDR, Linux lets two sockets that overlap be bound, and refuses the second one to listen.

    Raises:
        StartupBlocked: the address is in use, or does not belong to this machine.
        ConfigError: this user may not bind to it.
    """
    wanted = tcp.address(host, port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            bound = undo.enter_context(socket.socket(family, kind, proto))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for option in tcp.KEEPALIVE:
                bound.setsockopt(*option)
            bound.bind(address)
            bound.listen(BACKLOG)
            undo.pop_all()
    except PermissionError as error:
        raise ConfigError(f"cannot listen on {wanted}: {error.strerror}") from error
    except OSError as error:
        raise StartupBlocked(f"cannot listen on {wanted}: {error.strerror or error}") from error
    return bound


def require_free(*addresses: tuple[str, int] | None) -> None:
    """Check that these addresses, where there are any, can be bound.

    Raises:
        StartupBlocked, ConfigError: See `bind`.
    """
    for address in addresses:
        if address is not None:
            bind(*address).close()


def url_of(bound: socket.socket) -> str:
    """Return the base URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{tcp.address(host, port)}"
