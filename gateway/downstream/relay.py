"""One request inside one ASGI call: reads the body, runs the work, and cancels it when the caller leaves."""

from collections.abc import Awaitable, Callable

import anyio
from litestar.types import Receive, Scope, Send

from gateway.core.errors import BodyTooLarge, GatewayError, RequestTimeout
from gateway.downstream.errors import envelope, headers_of
from gateway.ports import Headers


class CallerGone(Exception):
    """The caller left before it had sent its body."""


class AsgiDownstream:
    """`ports.Downstream` over an ASGI `send`."""

    def __init__(self, send: Send) -> None:
        """Answer through `send`."""
        self._send = send
        self.is_started = False

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(scope: Scope, receive: Receive, *, bytes_max: int, within_s: float) -> bytes:
    """Return the request body.

    Raises:
        BodyTooLarge: it is longer than `bytes_max`; found by its announced length where it has one.
        RequestTimeout: it was not complete within that time.
        CallerGone: the caller left meanwhile.
    """
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if announced.isdigit() and int(announced) > bytes_max:
        raise _too_large(bytes_max)
    parts: list[bytes] = []
    size, more = 0, True
    with anyio.move_on_after(within_s) as limit:
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise CallerGone
            size += len(message["body"])
            if size > bytes_max:
                raise _too_large(bytes_max)
            parts.append(message["body"])
            more = message["more_body"]
    if limit.cancelled_caught:
        raise RequestTimeout(f"The request body was not complete within {within_s:g} s.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {bytes_max} bytes.")


async def run_for_caller(work: Callable[[], Awaitable[None]], receive: Receive) -> None:
    """Run `work`, cancelled as soon as the caller leaves.

    The server tells of that only through `receive`, so somebody has to listen all the while. An error is
    carried out by value, because a task group would wrap it.

    Raises:
        GatewayError: as raised by `work`.
    """
    failure: GatewayError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
        try:
            await work()
        except GatewayError as error:
            failure = error
        except OSError:
            # The server found the caller's socket closed before it told us so.
            pass
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def send_error(error: GatewayError, downstream: AsgiDownstream) -> None:
    """Answer with an error."""
    body = envelope(error)
    await downstream.start(error.http_status, headers_of(error, body))
    await downstream.send(body)
    await downstream.finish()


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
