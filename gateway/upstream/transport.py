"""httpx's transport, for servers that die at any moment, and what is behind its errors."""

from collections.abc import Iterator

import httpx


class Transport(httpx.AsyncHTTPTransport):
    """httpx's own, but for a connection that is reset as it is made: that is one that was not made.

    uvloop gives such a socket up before httpcore has looked at it, which then fails with AttributeError. It
    looks before it sends anything.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncHTTPTransport.handle_async_request`."""
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was reset as it was made", request=request) from error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it comes of; where several addresses were tried, what came of each."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for member in error.exceptions:
                yield from causes(member)
        error = error.__cause__ or error.__context__
