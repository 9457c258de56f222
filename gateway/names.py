"""An event loop with robust name resolution: slow lookups block no others, and dead addresses are skipped.

uvloop resolves names in two threads, asyncio in a small pool that is shared with other work. A name whose
servers do not respond occupies a thread for ten seconds or more, while its callers time out and ask again:
soon no other name is resolved, and all backends with a name are out of service. So here each name has its own
thread, and concurrent lookups of a name share the result. There are never more such threads than names in
the configuration, and none delays the end of the process.

If a name has several addresses, both loops try the second one only after the first has failed, which, for a
host that is down, takes longer than any caller waits. Here it is tried after `APART_S`.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from gateway import threads

APART_S = 0.25
"""Delay before the next address is tried concurrently, as recommended by RFC 8305."""

_Question = tuple[str | bytes | None, str | bytes | int | None, int, int, int, int]
_Found = list[tuple[Any, ...]]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a factory of such event loops: based on uvloop if it is installed, or else on asyncio."""
    base: Any = asyncio.SelectorEventLoop
    if find_spec("uvloop") is not None:
        import uvloop

        base = uvloop.Loop

    class Loop(base):  # type: ignore[misc]  # whichever it is
        def __init__(self) -> None:
            super().__init__()
            self._look_ups: dict[_Question, asyncio.Future[_Found]] = {}

        async def getaddrinfo(
            self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
        ) -> _Found:
            """See `asyncio.AbstractEventLoop.getaddrinfo`."""
            if not _is_name(host):
                found: _Found = await super().getaddrinfo(
                    host, port, family=family, type=type, proto=proto, flags=flags
                )
                return found
            return await _look_up(self, self._look_ups, (host, port, family, type, proto, flags))

        async def create_connection(
            self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
        ) -> Any:
            """See `asyncio.AbstractEventLoop.create_connection`."""
            if not _is_name(host):
                return await super().create_connection(protocol_factory, host, port, **options)
            if options.get("ssl"):
                options.setdefault("server_hostname", host)
            parts = {part: options.pop(part, 0) for part in ("family", "proto", "flags")}
            found = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM, **parts)
            connected = await _first_connected(self, found)
            return await super().create_connection(protocol_factory, sock=connected, **options)

    return Loop


def _is_name(host: Any) -> bool:
    """Return whether a host must be resolved."""
    if not host or not isinstance(host, str | bytes):
        return False
    try:
        ipaddress.ip_address(host if isinstance(host, str) else host.decode("latin-1"))
    except ValueError:
        return True
    return False


async def _look_up(
    loop: asyncio.AbstractEventLoop, under_way: dict[_Question, asyncio.Future[_Found]], question: _Question
) -> _Found:
    """Resolve a name, joining a lookup in progress.

    Raises:
        OSError, UnicodeError: it cannot be resolved.
    """
    answer = under_way.get(question)
    if answer is None:
        answer = threads.in_own(loop, f"look-up {question[0]!r}", partial(socket.getaddrinfo, *question))
        under_way[question] = answer
        answer.add_done_callback(partial(_forget, under_way, question))
    return list(await asyncio.shield(answer))


def _forget(
    under_way: dict[_Question, asyncio.Future[_Found]], question: _Question, answer: asyncio.Future[_Found]
) -> None:
    del under_way[question]
    if not answer.cancelled():
        answer.exception()  # marks the exception as retrieved, since all callers may have left


async def _first_connected(
    loop: asyncio.AbstractEventLoop, found: Sequence[tuple[Any, ...]]
) -> socket.socket:
    """Return a socket connected to the first address that accepts.

    Raises:
        OSError: none does; that one of them refuses, or else the error of the last one.
    """
    left = list(found)
    tries: set[asyncio.Task[socket.socket]] = set()
    failure: OSError = OSError(errno.EADDRNOTAVAIL, "its host name has no address")
    try:
        while left or tries:
            if left:
                tries.add(loop.create_task(_connected(loop, left.pop(0))))
            done, _ = await asyncio.wait(
                tries, timeout=APART_S if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for one in done:
                tries.discard(one)
                try:
                    return one.result()
                except OSError as error:
                    if not isinstance(failure, ConnectionRefusedError):  # which says the most
                        failure = error
        raise failure
    finally:
        for one in tries:
            one.cancel()
            one.add_done_callback(_drop)


def _drop(one: asyncio.Task[socket.socket]) -> None:
    """Close a connection that lost the race."""
    if not one.cancelled() and one.exception() is None:
        one.result().close()


async def _connected(loop: asyncio.AbstractEventLoop, address: tuple[Any, ...]) -> socket.socket:
    family, kind, proto, _, where = address
    connection = socket.socket(family, kind, proto)
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, where)
    except BaseException:
        connection.close()
        raise
    return connection
