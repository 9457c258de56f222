"""The two HTTP surfaces: the API for applications, and the admin API for operators."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
from litestar import Litestar, MediaType, Request, Response, asgi, get
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.core.backends import Backend
from gateway.core.errors import GatewayError, InvalidRequest, ModelNotFound, RouteNotFound
from gateway.core.policy import Policy
from gateway.core.request import Endpoint
from gateway.core.trace import Trace
from gateway.downstream import wire
from gateway.downstream.background import Background
from gateway.downstream.batches import PATH as BATCHES
from gateway.downstream.batches import Batches, Batching, BatchLines
from gateway.downstream.chat_jobs import ChatJobs
from gateway.downstream.cross_origin import CrossOrigin
from gateway.downstream.drained import Drained
from gateway.downstream.errors import MethodNotAllowed, envelope, fault, headers_of
from gateway.downstream.files import PATH as FILES
from gateway.downstream.files import Files, limit_of
from gateway.downstream.head_requests import HeadAsGet, with_head
from gateway.downstream.idempotency import IdempotencyRules, IdempotentRequests
from gateway.downstream.keys import KeyRing
from gateway.downstream.operator_guard import OperatorGuard
from gateway.downstream.operator_json import indented
from gateway.downstream.origins import Origins
from gateway.downstream.outgoing import Outgoing
from gateway.downstream.reading import BodyReaders, Read, Received, Work
from gateway.downstream.relay import AsgiCall, BodyLimits
from gateway.downstream.responses import PATH as RESPONSES
from gateway.downstream.responses import Responses
from gateway.downstream.serving import Relayed, ServedChats, Serving, new_request_id
from gateway.downstream.stored_responses import ResponseRetention
from gateway.events import about
from gateway.pipeline import Pipeline
from gateway.ports import Clock, Recorder
from gateway.threads import beside

log = logging.getLogger("gateway.downstream")

LISTED = 200
"""Requests that are listed if nobody says how many. A choice: 0.5 MB of JSON."""

LISTED_MAX = 1_000
"""Maximum number of requests that may be asked for. A choice: 2.5 MB of JSON, most of what is kept
(telemetry/journal.py)."""

_NO_EMBEDDINGS = "This gateway serves Gemma 4 for text generation; it has no embeddings."
_NO_CONVERSATIONS = "Conversations are not kept here: continue a response with `previous_response_id`."
_NO_ENGINES = "Engines are not part of paths any more: send `model` to /v1/completions."
_NOT_AZURE = "This is OpenAI's API, not Azure's: use the SDK's `OpenAI`, with a base URL that ends with /v1."
_NO_BATCHES = "This gateway has no files and no batches: there are no `jobs` in its configuration."
_NO_KEPT_CHATS = "Only chat completions of jobs are kept, and there are no `jobs` in the configuration."
_WITHOUT_V1 = ("/chat", "/completions", "/responses", "/models", "/embeddings", "/files", "/batches")
_API = (*_WITHOUT_V1, "/chat/completions")
_BESIDE_V1 = "There is nothing here: the base URL of the API ends with /v1, as in http://127.0.0.1:8080/v1."
_AT_THE_ROOT = "The API is under /v1: GET /v1/models lists the models."
_NOT_FOR_OPERATORS = "This is the port for applications (`listen`). Operators use the admin port (`admin`)."
_NOT_FOR_APPLICATIONS = "This is the admin port (`admin`). Applications use the other one (`listen`)."


class Absence(NamedTuple):
    """Why there is nothing at or under a path, and the code of the error that says so."""

    why: str
    code: str = RouteNotFound.code


Absences = Mapping[str, Absence]
"""By path: what clients expect on a port, and do not find."""

_NOT_ON_THE_PUBLIC_PORT: Absences = {
    "/v1/embeddings": Absence(_NO_EMBEDDINGS, code="no_embeddings"),
    "/v1/conversations": Absence(_NO_CONVERSATIONS),
    "/v1/engines": Absence(_NO_ENGINES),
    "/openai/deployments": Absence(_NOT_AZURE),
    **dict.fromkeys((*_WITHOUT_V1, "/v1/v1"), Absence(_BESIDE_V1)),
    **dict.fromkeys(("/admin", "/metrics"), Absence(_NOT_FOR_OPERATORS)),
}

_WITHOUT_JOBS: Absences = dict.fromkeys((FILES, BATCHES), Absence(_NO_BATCHES))

_NOT_ON_THE_ADMIN_PORT: Absences = {"/v1": Absence(_NOT_FOR_APPLICATIONS)}


class Applications:
    """The API for applications; one per process."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        policy: Callable[[], Policy],
        keys: KeyRing,
        origins: Origins,
        rules: wire.WireRules,
        limits: BodyLimits,
        retention: ResponseRetention,
        idempotency: IdempotencyRules,
        background: Background | None,
        batching: Batching | None,
        readiness: Callable[[], Mapping[str, bool]],
        recorder: Recorder,
        clock: Clock,
        trace_of: Callable[[str | None], Trace | None],
        window_of: Callable[[Backend], int],
    ) -> None:
        """Serve applications with `pipeline`. `readiness` returns the conditions for `/readyz`.

        `trace_of` returns a request's trace for its caller's `traceparent` header; `window_of` the context
        window of a backend. Web pages of `origins` may call too.
        """
        self.serving = Serving(keys=keys, limits=limits, recorder=recorder, clock=clock, trace_of=trace_of)
        self._pipeline = pipeline
        self._background = background
        self._policy = policy
        self._keys = keys
        self._readiness = readiness
        self._window_of = window_of
        self._started_at = int(clock.wall())
        self._origins = origins
        readers = BodyReaders()
        self._idempotency = IdempotentRequests(idempotency, readers, recorder, clock)
        self._responses = Responses(
            pipeline=pipeline,
            keys=keys,
            rules=rules,
            readers=readers,
            body_bytes_max=limits.bytes_max,
            retention=retention,
            idempotency=self._idempotency,
            background=background,
            clock=clock,
        )
        self.batch_lines = BatchLines(
            pipeline=pipeline,
            responses=self._responses,
            rules=rules,
            readers=readers,
            body_bytes_max=limits.bytes_max,
            background=background,
            clock=clock,
        )
        self._batching: list[BaseRouteHandler] = []
        self._absences = _NOT_ON_THE_PUBLIC_PORT
        if batching is not None:
            files = Files(batching.files, keys, batching.rules)
            self._batching += files.handlers()
            self._batching += Batches(batching, keys).handlers()
        else:
            self._absences = {**self._absences, **_WITHOUT_JOBS}
        self._chat_jobs = None
        if background is not None:
            self._chat_jobs = ChatJobs(
                background=background, pipeline=pipeline, keys=keys, clock=clock, serving=self.serving
            )
        relayed = Relayed(Endpoint.COMPLETIONS, pipeline, readers, rules)
        self._completions: Read = partial(self._idempotency.read, read=relayed.read)
        relayed = Relayed(Endpoint.CHAT, pipeline, readers, rules)
        chats: Read = partial(self._idempotency.read, read=relayed.read)
        if self._chat_jobs is not None:
            chats = partial(self._read_chat, self._chat_jobs, relayed)
        self.chats = ServedChats(self.serving, chats, origins, pipeline.cohort)

    @property
    def waiting_for_jobs(self) -> int:
        """Number of callers who stay connected for a job: they wait for its answer, or follow it."""
        return 0 if self._background is None else self._background.jobs.waits.callers

    def end(self) -> None:
        """End all requests, because this process is shutting down: each caller is told."""
        self.serving.is_ending = True
        self._pipeline.end()
        if self._background is not None:
            self._background.jobs.waits.end()

    def asgi_app(self) -> ASGIApp:
        """Return the ASGI application for the public port."""

        @asgi(Endpoint.CHAT.value, copy_scope=True)
        async def chat(scope: Scope, receive: Receive, send: Send) -> None:
            await self.chats.chat(AsgiCall(scope, receive, send))

        @asgi(Endpoint.COMPLETIONS.value, copy_scope=True)
        async def completions(scope: Scope, receive: Receive, send: Send) -> None:
            await self.serving.serve(
                Endpoint.COMPLETIONS.value, self._completions, AsgiCall(scope, receive, send)
            )

        @asgi(RESPONSES, copy_scope=True)
        async def responses(scope: Scope, receive: Receive, send: Send) -> None:
            await self.serving.serve(RESPONSES, self._responses.read, AsgiCall(scope, receive, send))

        @get("/v1/models", sync_to_thread=False)
        def models(request: Request[Any, Any, Any]) -> dict[str, Any]:
            self._keys.name_of(request.headers)
            return {"object": "list", "data": list(self._cards().values())}

        @get("/v1/models/{name:path}", sync_to_thread=False)
        def model(request: Request[Any, Any, Any], name: FromPath[str]) -> dict[str, Any]:
            self._keys.name_of(request.headers)
            wanted = name.removeprefix("/")
            card = self._cards().get(wanted)
            if card is None:
                raise ModelNotFound(f"The model `{wanted}` does not exist.", param="model")
            return card

        # /health for what expects vLLM here: benchmarks, and another gateway whose backend this one is.
        @get(["/readyz", "/health"], sync_to_thread=False)
        def readyz() -> Response[dict[str, Any]]:
            return _readiness({**self._readiness(), "not_draining": not self.serving.is_leaving})

        app = Litestar(
            [
                chat,
                completions,
                responses,
                *self._responses.handlers(),
                *self._batching,
                *([_no_kept_chat] if self._chat_jobs is None else self._chat_jobs.handlers()),
                models,
                model,
                livez,
                readyz,
            ],
            openapi_config=None,
            logging_config=None,
            exception_handlers=exception_handlers(self._absences),
            after_request=_with_id,
        )
        return CrossOrigin(Drained(Outgoing(HeadAsGet(app)), self.serving), self._origins)

    async def _read_chat(self, chat_jobs: ChatJobs, relayed: Relayed, received: Received) -> Work:
        """Return the work that answers a chat, with jobs enabled.

        A chat submitted as a job does not use `IdempotentRequests`: jobs have their own idempotency.
        """
        request = await relayed.request(received)
        if chat_jobs.wants_job(request):
            return chat_jobs.answering(request, received)

        async def read(received: Received) -> Work:
            return chat_jobs.answering(request, received)

        return await self._idempotency.read(received, read)

    def _cards(self) -> Mapping[str, dict[str, Any]]:
        """Return the model objects by name and alias; `max_model_len` and `root` as in vLLM."""
        policy = self._policy()
        return {
            name: {
                "id": name,
                "object": "model",
                "created": self._started_at,
                "owned_by": "gemma-gateway",
                "root": model.id,
                "max_model_len": policy.context_tokens(name, self._window_of),
            }
            for model in policy.models
            for name in model.names
        }


