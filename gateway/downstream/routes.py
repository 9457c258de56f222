"""The two HTTP surfaces: what applications call, and what operators look at."""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import msgspec
from litestar import Litestar, MediaType, Request, Response, asgi, get
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import (
    Draining,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    RouteNotFound,
)
from gateway.core.trace import Trace, passed_on
from gateway.core.usage import Ending, RequestRecord
from gateway.core.values import Endpoint, Policy
from gateway.downstream import wire
from gateway.downstream.background import Background
from gateway.downstream.batches import Batches, Batching, BatchLines
from gateway.downstream.chat_jobs import ChatJobs
from gateway.downstream.errors import envelope, headers_of
from gateway.downstream.files import Files
from gateway.downstream.keys import KeyRing
from gateway.downstream.operator_guard import OperatorGuard
from gateway.downstream.promises import PromiseKeeping, Promises
from gateway.downstream.reading import Read, Readers, Received, Work
from gateway.downstream.relay import (
    AsgiCall,
    AsgiDownstream,
    BodyLimits,
    Call,
    CallerGone,
    Head,
    HttpDownstream,
    Uploads,
    send_error,
)
from gateway.downstream.responses import PATH as RESPONSES
from gateway.downstream.responses import Keeping, Responses
from gateway.events import about
from gateway.pipeline import LEFT_STATUS, CallerStalled, Pipeline
from gateway.ports import Arrival, Clock, Headers, Recorder

log = logging.getLogger("gateway.downstream")

