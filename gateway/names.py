"""An event loop to which host names do no harm: neither unanswered look-ups, nor addresses that are gone.

uvloop looks names up in two threads, asyncio in a few that others need as well. A name for which no server
answers holds such a thread for ten seconds or more, and whoever asked has given up and asks anew long before:
soon no other name is found either, and every backend that has one is out of service. So each name has a
thread of its own here, and whoever asks for it meanwhile waits for the same answer. There are never more of
these threads than names in the configuration, and none delays the end of the process.

A name may have several addresses. Neither loop tries the second before the first has failed, which takes a
host that is gone longer than any caller waits. Here it is tried `APART_S` later.
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
"""An address that has not answered for this long is not waited for alone: RFC 8305's time."""

_Question = tuple[str | bytes | None, str | bytes | int | None, int, int, int, int]
_Found = list[tuple[Any, ...]]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes such event loops: uvloop's where it is installed, else asyncio's."""
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
    """Return whether a host has to be looked up."""
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
    """Return the answer to a question, which may have been asked by others already.

    Raises:
        OSError, UnicodeError: there is none.
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
        answer.exception()  # that is, nobody has to look at it: whoever asked may have left


async def _first_connected(
    loop: asyncio.AbstractEventLoop, found: Sequence[tuple[Any, ...]]
) -> socket.socket:
    """Return a socket connected to the first of these addresses that takes it.

    Raises:
        OSError: none does. It is that of the last.
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
                    failure = error
        raise failure
    finally:
        for one in tries:
            one.cancel()
            one.add_done_callback(_drop)


def _drop(one: asyncio.Task[socket.socket]) -> None:
    """Close a connection that was made when another had been taken."""
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
