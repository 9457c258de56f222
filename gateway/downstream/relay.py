"""A request within an ASGI call: read the body, run the work, cancel it when the caller disconnects."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import anyio
import msgspec
from litestar.types import Receive, Scope, Send

from gateway.core.errors import BodyEncoded, BodyTooLarge, GatewayError, OutOfResources, RequestTimeout
from gateway.core.sse import DONE
from gateway.core.value import valueclass
from gateway.downstream.errors import envelope, headers_of
from gateway.pipeline import CallerStalled
from gateway.ports import Downstream, Headers
from gateway.tasks import TasksBeside

FINISH_S = 30.0
"""How long the end of a body may wait for a caller that does not read. A choice: the backend has finished."""

KEY_SHARE = 0.75
"""Share of the memory for bodies being received that those of one API key may take. A choice: enough for one
key's burst, and the others can go on."""

PIECE_BYTES = 64 * 1024
"""Size of the writes of an answer that is there as a whole, which is the most that is buffered for a slow
caller. A choice: few writes against memory."""

HELD_BYTES_MAX = 256 * 1024 * 1024
"""Maximum bytes of whole answers of one kind that callers may read slowly. A choice that bounds memory, and
has room for several of the longest."""


class CallerGone(Exception):
    """The caller disconnected before its body was complete."""


