"""The routes under `/v1/batches`, and the conversion of a batch's lines to jobs."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath

from gateway.core.batches import ENDPOINTS, Batch, BatchLine, BatchRefusal, batch_object
from gateway.core.errors import (
    BatchNotFound,
    BodyTooLarge,
    CallerError,
    FileNotFound,
    GatewayError,
    IdempotencyKeyReused,
    InvalidRequest,
    JobRefused,
    StoreUnavailable,
)
from gateway.core.idempotency import HEADER, Idempotency
from gateway.core.jobs import ELSEWHERE, JobPriority, NewJob, lane_of
from gateway.core.quirks.tool_markup import NOT_IN_STREAMS
from gateway.core.request import Endpoint
from gateway.core.responses.items import response_id
from gateway.core.responses.replay import JobFacts
from gateway.core.responses.request import chat_param_here, metadata_of
from gateway.core.value import valueclass
from gateway.downstream import wire
from gateway.downstream.background import STREAMED, Background, headers_kept
from gateway.downstream.files import FileRules, expiry_of, limit_of, page_of
from gateway.downstream.keys import KeyRing
from gateway.downstream.reading import BodyReaders, Received
from gateway.downstream.relay import BodyLimits, CallerGone, Uploads, check_encoding, read_body
from gateway.downstream.responses import Responses
from gateway.pipeline import Pipeline
from gateway.ports import Arrival, BatchStore, Clock, FileStore, Incoming
from gateway.threads import decoded

PATH = "/v1/batches"

BODY_BYTES_MAX = 128 * 1024
"""Maximum size of a request for a batch. A choice: `metadata`, its largest part, has up to 108 KiB if all is
escaped; and one of 1 MiB may take 80 ms to decode, while the event loop stands still."""

_PAGE, _PAGE_MAX = 20, 100
"""Batches per page by default and at most: OpenAI's figures."""


@valueclass(frozen=True, slots=True)
class Batching:
    """The stores of batches and their files, and the rules for files."""

    batches: BatchStore
    files: FileStore
    rules: FileRules
    revoke: Callable[[str], None]
    """Makes sure that a batch does not run; see `Revocations.add`."""


