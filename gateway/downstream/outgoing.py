"""Bounds the memory of long answers that wait for their callers to read them, and how long they wait.

What is kept, such as the images of a conversation, may be long, and to ask for it takes a few bytes. Without
a bound, a caller that asks often and reads nothing would fill the memory.
"""

from typing import Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import OutOfResources
from gateway.downstream.relay import HELD_BYTES_MAX, PIECE_BYTES, HeldAnswers
from gateway.downstream.serving import send_refusal
from gateway.pipeline import CallerStalled
from gateway.pipeline.caller import while_caller_reads

LONG_BYTES = 1024 * 1024
"""Answers that arrive whole from their route and are longer count. A choice: most are much shorter, and are
sent as they are."""


class Outgoing:
    """ASGI middleware that bounds the memory of long answers to GET, and gives up callers that do not read.

    Attributes:
        held: Those that are being written.
    """

    def __init__(self, app: ASGIApp, together_max: int = HELD_BYTES_MAX) -> None:
        """Wrap `app`."""
        self.held = HeldAnswers(together_max)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope.get("method") != "GET":
            await self._app(scope, receive, send)
            return
        start: Any = None  # of an answer with a length, until its body comes
        is_refused = False

        async def send_in_time(message: Any) -> None:
            with while_caller_reads():
                await send(message)

        async def send_on(message: Any) -> None:
            nonlocal start, is_refused
            if is_refused:
                return
            if message["type"] == "http.response.start" and _has_length(message):
                start = message
                return
            if message["type"] != "http.response.body" or len(message["body"]) <= LONG_BYTES:
                if start is not None:
                    await send_in_time(start)
                    start = None
                await send_in_time(message)
                return
            is_refused = not await self._write(start, message, send_in_time)
            start = None

        async def send_or_end(message: Any) -> None:
            try:
                await send_on(message)
            except CallerStalled:  # the server closes the connection, because the body is incomplete
                answering.cancel()
                await checkpoint_if_cancelled()

        with anyio.CancelScope() as answering:
            await self._app(scope, receive, send_or_end)

    async def _write(self, start: Any, message: Any, send: Send) -> bool:
        """Write a long body, or refuse it. Return whether it was written."""
        body, size = message["body"], len(message["body"])
        if start is not None and not self.held.has_room(size):
            refusal = "Too many long answers are being sent at once. Please retry."
            await send_refusal(OutOfResources(refusal, retry_after_s=5), send)
            return False
        with self.held.holding(size):
            if start is not None:
                await send(start)
            for at in range(0, size, PIECE_BYTES):
                is_last = at + PIECE_BYTES >= size
                more_body = message["more_body"] or not is_last
                piece = body[at : at + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": more_body})
        return True


def _has_length(message: Any) -> bool:
    return any(name == b"content-length" for name, _ in message.get("headers", ()))
