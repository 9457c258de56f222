"""One client per backend, each with its own connections, retired when its backend is removed.

The configuration may change while requests run. The client of a removed backend gets no new requests, and
is closed when its last one has ended.
"""

import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import anyio

from gateway.core.backends import Backend
from gateway.core.errors import UpstreamUnreachable
from gateway.ports import UpstreamResponse


class BackendClient(ABC):
    """The client of one backend.

    Attributes:
        url: The backend's base URL.
        secret: The API key to send, or None.
        verify: How to verify the backend's certificate.
        in_flight: Number of requests in progress.
    """

    def __init__(self, url: str, secret: str | None, verify: ssl.SSLContext | bool) -> None:
        """Prepare the client; no connection is opened."""
        self.url, self.secret, self.verify = url, secret, verify
        self.in_flight = 0

    @abstractmethod
    async def aclose(self) -> None:
        """Close all connections."""


KEEPALIVE_S = 4.0
"""Idle connections are closed after this, before the backend does it: vLLM waits 5.0 s (measured), and the
second between is a choice."""

AGE_S = 60.0
"""Older connections are not reused. A choice: requests follow a host name to its new address within a minute
(docs/health.md)."""

STALE_S = 1.0
"""If a kept-alive connection ends this soon after a request was written, the backend was probably closing it
as idle. Later, the backend may have read the request and crashed on it. A choice: more than any round
trip."""

WRITE_S = 60.0
"""A backend that reads no byte of the body for this long is considered stuck. A choice: longer than a stall
of a busy server."""

CLOSE_S = 1.0
"""Time limit for closing. A choice: the response is complete by then."""

ENCODED = "The backend compresses its answers, although it is asked not to."
"""The message for an answer with status 200 and a content-encoding."""

C = TypeVar("C", bound=BackendClient)


class BackendClients(ABC, Generic[C]):
    """The clients of all backends: the base of every `ports.Upstream`. Close it with `aclose`."""

    def __init__(
        self,
        backends: Iterable[Backend],
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
    ) -> None:
        """Prepare a client per backend.

        Args:
            backends: The configured backends.
            secrets: Per backend id, the API key to send.
            tls: Per backend id, how to verify its certificate; True if missing.
        """
        self._clients: dict[str, C] = {}
        self._retired: list[C] = []
        self.update(backends, secrets=secrets, tls=tls)

    @abstractmethod
    def _new_client(self, url: str, secret: str | None, verify: ssl.SSLContext | bool) -> C:
        """Return a new client."""

    def update(
        self,
        backends: Iterable[Backend],
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
    ) -> None:
        """Replace the configured backends; arguments as for `__init__`. Requests in progress continue."""
        before, self._clients = self._clients, {}
        for backend in backends:
            kept = before.get(backend.id)
            wanted = (backend.url, secrets.get(backend.id), tls.get(backend.id, True))
            if kept is not None and (kept.url, kept.secret, kept.verify) == wanted:
                self._clients[backend.id] = before.pop(backend.id)
            else:
                self._clients[backend.id] = self._new_client(*wanted)
        self._retired += before.values()

    async def close_retired(self) -> None:
        """Close retired clients that are idle; the others are closed when their last request has ended."""
        idle = [client for client in self._retired if not client.in_flight]
        self._retired = [client for client in self._retired if client.in_flight]
        for client in idle:
            await client.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        for client in (*self._clients.values(), *self._retired):
            await client.aclose()

    def _take(self, backend: Backend) -> C:
        """Return the client of a backend, to be returned with `_give_back`.

        Raises:
            UpstreamUnreachable: the backend is no longer configured.
        """
        client = self._clients.get(backend.id)
        if client is None or client.url != backend.url:
            raise UpstreamUnreachable("The backend is no longer configured.")
        client.in_flight += 1
        return client

    async def _give_back(self, client: C) -> None:
        """Return a client after a request."""
        client.in_flight -= 1
        if client in self._retired:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self.close_retired()


async def read_on(response: UpstreamResponse, data: bytes, bytes_max: int) -> bytes:
    """Return `data` and the rest of a body. Stops reading when that is longer than `bytes_max`."""
    parts, size = [data], len(data)
    while size <= bytes_max and (data := await response.read()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)
