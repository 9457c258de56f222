"""httpx's transport, for servers that die at any moment, and what is behind its errors."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import cast

import httpx


class Transport(httpx.AsyncHTTPTransport):
    """httpx's own, but for two errors that it does not make its own, and for whom it trusts.

    A connection that is reset as it is made is one that was not made. uvloop gives such a socket up before
    httpcore has looked at it, which then fails with AttributeError. It looks before it sends anything.

    TLS may also fail once the handshake is over: a server says only then that it wants a client certificate
    (TLS 1.3), or sends what cannot be decrypted. httpcore lets that through as ssl.SSLError.

    Whom the system trusts is trusted, as everywhere in the gateway; httpx has a list of its own.
    """

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | bool = True,
        limits: httpx.Limits = httpx.Limits(),  # noqa: B008 - it never changes
        socket_options: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """Prepare; nothing is opened, and nothing taken from the environment but the system's certificates.

        Args:
            verify: How certificates are checked: True, by the system's; False, not at all.
            limits: Of the connections that are opened and kept.
            socket_options: What is set on each.
        """
        # Reading the system's certificates takes 20 ms.
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
    """The body of an answer that comes by TLS."""

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


def tls_fault(error: BaseException) -> str:
    """Return what is wrong about TLS with a server if an error comes of that, else "".

    Nothing of it is the server's own text.
    """
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"TLS: {cause.verify_message.rstrip('.')}"
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLWantReadError):  # it only waited
            return f"TLS: {(cause.reason or 'failed').replace('_', ' ').lower()}"
    return ""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it comes of; where several addresses were tried, what came of each."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for member in error.exceptions:
                yield from causes(member)
        error = error.__cause__ or error.__context__
