"""Adds HEAD to every GET route, as HTTP requires: probes and monitors use it."""

from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware that answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope.get("method") != "HEAD":  # WebSockets have no method
            await self._app(scope, receive, send)
            return
        is_over = False

        async def send_head(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_over:  # discard the body, even an endless one
                is_over = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        as_get: Any = {**scope, "method": "GET"}
        await self._app(as_get, receive, send_head)


def with_head(allowed: str) -> str:
    """Add HEAD to a value of `Allow` that contains GET."""
    methods = allowed.split(", ")
    return ", ".join([*methods, "HEAD"]) if "GET" in methods else allowed