class Batches:
    """The routes for batches; one per process."""

    def __init__(self, batching: Batching, keys: KeyRing) -> None:
        """Keep batches in the store of `batching`, each for its API key."""
        self._store = batching.batches
        self._revoke = batching.revoke
        self._keys = keys
        self._output_keep_s = batching.rules.keep_s
        self._limits = BodyLimits(BODY_BYTES_MAX, batching.rules.within_s)
        self._uploads = Uploads()

    def handlers(self) -> Sequence[BaseRouteHandler]:
        """Return the route handlers."""

        @post(PATH, status_code=200)
        async def create(request: Request[Any, Any, Any]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            return batch_object(await self._create(key, request))

        @get(PATH)
        async def list_(request: Request[Any, Any, Any]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            limit = limit_of(request.query_params, _PAGE, _PAGE_MAX)
            found = await self._store.page(key, after=request.query_params.get("after"), limit=limit + 1)
            if found is None:
                raise InvalidRequest("There is no such batch.", param="after")
            return page_of([batch_object(batch) for batch in found], limit)

        @get(PATH + "/{batch_id:str}")
        async def retrieve(request: Request[Any, Any, Any], batch_id: FromPath[str]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            return batch_object(await self._find(key, batch_id))

        @post(PATH + "/{batch_id:str}/cancel", status_code=200)
        async def cancel(request: Request[Any, Any, Any], batch_id: FromPath[str]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            batch = await self._find(key, batch_id)
            return batch_object(await self._store.cancel(batch.id) or batch)

        return [create, list_, retrieve, cancel]

    async def _find(self, key: str | None, id: str) -> Batch:
        batch = await self._store.get(id)
        if batch is None or batch.key != key:
            raise BatchNotFound(f"No batch {id[:64]!r} is kept here for this key.")
        return batch

    async def _create(self, key: str | None, request: Request[Any, Any, Any]) -> Batch:
        check_encoding(request.headers.get("content-encoding"))
        try:
            body = await read_body(request.scope, request.receive, self._limits, self._uploads, key)
        except CallerGone:
            raise InvalidRequest("The request broke off.") from None  # not received: the caller is gone
        members = _members(body)
        endpoint = members.get("endpoint")
        if endpoint not in ENDPOINTS:
            raise InvalidRequest(f"`endpoint` must be {' or '.join(ENDPOINTS)}.", param="endpoint")
        if members.get("completion_window") != "24h":
            raise InvalidRequest('`completion_window` must be "24h".', param="completion_window")
        input_file_id = members.get("input_file_id")
        if not isinstance(input_file_id, str) or not input_file_id.isascii():
            raise InvalidRequest("`input_file_id` must be the id of a file.", param="input_file_id")
        keep_s, metadata = self._output_keep_s, members.get("metadata")
        if members.get("output_expires_after") is not None:
            keep_s = expiry_of(members["output_expires_after"], "output_expires_after")
        idempotency = Idempotency.of(request.headers.get(HEADER), PATH, body)
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            key=key,
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=0,
            metadata=None if metadata is None else metadata_of(metadata),
            headers=headers_kept(request.headers),
            output_keep_s=keep_s,
        )
        try:
            return _accepted(await self._store.create(batch, idempotency))
        except StoreUnavailable:
            if idempotency is None:  # a repeat would be another batch
                self._revoke(batch.id)
            raise


def _accepted(found: Batch | BatchRefusal) -> Batch:
    """Return a batch that was accepted. Raises CallerError."""
    match found:
        case BatchRefusal.FILE_NOT_FOUND:
            message = "No such file is kept here for this key: it is unknown, deleted or expired."
            raise FileNotFound(message, param="input_file_id")
        case BatchRefusal.INVALID_PURPOSE:
            raise InvalidRequest("The file's purpose must be `batch`.", param="input_file_id")
        case BatchRefusal.IDEMPOTENCY_KEY_REUSED:
            raise IdempotencyKeyReused()
        case BatchRefusal.TOO_MANY_BATCHES:
            message = "This API key has reached its limit of open batches."
            raise JobRefused(message, code="too_many_batches", retry_after_s=30)
    return found


def _members(body: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("The request body is not a JSON object.", code="invalid_json") from error


class BatchLines:
    """Converts lines to jobs; one per process."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        responses: Responses,
        rules: wire.WireRules,
        readers: BodyReaders,
        body_bytes_max: int,
        background: Background | None,
        clock: Clock,
    ) -> None:
        """Create jobs that `pipeline` will serve like requests with the lines' bodies."""
        self._pipeline = pipeline
        self._responses = responses
        self._rules = rules
        self._readers = readers
        self._body_bytes_max = body_bytes_max
        self._background = background
        self._clock = clock

    async def job(self, batch: Batch, line: BatchLine) -> NewJob:
        """Return the job for a line.

        If no backend here could ever take it, it is left to processes with a different configuration, if one
        of them serves its model.

        Raises:
            CallerError: it is not a valid request, or no backend could ever take it.
            GatewayError: this cannot be determined at the moment.
        """
        if len(line.body) > self._body_bytes_max:
            raise BodyTooLarge(f"The request body is larger than {self._body_bytes_max} bytes.")
        token = batch.line_token(line.number)
        received = Received(
            arrival=Arrival(batch.line_id(line.number), self._clock.wall(), self._clock.now()),
            body=line.body,
            key=batch.key,
            headers=batch.headers,
            forwarded=(),
        )
        is_chat = batch.endpoint == Endpoint.CHAT.value
        incoming, facts = await (self._chat if is_chat else self._responses.line)(received, token)
        try:
            lane = await self._lane(incoming)
        except GatewayError as error:
            error.param = error.param if is_chat else chat_param_here(error.param)
            raise

        def new_job() -> NewJob:
            return NewJob(
                id=response_id(token),
                key=batch.key,
                lane=lane,
                body=incoming.body_for(incoming.request.model, STREAMED),
                facts=facts.encoded(),
                priority=JobPriority.BATCH,
                batch=batch.id,
            )

        return await decoded(len(line.body), new_job)

    async def _lane(self, incoming: Incoming) -> str:
        try:
            decision = await self._pipeline.decision_for(incoming)
        except CallerError:
            model = incoming.request.model
            if self._background is None or not await self._background.is_served_elsewhere(model):
                raise
            return lane_of(model, ELSEWHERE)
        return lane_of(decision.model, decision.traffic_class)

    async def _chat(self, received: Received, token: str) -> tuple[Incoming, JobFacts]:
        read = partial(wire.read, Endpoint.CHAT, received, self._rules)
        incoming = await self._readers.run(read, received.body)
        for name in NOT_IN_STREAMS:
            if incoming.member(name):
                message = f"`{name}` is not supported in batches: engines do not stream such answers."
                raise InvalidRequest(message, code="unsupported_parameter", param=name)
        return incoming, JobFacts({}, token, 0, headers_kept(received.headers), {}, is_chat=True)
