"""An HTTP request and the way to answer it, for the plain ASGI applications of this package."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from gateway.simulator import refusals
from gateway.simulator.door import ClientConnection
from gateway.simulator.reading import read_json

JSON = "application/json"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Handler = Callable[["Exchange"], Awaitable[None]]


@dataclass(slots=True)
class Exchange:
    """A request and the way to answer it.

    Attributes:
        status: Status sent, for the metrics; 0 before.
    """

    scope: Scope
    receive: Receive
    send: Send
    connection: ClientConnection
    status: int = 0

    def header(self, name: bytes) -> str:
        """Return a request header, or ""."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), "")

    def query(self) -> dict[str, str]:
        """Return the query parameters; the last one of duplicates."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1")))

    async def body(self) -> bytes:
        """Return the request's body."""
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def json(self) -> dict[str, Any]:
        """Return the request's JSON object."""
        body = await self.body()
        if self.header(b"content-type").partition(";")[0].strip().lower() != JSON:
            raise refusals.unsupported_media()
        return read_json(body)

    async def start(
        self, status: int, content_type: str, length: int | None, *, vary: bool = True, allow: str = ""
    ) -> None:
        """Send the status and headers."""
        self.status = status
        headers = [(b"allow", allow.encode())] if allow else []
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if content_type:
            headers.append((b"content-type", content_type.encode()))
        if vary:
            headers.append((b"vary", b"Origin"))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body: one HTTP chunk if no length was given."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, body: bytes = b"", kind: str = JSON, *, vary: bool = True) -> None:
        """Send a complete answer."""
        await self.start(status, kind if body else "", len(body), vary=vary)
        await self.write(body, more=False)


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


def as_bytes(value: object) -> bytes:
    """Encode a value as JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
