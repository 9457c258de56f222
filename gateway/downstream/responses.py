"""The routes under `/v1/responses`: requests are translated to chat requests, and answers back.

The pipeline serves the chat request like any other. Its answer, status, headers and the bytes of a chat
completion, is translated event by event, and stored if requested.
"""

import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from litestar import MediaType, Request, Response, delete, get, post
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.response import Stream

from gateway.core.errors import GatewayError, InvalidRequest, RouteNotFound
from gateway.core.idempotency import HEADER
from gateway.core.jobs import Job
from gateway.core.responses.items import Item
from gateway.core.responses.replay import JobFacts
from gateway.core.responses.request import chat_param_here, needs
from gateway.downstream import wire
from gateway.downstream.background import Background, handover_headers
from gateway.downstream.callers_jobs import CallersJobs, gone, retry_after_s
from gateway.downstream.files import limit_of, page_of
from gateway.downstream.idempotency import IdempotentRequests
from gateway.downstream.keys import KeyRing
from gateway.downstream.reading import BodyReaders, Received, Work
from gateway.downstream.relay import HttpDownstream, send_json
from gateway.downstream.response_answers import Answer, frames_of
from gateway.downstream.response_requests import ResponseRequest, members_in, request_of, wants_background
from gateway.downstream.stored_responses import (
    ResponseRetention,
    StoredResponses,
    conversation_in,
    response_in,
)
from gateway.pipeline import Pipeline
from gateway.pipeline.caller import KEEP_ALIVE, SSE_HEADERS, while_caller_reads
from gateway.ports import Clock, Incoming

PATH = "/v1/responses"

_NUMBER = re.compile(r"-?[0-9]{1,18}")

_PAGE = 20
_PAGE_MAX = 100
"""Input items per page by default and at most: OpenAI's figures."""