def operators_app(
    *,
    views: Mapping[str, Callable[[], Any]],
    metrics: Callable[[], tuple[Callable[[], bytes], str]],
    readiness: Callable[[], Mapping[str, bool]],
    names: Collection[str],
    handlers: Sequence[BaseRouteHandler],
) -> ASGIApp:
    """Return the ASGI application for the admin port, a listener that is not exposed by default.

    Each of `views` is served under `/admin/<name>` as JSON.

    Args:
        views: By name.
        metrics: Returns a function that writes the Prometheus page, in any thread, and its content type.
        readiness: Returns the conditions for `/readyz`, by name.
        names: Host names of this port.
        handlers: Additional route handlers.
    """

    @get("/metrics")
    async def page() -> Response[bytes]:
        write, content_type = metrics()
        return Response(await beside(write), media_type=content_type)

    @get("/admin/{view:str}")
    async def admin(request: Request[Any, Any, Any], view: FromPath[str]) -> Response[bytes]:
        if view not in views:
            known = ", ".join(sorted((*views, "jobs")))
            raise RouteNotFound(f"There is nothing at /admin/{view[:100]}. Known views: {known}.")
        shown = views[view]()
        if isinstance(shown, tuple) and ("limit" in request.query_params or view == "requests"):
            shown = shown[: limit_of(request.query_params, LISTED, LISTED_MAX)]
        # In a thread, because rankings of hundreds of decisions may have to be computed now.
        body = await anyio.to_thread.run_sync(indented, shown)
        return Response(body, media_type=MediaType.JSON)

    @get("/readyz", sync_to_thread=False)
    def readyz() -> Response[dict[str, Any]]:
        return _readiness(readiness())

    app = Litestar(
        [page, admin, livez, readyz, *handlers],
        openapi_config=None,
        logging_config=None,
        exception_handlers=exception_handlers(_NOT_ON_THE_ADMIN_PORT),
        after_request=_with_id,
    )
    return HeadAsGet(OperatorGuard(app, names))


