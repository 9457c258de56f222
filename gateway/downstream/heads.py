"""HEAD wherever there is GET, as HTTP wants of every server: probes and monitors ask so."""

from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """An application that answers HEAD as it answers GET, but for the body."""

    def __init__(self, app: ASGIApp) -> None:
        """Ask `app`, of which nothing is changed."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope.get("method") != "HEAD":  # a socket has none
            await self._app(scope, receive, send)
            return
        is_over = False

        async def send_head(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_over:  # whatever the body would be, even one that does not end
                is_over = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        as_get: Any = {**scope, "method": "GET"}
        await self._app(as_get, receive, send_head)


def with_head(allowed: str) -> str:
    """Return what `Allow` says, with the method that comes with GET."""
    methods = allowed.split(", ")
    return ", ".join([*methods, "HEAD"]) if "GET" in methods else allowed