_FORWARDED = frozenset({b"traceparent", b"tracestate"})
_SECRET = frozenset({"authorization", "cookie", "proxy-authorization"})


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method on it does not."""

    status = 405
    code = "method_not_allowed"


class InternalError(GatewayError):
    """A fault of the gateway itself. The log has it; the caller learns nothing of its insides."""

    code = "internal_error"


class Applications:
    """What the routes for applications need; one per process."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        policy: Callable[[], Policy],
        keys: KeyRing,
        rules: wire.WireRules,
        limits: BodyLimits,
        keeping: Keeping,
        promises: PromiseKeeping,
        background: Background | None,
        batching: Batching | None = None,
        readiness: Callable[[], Mapping[str, bool]],
        recorder: Recorder,
        clock: Clock,
        trace_of: Callable[[str | None], Trace | None] = passed_on,
    ) -> None:
        """Serve applications with `pipeline`; `readiness` names what must hold for `/readyz`.

        `trace_of` returns the place of a request in a trace, of its caller's `traceparent` header.
        """
        self._pipeline = pipeline
        self._policy = policy
        self._keys = keys
        self._rules = rules
        self.limits = limits
        self._readiness = readiness
        self._recorder = recorder
        self._clock = clock
        self._trace_of = trace_of
        self._started_at = int(clock.wall())
        self.uploads = Uploads()
        self._readers = Readers()
        self._promises = Promises(promises, self._readers, recorder, clock)
        self._responses = Responses(
            pipeline=pipeline,
            keys=keys,
            rules=rules,
            readers=self._readers,
            keeping=keeping,
            promises=self._promises,
            background=background,
            clock=clock,
        )
        self.batch_lines = BatchLines(
            pipeline=pipeline,
            responses=self._responses,
            rules=rules,
            readers=self._readers,
            body_bytes_max=limits.bytes_max,
            clock=clock,
        )
        self._batching: list[BaseRouteHandler] = []
        if batching is not None:
            files = Files(batching.files, keys, batching.rules)
            self._batching += files.handlers()
            self._batching += Batches(batching.batches, keys, batching.rules).handlers()
        self._chat_jobs = None
        if background is not None:
            self._chat_jobs = ChatJobs(
                background=background,
                pipeline=pipeline,
                keys=keys,
                clock=clock,
                refused=self._refused,
                is_stopping=lambda: self.is_draining,
            )
        self._chats = self._relayed(Endpoint.CHAT)
        self.is_draining = False
        self.in_flight = 0
        self._idle = anyio.Event()

    @property
    def waiting_in_place(self) -> int:
        """Callers whose answer is a job's."""
        return 0 if self._chat_jobs is None else self._chat_jobs.waiting

    async def drain(self) -> None:
        """Refuse new work from now on, and return when everything that runs has ended."""
        self.is_draining = True
        if self.in_flight or self.uploads.calls:
            await self._idle.wait()

    def asgi_app(self) -> Litestar:
        """Return the application that listens to applications."""
        read_completion = self._relayed(Endpoint.COMPLETIONS)

        @asgi(Endpoint.CHAT.value, copy_scope=True)
        async def chat(scope: Scope, receive: Receive, send: Send) -> None:
            await self.chat(AsgiCall(scope, receive, send))

        @asgi(Endpoint.COMPLETIONS.value, copy_scope=True)
        async def completions(scope: Scope, receive: Receive, send: Send) -> None:
            await self._generate(Endpoint.COMPLETIONS.value, read_completion, AsgiCall(scope, receive, send))

        @asgi(RESPONSES, copy_scope=True)
        async def responses(scope: Scope, receive: Receive, send: Send) -> None:
            await self._generate(RESPONSES, self._responses.read, AsgiCall(scope, receive, send))

        @get("/v1/models", sync_to_thread=False)
        def models(request: Request[Any, Any, Any]) -> dict[str, Any]:
            self._keys.name_of(request.headers.get("authorization"))
            return {"object": "list", "data": [self._card(name) for name in self._names()]}

        @get("/v1/models/{name:path}", sync_to_thread=False)
        def model(request: Request[Any, Any, Any], name: FromPath[str]) -> dict[str, Any]:
            self._keys.name_of(request.headers.get("authorization"))
            wanted = name.removeprefix("/")
            if wanted not in self._names():
                raise ModelNotFound(f"The model `{wanted}` does not exist.", param="model")
            return self._card(wanted)

        @asgi("/v1/embeddings", copy_scope=True)
        async def embeddings(scope: Scope, receive: Receive, send: Send) -> None:
            message = "This gateway serves Gemma 4 for text generation; it has no embeddings."
            error = RouteNotFound(message, code="no_embeddings")
            error.headers = ((b"x-request-id", new_request_id().encode()),)
            await send_error(error, AsgiDownstream(send))

        @get("/readyz", sync_to_thread=False)
        def readyz() -> Response[dict[str, Any]]:
            return _readiness({**self._readiness(), "not_draining": not self.is_draining})

        return Litestar(
            [
                chat,
                completions,
                responses,
                *self._responses.handlers(),
                *self._batching,
                *([] if self._chat_jobs is None else self._chat_jobs.handlers()),
                models,
                model,
                embeddings,
                livez,
                readyz,
            ],
            openapi_config=None,
            logging_config=None,
            exception_handlers=EXCEPTION_HANDLERS,
            after_request=_with_id,
        )

    def head(self, headers: Headers) -> Head:
        """Return what is read of a request before its body is.

        Raises:
            Draining, Unauthorized: its body is not worth reading.
        """
        if self.is_draining:
            raise Draining("This gateway is shutting down. Please retry.", retry_after_s=1)
        found = _headers(headers)
        return Head(found, self._keys.name_of(found.get("authorization")))

    async def chat(self, call: Call) -> None:
        """Answer a chat, whichever way it came."""
        await self._generate(Endpoint.CHAT.value, self._chats, call)

    def _relayed(self, endpoint: Endpoint) -> Read:
        """Return what reads the requests of an endpoint whose answers are relayed as they are."""
        if endpoint is Endpoint.CHAT and self._chat_jobs is not None:
            return partial(self._read_chat, self._chat_jobs)

        async def read(received: Received) -> Work:
            request = await self._read_request(endpoint, received)

            async def work(downstream: HttpDownstream) -> None:
                await self._pipeline.run(request, downstream)
                await downstream.finish()

            return work

        return partial(self._promises.read, read=read)

    async def _read_chat(self, chat_jobs: ChatJobs, received: Received) -> Work:
        """Return what answers a chat where there are jobs. One that is handed over is found as one again."""
        request = await self._read_request(Endpoint.CHAT, received)
        if chat_jobs.is_handed_over(request):
            return chat_jobs.answering(request, received)

        async def read(received: Received) -> Work:
            return chat_jobs.answering(request, received)

        return await self._promises.read(received, read)

    async def _read_request(self, endpoint: Endpoint, received: Received) -> wire.WireRequest:
        def read() -> wire.WireRequest:
            return wire.read(
                endpoint,
                received.body,
                self._rules,
                arrival=received.arrival,
                key=received.key,
                headers=received.headers,
                forwarded=received.forwarded,
            )

        return await self._readers.run(len(received.body), read)

    async def _generate(self, route: str, read: Read, call: Call) -> None:
        traceparent = next((value for name, value in call.headers if name == b"traceparent"), None)
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
            await self._serve(arrival, read, call)
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

    async def _serve(self, arrival: Arrival, read: Read, call: Call) -> None:
        try:
            work = await read(await self._receive(arrival, call))
        except GatewayError as error:
            self._refused(arrival, error)
            raise
        except CallerGone:
            self._refused(arrival, None)
            return
        # Without an end, the server drops the connection: nobody takes the answer for whole.
        with suppress(CallerStalled):
            await call.run(partial(work, call.downstream))

    async def _receive(self, arrival: Arrival, call: Call) -> Received:
        if call.method != "POST":
            raise MethodNotAllowed("Use POST.")
        head = call.head or self.head(call.headers)
        for secret in _SECRET:
            head.headers.pop(secret, None)
        return Received(
            arrival=arrival,
            body=await call.body(self.limits, self.uploads),
            key=head.key,
            headers=head.headers,
            forwarded=[pair for pair in call.headers if pair[0] in _FORWARDED],
        )

    def _refused(self, arrival: Arrival, error: GatewayError | None) -> None:
        """Record a request that ended before it could be read; None: the caller left."""
        self._recorder.finished(
            RequestRecord(
                id=arrival.id,
                model="",
                stream=False,
                ending=Ending.LEFT if error is None else Ending.of(error),
                status=LEFT_STATUS if error is None else error.http_status,
                error_code="" if error is None else error.code,
                key=None,
                wall_at=arrival.wall_at,
                received_at=arrival.received_at,
                ended_at=self._clock.now(),
                trace=arrival.trace,
                route=arrival.route,
            )
        )

    def _names(self) -> Sequence[str]:
        models = self._policy().models
        return [name for model in models for name in (model.id, *model.aliases, *model.reasoning_aliases)]

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started_at, "owned_by": "gemma-gateway"}