class HttpDownstream(Downstream, ABC):
    """`ports.Downstream` over HTTP, with further methods for the routes for applications.

    Attributes:
        is_started: Whether the status has been sent.
    """

    is_started = False

    @abstractmethod
    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`."""

    @abstractmethod
    async def finish(self) -> None:
        """End the body."""

    async def send_last(self, data: bytes, *, is_good: bool) -> None:
        """Send the last bytes of a stream without `[DONE]`; `is_good`: it is complete and successful."""
        await self.send(data)

    async def fail(self, error: GatewayError, code: str) -> None:
        """See `ports.Downstream.fail`. Every SDK raises an exception for this event."""
        await self.send(b"data: " + envelope(error, code) + b"\n\n" + DONE)


@valueclass(frozen=True, slots=True)
class Head:
    """The validated head of a request.

    Attributes:
        headers: Its headers by name, in lower case, without those that hold secrets.
        key: Name of the caller's API key, or None if no keys are configured.
        forwarded: Headers to forward to the backend.
        traceparent: The caller's trace context, or None.
        ring: Number of the set of API keys by which it was validated.
        received_at: When it was, in monotonic seconds. Its body may take long.
    """

    headers: dict[str, str]
    key: str | None
    forwarded: Headers = ()
    traceparent: str | None = None
    ring: int = 0
    received_at: float = 0.0


class Call(Protocol):
    """An HTTP request and the way to answer it, with or without ASGI."""

    @property
    def head(self) -> Head | None:
        """Its head, if already validated."""

    @property
    def method(self) -> str:
        """Its method."""

    @property
    def headers(self) -> Headers:
        """Its headers, names in lower case."""

    @property
    def downstream(self) -> HttpDownstream:
        """Where to send the answer."""

    async def body(self, limits: "BodyLimits", uploads: "Uploads", key: str | None) -> bytes:
        """Return its body. `key`: name of the caller's API key, or None if no keys are configured.

        Raises:
            BodyTooLarge: it exceeds the limit; detected by its Content-Length if it has one.
            RequestTimeout: it was not complete in time.
            OutOfResources: all bodies being received, or those of this key, have reached their limit.
            CallerGone: the caller disconnected.
        """

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, and cancel it when the caller disconnects.

        Raises:
            GatewayError, CallerStalled: as raised by `work`.
        """


class AsgiDownstream(HttpDownstream):
    """`ports.Downstream` over an ASGI `send`."""

    def __init__(self, send: Send) -> None:
        """Answer through `send`."""
        self._send = send

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End the body."""
        with anyio.move_on_after(FINISH_S):
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class AsgiCall:
    """`Call` of an ASGI request."""

    head: Head | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wrap an ASGI call."""
        self.method = str(scope.get("method", ""))  # WebSockets have no method
        self.headers: Headers = list(scope["headers"])
        self.downstream: HttpDownstream = AsgiDownstream(send)
        self._scope = scope
        self._receive = receive

    async def body(self, limits: "BodyLimits", uploads: "Uploads", key: str | None) -> bytes:
        """See `Call.body`."""
        return await read_body(self._scope, self._receive, limits, uploads, key)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """See `Call.run`."""
        await run_for_caller(work, self._receive)


@valueclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on the size of a body, the time to receive it, and the total memory of all bodies."""

    bytes_max: int = 32 * 1024 * 1024
    within_s: float = 60.0
    together_max: int = 512 * 1024 * 1024


class Uploads:
    """Accounts for the bodies being received, so that slow callers cannot fill the memory.

    One API key gets no more than `KEY_SHARE` of it, so that it cannot lock out the others.

    Attributes:
        bytes: Their total size so far.
        reserved_bytes: Memory allocated for bodies received into a single buffer (body_receiver.py).
        calls: Number of calls whose bodies are still incomplete.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.bytes = 0
        self.reserved_bytes = 0
        self.calls = 0
        self._bytes_of: dict[str, int] = {}

    def take(self, size: int, key: str | None, most: int) -> None:
        """Count bytes received from a caller with that API key; they remain counted if this raises.

        Raises:
            OutOfResources: these are too many, `most` being the limit for all.
        """
        self.bytes += size
        of_key = 0
        if key is not None:
            of_key = self._bytes_of[key] = self._bytes_of.get(key, 0) + size
        if self.bytes > most or of_key > KEY_SHARE * most:
            raise OutOfResources("Too much is being uploaded at once. Please retry.", retry_after_s=5)

    def release(self, size: int, key: str | None) -> None:
        """Count bytes no longer."""
        self.bytes -= size
        if key is not None:
            self._bytes_of[key] = self._bytes_of.get(key, 0) - size


class HeldAnswers:
    """Accounts for whole answers that wait to be read, so that slow callers cannot fill the memory.

    Attributes:
        bytes: Their total size.
    """

    def __init__(self, bytes_max: int = HELD_BYTES_MAX) -> None:
        """Start with none."""
        self.bytes = 0
        self._bytes_max = bytes_max

    def has_room(self, size: int) -> bool:
        """Return whether one more may be sent: the only one may be of any size."""
        return not self.bytes or self.bytes + size <= self._bytes_max

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count an answer while it is being sent."""
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size


def announced_bytes(digits: bytes | str) -> int:
    """Parse a Content-Length.

    The HTTP parser has rejected values of 2**64 and above, so any digits before the last 20 are zeros. They
    are cut off because int() rejects strings of thousands of digits.
    """
    return int(digits[-20:])


def check_encoding(written: str | None) -> None:
    """Reject a compressed body. `written`: the Content-Encoding header, if there is one.

    Raises:
        BodyEncoded: it is compressed.
    """
    if written and written.strip().lower() not in {"identity", ""}:
        raise BodyEncoded(
            f"Bodies with `Content-Encoding: {written[:40]}` are not accepted. Send the body uncompressed."
        )


async def read_body(
    scope: Scope, receive: Receive, limits: BodyLimits, uploads: Uploads, key: str | None
) -> bytes:
    """Return the request body of a caller with that API key. Raises as `Call.body`."""
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if announced.isdigit() and announced_bytes(announced) > limits.bytes_max:
        raise _too_large(limits.bytes_max)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        with anyio.move_on_after(limits.within_s) as limit:
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise CallerGone
                part = message["body"]
                size += len(part)
                uploads.take(len(part), key, limits.together_max)
                if size > limits.bytes_max:
                    raise _too_large(limits.bytes_max)
                parts.append(part)
                more = message["more_body"]
    finally:
        uploads.release(size, key)
    if limit.cancelled_caught:
        raise RequestTimeout(f"The request body was not complete within {limits.within_s:g} s.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {bytes_max} bytes.")


async def run_for_caller(work: Callable[[], Awaitable[None]], receive: Receive) -> None:
    """Run `work`, and cancel it when the caller disconnects. Raises as `Call.run`.

    ASGI reports a disconnect only through `receive`, so a task has to wait for it all the time.
    """
    async with TasksBeside(GatewayError, CallerStalled) as tasks:
        tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
        with suppress(OSError):  # the server may notice the closed socket before `receive` reports it
            await work()


async def send_json(
    value: object, downstream: HttpDownstream, status: int = 200, headers: Headers = ()
) -> None:
    """Respond with a JSON value."""
    await send_body(msgspec.json.encode(value), downstream, status, headers)


async def send_body(
    body: bytes, downstream: HttpDownstream, status: int = 200, headers: Headers = ()
) -> None:
    """Respond with encoded JSON."""
    await downstream.send_whole(status, ((b"content-type", b"application/json"), *headers), body)
    await downstream.finish()


async def send_error(error: GatewayError, downstream: HttpDownstream) -> None:
    """Respond with an error."""
    body = envelope(error)
    await downstream.start(error.status, headers_of(error, body))
    await downstream.send(body)
    await downstream.finish()


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
