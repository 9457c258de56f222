"""CORS for requests that are handled by ASGI.

Chats that bypass ASGI send the same headers (direct_call.py); preflight requests never bypass it.
"""

import re

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.downstream.origins import Origins
from gateway.downstream.serving import new_request_id
from gateway.ports import Headers

_ROUTES = re.compile("/+v1/")  # Litestar reads several slashes as one


class CrossOrigin:
    """ASGI middleware that allows pages of the configured origins to call the routes for applications."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        """Wrap `app`: answer preflight requests, and add headers to all other responses."""
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if not self._origins.allowed or _ROUTES.match(scope["path"]) is None:
            await self._app(scope, receive, send)
            return
        asked = dict(scope["headers"])
        origin = asked.get(b"origin", b"").decode("latin-1")
        if scope.get("method") == "OPTIONS" and b"access-control-request-method" in asked:
            names = asked.get(b"access-control-request-headers", b"")
            if (headers := self._origins.preflight(origin, names)) is not None:
                await _agree(headers, send)
                return
        fields = self._origins.fields(origin)

        async def send_with_fields(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *fields]
            await send(message)

        await self._app(scope, receive, send_with_fields)


async def _agree(headers: Headers, send: Send) -> None:
    named = [*headers, (b"x-request-id", new_request_id().encode())]
    await send({"type": "http.response.start", "status": 204, "headers": named})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