class Operators:
    """The admin surface. Its own listener, never exposed by default."""

    def __init__(
        self,
        *,
        views: Mapping[str, Callable[[], Any]],
        metrics: Callable[[], tuple[bytes, str]],
        readiness: Callable[[], Mapping[str, bool]],
        names: Collection[str] = (),
        handlers: Sequence[BaseRouteHandler] = (),
    ) -> None:
        """Show each of `views` under `/admin/<name>` as JSON, and `metrics` (body, content type).

        Args:
            views: By name.
            metrics: The page for Prometheus.
            readiness: What must hold for `/readyz`, each by its name.
            names: Hosts that this port is called by.
            handlers: What else operators can do.
        """
        self._names = names
        self._views = views
        self._handlers = handlers
        self._metrics = metrics
        self._readiness = readiness

    def asgi_app(self) -> ASGIApp:
        """Return the application that listens to operators."""

        @get("/metrics", sync_to_thread=False)
        def metrics() -> Response[bytes]:
            body, content_type = self._metrics()
            return Response(body, media_type=content_type)

        @get("/admin/{view:str}", sync_to_thread=False)
        def admin(view: FromPath[str]) -> Response[bytes]:
            if view not in self._views:
                raise NotFoundException(f"known views: {', '.join(sorted((*self._views, 'jobs')))}")
            body = msgspec.json.format(msgspec.json.encode(self._views[view]()), indent=2)
            return Response(body, media_type=MediaType.JSON)

        @get("/readyz", sync_to_thread=False)
        def readyz() -> Response[dict[str, Any]]:
            return _readiness(self._readiness())

        app = Litestar(
            [metrics, admin, livez, readyz, *self._handlers],
            openapi_config=None,
            logging_config=None,
            exception_handlers=EXCEPTION_HANDLERS,
            after_request=_with_id,
        )
        return OperatorGuard(app, self._names)


@get(["/livez", "/healthz"], sync_to_thread=False, media_type=MediaType.TEXT)
def livez() -> str:
    """Say that the process runs."""
    return "ok"


def _readiness(checks: Mapping[str, bool]) -> Response[dict[str, Any]]:
    ready = all(checks.values())
    return Response({"ready": ready, "checks": checks}, status_code=200 if ready else 503)


def new_request_id() -> str:
    """Return an id that nobody guesses."""
    try:
        return _IDS.pop()
    except IndexError:  # one call of the kernel for many
        drawn = secrets.token_hex(16 * 256)
        _IDS.extend(f"req-{drawn[at : at + 32]}" for at in range(0, len(drawn), 32))
        return _IDS.pop()


_IDS: list[str] = []


def _with_id(response: Response[Any]) -> Response[Any]:
    """Give an answer that has none a request id."""
    response.headers.setdefault("x-request-id", new_request_id())
    return response


def _headers(raw: Headers) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        # A list may come in several headers; of any other the last one counts.
        headers[name] = f"{headers[name]}, {value}" if name == "prefer" and name in headers else value
    return headers


def _internal(request_id: str) -> GatewayError:
    error = InternalError("The gateway failed. The request id helps to find out why.")
    error.headers = ((b"x-request-id", request_id.encode()),)
    return error


def _render(error: GatewayError) -> Response[bytes]:
    body = envelope(error)
    headers = {name.decode(): value.decode() for name, value in headers_of(error, body)}
    headers.setdefault("x-request-id", new_request_id())
    return Response(body, status_code=error.http_status, headers=headers, media_type=MediaType.JSON)


def _gateway_error(_: Request[Any, Any, Any], error: GatewayError) -> Response[bytes]:
    return _render(error)


def _framework_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    if isinstance(error, NotFoundException):
        return _render(RouteNotFound(f"There is nothing at {request.url.path}."))
    if isinstance(error, MethodNotAllowedException):
        return _render(MethodNotAllowed("This method is not allowed here."))
    if error.status_code < 500:
        return _render(InvalidRequest(error.detail or "The request is malformed."))
    return _unexpected(request, error)


def _unexpected(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("a request failed inside the gateway", exc_info=error, extra=about("internal_error"))
    return _render(InternalError("The gateway failed."))


EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    GatewayError: _gateway_error,
    HTTPException: _framework_error,
    Exception: _unexpected,
}
