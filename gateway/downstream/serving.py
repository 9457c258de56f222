"""Serves one request, whichever way and for whichever route it came: received, read, answered, recorded."""

import logging
import secrets
from collections.abc import Callable
from functools import partial

import anyio

from gateway.core.errors import Draining, GatewayError
from gateway.core.trace import Trace
from gateway.core.usage import Ending, RequestRecord
from gateway.core.values import Endpoint
from gateway.downstream import wire
from gateway.downstream.errors import MethodNotAllowed
from gateway.downstream.keys import KeyRing
from gateway.downstream.origins import Origins
from gateway.downstream.reading import Read, Readers, Received, Work
from gateway.downstream.relay import BodyLimits, Call, CallerGone, Head, HttpDownstream, Uploads, send_error
from gateway.events import about
from gateway.pipeline import LEFT_STATUS, CallerStalled, Pipeline
from gateway.ports import Arrival, Clock, Headers, Recorder

log = logging.getLogger("gateway.downstream")

_FORWARDED = frozenset({b"traceparent", b"tracestate"})
_SECRET = frozenset({"authorization", "cookie", "proxy-authorization"})
_CHAT = Endpoint.CHAT.value


class InternalError(GatewayError):
    """A fault of the gateway itself. The log has it; the caller learns nothing of its insides."""

    code = "internal_error"


class Serving:
    """What requests of all routes have in common; one per process.

    Attributes:
        limits: What bounds the body of a request.
        uploads: What is being received.
        in_flight: Requests that are being served.
        is_leaving: Whether this gateway is about to stop, and no more should be sent to it.
        is_draining: Whether new ones are refused.
    """

    def __init__(
        self,
        *,
        keys: KeyRing,
        limits: BodyLimits,
        recorder: Recorder,
        clock: Clock,
        trace_of: Callable[[str | None], Trace | None],
    ) -> None:
        """Serve whoever has one of `keys`.

        `trace_of` returns the place of a request in a trace, of its caller's `traceparent` header.
        """
        self.limits = limits
        self.uploads = Uploads()
        self.in_flight = 0
        self.is_leaving = False
        self.is_draining = False
        self._keys = keys
        self._recorder = recorder
        self._clock = clock
        self._trace_of = trace_of
        self._idle = anyio.Event()

    def refuse(self) -> None:
        """Refuse new work from now on."""
        self.is_leaving = self.is_draining = True

    async def drain(self) -> None:
        """Refuse new work from now on, and return when everything that runs has ended."""
        self.refuse()
        if self.in_flight or self.uploads.calls:
            await self._idle.wait()

    def head(self, headers: Headers) -> Head:
        """Return what is read of a request before its body is.

        Raises:
            Draining, Unauthorized: its body is not worth reading.
        """
        if self.is_draining:
            raise Draining("This gateway is shutting down. Please retry.", retry_after_s=1)
        found = _headers(headers)
        return Head(found, self._keys.name_of(found.get("authorization")))

    async def serve(self, route: str, read: Read, call: Call) -> None:
        """Read and answer a request of `route`. Whatever goes wrong with it ends here."""
        traceparent = dict(call.headers).get(b"traceparent")
        arrival = Arrival(
            new_request_id(),
            self._clock.wall(),
            self._clock.now(),
            self._trace_of(None if traceparent is None else traceparent.decode("latin-1")),
            route,
        )
        downstream = call.downstream
        self.in_flight += 1
        try:
            await self._run(arrival, read, call)
        except GatewayError as error:
            if downstream.is_started:  # its status is spent: without an end, the server drops the connection
                log.warning(
                    "request %s was cut off: %s",
                    arrival.id,
                    error.message,
                    extra=about("request_cut", id=arrival.id, code=error.code),
                )
                return
            error.headers = error.headers or ((b"x-request-id", arrival.id.encode()),)
            await send_error(error, downstream)
        except Exception:
            log.exception(
                "request %s failed inside the gateway",
                arrival.id,
                extra=about("internal_error", id=arrival.id),
            )
            if downstream.is_started:  # the server drops the connection, which clients see as an error
                raise
            await send_error(_internal(arrival.id), downstream)
        finally:
            self.in_flight -= 1
            if self.is_draining and not (self.in_flight or self.uploads.calls):
                self._idle.set()

    async def _run(self, arrival: Arrival, read: Read, call: Call) -> None:
        key = None
        try:
            head = self._head(call)
            key = head.key
            work = await read(await self._receive(arrival, head, call))
        except GatewayError as error:
            self.refused(arrival, error, key)
            raise
        except CallerGone:
            self.refused(arrival, None, key)
            return
        try:
            await call.run(partial(work, call.downstream))
        except CallerStalled:  # without an end, the server drops the connection: nobody takes it for whole
            return

    def _head(self, call: Call) -> Head:
        if call.method != "POST":
            raise MethodNotAllowed("Use POST.", "POST")
        return call.head or self.head(call.headers)

    async def _receive(self, arrival: Arrival, head: Head, call: Call) -> Received:
        for secret in _SECRET:
            head.headers.pop(secret, None)
        return Received(
            arrival=arrival,
            body=await call.body(self.limits, self.uploads),
            key=head.key,
            headers=head.headers,
            forwarded=[pair for pair in call.headers if pair[0] in _FORWARDED],
        )

    def refused(self, arrival: Arrival, error: GatewayError | None, key: str | None) -> None:
        """Record a request that ended before it was run, with the name of its key; no error: it was left."""
        self._recorder.finished(
            RequestRecord(
                id=arrival.id,
                model="",
                stream=False,
                ending=Ending.LEFT if error is None else Ending.of(error),
                status=LEFT_STATUS if error is None else error.http_status,
                error_code="" if error is None else error.code,
                key=key,
                wall_at=arrival.wall_at,
                received_at=arrival.received_at,
                ended_at=self._clock.now(),
                trace=arrival.trace,
                route=arrival.route,
            )
        )