@get(Endpoint.CHAT.value + "/{completion_id:str}", sync_to_thread=False)
def _no_kept_chat() -> None:
    raise RouteNotFound(_NO_KEPT_CHATS)


@get(["/livez", "/healthz"], sync_to_thread=False, media_type=MediaType.TEXT)
def livez() -> str:
    """Report that the process is running."""
    return "ok"


def _readiness(checks: Mapping[str, bool]) -> Response[dict[str, Any]]:
    ready = all(checks.values())
    return Response({"ready": ready, "checks": checks}, status_code=200 if ready else 503)


async def _with_id(response: Response[Any]) -> Response[Any]:
    """Add a request id if it is missing, and HEAD to `Allow`.

    Declared async because Litestar would run a plain function in a thread, and there may be none available.
    """
    response.headers.setdefault("x-request-id", new_request_id())
    if "Allow" in response.headers:  # in Litestar's spelling
        response.headers["Allow"] = with_head(response.headers["Allow"])
    return response


def _render(error: GatewayError) -> Response[bytes]:
    body = envelope(error)
    headers = {name.decode(): value.decode() for name, value in headers_of(error, body)}
    headers.setdefault("x-request-id", new_request_id())
    return Response(body, status_code=error.status, headers=headers, media_type=MediaType.JSON)


