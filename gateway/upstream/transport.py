"""httpx's transport with complete error mapping."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

import httpx


class Transport(httpx.AsyncHTTPTransport):
    """httpx's transport, with two more errors mapped to httpx exceptions, and the system's certificates.

    If a connection is reset while it is being set up, uvloop discards the socket before httpcore inspects
    it, and httpcore fails with AttributeError. Nothing has been sent at that point: it is a connect error.

    TLS may also fail after the handshake: only then does a server reject a missing client certificate
    (TLS 1.3) or send undecryptable data. httpcore does not map the resulting ssl.SSLError.

    Certificates are verified against the system's store, as everywhere in the gateway; httpx ships its own.
    """

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | bool = True,
        limits: httpx.Limits = httpx.Limits(),  # noqa: B008 - immutable
        socket_options: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """Prepare the transport; no connection is opened, and only the system's certificates are read.

        Args:
            verify: How to verify certificates: True, by the system's; False, not at all.
            limits: Limits on open and kept-alive connections.
            socket_options: Options set on each socket.
        """
        # Loading the system's certificates takes 20 ms.
        context = ssl.create_default_context() if verify is True else verify
        super().__init__(verify=context, limits=limits, trust_env=False, socket_options=socket_options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncHTTPTransport.handle_async_request`."""
        try:
            response = await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was reset as it was made", request=request) from error
        except ssl.SSLError as error:
            raise httpx.ReadError("TLS failed", request=request) from error
        if request.url.scheme == "https":
            response.stream = _Body(cast("httpx.AsyncByteStream", response.stream))
        return response


class _Body(httpx.AsyncByteStream):
    """The body of a response received over TLS."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(cast("AsyncGenerator[bytes, None]", aiter(self._stream))) as parts:
                async for part in parts:
                    yield part
        except ssl.SSLError as error:
            raise httpx.ReadError("TLS failed") from error

    async def aclose(self) -> None:
        await self._stream.aclose()