class Relayed:
    """The requests of one endpoint whose answers are relayed as they are."""

    def __init__(
        self, endpoint: Endpoint, pipeline: Pipeline, readers: Readers, rules: wire.WireRules
    ) -> None:
        """Read them by `rules`, and have `pipeline` answer them."""
        self._endpoint = endpoint
        self._pipeline = pipeline
        self._readers = readers
        self._rules = rules

    async def read(self, received: Received) -> Work:
        """See `reading.Read`."""
        return partial(self._answer, await self.request(received))

    async def request(self, received: Received) -> wire.WireRequest:
        """Return what was asked for.

        Raises:
            GatewayError: it is nothing that can be asked for.
        """
        return await self._readers.run(partial(self._read, received), received.body)

    def _read(self, received: Received) -> wire.WireRequest:
        return wire.read(
            self._endpoint,
            received.body,
            self._rules,
            arrival=received.arrival,
            key=received.key,
            headers=received.headers,
            forwarded=received.forwarded,
        )

    async def _answer(self, request: wire.WireRequest, downstream: HttpDownstream) -> None:
        await self._pipeline.run(request, downstream)
        await downstream.finish()


class ServedChats:
    """`direct_call.Chats`."""

    def __init__(self, serving: Serving, read: Read, origins: Origins) -> None:
        """Serve chats as `read` reads them, to web pages of `origins`, too."""
        self.limits = serving.limits
        self.uploads = serving.uploads
        self.origins = origins
        self._serving = serving
        self._read = read

    def head(self, headers: Headers) -> Head:
        """See `Chats.head`."""
        return self._serving.head(headers)

    async def chat(self, call: Call) -> None:
        """Answer a chat, whichever way it came."""
        await self._serving.serve(_CHAT, self._read, call)


def new_request_id() -> str:
    """Return an id that nobody guesses."""
    try:
        return _IDS.pop()
    except IndexError:  # one call of the kernel for many
        drawn = secrets.token_hex(16 * 256)
        _IDS.extend(f"req-{drawn[at : at + 32]}" for at in range(0, len(drawn), 32))
        return _IDS.pop()


_IDS: list[str] = []


def _headers(raw: Headers) -> dict[str, str]:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}
    if "prefer" in headers:  # a list may come in several headers; of any other the last one counts
        headers["prefer"] = ", ".join(
            [value.decode("latin-1") for name, value in raw if name.lower() == b"prefer"]
        )
    return headers


def _internal(request_id: str) -> GatewayError:
    error = InternalError("The gateway failed. The request id helps to find out why.")
    error.headers = ((b"x-request-id", request_id.encode()),)
    return error
