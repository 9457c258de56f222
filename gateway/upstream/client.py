"""Opens a backend's answer, over httpx.

One client, with a connection pool of its own, per backend: pools do not compete, TLS settings and keys do
not mix, and httpx's pool stays small enough to be quick. None of httpx's defaults is in force: they would
time out a read after 5 s and hold 100 connections at most.
"""

import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import anyio
import httpx

from gateway import __version__
from gateway.core.errors import UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from gateway.core.values import Backend, Timeouts
from gateway.ports import Headers, Target, UpstreamResponse

KEEPALIVE_S = 4.0
"""vLLM closes an idle connection after 5.0 s (measured); one given up earlier is never written into."""

WRITE_S = 60.0
"""A backend that takes no byte of the body for this long is not reading it."""

CLOSE_S = 1.0
_USER_AGENT = f"gemma-gateway/{__version__}"


class HttpxUpstream:
    """`ports.Upstream` over httpx. Close it with `aclose`."""

    def __init__(
        self,
        backends: Iterable[Backend],
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
    ) -> None:
        """Prepare a client per backend.

        Args:
            backends: Those that may be called; a call to any other is a programming error.
            secrets: Per backend id, the API key to present.
            tls: Per backend id, how to verify its certificate; True where absent.
        """
        self._clients: dict[str, httpx.AsyncClient] = {}
        for backend in backends:
            headers = {"user-agent": _USER_AGENT, "accept-encoding": "identity"}
            if backend.id in secrets:
                headers["authorization"] = f"Bearer {secrets[backend.id]}"
            self._clients[backend.id] = httpx.AsyncClient(
                base_url=backend.url,
                headers=headers,
                verify=tls.get(backend.id, True),
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
                ),
                timeout=httpx.Timeout(None),
                follow_redirects=False,
                trust_env=False,
            )

    async def aclose(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            await client.aclose()

    @asynccontextmanager
    async def open(self, target: Target, timeouts: Timeouts) -> AsyncIterator[UpstreamResponse]:
        """See `ports.Upstream.open`."""
        client = self._clients[target.backend.id]
        request = client.build_request(
            "POST",
            target.endpoint.value,
            content=target.body,
            headers=[(b"content-type", b"application/json"), (b"accept", b"*/*"), *target.headers],
            timeout=httpx.Timeout(None, connect=timeouts.connect_s, write=WRITE_S),
        )
        response = await _send(client, request)
        try:
            yield _Response(response)
        finally:
            # Leaving early closes the connection, which stops the engine's work.
            with anyio.move_on_after(CLOSE_S, shield=True):
                await response.aclose()


class _Response:
    """`ports.UpstreamResponse` over an open httpx response."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._parts = response.aiter_raw()

    @property
    def status(self) -> int:
        """See `ports.UpstreamResponse.status`."""
        return self._response.status_code

    @property
    def headers(self) -> Headers:
        """See `ports.UpstreamResponse.headers`."""
        return self._response.headers.raw

    async def read(self) -> bytes:
        """See `ports.UpstreamResponse.read`."""
        try:
            async for part in self._parts:
                if part:
                    return part
        except httpx.TransportError as error:
            raise UpstreamFailed("The connection to the backend broke.") from error
        return b""


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    try:
        return await _send_once(client, request)
    except httpx.RemoteProtocolError:
        # A kept connection that the backend closed at this very moment: no byte of an answer came, and
        # the backend did not read the request. Once, on a connection of its own.
        pass
    try:
        return await _send_once(client, request)
    except httpx.RemoteProtocolError as error:
        raise UpstreamFailed("The backend closed the connection without an answer.") from error


async def _send_once(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    try:
        return await client.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        raise UpstreamUnreachable("The backend cannot be reached.") from error
    except httpx.RemoteProtocolError as error:
        if "without sending a response" in str(error):
            raise
        raise UpstreamFailed("The backend sent something that is not HTTP.") from error
    except httpx.TimeoutException as error:
        raise UpstreamTimeout("The backend did not read the request in time.") from error
    except httpx.TransportError as error:
        raise UpstreamFailed("The connection to the backend broke.") from error