class Responses:
    """The routes for responses; one per process."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        keys: KeyRing,
        rules: wire.WireRules,
        readers: BodyReaders,
        body_bytes_max: int,
        retention: ResponseRetention,
        idempotency: IdempotentRequests,
        background: Background | None,
        clock: Clock,
    ) -> None:
        """Serve responses with `pipeline`, and background ones with `background`, if there is one.

        `body_bytes_max` limits a request together with everything stored that it refers to.
        """
        self._pipeline = pipeline
        self._keys = keys
        self._rules = rules
        self._readers = readers
        self._retention = retention
        self._idempotency = idempotency
        self._background = background
        self._jobs = None if background is None else background.jobs
        self._stored = StoredResponses(retention.store, self._jobs, readers, body_bytes_max)
        self._clock = clock

    async def read(self, received: Received) -> Work:
        """Return the work that answers a request to create a response. See `reading.Read`."""
        raws, members = await self._readers.run(lambda: members_in(received.body), received.body)
        wants_job = wants_background(members, has_jobs=self._background is not None)
        background = self._background if wants_job else None
        read_on = partial(self._read_on, raws=raws, members=members, background=background)
        if background is not None:
            return await read_on(received)
        return await self._idempotency.read(received, read_on)

    async def _read_on(
        self,
        received: Received,
        *,
        raws: Mapping[str, msgspec.Raw],
        members: Mapping[str, Any],
        background: Background | None,
    ) -> Work:
        key, token = received.key, secrets.token_hex(16)
        asked = await self._asked(received, raws, members, token)
        if background is not None:
            return await self._handed_over(background, asked, received, token)

        async def work(downstream: HttpDownstream) -> None:
            answer = Answer(downstream, asked, key, self._retention, self._clock)
            try:
                await self._pipeline.run(asked.incoming, answer)
            except GatewayError as error:
                error.param = chat_param_here(error.param)
                raise
            await answer.finish()

        return work

    async def line(self, received: Received, token: str) -> tuple[Incoming, JobFacts]:
        """Return the chat request for a batch's line, and the facts to store with its job."""
        raws, members = await self._readers.run(lambda: members_in(received.body), received.body)
        asked = await self._asked(received, raws, members, token)
        return asked.incoming, await self._facts(asked, received, token, {"store": False})

    async def _facts(
        self, asked: ResponseRequest, received: Received, token: str, says: Mapping[str, Any]
    ) -> JobFacts:
        kept = asked.conversation or b""
        return await self._readers.run(lambda: asked.facts(received, token, says), kept)

    async def _asked(
        self,
        received: Received,
        raws: Mapping[str, msgspec.Raw],
        members: Mapping[str, Any],
        token: str,
    ) -> ResponseRequest:
        found = await self._stored.look_up(received, needs(members, self._rules.messages_max))
        return await self._readers.run(
            lambda: request_of(received, self._rules, raws, members, token, found),
            received.body,
            *found.records,
        )

    # -------------------------------------------------------------- background

    async def _handed_over(
        self, background: Background, asked: ResponseRequest, received: Received, token: str
    ) -> Work:
        store = asked.conversation is not None
        facts = await self._facts(asked, received, token, {"background": True, "store": store})
        try:
            job, known = await background.submit(
                asked.incoming,
                facts,
                id=asked.draft.response["id"],
                store=store,
                idempotency_key=received.headers.get(HEADER),
                route=PATH,
                body=received.body,
            )
        except GatewayError as error:
            error.param = chat_param_here(error.param)
            raise

        headers = handover_headers(asked.incoming, job)

        async def follow(downstream: HttpDownstream) -> None:
            await downstream.start(200, (*SSE_HEADERS, *headers))
            with background.jobs.waits.of_a_caller():
                async for events in background.jobs.events(job, -1):
                    with while_caller_reads():
                        await downstream.send(frames_of(events) or KEEP_ALIVE)
            await downstream.finish()

        if asked.incoming.request.stream:
            return follow
        response = await background.jobs.response(job, known)
        return partial(send_json, response, headers=headers)

    # -------------------------------------------------------------- stored responses

    def handlers(self) -> Sequence[BaseRouteHandler]:
        """Return the route handlers for stored responses."""

        @get(PATH + "/{response_id:str}")
        async def retrieve(request: Request[Any, Any, Any], response_id: FromPath[str]) -> Response[bytes]:
            key = self._keys.name_of(request.headers)
            job = await self._stored.job(key, response_id)
            if job is not None and self._jobs is not None:
                return await self._shown(self._jobs, job, request)
            record = await self._stored.record(key, response_id)
            if _wants_stream(request.query_params):
                message = "Only background responses can be streamed again."
                raise InvalidRequest(message, code="unsupported_parameter", param="stream")
            response = await self._readers.run(partial(response_in, record), record)
            return Response(response, media_type=MediaType.JSON)

        @get(PATH + "/{response_id:str}/input_items")
        async def input_items(request: Request[Any, Any, Any], response_id: FromPath[str]) -> Response[bytes]:
            key = self._keys.name_of(request.headers)
            record = await self._stored.record(key, response_id)
            page = await self._readers.run(partial(_page_in, record, request.query_params), record)
            return Response(page, media_type=MediaType.JSON)

        @delete(PATH + "/{response_id:str}", status_code=200)
        async def forget(request: Request[Any, Any, Any], response_id: FromPath[str]) -> dict[str, Any]:
            key = self._keys.name_of(request.headers)
            is_job = self._jobs is not None and await self._jobs.delete(key, response_id)
            if not is_job and not await self._retention.store.delete(key, response_id):
                raise gone(response_id)
            return {"id": response_id, "object": "response", "deleted": True}

        @post(PATH + "/{response_id:str}/cancel", status_code=200)
        async def cancel(request: Request[Any, Any, Any], response_id: FromPath[str]) -> Response[bytes]:
            key = self._keys.name_of(request.headers)
            job = None if self._jobs is None else await self._jobs.cancel(key, response_id)
            if job is None or self._jobs is None:
                await self._stored.record(key, response_id)
                message = "Only background responses can be cancelled."
                raise InvalidRequest(message, code="not_in_background")
            return Response(msgspec.json.encode(await self._jobs.response(job)), media_type=MediaType.JSON)

        @post([PATH + "/compact", PATH + "/input_tokens"])
        async def elsewhere(request: Request[Any, Any, Any]) -> None:
            # Unsupported routes of OpenAI's API. Without this handler, they would match as response ids, and
            # be answered with 405.
            raise RouteNotFound(f"There is nothing at {request.scope['path']}.")

        return [retrieve, input_items, forget, cancel, elsewhere]

    async def _shown(self, jobs: CallersJobs, job: Job, request: Request[Any, Any, Any]) -> Response[Any]:
        """Return a job's current response, or its events from some number on."""
        query = request.query_params
        if not _wants_stream(query):
            response = await jobs.response(job)
            answer = Response(msgspec.json.encode(response), media_type=MediaType.JSON)
            if not job.status.is_final:
                answer.headers["retry-after"] = str(retry_after_s(response["queue"]))
            return answer
        after = str(query.get("starting_after", "-1"))
        if not _NUMBER.fullmatch(after):
            raise InvalidRequest("`starting_after` must be the number of an event.", param="starting_after")

        async def frames() -> AsyncIterator[bytes]:
            with jobs.waits.of_a_caller():
                async for events in jobs.events(job, int(after)):
                    yield frames_of(events) or KEEP_ALIVE

        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        return Stream(frames(), headers=headers, media_type="text/event-stream; charset=utf-8")


def _wants_stream(query: Mapping[str, Any]) -> bool:
    return query.get("stream", "false").lower() not in ("false", "0", "")


def _page_in(record: bytes, query: Mapping[str, Any]) -> bytes:
    kept = conversation_in(record)
    return msgspec.json.encode(_page([*kept.context, *kept.input], query))


def _page(items: Sequence[Item], query: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a page of items according to `limit`, `order` and `after`."""
    limit, order = limit_of(query, _PAGE, _PAGE_MAX), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("`order` must be asc or desc.", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest("There is no such item.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    return page_of(ordered, limit)