def _framework_error(
    absences: Absences, request: Request[Any, Any, Any], error: HTTPException
) -> Response[bytes]:
    path = request.scope["path"]
    if isinstance(error, NotFoundException):
        for expected, absence in absences.items():
            if path == expected or path.startswith(f"{expected}/"):
                return _render(RouteNotFound(absence.why, code=absence.code))
    is_nowhere = isinstance(error, (NotFoundException, MethodNotAllowedException))
    if is_nowhere and path.endswith(_WITHOUT_V1) and path.removeprefix("/v1") not in _API:
        return _render(RouteNotFound(_BESIDE_V1))  # behind another route, say
    if isinstance(error, NotFoundException):
        at_root = path.rstrip("/") in {"", "/v1"}  # whoever was given the URL opens it first
        return _render(RouteNotFound(_AT_THE_ROOT if at_root else f"There is nothing at {path}."))
    if isinstance(error, MethodNotAllowedException):
        allowed = with_head((error.headers or {}).get("allow", ""))
        return _render(MethodNotAllowed("This method is not allowed here.", allowed))
    if error.status_code < 500:
        return _render(InvalidRequest(error.detail or "The request is malformed."))
    return _unexpected(request, error)


def _unexpected(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("a request failed inside the gateway", exc_info=error, extra=about("internal_error"))
    return _render(fault(error))


def exception_handlers(absences: Absences) -> dict[int | type[Exception], Any]:
    """Return what answers for errors on a port where some paths have no route."""
    return {
        GatewayError: lambda _, error: _render(error),
        HTTPException: partial(_framework_error, absences),
        Exception: _unexpected,
    }
