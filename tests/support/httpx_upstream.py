"""Opens a backend's answer over httpx: the reference whose tests `upstream/direct.py` must also pass.

One httpx client and pool per backend: pools do not compete, TLS settings and keys are separate, and httpx's
pools stay small enough to be fast. httpx's defaults are overridden: they would time out a read after 5 s and
limit the pool to 100 connections.
"""

import errno
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import anyio
import httpx

from gateway import __version__
from gateway.core.backends import Timeouts
from gateway.core.errors import (
    OutOfResources,
    UpstreamFailed,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.ports import TakeChunk, Target, UpstreamResponse
from gateway.tcp import KEEPALIVE
from gateway.upstream import backend_clients
from gateway.upstream.backend_clients import BackendClient, BackendClients
from gateway.upstream.faults import causes
from gateway.upstream.transport import Transport

_USER_AGENT = f"gemma-gateway/{__version__}"


class HttpxUpstream(BackendClients["_HttpxClient"]):
    """`ports.Upstream` over httpx."""

    def _new_client(self, url: str, secret: str | None, verify: ssl.SSLContext | bool) -> "_HttpxClient":
        return _HttpxClient(url, secret, verify)

    @asynccontextmanager
    async def open(self, target: Target, timeouts: Timeouts) -> AsyncIterator[UpstreamResponse]:
        """See `ports.Upstream.open`."""
        client = self._take(target.backend)
        try:
            async with self._exchange(client.client, target, timeouts) as response:
                yield response
        finally:
            await self._give_back(client)

    @asynccontextmanager
    async def _exchange(
        self, client: httpx.AsyncClient, target: Target, timeouts: Timeouts
    ) -> AsyncIterator[UpstreamResponse]:
        request = client.build_request(
            "POST",
            target.endpoint.value,
            content=target.body,
            headers=[(b"content-type", b"application/json"), (b"accept", b"*/*"), *target.headers],
            timeout=httpx.Timeout(None, connect=timeouts.connect_s, write=backend_clients.WRITE_S),
        )
        response = await _send(client, request)
        try:
            encoding = response.headers.get("content-encoding", "").lower()
            if encoding not in ("", "identity") and response.status_code == 200:
                raise UpstreamFailed(backend_clients.ENCODED)
            yield _Response(response)
        finally:
            # Closing the connection early tells the engine to stop generating.
            with anyio.move_on_after(backend_clients.CLOSE_S, shield=True):
                await response.aclose()


class _HttpxClient(BackendClient):
    """The httpx client of one backend, with its own pool."""

    def __init__(self, url: str, secret: str | None, verify: ssl.SSLContext | bool) -> None:
        super().__init__(url, secret, verify)
        headers = {"user-agent": _USER_AGENT, "accept-encoding": "identity"}
        if secret is not None:
            headers["authorization"] = f"Bearer {secret}"
        self.client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            transport=Transport(
                # Loading certificates takes 20 ms: do it only if there is something to verify.
                verify=verify if url.startswith("https:") else False,
                limits=httpx.Limits(
                    max_connections=None,
                    max_keepalive_connections=None,
                    keepalive_expiry=backend_clients.KEEPALIVE_S,
                ),
                socket_options=KEEPALIVE,
            ),
            timeout=httpx.Timeout(None),
            follow_redirects=False,
            trust_env=False,
        )

    async def aclose(self) -> None:
        """See `BackendClient.aclose`."""
        await self.client.aclose()


class _Response:
    """`ports.UpstreamResponse` over an open httpx response."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._parts = response.aiter_raw()
        self._held: anyio.Event | None = None

    @property
    def status(self) -> int:
        """See `ports.UpstreamResponse.status`."""
        return self._response.status_code

    @property
    def connect_s(self) -> float:
        """See `ports.UpstreamResponse.connect_s`. httpx does not report it."""
        return 0.0

    @property
    def retry_after(self) -> str | None:
        """See `ports.UpstreamResponse.retry_after`."""
        said: str | None = self._response.headers.get("retry-after")
        return said

    async def read(self) -> bytes:
        """See `ports.UpstreamResponse.read`."""
        try:
            async for part in self._parts:
                if part:
                    return part
        except httpx.TransportError as error:
            raise UpstreamFailed("The connection to the backend broke.") from error
        return b""

    async def read_whole(self, bytes_max: int) -> bytes:
        """See `ports.UpstreamResponse.read_whole`."""
        return await backend_clients.read_on(self, b"", bytes_max)

    async def stream_to(self, take: Callable[[bytes], bool], take_chunk: TakeChunk | None = None) -> None:
        """See `ports.UpstreamResponse.stream_to`. httpx hides chunk boundaries."""
        while data := await self.read():
            if self._held is not None:
                await self._held.wait()
            if not take(data):
                return

    def pause(self) -> None:
        """See `ports.UpstreamResponse.pause`."""
        self._held = self._held or anyio.Event()

    def resume(self) -> None:
        """See `ports.UpstreamResponse.resume`."""
        if self._held is not None:
            self._held.set()
            self._held = None


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    since = monotonic()
    try:
        return await _send_once(client, request)
    except _StaleConnection as error:
        if monotonic() - since >= backend_clients.STALE_S:
            raise UpstreamLost("The connection to the backend broke before it answered.") from error
        # The backend closed the kept-alive connection before it read the request.
    try:
        return await _send_once(client, request)
    except (_StaleConnection, UpstreamUnreachable) as error:  # it may have been read, and crashed the engine
        raise UpstreamLost("The backend closed the connection without an answer.") from error


class _StaleConnection(Exception):
    """A kept-alive connection was already closed."""


async def _send_once(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    is_new = False

    async def trace(event: str, _: object) -> None:
        nonlocal is_new
        is_new = is_new or event == "connection.connect_tcp.started"

    request.extensions["trace"] = trace
    try:
        return await client.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        if _is_exhaustion(error):
            raise OutOfResources("This gateway has no connections left.", retry_after_s=1) from error
        raise UpstreamUnreachable("The backend cannot be reached.") from error
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
        if isinstance(error, httpx.RemoteProtocolError) and "without sending a response" not in str(error):
            raise UpstreamFailed("The backend sent something that is not HTTP.") from error
        if not is_new:
            raise _StaleConnection from error
        raise UpstreamLost("The connection to the backend broke before it answered.") from error
    except httpx.TimeoutException as error:
        raise UpstreamTimeout("The backend did not read the request in time.") from error
    except httpx.TransportError as error:
        raise UpstreamFailed("The connection to the backend broke.") from error


def _is_exhaustion(error: BaseException) -> bool:
    """Return whether an error was caused by a lack of file descriptors here rather than by the backend."""
    return any(
        isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE) for cause in causes(error)
    )
