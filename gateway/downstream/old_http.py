"""Answers to requests of HTTP/1.0, as proxies still send them: nginx before 1.29.7, unless told otherwise.

HTTP/1.0 knows no chunks, and nobody may send it any (RFC 9112, 6.1): an answer whose length is not known when
it begins lasts until its connection ends. Nor does it know of being told to go on.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def as_http_1_0(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return `app`, with answers that fit the request of `cycle`, which is not of HTTP/1.1.

    A connection is kept only where that was asked for, and the answer says how long it is. One whose end is
    that of the answer is reset instead wherever it ends before, so that nobody takes a part for the whole.
    """
    cycle.waiting_for_100_continue = False
    cycle.keep_alive = _is_to_be_kept(cycle.scope["headers"])
    lasts_until_closed = False

    async def send(message: ASGISendEvent) -> None:
        nonlocal lasts_until_closed
        fitting: Any = message
        if message["type"] == "http.response.start":
            fields = list(message.get("headers", ()))
            names = {name.lower() for name, _ in fields}
            if b"content-length" not in names:
                lasts_until_closed, cycle.keep_alive, cycle.chunked_encoding = True, False, False
                _reset_at_close(cycle.transport, True)
            elif cycle.keep_alive and b"connection" not in names:
                fitting = {**message, "headers": [*fields, (b"connection", b"keep-alive")]}
        elif lasts_until_closed and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(fitting)
        if lasts_until_closed and cycle.response_complete:
            _reset_at_close(cycle.transport, False)

    async def answer(scope: Scope, receive: ASGIReceiveCallable, _: object) -> None:
        await app(scope, receive, send)

    return answer


def _is_to_be_kept(headers: Any) -> bool:
    """Return whether the connection is to be kept. Where a body is in chunks, all else is in doubt, too."""
    wishes = b",".join(value for name, value in headers if name == b"connection").lower()
    is_in_chunks = any(name == b"transfer-encoding" for name, _ in headers)
    return b"keep-alive" in {wish.strip() for wish in wishes.split(b",")} and not is_in_chunks


def _reset_at_close(transport: asyncio.Transport, is_so: bool) -> None:
    """Have the kernel reset the connection when it is closed, whoever closes it, or end it as is usual."""
    with suppress(OSError):  # it is closed by now
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_so, 0)
        )
