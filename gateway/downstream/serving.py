"""Serves one request of any route: receive, parse, answer, record."""

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio
from litestar.types import Send

from gateway.cohort import Cohort
from gateway.core.errors import CallerError, Draining, GatewayError, let_go
from gateway.core.request import SECRET_HEADERS, Endpoint
from gateway.core.trace import Trace
from gateway.core.usage import Ending
from gateway.downstream import wire
from gateway.downstream.errors import MethodNotAllowed, fault
from gateway.downstream.keys import KeyRing
from gateway.downstream.origins import Origins
from gateway.downstream.reading import COUNTED_BYTES, BodyReaders, Read, Received, Work, arrival_record
from gateway.downstream.relay import (
    AsgiDownstream,
    BodyLimits,
    Call,
    CallerGone,
    Head,
    HttpDownstream,
    Uploads,
    check_encoding,
    send_error,
)
from gateway.events import about
from gateway.pipeline import LEFT_STATUS, CallerStalled, Pipeline
from gateway.ports import Arrival, Clock, Headers, Recorder

log = logging.getLogger("gateway.downstream")

_FORWARDED = frozenset({b"traceparent", b"tracestate"})


class Serving:
    """The common part of serving all requests; one per process.

    Attributes:
        limits: Limits on request bodies.
        uploads: The bodies being received.
        in_flight: Number of requests being served.
        is_leaving: Whether this gateway is about to stop, so that load balancers should avoid it.
        is_draining: Whether new requests are rejected.
        is_ending: Whether this process is about to cut off what is in flight, so that a lost connection does
            not mean that its caller left.
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
        """Serve callers with one of `keys`.

        `trace_of` returns a request's trace for its caller's `traceparent` header.
        """
        self.limits = limits
        self.uploads = Uploads()
        self.in_flight = 0
        self.is_leaving = False
        self.is_draining = False
        self.is_ending = False
        self._keys = keys
        self._recorder = recorder
        self._clock = clock
        self._trace_of = trace_of
        self._idle = anyio.Event()

    def refuse(self) -> None:
        """Reject new requests from now on."""
        self.is_leaving = self.is_draining = True

    async def drain(self) -> None:
        """Reject new requests from now on, and return when all running ones have ended."""
        self.refuse()
        if self.in_flight or self.uploads.calls:
            if self._idle.is_set():  # what runs now has begun since: some routes are served to the end
                self._idle = anyio.Event()
            await self._idle.wait()

    def head(self, headers: Headers) -> Head:
        """Validate a request by its head, before its body is read.

        Raises:
            Draining, Unauthorized, BodyEncoded: the request is rejected.
        """
        if self.is_draining:
            raise Draining
        found = _headers(headers)
        key = self._keys.name_of(found)
        check_encoding(found.get("content-encoding"))
        for secret in SECRET_HEADERS:
            found.pop(secret, None)
        forwarded = [pair for pair in headers if pair[0] in _FORWARDED]
        return Head(found, key, forwarded, _traceparent(forwarded), self._keys.number, self._clock.now())

    def head_again(self, head: Head, length: str) -> Head | None:
        """Return the head of a request with the same headers as an earlier one, but another Content-Length.

        Returns None if that has to be validated anew: API keys were replaced, or new requests are rejected.
        """
        if self.is_draining or head.ring != self._keys.number:
            return None
        headers = head.headers.copy()
        headers["content-length"] = length
        return Head(headers, head.key, head.forwarded, head.traceparent, head.ring, self._clock.now())

    async def serve(self, route: str, read: Read, call: Call) -> None:
        """Parse and answer a request of `route`. Handles all its errors."""
        wall_at, now, head = self._clock.wall(), self._clock.now(), call.head
        if head is None:
            traceparent, received_at = _traceparent(call.headers), now
        else:  # its body has come since
            traceparent, received_at = head.traceparent, head.received_at
        arrival = Arrival(
            new_request_id(), wall_at - (now - received_at), received_at, self._trace_of(traceparent), route
        )
        downstream = call.downstream
        self.in_flight += 1
        try:
            await self._run(arrival, read, call)
        except GatewayError as error:
            if downstream.is_started:  # the server closes the connection: the body is incomplete
                log.warning(
                    "request %s was cut off: %s",
                    arrival.id,
                    error.message,
                    extra=about("request_cut", id=arrival.id, code=error.code),
                )
                return
            error.headers = error.headers or ((b"x-request-id", arrival.id.encode()),)
            let_go(error)
            await send_error(error, downstream)
        except Exception as error:
            log.exception(
                "request %s failed inside the gateway",
                arrival.id,
                extra=about("internal_error", id=arrival.id),
            )
            let_go(error)
            if downstream.is_started:  # the server closes the connection, which clients treat as an error
                raise
            await send_error(_fault(error, arrival.id), downstream)
        finally:
            self._one_less()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what runs in the block as in flight: a shutdown waits for it."""
        self.in_flight += 1
        try:
            yield
        finally:
            self._one_less()

    def _one_less(self) -> None:
        self.in_flight -= 1
        if self.is_draining and not (self.in_flight or self.uploads.calls):
            self._idle.set()

    async def _run(self, arrival: Arrival, read: Read, call: Call) -> None:
        key = None
        try:
            if call.method != "POST":
                raise MethodNotAllowed("Use POST.", "POST")
            head = call.head or self.head(call.headers)
            key = head.key
            work = await read(
                Received(
                    arrival,
                    await call.body(self.limits, self.uploads, key),  # not held here: `work` may release it
                    key,
                    head.headers,
                    head.forwarded,
                )
            )
        except GatewayError as error:
            self.refused(arrival, error, key)
            raise
        except CallerGone as gone:
            let_go(gone)
            self._ended_unread(arrival, key)
            return
        except anyio.get_cancelled_exc_class():
            self._ended_unread(arrival, key)
            raise
        try:
            await call.run(partial(work, call.downstream))
        except CallerStalled as stalled:  # the server closes the connection, because the body is incomplete
            let_go(stalled)

    def refused(self, arrival: Arrival, error: GatewayError, key: str | None) -> None:
        """Record a request that was rejected before it ran. `key`: name of its key."""
        self._note(arrival, key, Ending.of(error), error.status, error.code)

    def _ended_unread(self, arrival: Arrival, key: str | None) -> None:
        """Record a request whose connection was lost before it ran."""
        if self.is_ending:
            self._note(arrival, key, Ending.FAILED, LEFT_STATUS, Draining.code)
        else:
            self._note(arrival, key, Ending.LEFT, LEFT_STATUS)

    def _note(
        self, arrival: Arrival, key: str | None, ending: Ending, status: int, error_code: str = ""
    ) -> None:
        self._recorder.finished(arrival_record(arrival, key, ending, status, error_code, self._clock.now()))


