"""The routes beside chats and responses in a shutdown: it waits for what runs there, and nothing new begins.

`Serving.serve` does this for requests to models. Litestar's handlers know nothing of it.
"""

import re

from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import Draining
from gateway.downstream.serving import Serving, send_refusal

_ROUTES = re.compile("/+v1/+(files|batches|responses/+.|chat/completions/+.)")


class Drained:
    """ASGI middleware that counts requests for files, batches and stored answers as in flight."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        """Wrap `app`, whose requests `serving` counts."""
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if _ROUTES.match(scope["path"]) is None:
            await self._app(scope, receive, send)
            return
        is_new = scope.get("method") == "POST" and not scope["path"].rstrip("/").endswith("/cancel")
        if is_new and self._serving.is_draining:
            await send_refusal(Draining(), send)
            return
        with self._serving.counted():
            await self._app(scope, receive, send)
