"""Support for HTTP/1.0 requests, which some proxies still send: nginx before 1.29.7, by default.

HTTP/1.0 has no chunked encoding, and a server must not send it (RFC 9112, 6.1): an answer of unknown length
is delimited by the end of its connection. Nor does it have `Expect: 100-continue`.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def as_http_1_0(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Wrap `app` so that its answers fit the request of `cycle`, which is not HTTP/1.1.

    The connection is kept alive only if that was requested and the answer has a length. If an answer that is
    delimited by the end of its connection is incomplete, the connection is reset, so that the caller notices.
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
                reset_at_close(cycle.transport, True)
            elif cycle.keep_alive and b"connection" not in names:
                fitting = {**message, "headers": [*fields, (b"connection", b"keep-alive")]}
        elif lasts_until_closed and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(fitting)
        if lasts_until_closed and cycle.response_complete:
            reset_at_close(cycle.transport, False)

    async def answer(scope: Scope, receive: ASGIReceiveCallable, _: object) -> None:
        await app(scope, receive, send)

    return answer


def _is_to_be_kept(headers: Any) -> bool:
    """Return whether to keep the connection alive. Not after a chunked body: its framing is unreliable."""
    wishes = b",".join(value for name, value in headers if name == b"connection").lower()
    is_in_chunks = any(name == b"transfer-encoding" for name, _ in headers)
    return b"keep-alive" in {wish.strip() for wish in wishes.split(b",")} and not is_in_chunks


def reset_at_close(transport: asyncio.Transport, is_so: bool) -> None:
    """Configure whether closing the connection resets it."""
    with suppress(OSError, ValueError):  # already closed; ValueError is uvloop's
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_so, 0)
        )