class Relayed:
    """The requests of one endpoint whose answers are relayed unchanged."""

    def __init__(
        self, endpoint: Endpoint, pipeline: Pipeline, readers: BodyReaders, rules: wire.WireRules
    ) -> None:
        """Parse requests by `rules`, and have `pipeline` answer them."""
        self._endpoint = endpoint
        self._pipeline = pipeline
        self._readers = readers
        self._rules = rules

    async def read(self, received: Received) -> Work:
        """See `reading.Read`."""
        if len(received.body) <= COUNTED_BYTES:
            return partial(self._answer, self._read(received))
        return partial(self._answer, await self.request(received))

    async def request(self, received: Received) -> wire.WireRequest:
        """Parse a request.

        Raises:
            GatewayError: it is invalid.
        """
        return await self._readers.run(partial(self._read, received), received.body)

    def _read(self, received: Received) -> wire.WireRequest:
        return wire.read(self._endpoint, received, self._rules)

    async def _answer(self, request: wire.WireRequest, downstream: HttpDownstream) -> None:
        try:
            await self._pipeline.run(request, downstream)
        except CallerError as error:
            if self._endpoint is Endpoint.COMPLETIONS and error.param == "messages":
                error.param = "prompt"
            raise
        await downstream.finish()


class ServedChats:
    """`direct_call.Chats`."""

    def __init__(self, serving: Serving, read: Read, origins: Origins, cohort: Cohort) -> None:
        """Serve chats as `read` parses them, for web pages of `origins` too."""
        self.limits = serving.limits
        self.uploads = serving.uploads
        self.origins = origins
        self.cohort = cohort
        self.head = serving.head
        self.head_again = serving.head_again
        self.chat = partial(serving.serve, Endpoint.CHAT.value, read)


def new_request_id() -> str:
    """Return an unguessable id."""
    try:
        return _IDS.pop()
    except IndexError:  # one system call for many ids
        drawn = secrets.token_hex(16 * 256)
        _IDS.extend(f"req-{drawn[at : at + 32]}" for at in range(0, len(drawn), 32))
        return _IDS.pop()


_IDS: list[str] = []


async def send_refusal(error: GatewayError, send: Send) -> None:
    """Respond to an ASGI request with an error, under a request id of its own."""
    error.headers = ((b"x-request-id", new_request_id().encode()),)
    await send_error(error, AsgiDownstream(send))


def _traceparent(headers: Headers) -> str | None:
    written = dict(headers).get(b"traceparent")
    return None if written is None else written.decode("latin-1")


def _headers(raw: Headers) -> dict[str, str]:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}
    if "prefer" in headers:  # this header may be a list in several lines; of all others the last one is used
        headers["prefer"] = ", ".join(
            [value.decode("latin-1") for name, value in raw if name.lower() == b"prefer"]
        )
    return headers


def _fault(error: Exception, request_id: str) -> GatewayError:
    told = fault(error, "The gateway failed. The request id helps to find out why.")
    told.headers = ((b"x-request-id", request_id.encode()),)
    return told
